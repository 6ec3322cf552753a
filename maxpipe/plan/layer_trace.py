"""Trace a model abstractly: one layer, its residuals and the logits, on shapes of one sequence.

Attention is traced as one equation, whatever kernel runs: FLOPs and memory are those of a kernel
that skips what is masked and never holds the matrix of probabilities, which `layer_costs` adds. A
product of rows with the weights of their experts is one equation, too, without rows that pad
blocks; where devices share experts, there are rows for every choice of all their tokens, and the
products skip empty ones. Where windows differ by layer, the traced layer has their average.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive

from maxpipe.config.catalog import BLOCKS, Block, RematPolicy
from maxpipe.config.sections import ModelConfig
from maxpipe.model.experts.capacity import layout_for
from maxpipe.model.experts.dispatch import Layout, Places
from maxpipe.model.experts.mixture import ExpertsFn, experts_with
from maxpipe.model.layer_facts import visible_share
from maxpipe.model.layers import SideInputs, gating
from maxpipe.model.parameters import Params, map_specs
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import checkpoint
from maxpipe.plan.jaxpr_flops import program_flops
from maxpipe.sharding.attention_contract import PLAIN, AttentionOptions

ATTENTION = "planned_attention"  # names of the equations that stand for kernels
GROUPED = "planned_grouped_product"
_Saved = tuple[tuple[jax.Array, ...], jax.Array | None]  # operands, result


def _stand_in(name: str, *, saves_result: bool) -> Callable[..., jax.Array]:
    """Return a function that is traced as one equation, with a result as wide as its last operand.

    It has a backward, and saves what a kernel saves, but cannot be run.
    """
    primitive = Primitive(name)
    primitive.def_abstract_eval(
        lambda *operands, assignments: operands[0].update(
            shape=(*operands[0].shape[:-1], operands[-1].shape[-1])
        )
    )

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(assignments: int, *operands: jax.Array) -> jax.Array:
        result: jax.Array = primitive.bind(*operands, assignments=assignments)
        return result

    def forward(assignments: int, *operands: jax.Array) -> tuple[jax.Array, _Saved]:
        result = call(assignments, *operands)
        return result, (operands, result if saves_result else None)

    def backward(assignments: int, saved: _Saved, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        operands, result = saved
        used = jnp.sum(cotangent if result is None else result * cotangent)
        return tuple(operand * used for operand in operands)

    call.defvjp(forward, backward)
    return call


_attention = _stand_in(ATTENTION, saves_result=True)
_grouped = _stand_in(GROUPED, saves_result=False)  # a product of rows with their experts' weights


def planned_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    options: AttentionOptions = PLAIN,
) -> jax.Array:
    """Stand in for an attention kernel while a layer is traced; arguments as for `AttentionFn`."""
    return _attention(0, q, k, v)


def _planned_experts(model: ModelConfig, devices: int) -> ExpertsFn:
    rows_of = layout_for(lambda _, experts, most: Layout(most, 1), model.moe, devices)

    def layout(choice: tuple[int, ...], num_experts: int) -> Layout:
        sequences, *others = choice
        return rows_of((devices * sequences, *others), num_experts // devices)

    def multiply(rows: jax.Array, weights: jax.Array, places: Places, layout: Layout) -> jax.Array:
        return _grouped(places.rows.size, rows, weights)

    return experts_with(layout, multiply, gating(model))


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """The programs of a model that costs are read from, for one sequence of T `tokens`.

    Attributes:
      layer: jaxpr of a layer; its inputs are the leaves of the layer's parameters, then x
        [1, T, D], then inputs without a gradient; its first output is [1, T, D].
      head_flops: FLOPs of the logits of one token.
      visible_share: share of attention's scores that are not masked, averaged over the layers.
    """

    program: ModelProgram
    tokens: int
    layer: ClosedJaxpr
    head_flops: float
    visible_share: float


def model_program(model: ModelConfig, expert_devices: int = 1) -> ModelProgram:
    """Return the program of a resolved model, whose experts so many devices share."""
    assert model.head_dim > 0, "head_dim is not resolved"
    return _program(model, BLOCKS[model.block], expert_devices)


def trace_model(model: ModelConfig, sequence_length: int, expert_devices: int = 1) -> ModelTrace:
    """Trace a resolved model once.

    Adapters are left out, since their products and results are narrow next to the base's. So is
    quantisation, which changes neither the products nor what is saved. The attention kernel does
    not change the trace either.
    """
    plain = replace(model.base, quantisation="none", quantised_passes="forward", attention="auto")
    return _trace(model_program(plain, expert_devices), sequence_length)


@cache
def _program(model: ModelConfig, block: Block, expert_devices: int) -> ModelProgram:
    return ModelProgram(model, planned_attention, _planned_experts(model, expert_devices))


@cache
def _trace(program: ModelProgram, tokens: int) -> ModelTrace:
    params, x, side, key = _shapes(program, tokens)
    layer = jax.make_jaxpr(program.block)(params["layers"], x, side, key)
    outer = {name: params[name] for name in ("embed", "head")}
    head = jax.make_jaxpr(program.logits)(outer, x)
    share = visible_share(program.config, tokens)
    return ModelTrace(program, tokens, layer, program_flops(head) / tokens, share)


@cache
def trace_residuals(trace: ModelTrace, policy: RematPolicy | None) -> ClosedJaxpr:
    """Trace a layer that applies a policy to itself, or none; inputs as in `ModelTrace.layer`.

    The outputs are the saved values, in any order; some are inputs of the layer.
    """
    params, x, side, key = _shapes(trace.program, trace.tokens)

    def residuals(
        layer: Params, x: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> list[jax.Array]:
        block = trace.program.block
        if policy is not None:
            block = checkpoint(block, policy)
        _, vjp = jax.vjp(lambda layer, x: block(layer, x, side, key), layer, x)
        return jax.tree.leaves(vjp)

    return jax.make_jaxpr(residuals)(params["layers"], x, side, key)


def _shapes(
    program: ModelProgram, tokens: int
) -> tuple[Params, jax.ShapeDtypeStruct, SideInputs, jax.Array | None]:
    dtype = jnp.dtype(program.config.dtype)
    params = map_specs(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.compute_dtype(dtype)), program.specs
    )
    x = jax.ShapeDtypeStruct((1, tokens, program.config.embed_dim), dtype)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    side = jax.eval_shape(lambda: SideInputs(zeros(1, tokens), zeros(1, tokens), zeros(1), zeros()))
    key = jax.eval_shape(lambda: jax.random.key(0)) if program.needs_key else None
    return params, x, side, key
