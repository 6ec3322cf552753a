"""Read products, tensors and their widths off the traced program of a layer.

A walk over the jaxpr tracks which values depend on activations and which on parameters alone, and
what each is made of. Widths are values per token on one device: a dimension of a result is split
over devices like the dimension of the weight that it comes from.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from maxpipe.config.catalog import RematPolicy
from maxpipe.model.parameters import ParamSpec
from maxpipe.pipeline.jaxprs import CALLS, CHECKPOINTS, inner_jaxprs, open_jaxpr, shaped
from maxpipe.plan.jaxpr_flops import equation_flops
from maxpipe.plan.layer_trace import ATTENTION, GROUPED, ModelTrace, trace_residuals

# Returns over how many devices each dimension of a parameter is split while a layer computes.
DimensionShards = Callable[[ParamSpec], Sequence[int]]

_CALLS = (*CALLS, *CHECKPOINTS, "custom_vjp_call", "custom_jvp_call")
_ALIASES = ("copy", "optimization_barrier", "reshape", "sharding_constraint", "squeeze")
_ACTIVATION_FUNCTIONS = ("erf", "exp", "integer_pow", "logistic", "max", "square", "tanh")
_SAME_DIMENSIONS = ("convert_element_type", "copy", "optimization_barrier", "stop_gradient")


@dataclass(frozen=True, eq=False)
class Tensor:
    """The result of a product, or a value that `checkpoint_name` names.

    Attributes:
      name: its name, or ""; for a kernel, the name of the equation that stands for it.
      width: values per token on one device.
      makers: for a named value, the nearest tensors that it is made of.
    """

    name: str
    width: float
    makers: frozenset["Tensor"] = frozenset()


@dataclass(frozen=True, eq=False)
class Scale:
    """An element-wise product of activations with a parameter, as in a norm.

    Attributes:
      width: values of the result per token on one device.
      bytes: bytes of the result per token on one device.
      tensors: nearest tensors that the activations are made of.
    """

    width: float
    bytes: float
    tensors: frozenset[Tensor]


@dataclass(frozen=True, eq=False)
class Product:
    """A multiplication of activations with weights, or with each other.

    Attributes:
      flops: FLOPs per token of the sequence, over all devices. Attention counts by the
        share of keys that a query sees on average.
      has_weight: whether an operand is made of parameters.
      operands: the operands that are made of activations.
      result: the product's result.
    """

    flops: float
    has_weight: bool
    operands: tuple["Value", ...]
    result: Tensor


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the program.

    Attributes:
      kind: "activation" if it depends on x, "weight" if on parameters alone, else "constant".
      width: values per token on one device.
      itemsize: bytes per value.
      shards: number of devices over which dimensions of weights split it.
      dimension_shards: the same for each dimension of a weight; empty where it is not known.
      tensors: nearest tensors that it is made of.
      results: products and scales that it is made of without another product in between.
      activated: those of `results` that went through an activation function.
    """

    kind: str
    width: float
    itemsize: int
    shards: int = 1
    dimension_shards: tuple[int, ...] = ()
    tensors: frozenset[Tensor] = frozenset()
    results: frozenset[Product | Scale] = frozenset()
    activated: frozenset[Product | Scale] = frozenset()


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer multiplies and makes.

    Attributes:
      products, scales: its products and scales, in the program's order.
      gathered_width: width of activations that are gathered: rows of experts, and their results.
      named: values that `checkpoint_name` names.
      output: the layer's output activations.
      residual_bytes: returns the bytes per token on one device that a layer saves if it applies a
        policy to itself, or none; its input and weights do not count.
    """

    products: Sequence[Product]
    scales: Sequence[Scale]
    gathered_width: float
    named: Sequence[Tensor]
    output: Value
    residual_bytes: Callable[[RematPolicy | None], float]

    @cached_property
    def weight_flops(self) -> float:
        """Return the FLOPs per token of a forward's products with weights."""
        return sum(p.flops for p in self.products if p.has_weight)

    @cached_property
    def expert_flops(self) -> float:
        """Return the part of `weight_flops` that multiplies rows with their experts' weights."""
        return sum(p.flops for p in self.products if p.result.name == GROUPED)

    @cached_property
    def activation_flops(self) -> float:
        """Return the FLOPs per token of a forward's products of activations with each other."""
        return sum(p.flops for p in self.products if not p.has_weight)

    def recomputed_flops(self, saved: Collection[str]) -> float:
        """Return the FLOPs per token of a second forward that finds the named tensors saved.

        A product is left out if only saved tensors depend on its result before the next product.
        """
        used = self._used_tensors
        users: dict[Tensor, list[Tensor]] = {}
        for tensor in self.named:
            for maker in tensor.makers:
                users.setdefault(maker, []).append(tensor)

        def is_needed(tensor: Tensor) -> bool:
            return tensor in used or any(
                is_needed(user) for user in users.get(tensor, []) if user.name not in saved
            )

        return sum(p.flops for p in self.products if is_needed(p.result))

    def saved_width(self, names: Collection[str]) -> float:
        return sum(tensor.width for tensor in self.named if tensor.name in names)

    @cached_property
    def result_width(self) -> float:
        return sum(p.result.width for p in self.products)

    @cached_property
    def weight_result_width(self) -> float:
        return sum(p.result.width for p in self.products if p.has_weight)

    @cached_property
    def key_value_width(self) -> float:
        """Return the width of what attention reads besides queries."""
        attention = (p for p in self.products if p.result.name == ATTENTION)
        return sum(operand.width for p in attention for operand in p.operands[1:])

    @cached_property
    def elementwise_width(self) -> float:
        """Return the width of what norms and gathers make, and of sums with the residual stream.

        A norm makes two tensors: one normalised, one scaled.
        """
        norms = 2 * sum(scale.width for scale in self.scales)
        # Rows of experts have been summed to tokens before.
        sums = sum(
            self.output.width if result.result.name == GROUPED else result.result.width
            for result in self.output.results
            if isinstance(result, Product)
        )
        return norms + sums + self.gathered_width

    @cached_property
    def operand_width(self) -> float:
        """Return the width of the activations that are multiplied with weights, each once."""
        return sum(operand.width for operand in self._weight_operands)

    @cached_property
    def gradient_width(self) -> float:
        """Return the width of the gradients of results from which weight gradients are computed.

        Results that go into one operand of a product and nothing else share that operand's
        gradient, as a gate and what it multiplies do.
        """
        gradients = {self._shared_operand(r) or r: r for r in self._results_with_gradient}
        return sum(
            key.width if isinstance(key, (Value, Scale)) else key.result.width for key in gradients
        )

    @cached_property
    def widest_gradients(self) -> float:
        """Return the width of the gradients that exist at once: of all that one product reads."""
        read = [
            {r for v in p.operands for r in v.results if isinstance(r, Product)}
            for p in self.products
        ]
        return max(sum(result.result.width for result in results) for results in read)

    @cached_property
    def activated_width(self) -> float:
        """Return the width of results that an activation function turns into an operand."""
        return sum(
            product.result.width
            for product in self.products
            if (operand := self._shared_operand(product)) in self._weight_operands
            and operand is not None
            and product in operand.activated
        )

    def recomputed_operand_width(self, saved: Collection[str]) -> float:
        """Return the width of the results from which weight gradients compute their operands.

        Saved tensors are left out. The layer's output counts, as an operand of the next layer.
        """
        readers: list[Value | Scale] = [*self._weight_operands, *self.scales, self.output]
        tensors = frozenset[Tensor]().union(*(reader.tensors for reader in readers))
        return sum(tensor.width for tensor in tensors if tensor.name not in saved)

    @cached_property
    def _weight_operands(self) -> set[Value]:
        return {operand for p in self.products if p.has_weight for operand in p.operands}

    @cached_property
    def _used_tensors(self) -> frozenset[Tensor]:
        """Return the tensors that products and the layer's output are made of."""
        operands = [operand for product in self.products for operand in product.operands]
        return frozenset[Tensor]().union(*(value.tensors for value in [*operands, self.output]))

    @property
    def _results_with_gradient(self) -> list[Product | Scale]:
        return [*(p for p in self.products if p.has_weight), *self.scales]

    @cached_property
    def _ends(self) -> dict[Product | Scale, set[Value]]:
        """Return for each result the operands of products, or the output, that are made of it."""
        ends: dict[Product | Scale, set[Value]] = {}
        operands = [operand for product in self.products for operand in product.operands]
        for value in [*operands, self.output]:
            for result in value.results:
                ends.setdefault(result, set()).add(value)
        return ends

    def _shared_operand(self, result: Product | Scale) -> Value | None:
        """Return the only value made of a result, if it is a product's operand, else None."""
        ends = self._ends.get(result, set())
        return next(iter(ends)) if len(ends) == 1 and self.output not in ends else None


