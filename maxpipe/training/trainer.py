"""Define trainers, which own the live state, and train with SPMD engines.

The training loop sees a state that `step` replaces, and its form on disk, which is the same for all
engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note
from maxpipe.devices.host_memory import to_host
from maxpipe.model import parameters
from maxpipe.model.parameters import Params
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import Batch, EngineInputs, Metrics, SpmdEngine
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.batches import batch_digest
from maxpipe.training.state import (
    HostArray,
    Programs,
    TrainState,
    abstract_on_disk,
    abstract_state,
    first_state,
    layer_flags,
    names_of,
    shardings_of,
    with_sharding,
)
from maxpipe.training.step import train_step
from maxpipe.training.update import Optimizer, with_excess

StateT = TypeVar("StateT")
# Returns the parameter at a path in its layout on disk, given its shape, dtype and sharding there.
ReadParameter = Callable[[tuple[str, ...], jax.ShapeDtypeStruct], jax.Array]
StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Trainer(ABC, Generic[StateT]):
    """Own the live state of a run, of type `StateT`, and apply the update.

    Attributes:
      batch_spec: layout of batches over the mesh of all devices.
      adds_batch_digest: whether steps have the further metric "batch_digest", uint32: proof that no
        batch is repeated or left out across restarts. It depends only on the global batch, not on
        mesh or processes.
    """

    batch_spec: PartitionSpec

    def __init__(
        self,
        program_specs: Params,
        rules: AxisRules,
        optimizer: Optimizer,
        num_layers: int,
        adds_batch_digest: bool,
    ):
        self.adds_batch_digest = adds_batch_digest
        self._specs = program_specs
        self._rules = rules
        self._optimizer = optimizer
        self._num_layers = num_layers

    @classmethod
    @abstractmethod
    def of_run(
        cls, config: Config, mesh: Mesh, inputs: EngineInputs, engine: Any, note: Note
    ) -> Self:
        """Build the trainer of a resolved configuration for the mesh of all devices."""

    @cached_property
    def _on_disk(self) -> TrainState:
        return abstract_on_disk(self._specs, self._rules, self._optimizer, self._num_layers)

    def abstract_canonical(self) -> TrainState:
        """Return shapes, dtypes and shardings of `to_canonical`'s result."""
        return self._on_disk

    @abstractmethod
    def init(self, key: jax.Array) -> StateT:
        """Return the state before the first step, initialised in its layout on the devices."""

    @abstractmethod
    def update(self, state: StateT, batch: Batch) -> tuple[StateT, Metrics]:
        """Run one training step without the batch digest; `state` is donated."""

    def step(self, state: StateT, batch: Batch) -> tuple[StateT, Metrics]:
        """Run one training step; `state` is donated."""
        digest = {"batch_digest": batch_digest(batch)} if self.adds_batch_digest else {}
        state, metrics = self.update(state, batch)
        return state, metrics | digest

    def stage_seconds(self) -> list[float]:
        """Return each stage's seconds for a finished step, once for each; empty in one program."""
        return []

    def resume_clocks(self) -> None:
        """Exclude the time since the last step from the next step's `stage_seconds`."""

    @abstractmethod
    def replace_parameters(self, state: StateT, read: ReadParameter) -> StateT:
        """Return a new state with the parameters that `read` returns in the layout on disk.

        The parameters of `state` are deleted first, leaf by leaf where there is one program.
        """

    @abstractmethod
    def restart_optimizer(self, state: StateT) -> StateT:
        """Return `state` with the optimizer's state from before the first step."""

    @abstractmethod
    def forward(self, state: StateT, batch: Batch) -> Metrics:
        """Return the sums over an evaluation batch, as `Engine.evaluate` does."""

    @abstractmethod
    def to_canonical(self, state: StateT) -> TrainState:
        """Return the state as on disk, layers in model order, copied to the host leaf by leaf."""

    @abstractmethod
    def canonical_params(self, state: StateT) -> Params:
        """Return only the parameters of `to_canonical`'s result."""

    @abstractmethod
    def from_canonical(self, state: TrainState) -> StateT:
        """Return the live state from what a checkpoint holds; the inverse of `to_canonical`."""


class BuildTrainer(Protocol):
    """`maxpipe.builder.build_trainer`, passed in because the builder imports this package."""

    def __call__(self, config: Config, mesh: Mesh, *, note: Note) -> Trainer: ...


