"""Read products, tensors and their widths off the traced program of a layer.

A walk over the jaxpr tracks which values depend on activations and which on parameters alone, and
what each is made of. Widths are values per token on one device: a dimension of a result is split
over devices like the dimension of the weight that it comes from.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
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
    """The result of a product, a norm's scaled result, or a value that `checkpoint_name` names."""

    name: str  # or ""; for a kernel, the name of the equation that stands for it
    width: float  # values per token on one device
    makers: frozenset["Tensor"] = frozenset()  # nearest tensors that it is made of; not a product's
    # Of a product, FLOPs per token of the sequence, over all devices. Attention counts by the share
    # of keys that a query sees on average.
    flops: float = 0.0
    operands: tuple["Value", ...] = ()  # of a product, those that are made of activations
    has_weight: bool = False  # whether an operand of a product is made of parameters
    itemsize: int = 0  # bytes per value


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the program."""

    kind: str  # "activation" if it depends on x, "weight" if on parameters alone, else "constant"
    width: float
    itemsize: int
    shards: int = 1  # number of devices over which dimensions of weights split it
    dimension_shards: tuple[int, ...] = ()  # for each dimension of a weight; () where not known
    tensors: frozenset[Tensor] = frozenset()  # nearest products and named values it is made of
    # Products and scales that it is made of without another product in between, and those of them
    # that went through an activation function.
    results: frozenset[Tensor] = frozenset()
    activated: frozenset[Tensor] = frozenset()


def _width(of: Iterable[Tensor | Value]) -> float:
    return sum(each.width for each in of)


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer multiplies and makes, in the program's order."""

    products: Sequence[Tensor]
    scales: Sequence[Tensor]  # results of norms
    named: Sequence[Tensor]  # values that `checkpoint_name` names
    gathered_width: float  # of activations that are gathered: rows of experts, and their results
    output: Value  # the layer's output activations
    # Returns the width that a layer saves if it applies a policy to itself, or none; its input and
    # weights do not count.
    residuals: Callable[[RematPolicy | None], float]

    # FLOPs per token of a forward's products: with weights, with those of experts, and of
    # activations with each other.

    @cached_property
    def weight_flops(self) -> float:
        return sum(p.flops for p in self._weight_products)

    @cached_property
    def expert_flops(self) -> float:
        return sum(p.flops for p in self.products if p.name == GROUPED)

    @cached_property
    def activation_flops(self) -> float:
        return sum(p.flops for p in self.products if not p.has_weight)

    def recomputed_flops(self, saved: Collection[str]) -> float:
        """Return the FLOPs per token of a second forward that finds the named tensors saved.

        A product is left out if only saved tensors depend on its result before the next product.
        """
        used = frozenset[Tensor]().union(*(value.tensors for value in self._read))
        users: dict[Tensor, list[Tensor]] = {}
        for tensor in self.named:
            for maker in tensor.makers:
                users.setdefault(maker, []).append(tensor)

        def is_needed(tensor: Tensor) -> bool:
            return tensor in used or any(
                is_needed(user) for user in users.get(tensor, []) if user.name not in saved
            )

        return sum(p.flops for p in self.products if is_needed(p))

    def saved_width(self, names: Collection[str]) -> float:
        return _width(tensor for tensor in self.named if tensor.name in names)

    @cached_property
    def result_width(self) -> float:
        return _width(self.products)

    @cached_property
    def key_value_width(self) -> float:
        """Return the width of what attention reads besides queries."""
        return sum(_width(p.operands[1:]) for p in self.products if p.name == ATTENTION)

    @cached_property
    def elementwise_width(self) -> float:
        """Return the width of what norms and gathers make, and of sums with the residual stream.

        A norm makes two tensors: one normalised, one scaled.
        """
        # Rows of experts have been summed to tokens before.
        sums = sum(
            self.output.width if result.name == GROUPED else result.width
            for result in self.output.results
            if result.flops
        )
        return 2 * _width(self.scales) + sums + self.gathered_width

    @cached_property
    def gradient_width(self) -> float:
        """Return the width of the gradients of results from which weight gradients are computed.

        Results that go into one operand of a product and nothing else share that operand's
        gradient, as a gate and what it multiplies do.
        """
        results = (*self._weight_products, *self.scales)
        return _width({self._shared_operand(result) or result for result in results})

    @cached_property
    def widest_gradients(self) -> float:
        """Return the width of the gradients that exist at once: of all that one product reads."""
        read = ({r for v in p.operands for r in v.results if r.flops} for p in self.products)
        return max(map(_width, read))

    @cached_property
    def handed_over(self) -> float:
        """Return the width of what the I of a split backward leaves to a W in another program.

        These are the operands of products, the gradients of their results, and what the slicing
        does not take apart further: norms in their own dtype, and results that an activation
        function turns into an operand.
        """
        norms = sum(scale.width * scale.itemsize for scale in self.scales) / self.output.itemsize
        activated = (
            product
            for product in self.products
            if (operand := self._shared_operand(product)) in self._weight_operands
            and operand is not None
            and product in operand.activated
        )
        return norms + _width((*self._weight_operands, *self._weight_products, *activated))

    def recomputed_operand_width(self, saved: Collection[str]) -> float:
        """Return the width of the results from which weight gradients compute their operands.

        Saved tensors are left out. The layer's output counts, as an operand of the next layer.
        """
        made = [value.tensors for value in (*self._weight_operands, self.output)]
        tensors = frozenset[Tensor]().union(*made, *(scale.makers for scale in self.scales))
        return _width(tensor for tensor in tensors if tensor.name not in saved)

    @cached_property
    def _weight_products(self) -> list[Tensor]:
        return [product for product in self.products if product.has_weight]

    @cached_property
    def _weight_operands(self) -> set[Value]:
        return {operand for product in self._weight_products for operand in product.operands}

    @cached_property
    def _read(self) -> set[Value]:
        return {self.output, *(operand for p in self.products for operand in p.operands)}

    def _shared_operand(self, result: Tensor) -> Value | None:
        """Return the only value made of a result, if it is a product's operand, else None."""
        ends = [value for value in self._read if result in value.results]
        return ends[0] if len(ends) == 1 and ends[0] is not self.output else None


