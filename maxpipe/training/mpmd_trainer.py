"""Train with the mpmd engine: each stage holds and updates its part of the state.

On disk the state is the same as with other trainers. Its subtrees that mirror the parameters
(the parameters themselves, an optimizer's moments) are joined from and split into the stages'
parts; see `_join` and `_split`. Every process has the whole tree, in which arrays of other
processes are absent (`devices.transfers`), and calls the same functions in the same order.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note
from maxpipe.devices import processes
from maxpipe.devices.agreement import agree_on
from maxpipe.devices.transfers import absent, describe_transfers, is_here, processes_of, send
from maxpipe.model.layers import EXPERT_DROPS, EXPERT_LOAD
from maxpipe.model.parameters import Params, trainable
from maxpipe.pipeline.engines.base import Batch, EngineInputs, Metrics
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine, StageParams
from maxpipe.pipeline.engines.mpmd.program import fingerprint
from maxpipe.pipeline.engines.mpmd.stage_clock import StageClock, timed
from maxpipe.pipeline.engines.mpmd.staged import UnitCompiler
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.mirrors import mirrors
from maxpipe.training.stage_exchange import DeviceExchange, HostExchange
from maxpipe.training.state import (
    HostArray,
    TrainState,
    names_of,
    shardings_of,
    step_key,
    with_sharding,
)
from maxpipe.training.step import judge_step
from maxpipe.training.trainer import ReadParameter, Trainer
from maxpipe.training.update import History, Optimizer, load_figures, with_excess

ResultT = TypeVar("ResultT")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageState:
    """What one stage owns; fields as in `TrainState`."""

    step: jax.Array
    key: jax.Array
    params: Params  # {"chunks": {global chunk: layers}}, "embed" and "head" if the stage owns them
    opt_state: optax.OptState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MpmdState:
    """Live state of a run over all stages; `skips` and `history` are on the stage of the loss."""

    stages: tuple[StageState, ...]
    skips: jax.Array
    history: History | None

    @property
    def params(self) -> StageParams:
        return tuple(stage.params for stage in self.stages)


class MpmdTrainer(Trainer[MpmdState]):
    """Train with the mpmd engine.

    Args:
      rules: logical axis rules on the mesh of all stages.
      make_optimizer: function of a tree of `ParamSpec`s, with options of `Optimizer`.
    """

    def __init__(
        self,
        program_specs: Params,
        engine: MpmdEngine,
        rules: AxisRules,
        make_optimizer: Callable[..., Optimizer],
        *,
        adds_batch_digest: bool = False,
    ):
        num_layers = sum(map(len, engine.layer_index()))
        optimizer = make_optimizer(program_specs)
        super().__init__(program_specs, rules, optimizer, num_layers, adds_batch_digest)
        self.engine = engine
        self.batch_spec = engine.batch_spec
        stages = range(len(engine.meshes))
        self._is_here = list(map(is_here, engine.meshes))
        self._replicated = [NamedSharding(mesh, PartitionSpec()) for mesh in engine.meshes]
        self._make_optimizer = make_optimizer
        self._optimizers = [self._optimizer_of(stage) for stage in stages]
        self._abstract = [self._abstract_stage(stage, engine.meshes[stage]) for stage in stages]
        self._shardings: list[StageState] = jax.tree.map(lambda x: x.sharding, self._abstract)
        mesh = rules.mesh
        assert isinstance(mesh, Mesh)
        self._exchange: HostExchange | DeviceExchange = HostExchange(engine)
        if len(processes_of(mesh)) > 1:
            self._exchange = DeviceExchange(engine, mesh)
            engine.clocks = {stage: StageClock() for stage in stages if self._is_here[stage]}
        self._step_key = jax.jit(step_key)
        squared_norm = partial(optax.tree.norm, squared=True)
        self._squared_norms = [OnStage(squared_norm, mesh) for mesh in engine.meshes]
        end = engine.meshes[engine.loss_stage]
        self._norm = OnStage(lambda squares: jnp.sqrt(sum(squares[1:], squares[0])), end)
        self._load_figures = OnStage(load_figures, end)
        self._judge = OnStage(partial(judge_step, self._optimizer), end)
        self._update = [self._update_of(stage, self._shardings[stage]) for stage in stages]

    @classmethod
    def of_run(
        cls, config: Config, mesh: Mesh, inputs: EngineInputs, engine: MpmdEngine, note: Note
    ) -> Self:
        if jax.process_count() > 1:
            _check_agreement(engine)
            note(f"transfers between processes: {describe_transfers()}")
        return cls(
            inputs.program.specs,
            engine,
            AxisRules(config.sharding.logical_axis_rules, mesh),
            partial(Optimizer, config.optimizer, bias_rate=config.model.moe.bias_rate),
            adds_batch_digest=config.telemetry.batch_digest,
        )

    def init(self, key: jax.Array) -> MpmdState:
        stages = []
        for stage, abstract in enumerate(self._abstract):
            if self._is_here[stage]:
                new_stage = partial(self._new_stage, stage)
                stages.append(jax.jit(new_stage, out_shardings=self._shardings[stage])(key))
            else:
                stages.append(jax.tree.map(absent, abstract))
        return self._state(stages, jnp.zeros((), jnp.int32), self._optimizer.spike_filter.init())

    def replace_parameters(self, state: MpmdState, read: ReadParameter) -> MpmdState:
        for leaf in jax.tree.leaves(state.params):
            leaf.delete()
        params = jax.tree_util.tree_map_with_path(
            lambda path, like: read(names_of(path), like), self._on_disk.params
        )
        parts = self._split(params, *(live.params for live in self._shardings))
        stages = [replace(stage, params=p) for stage, p in zip(state.stages, parts, strict=True)]
        return replace(state, stages=tuple(stages))

    def restart_optimizer(self, state: MpmdState) -> MpmdState:
        stages = list(state.stages)
        for i, (stage, optimizer) in enumerate(zip(stages, self._optimizers, strict=True)):
            if self._is_here[i]:
                begin = jax.jit(optimizer.init, out_shardings=self._shardings[i].opt_state)
                stages[i] = replace(stage, opt_state=begin(stage.params))
        return replace(state, stages=tuple(stages))

    def update(self, state: MpmdState, batch: Batch) -> tuple[MpmdState, Metrics]:
        with timed(self.engine.clocks.values()):
            return self._update_stages(state, batch)

    def _update_stages(self, state: MpmdState, batch: Batch) -> tuple[MpmdState, Metrics]:
        end = self.engine.loss_stage
        home = end if self._is_here[end] else self._is_here.index(True)
        clocks = self.engine.clocks
        # 1. Loss and gradients. Every stage has the key of the run, and counts the steps.
        key = self._step_key(state.stages[home].key, state.stages[home].step)
        metrics, gradients = self.engine.loss_and_gradients(state.params, batch, key)
        # 2. The norm of all gradients, and the verdict, on the stage of the loss.
        squares: list[jax.Array] = []
        for stage, squared_norm in enumerate(self._squared_norms):
            square = squared_norm(gradients[stage])
            if stage in clocks:
                clocks[stage].dispatched(square)
            squares += send([square], [self._replicated[end]])
        verdict = self._judge(
            metrics["loss"],
            self._norm(squares),
            self.engine.total_weight(batch["weights"]),
            state.stages[end].step,
            state.skips,
            state.history,
        )
        load = metrics.pop(EXPERT_LOAD, None)
        if load is not None:
            metrics |= self._load_figures(load, metrics.pop(EXPERT_DROPS, None))
        # 3. The update, on each stage.
        facts, tree = jax.tree.flatten((verdict.metrics["grad_norm"], verdict.accept, load))
        stages = []
        for stage, update in enumerate(self._update):
            arrived = send(facts, [self._replicated[stage]] * len(facts))
            if stage in clocks:
                clocks[stage].end(arrived[0])
            # Stages of other processes stay absent.
            after = state.stages[stage]
            if self._is_here[stage]:
                after = update(after, gradients[stage], *jax.tree.unflatten(tree, arrived))
            stages.append(after)
        after_step = MpmdState(tuple(stages), verdict.skips, verdict.history)
        return after_step, self.engine.everywhere(metrics | verdict.metrics)

    def stage_seconds(self) -> list[float]:
        """Return each stage's seconds for a step, without waits for other stages, on process 0.

        For a stage of several processes this is the time of the slowest. The list is empty on other
        processes, or if there is only one.
        """
        if not self.engine.clocks:
            return []
        own = {stage: clock.take_seconds() for stage, clock in self.engine.clocks.items()}
        of_processes = processes.of_all_on_first(json.dumps(list(own.items())))
        seconds = [0.0] * len(self._is_here)
        for text in of_processes:
            for stage, of_stage in json.loads(text):
                seconds[stage] = max(seconds[stage], of_stage)
        return seconds if of_processes else []

    def resume_clocks(self) -> None:
        for clock in self.engine.clocks.values():
            clock.resume()

    def forward(self, state: MpmdState, batch: Batch) -> Metrics:
        return self.engine.everywhere(self.engine.evaluate(state.params, batch))

    def to_canonical(self, state: MpmdState) -> TrainState:
        opt_states = [stage.opt_state for stage in state.stages]
        is_mirror = partial(mirrors, jax.tree.structure(state.stages[0].params))
        own = state.stages[self._is_here.index(True)]
        skips, history = self.engine.everywhere((state.skips, state.history))
        # The same in all processes.
        step, key, skips, history = jax.tree.map(np.array, (own.step, own.key, skips, history))
        params = self.canonical_params(state)
        opt_state = jax.tree.map(
            self._join, *opt_states, self._on_disk.opt_state, is_leaf=is_mirror
        )
        return TrainState(step, key, params, opt_state, skips, history)

    def canonical_params(self, state: MpmdState) -> Params:
        return self._join(*state.params, self._on_disk.params)

    def from_canonical(self, state: TrainState) -> MpmdState:
        is_mirror = partial(mirrors, jax.tree.structure(state.params))
        params = self._split(state.params, *(live.params for live in self._shardings))
        opt_states = jax.tree.map(
            lambda node, *live: self._split(node, *live),
            state.opt_state,
            *(live.opt_state for live in self._shardings),
            is_leaf=is_mirror,
        )
        stages = []
        for stage, live in enumerate(self._shardings):
            step, key = jax.tree.map(_place, (state.step, state.key), (live.step, live.key))
            opt_state = jax.tree.map(
                lambda parts, s=stage: parts[s],
                opt_states,
                is_leaf=lambda node: isinstance(node, list),
            )
            stages.append(StageState(step, key, params[stage], opt_state))
        return self._state(stages, state.skips, state.history)

    def _join(self, *parts: Any) -> Any:
        """Join the stages' parts of a subtree that mirrors the parameters, on the host.

        What belongs to no parameter is the same on all stages.

        Args:
          parts: the part of each stage, then the subtree on disk, with shapes and shardings.
        """
        *stages, on_disk = parts
        if not mirrors(jax.tree.structure(self.engine.abstract[0]), stages[0]):
            return np.array(stages[self._is_here.index(True)])
        chunks = {chunk: layers for part in stages for chunk, layers in part["chunks"].items()}
        joined = {
            "layers": jax.tree.map(
                lambda like, *leaf: self._exchange.join_layers(leaf, like),
                on_disk["layers"],
                *(chunks[chunk] for chunk in sorted(chunks)),
            )
        }
        for part in stages:
            # Sorted, because all processes must join the parts in the same order.
            for name in sorted(part.keys() - {"chunks"}):
                joined[name] = jax.tree.map(self._exchange.join_outer, part[name], on_disk[name])
        return joined

    def _split(self, node: Any, *shardings: Any) -> list[Any]:
        """Return each stage's part of a subtree on disk that mirrors the parameters.

        What belongs to no parameter is copied to all stages.

        Args:
          shardings: shardings of each stage's part, which also say what the stage owns.
        """
        if isinstance(shardings[0], NamedSharding):
            return [_place(node, sharding) for sharding in shardings]
        of_chunk = {c: layers for live in shardings for c, layers in live["chunks"].items()}
        leaves, tree = jax.tree.flatten(node["layers"])
        targets = [jax.tree.leaves(of_chunk[chunk]) for chunk in sorted(of_chunk)]
        chunks: list[list[jax.Array]] = [[] for _ in targets]
        for leaf, *live in zip(leaves, *targets, strict=True):
            for chunk, array in zip(chunks, self._exchange.split_layers(leaf, live), strict=True):
                chunk.append(array)
        parts: list[Params] = []
        for live in shardings:
            part: Params = {
                "chunks": {
                    chunk: jax.tree.unflatten(tree, chunks[chunk]) for chunk in live["chunks"]
                }
            }
            for name in sorted(live.keys() - {"chunks"}):
                part[name] = jax.tree.map(self._exchange.place_outer, node[name], live[name])
            parts.append(part)
        return parts

    def _place_load(self, gradients: Params, load: jax.Array | None) -> Params:
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
        place = partial(_place, sharding=self._replicated[self.engine.loss_stage])
        return MpmdState(tuple(stages), *jax.tree.map(place, (skips, history)))

    def _optimizer_of(self, stage: int, shardings: Params | None = None) -> Optimizer:
        layer_index, specs = self.engine.layer_index(), self.engine.model.specs(stage)
        return self._make_optimizer(specs, shardings=shardings, layer_index=layer_index)

    def _update_of(self, stage: int, shardings: StageState) -> jax.stages.Wrapped:
        optimizer = self._optimizer_of(stage, shardings.params)
        return jax.jit(
            partial(_update, optimizer, self._place_load), out_shardings=shardings, donate_argnums=0
        )

    def compile_updates(self, meshes: Sequence[Mesh]) -> Iterator[jax.stages.Compiled]:
        """Compile the update of each stage, without load of experts, for a mesh like its own."""
        compiler = UnitCompiler()
        for stage, mesh in enumerate(meshes):
            replicated = NamedSharding(mesh, PartitionSpec())
            state = self._abstract_stage(stage, mesh)
            moving = trainable(self.engine.model.specs(stage), state.params)
            gradients = jax.tree.map(lambda p: p.update(dtype=jnp.float32), moving)
            norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
            accept = jax.ShapeDtypeStruct((), jnp.bool_, sharding=replicated)
            update = self._update_of(stage, jax.tree.map(lambda x: x.sharding, state))
            yield compiler.compile(update.lower(state, gradients, norm, accept, None), mesh)

    def _abstract_stage(self, stage: int, mesh: Mesh) -> StageState:
        shapes = jax.eval_shape(partial(self._new_stage, stage), jax.random.key(0))
        params = self.engine.model.abstract(stage, mesh)
        shardings = shardings_of(shapes, params, NamedSharding(mesh, PartitionSpec()))
        return jax.tree.map(with_sharding, shapes, shardings)

    def _new_stage(self, stage: int, key: jax.Array) -> StageState:
        params = self.engine.model.init(stage, key)
        opt_state = self._optimizers[stage].init(params)
        return StageState(jnp.zeros((), jnp.int32), jax.random.key_data(key), params, opt_state)


class OnStage(Generic[ResultT]):
    """A function that runs on a stage; its results are replicated there and absent elsewhere."""

    def __init__(self, f: Callable[..., ResultT], mesh: Mesh):
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._is_here = is_here(mesh)
        self._run = jax.jit(f, out_shardings=self._replicated)

    def __call__(self, *args: object) -> ResultT:
        result: ResultT
        if self._is_here:
            result = self._run(*args)
        else:
            shapes = self._run.eval_shape(*args)
            result = jax.tree.map(lambda x: absent(with_sharding(x, self._replicated)), shapes)
        return result


def _check_agreement(engine: MpmdEngine) -> None:
    if not describe_transfers():
        message = (
            "JAX has started for another engine, without sockets between its processes; start the "
            "run in new processes"
        )
        raise ConfigError(Problem("pipeline.engine", message))
    if engine.model.offloaded and any(len(processes_of(stage)) > 1 for stage in engine.meshes):
        reason = "a stage of several processes has no memory of one host"
        raise ConfigError(Problem("pipeline.remat_policy", f"{reason}; use minimal or full"))
    agree_on({"traced program": fingerprint(engine.training.program, engine.table)})


def _place(x: HostArray, sharding: NamedSharding) -> jax.Array:
    assert isinstance(sharding.mesh, Mesh)
    if not is_here(sharding.mesh):
        return absent(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
    is_whole = not isinstance(x, jax.Array) or x.is_fully_addressable
    return jax.device_put(x if is_whole else np.asarray(x), sharding)


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
