"""Train with the mpmd engine: each stage holds and updates its part of the state.

On disk the state is the same as that of other trainers. Its subtrees that mirror the parameters
(the parameters themselves, an optimizer's moments) are joined from and split into the stages'
parts; see `_join` and `_split`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.devices.host_memory import to_host
from maxpipe.model.layers import EXPERT_DROPS, EXPERT_LOAD
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.pipeline.engines.base import Batch, Metrics
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine, StageParams
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.expert_load import load_figures, with_excess
from maxpipe.training.optimizer import Optimizer
from maxpipe.training.spikes import History
from maxpipe.training.state import (
    TrainState,
    canonical_sharding,
    initial_params,
    layer_flags,
    like_parameter,
    map_by_parameter,
    mirrors,
    names_of,
    new_state,
    pick_value,
    step_key,
    with_sharding,
)
from maxpipe.training.step import judge_step
from maxpipe.training.trainer import ReadParameter, Trainer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageState:
    """What one stage owns; names as in `TrainState`.

    Attributes:
      step: int32 scalar, finished steps.
      key: uint32 key data of the run.
      params: {"chunks": {global chunk: layers}} and, where the stage owns them, "embed" and "head".
      opt_state: the optimizer's state of `params`.
    """

    step: jax.Array
    key: jax.Array
    params: Params
    opt_state: optax.OptState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MpmdState:
    """Live state of a run over all stages.

    Attributes:
      stages: what each stage owns.
      skips, history: as in `TrainState`, on the stage of the loss.
    """

    stages: tuple[StageState, ...]
    skips: jax.Array
    history: History | None

    @property
    def params(self) -> StageParams:
        """Return the live parameters as the engine takes them."""
        return tuple(stage.params for stage in self.stages)


class MpmdTrainer(Trainer[MpmdState]):
    """Train with the mpmd engine.

    Args:
      program_specs: {"embed", "layers", "head"} of `ModelProgram.specs`.
      engine: computes losses and gradients.
      rules: logical axis rules on the mesh of all stages.
      make_optimizer: returns the update rule for a tree of `ParamSpec`s.
      adds_batch_digest: see `Trainer`.
    """

    def __init__(
        self,
        program_specs: Params,
        engine: MpmdEngine,
        rules: AxisRules,
        make_optimizer: Callable[[Params], Optimizer],
        *,
        adds_batch_digest: bool = False,
    ):
        self._specs = program_specs
        self._rules = rules
        self.engine = engine
        self.batch_spec = engine.batch_spec
        self.adds_batch_digest = adds_batch_digest
        stages = range(len(engine.meshes))
        self._replicated = [NamedSharding(mesh, PartitionSpec()) for mesh in engine.meshes]
        self._optimizer = make_optimizer(program_specs)
        self._optimizers = [make_optimizer(engine.model.specs(stage)) for stage in stages]
        self._shardings = [
            map_by_parameter(
                partial(like_parameter, self._replicated[stage]),
                jax.eval_shape(partial(self._new_stage, stage), jax.random.key(0)),
                engine.abstract[stage],
                None,
            )
            for stage in stages
        ]
        self._step_key = jax.jit(step_key)
        self._squared_norm = jax.jit(partial(optax.tree.norm, squared=True))
        self._load_figures = jax.jit(load_figures)
        self._judge = jax.jit(partial(judge_step, self._optimizer))
        self._update = [
            jax.jit(
                partial(_update, optimizer, self._place_load),
                out_shardings=shardings,
                donate_argnums=0,
            )
            for optimizer, shardings in zip(self._optimizers, self._shardings, strict=True)
        ]

    def init(self, key: jax.Array) -> MpmdState:
        stages = []
        for stage, replicated in enumerate(self._replicated):
            new_stage = partial(self._new_stage, stage)
            make = jax.jit(new_stage, out_shardings=self._shardings[stage])
            stages.append(make(jax.device_put(key, replicated)))
        return self._state(stages, jnp.zeros((), jnp.int32), self._optimizer.spike_filter.init())

    def replace_parameters(self, state: MpmdState, read: ReadParameter) -> MpmdState:
        for leaf in jax.tree.leaves(state.params):
            leaf.delete()
        params = jax.tree_util.tree_map_with_path(
            lambda path, like: read(names_of(path), like), self.abstract_canonical().params
        )
        stages = [
            replace(stage, params=self._split(params, live.params))
            for stage, live in zip(state.stages, self._shardings, strict=True)
        ]
        return replace(state, stages=tuple(stages))

    def update(self, state: MpmdState, batch: Batch) -> tuple[MpmdState, Metrics]:
        end = self.engine.loss_stage
        # 1. Loss and gradients.
        key = self._step_key(state.stages[end].key, state.stages[end].step)
        metrics, gradients = self.engine.loss_and_gradients(state.params, batch, key)
        # 2. The norm of all gradients, and the verdict, on the stage of the loss.
        squares = jax.device_put([self._squared_norm(g) for g in gradients], self._replicated[end])
        norm = jnp.sqrt(sum(squares[1:], squares[0]))
        verdict = self._judge(
            metrics["loss"], norm, state.stages[end].step, state.skips, state.history
        )
        load = metrics.pop(EXPERT_LOAD, None)
        if load is not None:
            metrics |= self._load_figures(load, metrics.pop(EXPERT_DROPS, None))
        # 3. The update, on each stage.
        stages = []
        for stage, update in enumerate(self._update):
            facts = jax.device_put(
                (verdict.metrics["grad_norm"], verdict.accept, load), self._replicated[stage]
            )
            stages.append(update(state.stages[stage], gradients[stage], *facts))
        after = MpmdState(tuple(stages), verdict.skips, verdict.history)
        return after, metrics | verdict.metrics

    def forward(self, state: MpmdState, batch: Batch) -> Metrics:
        return self.engine.evaluate(state.params, batch)

    def to_canonical(self, state: MpmdState) -> TrainState:
        opt_states = [stage.opt_state for stage in state.stages]
        is_mirror = partial(mirrors, jax.tree.structure(state.stages[0].params))
        step, key, skips, history = jax.tree.map(
            to_host, (state.stages[0].step, state.stages[0].key, state.skips, state.history)
        )
        params = self._join(*state.params)
        opt_state = jax.tree.map(self._join, *opt_states, is_leaf=is_mirror)
        return TrainState(step, key, params, opt_state, skips, history)

    def from_canonical(self, state: TrainState) -> MpmdState:
        is_mirror = partial(mirrors, jax.tree.structure(state.params))
        stages = []
        for live in self._shardings:
            opt_state = jax.tree.map(
                self._split, state.opt_state, live.opt_state, is_leaf=is_mirror
            )
            step, key = jax.device_put((state.step, state.key), (live.step, live.key))
            stages.append(StageState(step, key, self._split(state.params, live.params), opt_state))
        return self._state(stages, state.skips, state.history)

    def _join(self, *parts: Any) -> Any:
        """Join the stages' parts of a subtree that mirrors the parameters, on the host.

        Leaves are moved one by one. What belongs to no parameter is the same on all stages.
        """
        if not mirrors(jax.tree.structure(self.engine.abstract[0]), parts[0]):
            return to_host(parts[0])
        chunks = {chunk: layers for part in parts for chunk, layers in part["chunks"].items()}
        in_order = [chunks[chunk] for chunk in sorted(chunks)]
        joined = {"layers": jax.tree.map(lambda *leaf: self.engine.to_canonical(leaf), *in_order)}
        for part in parts:
            for name in part.keys() - {"chunks"}:
                joined[name] = jax.tree.map(to_host, part[name])
        return joined

    def _split(self, node: Params, shardings: Params) -> Params:
        """Take a stage's part from a subtree on disk that mirrors the parameters.

        What belongs to no parameter is copied to all stages.

        Args:
          node: like {"embed", "layers", "head"}, or an array.
          shardings: of the stage's part, which also say what it owns.
        """
        if isinstance(shardings, NamedSharding):
            return jax.device_put(node, shardings)

        def layers_of(chunk: int) -> Params:
            def take(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
                return jax.device_put(self.engine.layers_of(chunk, leaf), sharding)

            return jax.tree.map(take, node["layers"], shardings["chunks"][chunk])

        part: Params = {"chunks": {chunk: layers_of(chunk) for chunk in shardings["chunks"]}}
        for name in shardings.keys() - {"chunks"}:
            part[name] = jax.tree.map(jax.device_put, node[name], shardings[name])
        return part

    def abstract_canonical(self) -> TrainState:
        """Return `to_canonical`'s shapes and dtypes, sharded over the devices of all stages."""
        mesh, rules = self._rules.mesh, self._rules
        num_layers = sum(map(len, self.engine.layer_index()))

        def outer(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, rules.spec(spec.axes, spec.shape))
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

        def layers(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            pspec = PartitionSpec("stage", *rules.spec(spec.axes, spec.shape))
            sharding = NamedSharding(mesh, pspec)
            return jax.ShapeDtypeStruct((num_layers, *spec.shape), spec.dtype, sharding=sharding)

        def convert(
            leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, is_layer: bool
        ) -> jax.ShapeDtypeStruct:
            sharding = canonical_sharding(sharding, 1, leaf.shape) if is_layer else sharding
            return with_sharding(leaf, sharding)

        params = {
            name: map_specs(layers if name == "layers" else outer, specs)
            for name, specs in self._specs.items()
        }
        replicated = NamedSharding(mesh, PartitionSpec())
        abstract = jax.eval_shape(partial(self._new_canonical, num_layers), jax.random.key(0))
        shardings = map_by_parameter(partial(like_parameter, replicated), abstract, params, None)
        is_layer = map_by_parameter(pick_value, abstract, layer_flags(params), False)
        return jax.tree.map(convert, abstract, shardings, is_layer)

    def _place_load(self, gradients: Params, load: jax.Array | None) -> Params:
        """Return a stage's gradients with the load of experts for those of selection biases.

        Args:
          gradients: of what a stage owns.
          load: float32 [N, E]; None without experts.
        """
        if load is None:
            return gradients
        chunks = {
            chunk: with_excess(self._specs["layers"], layers, self.engine.layers_of(chunk, load))
            for chunk, layers in gradients["chunks"].items()
        }
        return gradients | {"chunks": chunks}

    def _state(
        self, stages: Sequence[StageState], skips: jax.Array, history: History | None
    ) -> MpmdState:
        replicated = self._replicated[self.engine.loss_stage]
        return MpmdState(tuple(stages), *jax.device_put((skips, history), replicated))

    def _new_stage(self, stage: int, key: jax.Array) -> StageState:
        params = self.engine.model.init(stage, key)
        opt_state = self._optimizers[stage].init(params)
        return StageState(jnp.zeros((), jnp.int32), jax.random.key_data(key), params, opt_state)

    def _new_canonical(self, num_layers: int, key: jax.Array) -> TrainState:
        params = initial_params(self._specs, key, np.arange(num_layers))
        history = self._optimizer.spike_filter.init()
        return new_state(params, self._optimizer.init(params), key, history)


def _update(
    optimizer: Optimizer,
    place_load: Callable[[Params, jax.Array | None], Params],
    stage: StageState,
    gradients: Params,
    norm: jax.Array,
    accept: jax.Array,
    load: jax.Array | None,
) -> StageState:
    gradients = place_load(gradients, load)
    params, opt_state = optimizer.update(
        stage.params, gradients, stage.opt_state, stage.step, norm, accept
    )
    return StageState(stage.step + 1, stage.key, params, opt_state)
