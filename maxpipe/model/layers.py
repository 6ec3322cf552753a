"""Define what a decoder block is made of: projection, its adapters, norm, gated MLP and dropout.

Shapes: B batch, T sequence, D embed, F hidden width of the MLP.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout
from jax.typing import DTypeLike

from maxpipe.config.sections import LoRAConfig, ModelConfig
from maxpipe.model.parameters import ParamSpec, declare

# Losses of a layer besides the tokens' loss, by name: float32 scalars, each a sum over sequences of
# a function of one sequence, times its weight in the total loss. `COUNTS` are kept with them.
AuxiliaryLosses: TypeAlias = dict[str, jax.Array]
# Not losses, but numbers of assignments of tokens, float32: to each expert, [E] for a layer, and
# those that are dropped, []. For several layers there is a row for each layer of the model, [N, E]
# and [N]. They are added up like losses, but have no gradient.
EXPERT_LOAD, EXPERT_DROPS = "expert_load", "expert_drops"
COUNTS = (EXPERT_LOAD, EXPERT_DROPS)

ROW_MAJOR = Layout(major_to_minor=(0, 1, 2))  # of activations [B, T, D], for TPUs


class SideInputs(NamedTuple):
    """What every layer reads besides activations and weights.

    Attributes:
      positions: int32 [B, T], position of each token in its segment.
      segment_ids: int32 [B, T], which of a row's packed segments each token belongs to.
      sequence_index: int32 [B], index of each row in the global batch, from which dropout masks are
        drawn.
      layer_index: int32 scalar, the layer's index in model order, from which it knows how it
        differs from others. The caller that applies a layer sets it; until then it is None.
    """

    positions: jax.Array
    segment_ids: jax.Array
    sequence_index: jax.Array
    layer_index: jax.Array | None = None


# ------------------------------------------------------------------------------------------------
# Projection, with the two products of its gradient written out
# ------------------------------------------------------------------------------------------------

# (activations [..., *C], weight [*C, *K], number of dimensions C) -> [..., *K]
ProjectFn: TypeAlias = Callable[[jax.Array, jax.Array, int], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(
    x: jax.Array, weight: jax.Array, contracted: int = 1, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiply activations with a weight, summing over the last dimensions of `x`.

    The gradient of the weight is the product of `x` with the cotangent, in that order. JAX's own
    rule takes the cotangent first and transposes the product. For that XLA's CPU backend makes a
    transposed copy of the cotangent; after an activation function it computes the derivative again
    for the copy, against the order of memory. There are no forward-mode derivatives.

    Args:
      x: [..., *C], where C are the `contracted` dimensions.
      weight: [*C, *K], in the dtype of `x`.
      contracted: number of dimensions that are summed over.
      dtype: dtype of the result, and of gradients until they are summed; None = as `x`.
        Cotangents are first rounded to the dtype of `x`.

    Returns:
      [..., *K].
    """
    num_batch = x.ndim - contracted
    return dot(x, weight, range(num_batch, x.ndim), range(contracted), dtype)


