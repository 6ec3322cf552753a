"""Run the layers of one chunk, and decide what their forward saves for their backward.

The backward computes the rest again. A rematerialisation policy is data, see
`maxpipe.config.catalog.RematPolicy`: the names that the model gives tensors with `checkpoint_name`,
and where these tensors are saved. Weights are never saved, gathered or not: the backward has them
anyway, and a pipeline would save a copy in every iteration.

Letters: see `maxpipe.pipeline`.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from maxpipe.config.catalog import ENGINES, EXPERT_CHOICE, MLP, NAMED, REMAT_POLICIES, RematPolicy
from maxpipe.config.sections import PipelineConfig
from maxpipe.devices.host_memory import DEVICE, HOST
from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram

Function = Callable[..., Any]
SavePolicy = Callable[..., bool]  # a policy of `jax.checkpoint`
# (layer parameters, layer index, activations [B, T, D], side inputs, key of the step or None) ->
# (activations [B, T, D], auxiliary losses)
LayerFn = Callable[
    [Params, jax.Array, jax.Array, SideInputs, jax.Array | None], tuple[jax.Array, AuxiliaryLosses]
]

LAYER_INPUT = "layer_input"

# Operations on a weight between its storage and a matrix product. For activations they cost next to
# nothing, so recomputing them is no loss there.
_COPIES = frozenset(
    {
        "gather",
        "dynamic_slice",
        "slice",
        "squeeze",
        "reshape",
        "broadcast_in_dim",
        "concatenate",
        "pad",
        "split",
        "transpose",
        "convert_element_type",
        "sharding_constraint",
        "all_gather",
    }
)

# XLA fuses these into the operations that read their results: recomputing them there is faster than
# reading a copy. In norms and rotations they are float32, twice the size of their operands. Results
# that a barrier keeps apart are element-wise as well. Comparisons are not listed: a mask takes one
# byte an element, the random bits that it is made from take four. Nor are sums: XLA adds terms
# before it rounds them, and saved terms are rounded.
_ELEMENTWISE = frozenset(
    {
        "abs",
        "clamp",
        "div",
        "erf",
        "exp",
        "floor",
        "integer_pow",
        "log",
        "logistic",
        "max",
        "min",
        "mul",
        "neg",
        "optimization_barrier",
        "pow",
        "reduce_precision",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sqrt",
        "square",
        "sub",
        "tanh",
    }
)
_RECOMPUTED = _COPIES | _ELEMENTWISE


def layer_function(
    program: ModelProgram, prepare: Callable[[Params], Params], *, padded: bool
) -> LayerFn:
    """Return the function with which engines apply one layer.

    Args:
      prepare: makes one layer's parameters ready for use: casts them to the compute dtype and
        gathers them over the storage axes.
      padded: whether some layers are padding (index = stacked_layers), which must return the
        activations unchanged.
    """
    config = program.config

    def apply(
        layer: Params, index: jax.Array, x: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        # `index` counts the stacked layers, which come after the first dense ones.
        number = index + config.first_dense_layers if config.first_dense_layers else index
        layer_key = _layer_key(program, key, number)
        y, aux = program.block(prepare(layer), x, side._replace(layer_index=number), layer_key)
        if not padded:
            return y, aux
        is_layer = index < config.stacked_layers
        return jnp.where(is_layer, y, x), jax.tree.map(lambda a: jnp.where(is_layer, a, 0), aux)

    return apply


def apply_first_layers(
    program: ModelProgram,
    layers: Params,
    prepare: Callable[[Params], Params],
    policy: RematPolicy,
    x: jax.Array,
    side: SideInputs,
    key: jax.Array | None,
) -> jax.Array:
    """Apply the first dense layers, {"0": ..., "1": ...}, to x [B, T, D], if the model has any."""

    def apply(
        layer: Params, index: jax.Array, x: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> jax.Array:
        numbered = side._replace(layer_index=index)
        return program.first_block(prepare(layer), x, numbered, _layer_key(program, key, index))

    for i in range(len(layers)):
        x = checkpoint(apply, policy)(layers[str(i)], jnp.int32(i), x, side, key)
    return x


def _layer_key(program: ModelProgram, key: jax.Array | None, number: jax.Array) -> jax.Array | None:
    return jax.random.fold_in(key, number) if program.needs_key and key is not None else None


def apply_layers(
    layer_fn: LayerFn,
    layers: Params | tuple[Params, ...],
    index: jax.Array,
    x: jax.Array,
    side: SideInputs,
    key: jax.Array | None,
    *,
    scan: bool,
) -> tuple[jax.Array, AuxiliaryLosses]:
    """Apply consecutive layers to x [B, T, D]; auxiliary losses are summed.

    Args:
      layer_fn: the result of `layer_function`, perhaps rematerialised.
      layers: parameters, leaves [L, ...]; without `scan` perhaps a tuple with one tree per layer.
      index: the layers' indices in model order, int32 [L].
      scan: whether to compile one layer in a loop, not L copies.
    """
    if scan and index.shape[0] > 1:
        assert not isinstance(layers, tuple)

        def body(
            x: jax.Array, layer: tuple[Params, jax.Array]
        ) -> tuple[jax.Array, AuxiliaryLosses]:
            return layer_fn(layer[0], layer[1], x, side, key)

        x, stacked = jax.lax.scan(body, x, (layers, index))
        return x, jax.tree.map(partial(jnp.sum, axis=0), stacked)
    of_layers: list[AuxiliaryLosses] = []
    for i in range(index.shape[0]):
        layer = (
            layers[i] if isinstance(layers, tuple) else jax.tree.map(lambda p, i=i: p[i], layers)
        )
        x, aux = layer_fn(layer, index[i], x, side, key)
        of_layers.append(aux)
    return x, jax.tree.map(lambda *values: sum(values[1:], values[0]), *of_layers)


def sum_where(is_counted: jax.Array, aux: AuxiliaryLosses) -> AuxiliaryLosses:
    """Sum auxiliary losses [R, ...] over the parts that `is_counted`, bool [R], selects."""

    def total(a: jax.Array) -> jax.Array:
        mask = jnp.expand_dims(is_counted, range(1, a.ndim))
        return jnp.sum(jnp.where(mask, a, 0), axis=0)

    return jax.tree.map(total, aux)


def remat_policy(config: PipelineConfig) -> RematPolicy:
    """Return `pipeline.remat_policy`; `custom` is built from `pipeline.remat_tensors`."""
    policy = REMAT_POLICIES[config.remat_policy]
    if not policy.by_tensor:
        return policy
    places = asdict(config.remat_tensors)
    on_device = [name for name, place in places.items() if place == "device"]
    on_host = [name for name, place in places.items() if place == "offload"]
    if not {*MLP}.isdisjoint({*on_device, *on_host}):
        on_device.append(EXPERT_CHOICE)
    return RematPolicy(device=tuple(on_device), host=tuple(on_host))


def recomputes_rows(config: PipelineConfig) -> bool:
    """Return whether the backward recomputes the gates of an MLP, and with them rows of experts."""
    policy = remat_policy(config)
    if policy.everything or not {*MLP}.isdisjoint({*policy.device, *policy.host}):
        return False
    by_layer = config.remat_layers or not ENGINES[config.engine].has_stages
    return by_layer or config.remat_iterations


def offloaded_names(config: PipelineConfig) -> tuple[str, ...]:
    # Without rematerialisation all values are saved on the device.
    recomputes = config.remat_iterations or config.remat_layers
    return remat_policy(config).host if recomputes else ()


def saved_on_device(policy: RematPolicy) -> RematPolicy:
    return replace(policy, device=(*policy.device, *policy.host), host=())


def checkpoint(f: Function, policy: RematPolicy, *, prevent_cse: bool = True) -> Function:
    """Return `f` with a backward that recomputes what the policy does not save.

    Args:
      prevent_cse: keep XLA from merging what the backward recomputes with the forward, which would
        save it after all. Not needed where the two are in different loops, or where the backward
        reads what the forward stored at indices known only at run time: XLA does not merge them
        there, and preventing it would copy everything that the backward reads from a stack of
        saved tensors or weights.
    """
    saved = _is_worth_saving if policy.everything else _names(policy)
    return jax.checkpoint(f, policy=saved, prevent_cse=prevent_cse)


class Remat:
    """Rematerialisation of a pipeline's iteration, and of each layer within it.

    With `remat_iterations` an iteration saves what the policy names, in all its layers. The
    backward computes the rest again for all layers at once. If there are several, it holds only
    results of matrix products between them, and recomputes cheap operations layer by layer; with
    `remat_cheap=false` it holds everything.

    With `remat_layers` the backward recomputes one layer at a time, from that layer's input.
    The inputs are saved if iterations are not rematerialised; if they are, the backward computes
    them again too, which makes two passes through each layer.

    With neither, an iteration saves what the policy `none` does.
    """

    def __init__(self, config: PipelineConfig, policy: RematPolicy, *, prevent_cse: bool = True):
        self._policy = policy
        self._prevent_cse = prevent_cse
        self._iterations, self._layers = config.remat_iterations, config.remat_layers
        self._holds_cheap = config.remat_cheap == "false"

    def iteration(self, f: Function) -> Function:
        """Wrap one iteration of one stage, including the selection of its weights."""
        policy = RematPolicy((*self._policy.device, LAYER_INPUT), self._policy.host)
        if self._iterations or self._policy.everything:
            policy = self._policy
        elif not self._layers:
            policy = RematPolicy(everything=True)
        return checkpoint(f, policy, prevent_cse=self._prevent_cse)

    def layer(self, f: LayerFn, *, is_only: bool) -> LayerFn:
        """Wrap one layer, perhaps the only one of an iteration."""
        if not self._layers:
            holds_all = is_only or self._holds_cheap or self._policy.everything
            return f if holds_all else checkpoint(f, RematPolicy(NAMED))
        # XLA would merge the layer's recomputation with the iteration's.
        inner = checkpoint(f, self._policy, prevent_cse=self._prevent_cse or self._iterations)

        def with_named_input(
            layer: Params, index: jax.Array, x: jax.Array, side: SideInputs, key: jax.Array | None
        ) -> tuple[jax.Array, AuxiliaryLosses]:
            return inner(layer, index, checkpoint_name(x, LAYER_INPUT), side, key)

        return with_named_input


def _names(policy: RematPolicy) -> SavePolicy:
    if not policy.host:
        return jax.checkpoint_policies.save_only_these_names(*policy.device)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=policy.device,
        names_which_can_be_offloaded=policy.host,
        offload_src=DEVICE,
        offload_dst=HOST,
    )


def _is_worth_saving(primitive: Primitive, *_: object, **params: object) -> bool:
    return primitive.name not in _RECOMPUTED
