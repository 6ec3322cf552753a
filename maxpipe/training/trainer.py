"""The engine contract, and the engine whose state is one sharded tree in one jitted step."""

import itertools
import math
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.devices.host_memory import to_host
from maxpipe.model import parameters
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch, Engine, Metrics
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.optimizer import Optimizer
from maxpipe.training.step import TrainState, map_by_parameter, new_state, train_step


class Trainer(Protocol):
    """All that the training loop knows of an engine, which owns the live state."""

    batch_spec: PartitionSpec

    def init(self, key: jax.Array) -> Any:
        """State before the first step."""

    def step(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """One step; `state` is donated."""

    def forward(self, state: Any, batch: Batch) -> Metrics:
        """Sums over an evaluation batch."""

    def to_canonical(self, state: Any) -> Any:
        """The state as it is on disk, layers in model order, leaf by leaf."""

    def from_canonical(self, state: Any) -> Any:
        """The live state; the inverse of `to_canonical`."""

    def abstract_canonical(self) -> Any:
        """Shapes, dtypes and shardings of `to_canonical`'s result."""


class SpmdTrainer:
    """One program on all devices around an `Engine`.

    Args:
      program_specs: {"embed", "layers", "head"} of `ModelProgram.specs`.
      pipeline: losses and gradients.
      rules: logical axis rules.
      optimizer: the update rule.
    """

    def __init__(
        self, program_specs: Any, pipeline: Engine, rules: AxisRules, optimizer: Optimizer
    ):
        self._specs = program_specs
        self._pipeline = pipeline
        self._rules = rules
        self._optimizer = optimizer
        self.batch_spec = rules.spec(("activation_batch", "activation_length"))
        index = pipeline.layer_index()
        params = Weights(rules, program_specs, pipeline.layer_axes, index.shape).abstract()
        self._param_shardings = jax.tree.map(lambda p: p.sharding, params)
        self._whole = NamedSharding(rules.mesh, PartitionSpec())
        self._abstract = jax.eval_shape(self._new_state, jax.random.key(0))
        self._shardings = map_by_parameter(
            partial(like_parameter, self._whole), self._abstract, params, None
        )
        batch = dict.fromkeys(microbatches.ARRAYS, NamedSharding(rules.mesh, self.batch_spec))
        self.jitted_step = jax.jit(
            partial(train_step, pipeline.loss_and_gradients, optimizer),
            in_shardings=(self._shardings, batch),
            out_shardings=(self._shardings, self._whole),
            donate_argnums=0,
            keep_unused=True,  # the arguments of a stored executable are all leaves
        )
        self._forward = jax.jit(pipeline.evaluate, in_shardings=(self._param_shardings, batch))
        self._conversions: dict[Any, Any] = {}

    def init(self, key: jax.Array) -> TrainState:
        """State before the first step, initialised sharded by one compiled program."""
        return jax.jit(self._new_state, out_shardings=self._shardings)(key)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self.jitted_step(state, batch)

    def forward(self, state: TrainState, batch: Batch) -> Metrics:
        return self._forward(state.params, batch)

    def to_canonical(self, state: TrainState) -> TrainState:
        """The state as on disk; each leaf is moved to the host before the next is converted."""

        def convert(leaf: jax.Array, is_layer: bool, target: jax.ShapeDtypeStruct) -> Any:
            return to_host(
                self._jit(self._pipeline.to_canonical, target.sharding)(leaf) if is_layer else leaf
            )

        return jax.tree.map(convert, state, self._is_layer(state), self.abstract_canonical())

    def from_canonical(self, state: TrainState) -> TrainState:
        """The live state from what a checkpoint held."""

        def convert(leaf: Any, is_layer: bool, target: jax.ShapeDtypeStruct) -> jax.Array:
            return (
                self._jit(self._pipeline.from_canonical, target.sharding)(leaf)
                if is_layer
                else leaf
            )

        return jax.tree.map(convert, state, self._is_layer(state), self.abstract_state())

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the live state."""
        return jax.tree.map(_with_sharding, self._abstract, self._shardings)

    def abstract_canonical(self) -> TrainState:
        """As `abstract_state`, for the layout on disk."""

        def one(
            leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, is_layer: bool
        ) -> jax.ShapeDtypeStruct:
            if not is_layer:
                return _with_sharding(leaf, sharding)
            canonical = jax.eval_shape(self._pipeline.to_canonical, leaf)
            leading = len(self._pipeline.layer_axes)
            return _with_sharding(canonical, canonical_sharding(sharding, leading, canonical.shape))

        return jax.tree.map(one, self._abstract, self._shardings, self._is_layer(self._abstract))

    def _is_layer(self, state: TrainState) -> Any:
        by_path = {
            n: jax.tree.map(lambda _, n=n: n == "layers", s)
            for n, s in self._param_shardings.items()
        }
        return map_by_parameter(lambda leaf, is_layer: is_layer, state, by_path, False)

    def _jit(self, convert: Any, sharding: Any) -> Any:
        if (convert, sharding) not in self._conversions:
            self._conversions[convert, sharding] = jax.jit(convert, out_shardings=sharding)
        return self._conversions[convert, sharding]

    def _new_state(self, key: jax.Array) -> TrainState:
        params = parameters.init_params({n: self._specs[n] for n in ("embed", "head")}, key)
        params["layers"] = parameters.init_layers(
            self._specs["layers"], key, jnp.asarray(self._pipeline.layer_index())
        )
        return new_state(
            params, self._optimizer.init(params), key, self._optimizer.spike_filter.init()
        )


def like_parameter(
    whole: NamedSharding, leaf: Any, param: jax.ShapeDtypeStruct | None
) -> NamedSharding:
    """Leaves are laid out like their parameter as far as their dimensions are the same, the layers' always.

    Args:
      whole: for leaves that belong to no parameter.
      leaf: of the state.
      param: its parameter, or None.
    """
    if param is None:
        return whole
    dims = zip(param.sharding.spec, param.shape, leaf.shape, strict=False)
    same = [entry for entry, *_ in itertools.takewhile(lambda dim: dim[1] == dim[2], dims)]
    return NamedSharding(whole.mesh, PartitionSpec(*same, *[None] * (leaf.ndim - len(same))))


def canonical_sharding(live: NamedSharding, leading: int, shape: tuple[int, ...]) -> NamedSharding:
    """How a layer leaf lies on the devices when its layers are in model order.

    What lay over `stage` lies over the first other dimension that it divides. Laid over the layers
    instead, every device would have to hold all of them for a moment, since the layers of a stage
    are not neighbours in model order.

    Args:
      live: of the live leaf.
      leading: number of its layer dimensions.
      shape: in model order, one layer dimension.
    """
    entries = [
        e if isinstance(e, tuple) else (e,) if e else () for e in (None, *live.spec[leading:])
    ]
    if "stage" in live.spec[:leading]:
        for i in range(1, len(shape)):
            parts = live.mesh.shape["stage"] * math.prod(live.mesh.shape[a] for a in entries[i])
            if shape[i] % parts == 0:
                entries[i] = (*entries[i], "stage")
                break
    return NamedSharding(live.mesh, PartitionSpec(*entries))


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