def read_layer(trace: ModelTrace, dimension_shards: DimensionShards) -> Layer:
    """Read a traced layer.

    Args:
      trace: the traced model.
      dimension_shards: returns over how many devices each dimension of a parameter is split while
        a layer computes with it.
    """
    walk = _Walk(trace.tokens, trace.visible_share)
    inputs = _inputs(trace, trace.layer, dimension_shards)
    consts = [walk.constant(v) for v in trace.layer.jaxpr.constvars]
    output = walk.run(trace.layer.jaxpr, consts, inputs)[0]

    @cache
    def residual_bytes(policy: RematPolicy | None) -> float:
        program = trace_residuals(trace, policy)
        values = _inputs(trace, program, dimension_shards)
        residuals = _Walk(trace.tokens, trace.visible_share)
        constants = [residuals.constant(v) for v in program.jaxpr.constvars]
        outputs = set(residuals.run(program.jaxpr, constants, values)) - set(values)
        return sum(v.width * v.itemsize for v in outputs if v.kind == "activation")

    return Layer(
        walk.products, walk.scales, walk.gathered_width, walk.named, output, residual_bytes
    )


def _inputs(trace: ModelTrace, program: ClosedJaxpr, shards: DimensionShards) -> list[Value]:
    """Return the values of a layer's inputs: parameters, x, and inputs without a gradient."""
    specs = jax.tree.leaves(
        trace.program.specs["layers"], is_leaf=lambda s: isinstance(s, ParamSpec)
    )
    walk, atoms = _Walk(trace.tokens, trace.visible_share), program.jaxpr.invars
    weights = [
        replace(walk.constant(v), kind="weight", dimension_shards=tuple(shards(spec)))
        for v, spec in zip(atoms, specs, strict=False)
    ]
    x, *others = (walk.constant(v) for v in atoms[len(specs) :])
    return [*weights, replace(x, kind="activation"), *others]