class SpmdTrainer(Trainer[TrainState]):
    """Train with an `SpmdEngine`: the state is one sharded tree, the step one jitted program.

    Args:
      make_optimizer: function of a tree of `ParamSpec`s, with options of `Optimizer`.
      load_step: function of the abstract live state and the sharding of batches that returns a
        step to run instead of the one compiled here, such as `stored_step.StoredStep`.
    """

    def __init__(
        self,
        program_specs: Params,
        engine: SpmdEngine,
        rules: AxisRules,
        make_optimizer: Callable[..., Optimizer],
        *,
        load_step: Callable[[TrainState, NamedSharding], StepFunction] | None = None,
        adds_batch_digest: bool = False,
    ):
        layer_shape = engine.layer_index().shape
        layers = jax.eval_shape(engine.to_canonical, np.zeros(layer_shape))
        params = Weights(rules, program_specs, engine.layer_axes, layer_shape).abstract()
        self._param_shardings = jax.tree.map(lambda p: p.sharding, params)
        optimizer = make_optimizer(
            program_specs, shardings=self._param_shardings, layer_index=engine.layer_index()
        )
        super().__init__(program_specs, rules, optimizer, len(layers), adds_batch_digest)
        self._engine = engine
        self.batch_spec = rules.spec(("activation_batch", "activation_length"))
        self._replicated = NamedSharding(rules.mesh, PartitionSpec())
        self._abstract = abstract_state(program_specs, engine.layer_index(), optimizer)
        self._shardings = shardings_of(self._abstract, params, self._replicated)
        batch_sharding = NamedSharding(rules.mesh, self.batch_spec)
        batch = dict.fromkeys(microbatches.ARRAYS, batch_sharding)
        self.jitted_step = jax.jit(
            partial(train_step, engine.loss_and_gradients, self._place_load, optimizer),
            in_shardings=(self._shardings, batch),
            out_shardings=(self._shardings, self._replicated),
            donate_argnums=0,
            keep_unused=True,  # a stored executable takes all leaves
        )
        self._step: StepFunction = (
            load_step(self.abstract_state(), batch_sharding) if load_step else self.jitted_step
        )
        self._forward = jax.jit(engine.evaluate, in_shardings=(self._param_shardings, batch))
        self._program = Programs()

    @classmethod
    def of_run(
        cls, config: Config, mesh: Mesh, inputs: EngineInputs, engine: SpmdEngine, note: Note
    ) -> Self:
        specs, load_step = inputs.program.specs, None
        if config.compile.load:
            from maxpipe.training.stored_step import StoredStep

            load_step = partial(StoredStep, config, mesh)
        return cls(
            specs,
            engine,
            inputs.rules,
            partial(Optimizer, config.optimizer, bias_rate=config.model.moe.bias_rate),
            load_step=load_step,
            adds_batch_digest=config.telemetry.batch_digest,
        )

    def init(self, key: jax.Array) -> TrainState:
        specs, shardings = self._specs, self._param_shardings
        params = parameters.draw(
            {name: specs[name] for name in ("embed", "head")},
            {name: shardings[name] for name in ("embed", "head")},
            key,
        )
        index = jnp.asarray(self._engine.layer_index())
        params["layers"] = parameters.draw(specs["layers"], shardings["layers"], key, index)
        complete = partial(first_state, optimizer=self._optimizer)
        return jax.jit(complete, out_shardings=self._shardings, donate_argnums=0)(params, key)

    def replace_parameters(self, state: TrainState, read: ReadParameter) -> TrainState:
        def replace_leaf(
            path: KeyPath,
            leaf: jax.Array,
            is_layer: bool,
            on_disk: jax.ShapeDtypeStruct,
            live: NamedSharding,
        ) -> jax.Array:
            leaf.delete()
            return self._to_live(read(names_of(path), on_disk), is_layer, on_disk, live)

        params = jax.tree_util.tree_map_with_path(
            replace_leaf,
            state.params,
            self._is_layer(state).params,
            self._on_disk.params,
            self._param_shardings,
        )
        return replace(state, params=params)

    def restart_optimizer(self, state: TrainState) -> TrainState:
        begin = jax.jit(self._optimizer.init, out_shardings=self._shardings.opt_state)
        return replace(state, opt_state=begin(state.params))

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self._step(state, batch)

    def forward(self, state: TrainState, batch: Batch) -> Metrics:
        return self._forward(state.params, batch)

    def to_canonical(self, state: TrainState) -> TrainState:
        return jax.tree.map(self._to_host, state, self._is_layer(state), self._on_disk)

    def canonical_params(self, state: TrainState) -> Params:
        is_layer = self._is_layer(state).params
        return jax.tree.map(self._to_host, state.params, is_layer, self._on_disk.params)

    def from_canonical(self, state: TrainState) -> TrainState:
        is_layer = self._is_layer(state)
        return jax.tree.map(self._to_live, state, is_layer, self._on_disk, self._shardings)

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the live state."""
        return jax.tree.map(with_sharding, self._abstract, self._shardings)

    def _place_load(self, gradients: Params, load: jax.Array) -> Params:
        rows = self._engine.from_canonical(load)
        return gradients | {"layers": with_excess(self._specs["layers"], gradients["layers"], rows)}

    # XLA replicates an array that it must reshape and spread over `stage` at once, so both ways
    # reshape while `stage` splits the dimension that it splits on disk.

    def _to_host(self, leaf: jax.Array, is_layer: bool, like: jax.ShapeDtypeStruct) -> HostArray:
        join = self._program(self._join, like.sharding, like.sharding)
        return to_host(join(leaf) if is_layer else leaf)

    def _join(self, on_disk: NamedSharding, leaf: jax.Array) -> jax.Array:
        leaf = jax.lax.with_sharding_constraint(leaf, self._layers_together(on_disk))
        return self._engine.to_canonical(leaf)

    def _to_live(
        self, leaf: jax.Array, is_layer: bool, like: jax.ShapeDtypeStruct, live: NamedSharding
    ) -> jax.Array:
        converted: jax.Array = leaf
        if is_layer:
            converted = self._program(self._split, live, like.sharding)(leaf)
        return converted

    def _split(self, on_disk: NamedSharding, leaf: jax.Array) -> jax.Array:
        leaf = self._engine.from_canonical(leaf)
        return jax.lax.with_sharding_constraint(leaf, self._layers_together(on_disk))

    def _layers_together(self, on_disk: NamedSharding) -> NamedSharding:
        layer_axes = (None,) * len(self._engine.layer_axes)
        return NamedSharding(on_disk.mesh, PartitionSpec(*layer_axes, *on_disk.spec[1:]))

    def _is_layer(self, state: TrainState) -> TrainState:
        return layer_flags(state, self._param_shardings)
