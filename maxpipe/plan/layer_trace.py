"""Trace a model abstractly: one layer, its residuals and the logits, on shapes of one sequence.

Nothing is computed and no parameter is made. Attention is traced as one equation, whatever kernel
runs: model FLOPs and memory are those of a kernel that skips what is masked and never holds the
matrix of probabilities; `footprint` adds the matrix where a kernel holds it. A product of rows with
the weights of their experts is one equation, too, without rows that pad blocks; where devices share
experts, there are rows for every choice of all their tokens, and the products skip empty ones.
Where windows differ by layer, the traced layer has their average.
"""

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

ATTENTION = "planned_attention"  # name of the equation that stands for an attention kernel

_attention_p = Primitive(ATTENTION)
_attention_p.def_abstract_eval(
    lambda q, k, v, segments: q.update(shape=(*q.shape[:-1], v.shape[-1]))
)


def planned_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    options: AttentionOptions = PLAIN,
) -> jax.Array:
    """Stand in for an attention kernel while a layer is traced; arguments as for `AttentionFn`.

    It saves what a kernel saves, its operands and its result, and cannot be run.
    """
    return _planned(q, k, v, segment_ids)


@jax.custom_vjp
def _planned(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    context: jax.Array = _attention_p.bind(q, k, v, segment_ids)
    return context


def _save_operands(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    context = _planned(q, k, v, segment_ids)
    return context, (q, k, v, segment_ids, context)


def _stand_in_gradients(
    saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    q, k, v, _, context = saved
    used = jnp.sum(context * cotangent)
    return q * used, k * used, v * used, None


_planned.defvjp(_save_operands, _stand_in_gradients)


GROUPED = "planned_grouped_product"  # stands for a product of rows with their experts' weights

_grouped_p = Primitive(GROUPED)
_grouped_p.def_abstract_eval(
    lambda rows, weights, *, assignments: rows.update(shape=(rows.shape[0], weights.shape[-1]))
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _grouped(rows: jax.Array, weights: jax.Array, assignments: int) -> jax.Array:
    product: jax.Array = _grouped_p.bind(rows, weights, assignments=assignments)
    return product


def _save_factors(
    rows: jax.Array, weights: jax.Array, assignments: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _grouped(rows, weights, assignments), (rows, weights)


def _stand_in_products(
    assignments: int, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, weights = saved
    used = jnp.sum(cotangent)
    return rows * used, weights * used


_grouped.defvjp(_save_factors, _stand_in_products)


def _planned_experts(model: ModelConfig, devices: int) -> ExpertsFn:
    rows_of = layout_for(lambda _, experts, most: Layout(most, 1), model.moe, devices)

    def layout(choice: tuple[int, ...], num_experts: int) -> Layout:
        sequences, *others = choice
        return rows_of((devices * sequences, *others), num_experts // devices)

    def multiply(rows: jax.Array, weights: jax.Array, places: Places, layout: Layout) -> jax.Array:
        return _grouped(rows, weights, places.rows.size)

    return experts_with(layout, multiply, gating(model))


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """The programs of a model that costs are read from, for one sequence.

    Attributes:
      program: the model around `planned_attention`.
      tokens: T, tokens of the sequence.
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
    """Return the program of a resolved model around `planned_attention`.

    Args:
      expert_devices: number of devices that share its experts.
    """
    assert model.head_dim > 0, "head_dim is not resolved"
    return _program(model, BLOCKS[model.block], expert_devices)


def trace_model(model: ModelConfig, sequence_length: int, expert_devices: int = 1) -> ModelTrace:
    """Trace a resolved model, once for each model, length and number of devices.

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
    """Return the shapes of parameters in the compute dtype, x, side inputs and key."""
    dtype = jnp.dtype(program.config.dtype)
    params = map_specs(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.compute_dtype(dtype)), program.specs
    )
    x = jax.ShapeDtypeStruct((1, tokens, program.config.embed_dim), dtype)

    def side_inputs() -> SideInputs:
        ids = jnp.zeros((1, tokens), jnp.int32)
        return SideInputs(
            positions=ids,
            segment_ids=ids,
            sequence_index=jnp.zeros(1, jnp.int32),
            layer_index=jnp.zeros((), jnp.int32),
        )

    side = jax.eval_shape(side_inputs)
    key = jax.eval_shape(lambda: jax.random.key(0)) if program.needs_key else None
    return params, x, side, key