def read_layer(trace: ModelTrace, dimension_shards: DimensionShards) -> Layer:
    walk = _Walk(trace, dimension_shards)
    output = walk.outputs(trace.layer)[0]

    @cache
    def residuals(policy: RematPolicy | None) -> float:
        saved = {*_Walk(trace, dimension_shards).outputs(trace_residuals(trace, policy))}
        num_bytes = sum(v.width * v.itemsize for v in saved if v.kind == "activation")
        return num_bytes / output.itemsize

    return Layer(walk.products, walk.scales, walk.named, walk.gathered_width, output, residuals)


@dataclass(eq=False)
class _Walk:
    trace: ModelTrace
    dimension_shards: DimensionShards
    products: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    named: list[Tensor] = field(default_factory=list)
    gathered_width: float = 0.0

    def outputs(self, program: ClosedJaxpr) -> list[Value]:
        """Walk over a program with the inputs of a layer; return its outputs, except for x."""
        specs = jax.tree.leaves(
            self.trace.program.specs["layers"], is_leaf=lambda s: isinstance(s, ParamSpec)
        )
        inputs = [self._constant(v) for v in program.jaxpr.invars]
        for i, spec in enumerate(specs):
            shards = tuple(self.dimension_shards(spec))
            inputs[i] = replace(inputs[i], kind="weight", dimension_shards=shards)
        x = inputs[len(specs)] = replace(inputs[len(specs)], kind="activation")
        return [value for value in self._run(program.jaxpr, inputs) if value is not x]

    def _run(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        values = {v: self._constant(v) for v in jaxpr.constvars}
        values |= zip(jaxpr.invars, inputs, strict=True)

        def read(atom: Var | Literal) -> Value:
            return self._constant(atom) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            values |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, atom: Var | Literal) -> Value:
        """Return the value of an atom that depends on no input and is not split over devices."""
        dtype = getattr(atom.aval, "dtype", None)
        itemsize = getattr(dtype, "itemsize", 0)  # random keys have none
        return Value("constant", math.prod(shaped(atom).shape) / self.trace.tokens, itemsize)

    def _equation(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in _CALLS:
            for program in map(open_jaxpr, inner_jaxprs(eqn)):
                if len(program.invars) == len(inputs):
                    return self._run(program, inputs)
        activations = tuple(value for value in inputs if value.kind == "activation")
        weights = [value for value in inputs if value.kind == "weight"]
        if not activations:
            return self._of_weights(eqn, weights)
        if name in _ALIASES and len(inputs) == 1:
            return inputs
        if name == "name":
            tensor = Tensor(eqn.params["name"], inputs[0].width, inputs[0].tensors)
            self.named.append(tensor)
            return [replace(inputs[0], tensors=frozenset({tensor}))]
        if flops := self._flops(eqn):
            return self._multiply(eqn, inputs, activations, flops / self.trace.tokens)
        results = [self._derive(v, activations) for v in eqn.outvars]
        if name == "gather" and jnp.issubdtype(shaped(eqn.outvars[0]).dtype, jnp.floating):
            self.gathered_width += results[0].width
        if name in _ACTIVATION_FUNCTIONS:
            return [replace(result, activated=result.results) for result in results]
        if name in ("mul", "div") and weights:
            (result,) = results
            scale = Tensor("", result.width, result.tensors, itemsize=result.itemsize)
            self.scales.append(scale)
            return [replace(result, results=result.results | {scale})]
        return results

    def _of_weights(self, eqn: JaxprEqn, weights: Sequence[Value]) -> list[Value]:
        results = [self._constant(v) for v in eqn.outvars]
        if not weights:
            return results
        shards: tuple[int, ...] = ()
        if eqn.primitive.name in _SAME_DIMENSIONS:
            shards = weights[0].dimension_shards
        elif eqn.primitive.name == "transpose" and weights[0].dimension_shards:
            shards = tuple(weights[0].dimension_shards[d] for d in eqn.params["permutation"])
        return [replace(result, kind="weight", dimension_shards=shards) for result in results]

    def _flops(self, eqn: JaxprEqn) -> float:
        if eqn.primitive.name == GROUPED:
            weights = shaped(eqn.invars[1]).shape
            return 2.0 * eqn.params["assignments"] * weights[1] * weights[2]
        if eqn.primitive.name != ATTENTION:
            return equation_flops(eqn)
        q, k, v = (shaped(atom).shape for atom in eqn.invars)
        # Scores [T, T] of a head from [T, C], and their products with values; masked ones are free.
        return self.trace.visible_share * 2.0 * math.prod(q[:-1]) * k[1] * (q[-1] + v[-1])

    def _multiply(
        self, eqn: JaxprEqn, inputs: list[Value], activations: tuple[Value, ...], flops: float
    ) -> list[Value]:
        (result,) = (self._constant(v) for v in eqn.outvars)
        shards = self._product_shards(eqn, inputs)
        primitive, width = eqn.primitive.name, result.width / shards
        product = Tensor(
            name=primitive if primitive in (ATTENTION, GROUPED) else "",
            width=width,
            flops=flops,
            operands=activations,
            has_weight=any(value.kind == "weight" for value in inputs),
            itemsize=result.itemsize,
        )
        self.products.append(product)
        of = frozenset({product})
        return [Value("activation", width, result.itemsize, shards, tensors=of, results=of)]

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
        plain = self._constant(atom)
        shards = max(value.shards for value in activations)
        tensors, results, activated = (
            frozenset[Tensor]().union(*(getattr(value, name) for value in activations))
            for name in ("tensors", "results", "activated")
        )
        width = plain.width / shards
        return Value("activation", width, plain.itemsize, shards, (), tensors, results, activated)