@dataclass(eq=False)
class _Walk:
    tokens: int
    visible_share: float
    products: list[Product] = field(default_factory=list)
    scales: list[Scale] = field(default_factory=list)
    gathered_width: float = 0.0
    named: list[Tensor] = field(default_factory=list)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        """Walk over a program and return the values of its outputs."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Var | Literal) -> Value:
            return self.constant(atom) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, atom: Var | Literal) -> Value:
        """Return the value of an atom that depends on no input and is not split over devices."""
        dtype = getattr(atom.aval, "dtype", None)
        itemsize = getattr(dtype, "itemsize", 0)  # random keys have none
        return Value("constant", math.prod(shaped(atom).shape) / self.tokens, itemsize)

    def _equation(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in _CALLS:
            for program in map(open_jaxpr, inner_jaxprs(eqn)):
                if len(program.invars) == len(inputs):
                    return self.run(program, [self.constant(v) for v in program.constvars], inputs)
        activations = tuple(value for value in inputs if value.kind == "activation")
        if not activations:
            return self._of_weights(eqn, inputs)
        if name in _ALIASES and len(inputs) == 1:
            return inputs
        if name == "name":
            return [self._name(eqn.params["name"], inputs[0])]
        if flops := self._flops(eqn):
            return self._multiply(eqn, inputs, activations, flops / self.tokens)
        results = [self._derive(v, activations) for v in eqn.outvars]
        if name == "gather" and jnp.issubdtype(shaped(eqn.outvars[0]).dtype, jnp.floating):
            self.gathered_width += results[0].width
        if name in _ACTIVATION_FUNCTIONS:
            results = [replace(result, activated=result.results) for result in results]
        if name in ("mul", "div") and any(value.kind == "weight" for value in inputs):
            (result,) = results
            scale = Scale(result.width, result.width * result.itemsize, result.tensors)
            self.scales.append(scale)
            results = [replace(result, results=result.results | {scale})]
        return results

    def _of_weights(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        weights = [value for value in inputs if value.kind == "weight"]
        results = [self.constant(v) for v in eqn.outvars]
        if not weights:
            return results
        shards: tuple[int, ...] = ()
        if eqn.primitive.name in _SAME_DIMENSIONS:
            shards = weights[0].dimension_shards
        elif eqn.primitive.name == "transpose" and weights[0].dimension_shards:
            shards = tuple(weights[0].dimension_shards[d] for d in eqn.params["permutation"])
        return [replace(result, kind="weight", dimension_shards=shards) for result in results]

    def _name(self, name: str, value: Value) -> Value:
        tensor = Tensor(name, value.width, value.tensors)
        self.named.append(tensor)
        return replace(value, tensors=frozenset({tensor}))

    def _flops(self, eqn: JaxprEqn) -> float:
        """Return the FLOPs of an equation's products for the sequence."""
        if eqn.primitive.name == GROUPED:
            weights = shaped(eqn.invars[1]).shape
            return 2.0 * eqn.params["assignments"] * weights[1] * weights[2]
        if eqn.primitive.name != ATTENTION:
            return equation_flops(eqn)
        q, k, v = (shaped(atom).shape for atom in eqn.invars[:3])
        # Scores [T, T] of a head from [T, C], and their products with values; masked ones are free.
        return self.visible_share * 2.0 * math.prod(q[:-1]) * k[1] * (q[-1] + v[-1])

    def _multiply(
        self, eqn: JaxprEqn, inputs: list[Value], activations: tuple[Value, ...], flops: float
    ) -> list[Value]:
        """Collect a product, and return its results."""
        shards = self._product_shards(eqn, inputs)
        results = [replace(self.constant(v), kind="activation", shards=shards) for v in eqn.outvars]
        results = [replace(result, width=result.width / shards) for result in results]
        primitive = eqn.primitive.name
        name = primitive if primitive in (ATTENTION, GROUPED) else ""
        tensor = Tensor(name, sum(result.width for result in results))
        has_weight = any(value.kind == "weight" for value in inputs)
        product = Product(flops, has_weight, activations, tensor)
        self.products.append(product)
        return [
            replace(result, tensors=frozenset({tensor}), results=frozenset({product}))
            for result in results
        ]

    def _product_shards(self, eqn: JaxprEqn, inputs: list[Value]) -> int:
        """Return the number of devices over which a product's result is split.

        Summing over split dimensions makes a result that is whole on each of their devices.
        """
        shards = max(value.shards for value in inputs)
        weight = next((i for i, value in enumerate(inputs) if value.kind == "weight"), None)
        if weight is None or eqn.primitive.name not in ("dot_general", GROUPED):
            return shards
        dimension_shards = inputs[weight].dimension_shards
        contracted, batched = (1,), (0,)
        if eqn.primitive.name == "dot_general":
            contracted, batched = (of[weight] for of in eqn.params["dimension_numbers"])
        summed = math.prod(dimension_shards[d] for d in contracted) if dimension_shards else 1
        free = [s for d, s in enumerate(dimension_shards) if d not in (*contracted, *batched)]
        return max(shards // summed, 1) * math.prod(free)

    def _derive(self, atom: Var, activations: Sequence[Value]) -> Value:
        """Return a result that is not a product's: it is split like what it is made of."""
        shards = max(value.shards for value in activations)
        plain = self.constant(atom)
        return replace(
            plain,
            kind="activation",
            shards=shards,
            width=plain.width / shards,
            tensors=frozenset[Tensor]().union(*(value.tensors for value in activations)),
            results=frozenset[Product | Scale]().union(*(value.results for value in activations)),
            activated=frozenset[Product | Scale]().union(*(v.activated for v in activations)),
        )
