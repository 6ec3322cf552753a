"""Hold the state of a run, and convert between its layouts on devices and on disk.

On disk a layer parameter is [N, ...] in model order, and so is every leaf of the optimizer's state
that belongs to it. Letters: N layers.
"""

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.model import parameters
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.mirrors import map_by_parameter
from maxpipe.training.update import History, Optimizer

StateT = TypeVar("StateT")
HostArray = np.ndarray | jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of a run, live or as on disk.

    Attributes:
      step: int32 scalar, finished steps.
      key: uint32 key data of the run; the key of each step is folded from it.
      params: {"embed", "layers", "head"}.
      opt_state: the optimizer's state; subtrees that mirror `params` have the same keys.
      skips: int32 scalar, consecutive non-finite steps up to now.
      history: recent steps for the spike filter; None, no leaf at all, without it.
    """

    step: jax.Array
    key: jax.Array
    params: Params
    opt_state: optax.OptState
    skips: jax.Array
    history: History | None = None

    def step_key(self) -> jax.Array:
        return step_key(self.key, self.step)


def step_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """Return the PRNG key of the step after `step` finished ones; `key` is the run's key data."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), step)


def first_state(params: Params, key: jax.Array, optimizer: Optimizer) -> TrainState:
    zero, history = jnp.zeros((), jnp.int32), optimizer.spike_filter.init()
    key_data = jax.random.key_data(key)
    return TrainState(zero, key_data, params, optimizer.init(params), zero, history)


def abstract_state(specs: Params, layer_index: np.ndarray, optimizer: Optimizer) -> TrainState:
    """Return shapes and dtypes of a state; arguments as for `initial_params`."""

    def new_state(key: jax.Array) -> TrainState:
        return first_state(initial_params(specs, key, layer_index), key, optimizer)

    abstract: TrainState = jax.eval_shape(new_state, jax.random.key(0))
    return abstract


def initial_params(specs: Params, key: jax.Array, layer_index: np.ndarray) -> Params:
    """Return initial {"embed", "layers", "head"}, layer leaves [*layer_index.shape, ...].

    `specs` are of one layer for the layers; `layer_index` has each layer's index in model order.
    """
    params = parameters.init_params({n: specs[n] for n in ("embed", "head")}, key)
    params["layers"] = parameters.init_layers(specs["layers"], key, jnp.asarray(layer_index))
    return params


def names_of(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", key)) for key in path)


def layer_flags(state: StateT, params: Params) -> StateT:
    """Return a tree like `state` of bools: whether a leaf has leading layer dimensions."""
    is_layer = {
        name: jax.tree.map(lambda _, flag=(name == "layers"): flag, tree)
        for name, tree in params.items()
    }
    return map_by_parameter(lambda leaf, flag: flag, state, is_layer, False)


def shardings_of(state: StateT, params: Params, replicated: NamedSharding) -> StateT:
    """Return each leaf's sharding: its parameter's, as far as the leading sizes agree."""

    def sharding(leaf: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct | None) -> NamedSharding:
        if param is None:
            return replicated
        assert isinstance(param.sharding, NamedSharding)
        dims = zip(param.sharding.spec, param.shape, leaf.shape, strict=False)
        same = [entry for entry, *_ in itertools.takewhile(lambda dim: dim[1] == dim[2], dims)]
        spec = PartitionSpec(*same, *[None] * (leaf.ndim - len(same)))
        return NamedSharding(replicated.mesh, spec)

    return map_by_parameter(sharding, state, params, None)


def abstract_on_disk(
    specs: Params, rules: AxisRules, optimizer: Optimizer, num_layers: int
) -> TrainState:
    """Return shapes, dtypes and shardings of a state as on disk; specs as for `initial_params`."""
    mesh = rules.mesh

    def param(spec: ParamSpec, *, layers: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        pspec = PartitionSpec(*[None] * len(layers), *rules.spec(spec.axes, spec.shape))
        sharding = NamedSharding(mesh, pspec)
        return jax.ShapeDtypeStruct((*layers, *spec.shape), spec.dtype, sharding=sharding)

    def leaf(
        like: jax.ShapeDtypeStruct, sharding: NamedSharding, is_layer: bool
    ) -> jax.ShapeDtypeStruct:
        return with_sharding(like, _over_stages(sharding, like.shape) if is_layer else sharding)

    params = {
        name: map_specs(partial(param, layers=(num_layers,) if name == "layers" else ()), part)
        for name, part in specs.items()
    }
    abstract = abstract_state(specs, np.arange(num_layers), optimizer)
    shardings = shardings_of(abstract, params, NamedSharding(mesh, PartitionSpec()))
    return jax.tree.map(leaf, abstract, shardings, layer_flags(abstract, params))


def _over_stages(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Split the first dimension after the layers that the mesh axis `stage` divides.

    If it split the layers, every device would have to hold all of them for a moment, since the
    layers of a stage are not neighbours in model order.
    """
    sizes = sharding.mesh.shape
    entries = [
        entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in sharding.spec
    ]
    for i in range(1, len(shape) if sizes["stage"] > 1 else 0):
        if shape[i] % (sizes["stage"] * math.prod(sizes[axis] for axis in entries[i])) == 0:
            entries[i] = (*entries[i], "stage")
            break
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def with_sharding(
    leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class Programs:
    """Jitted functions, each compiled once for each layout of its result."""

    def __init__(self) -> None:
        self._jitted: dict[Hashable, jax.stages.Wrapped] = {}

    def __call__(
        self, f: Callable[..., object], out_shardings: Hashable, *settings: Hashable
    ) -> jax.stages.Wrapped:
        key = f, out_shardings, settings
        if key not in self._jitted:
            self._jitted[key] = jax.jit(partial(f, *settings), out_shardings=out_shardings)
        return self._jitted[key]