def _project_forward(
    x: jax.Array, weight: jax.Array, contracted: int, dtype: DTypeLike | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return project(x, weight, contracted, dtype), (x, weight)


def _project_backward(
    contracted: int,
    dtype: DTypeLike | None,
    operands: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    cotangent = cotangent.astype(x.dtype)
    dx = input_gradient(cotangent, weight, contracted, dtype)
    return dx, weight_gradient(x, cotangent, contracted, dtype)


project.defvjp(_project_forward, _project_backward)


def input_gradient(
    cotangent: jax.Array, weight: jax.Array, contracted: int, dtype: DTypeLike | None = None
) -> jax.Array:
    """Return the gradient [..., *C] of the activations, in the dtype of the cotangent [..., *K].

    `weight`, `contracted` and `dtype` are as for `project`.
    """
    outputs = range(cotangent.ndim - (weight.ndim - contracted), cotangent.ndim)
    dx = dot(cotangent, weight, outputs, range(contracted, weight.ndim), dtype)
    return dx.astype(cotangent.dtype)


def weight_gradient(
    x: jax.Array, cotangent: jax.Array, contracted: int, dtype: DTypeLike | None = None
) -> jax.Array:
    """Return the gradient [*C, *K] of the weight, in the dtype of `x`; see `input_gradient`."""
    batch = range(x.ndim - contracted)
    return dot(x, cotangent, batch, batch, dtype).astype(x.dtype)


def dot(
    a: jax.Array, b: jax.Array, dims_a: range, dims_b: range, dtype: DTypeLike | None
) -> jax.Array:
    """Return the product of `a` and `b` in `dtype`, summed over `dims_a` and `dims_b`."""
    contracted = (tuple(dims_a), tuple(dims_b))
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=dtype)


def projection(config: ModelConfig) -> ProjectFn:
    """Return the function by which a model's projections multiply with their weights."""
    if config.quantisation == "none":
        return project
    from maxpipe.model.quantisation import FORMATS, project_quantised

    is_full = config.quantised_passes == "full"
    return partial(project_quantised, FORMATS[config.quantisation], is_full)


# ------------------------------------------------------------------------------------------------
# Low-rank adapters of projections (LoRA, Hu et al. 2021)
# ------------------------------------------------------------------------------------------------

RANK_AXIS = "adapter_rank"  # logical axis that marks an adapter
# (input of an adapter [B, T, ...], name of its projection) -> the input after dropout
DropFn: TypeAlias = Callable[[jax.Array, str], jax.Array]


class Adapter(nnx.Module):
    """A term added to a projection of x: alpha / rank * x A B, where A maps x to R = rank numbers.

    B starts at 0, so that the first step has the losses of the base.

    Args:
      config: `model.lora`.
      spec: spec of the projection's weight, whose logical axes A and B have.
      contracted: number of dimensions of the weight that are summed over.
    """

    def __init__(self, config: LoRAConfig, spec: ParamSpec, contracted: int):
        ins, outs = spec.shape[:contracted], spec.shape[contracted:]
        self.contracted = contracted
        self.scale = config.alpha / config.rank
        # The same deviation as PEFT's initial values.
        self.a = declare(
            (*ins, config.rank),
            (*spec.axes[:contracted], RANK_AXIS),
            spec.dtype,
            stddev=1 / math.sqrt(3 * math.prod(ins)),
        )
        self.b = declare((config.rank, *outs), (RANK_AXIS, *spec.axes[contracted:]), spec.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the added term [B, T, *K] for x [B, T, *C]."""
        low = project(x, self.a[...], self.contracted) * self.scale  # [B, T, R]
        return project(low, self.b[...])


def add_adapters(module: nnx.Module, config: ModelConfig, contracted: Mapping[str, int]) -> None:
    """Give a module adapters for those of its projections that `model.lora` names.

    Args:
      module: module with the projections' weights under their names; gets `<name>_adapter`.
      config: the model's section of the configuration.
      contracted: number of dimensions summed over in each projection's weight, by name.
    """
    for name in config.adapted:
        if name in contracted:
            spec = getattr(module, name).get_metadata()["spec"]
            setattr(module, f"{name}_adapter", Adapter(config.lora, spec, contracted[name]))


def adapted(
    module: nnx.Module,
    name: str,
    x: jax.Array,
    contracted: int = 1,
    drop: DropFn | None = None,
    *,
    multiply: ProjectFn,
) -> jax.Array:
    """Project with the module's weight `name`, and add the term of its adapter, if it has one.

    Args:
      module: a module that `add_adapters` was called with.
      name: name of the projection.
      x: input of the projection, [B, T, *C].
      contracted: as for `project`.
      drop: dropout on the adapter's input; None without.
      multiply: function that multiplies with the weight; adapters compute in the dtype of `x`.

    Returns:
      [B, T, *K].
    """
    y = multiply(x, getattr(module, name)[...], contracted)
    adapter: Adapter | None = getattr(module, f"{name}_adapter", None)
    if adapter is None:
        return y
    return y + adapter(drop(x, name) if drop else x)


# ------------------------------------------------------------------------------------------------
# Normalisation
# ------------------------------------------------------------------------------------------------


class RMSNorm(nnx.Module):
    """Root-mean-square norm of the last dimensions, in float32 (Zhang & Sennrich 2019).

    Args:
      shape: sizes of the dimensions that are normalised together, usually one.
      eps: added to the mean square.
      dtype: dtype of the scale.
      axes: logical axes of the scale.
      offset: whether to multiply by 1 + scale, where the scale starts at 0.
    """

    def __init__(
        self,
        *shape: int,
        eps: float,
        dtype: DTypeLike,
        axes: tuple[str, ...] = ("norm",),
        offset: bool = False,
    ):
        self.eps = eps
        self.offset = offset
        self.dimensions = tuple(range(-len(shape), 0)) if len(shape) > 1 else -1
        self.scale = declare(shape, axes, dtype, fill=0.0 if offset else 1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., *shape]; the result has its shape and dtype."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=self.dimensions, keepdims=True)
        x32 *= jax.lax.rsqrt(mean_square + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (x32 * (1 + scale if self.offset else scale)).astype(x.dtype)


# ------------------------------------------------------------------------------------------------
# Gated MLP (SwiGLU and GeGLU, Shazeer 2020)
# ------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
GatingFn: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def gating(config: ModelConfig) -> GatingFn:
    """Return the function of gate and up, [..., F] each, whose result is projected down."""
    activation, limit = ACTIVATIONS[config.mlp_activation], config.mlp_limit
    offset = config.mlp_up_offset

    def apply(gate: jax.Array, up: jax.Array) -> jax.Array:
        if limit:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return activation(gate) * (up + offset if offset else up)

    return computed_once(apply) if config.gating == "separate" else apply


def computed_once(apply: GatingFn) -> GatingFn:
    """Return an elementwise function whose result and gradients are stored as arrays.

    TPUs would compute them within every product that reads them, forward and backward, which costs
    those products more time than the memory traffic that it saves.
    """

    def array_of_its_own(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(apply(gate, up))

    once = jax.custom_vjp(array_of_its_own)

    # Not `once`: policies of rematerialisation see single operations here, but would see a call.
    def forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return array_of_its_own(gate, up), (gate, up)

    def backward(
        saved: tuple[jax.Array, jax.Array], gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return jax.lax.optimization_barrier(jax.vjp(apply, *saved)[1](gradient))

    once.defvjp(forward, backward)
    return once


class GatedMLP(nnx.Module):
    """A gated MLP: down(activation(gate(x)) * up(x)), with the options of `gating`."""

    def __init__(self, config: ModelConfig):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        std = 1 / math.sqrt(D)
        out_std = 1 / math.sqrt(F * 2 * config.num_layers)  # see `Attention`
        self.gating = gating(config)
        self.multiply = projection(config)
        self.gate = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.up = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.down = declare((F, D), ("mlp", "embed"), dtype, stddev=out_std)
        self.has_bias = config.mlp_bias
        if config.mlp_bias:
            self.gate_bias = declare((F,), ("mlp",), dtype)
            self.up_bias = declare((F,), ("mlp",), dtype)
            self.down_bias = declare((D,), ("norm",), dtype)
        add_adapters(self, config, {"gate": 1, "up": 1, "down": 1})

    def __call__(self, x_BTD: jax.Array, drop: DropFn | None = None) -> jax.Array:
        """Apply the MLP to each token, [B, T, D] -> [B, T, D]; `drop` is for its adapters."""
        gate = checkpoint_name(self._project(x_BTD, "gate", drop), "mlp_gate")  # [B, T, F]
        up = checkpoint_name(self._project(x_BTD, "up", drop), "mlp_up")  # [B, T, F]
        return checkpoint_name(self._project(self.gating(gate, up), "down", drop), "mlp_down")

    def _project(self, x: jax.Array, name: str, drop: DropFn | None) -> jax.Array:
        y = adapted(self, name, x, drop=drop, multiply=self.multiply)
        return y + getattr(self, f"{name}_bias")[...] if self.has_bias else y


# ------------------------------------------------------------------------------------------------
# Dropout
# ------------------------------------------------------------------------------------------------


def dropout(x_BTD: jax.Array, rate: float, key: jax.Array, side: SideInputs) -> jax.Array:
    """Zero entries with probability `rate` and scale the others by 1 / (1 - rate).

    The mask depends only on (key, sequence, segment, position), so that no layout of devices and no
    order of tokens changes it.

    Args:
      x_BTD: activations [B, T, D], or with several dimensions after T.
      rate: probability in [0, 1).
      key: key of the step, layer and sublayer.
      side: identifies sequences and tokens.
    """

    def keep_token(key: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, segment), position)
        return jax.random.bernoulli(key, 1 - rate, x_BTD.shape[2:])  # [D]

    def keep_sequence(sequence: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        sequence_key = jax.random.fold_in(key, sequence)
        return jax.vmap(keep_token, (None, 0, 0))(sequence_key, segments, positions)  # [T, D]

    mask = jax.vmap(keep_sequence)(side.sequence_index, side.segment_ids, side.positions)
    return jnp.where(mask, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
