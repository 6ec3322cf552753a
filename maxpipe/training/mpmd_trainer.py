"""The engine whose state lies in parts on the stages' own devices, each part updated by a program of its own."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.devices.host_memory import to_host
from maxpipe.model import parameters
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.pipeline.engines.base import Batch, Metrics
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine
from maxpipe.pipeline.engines.mpmd.staged import ArraysByPath
from maxpipe.pipeline.engines.mpmd.stages import named
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.optimizer import Optimizer
from maxpipe.training.spikes import History
from maxpipe.training.step import TrainState, judge_step, map_by_parameter, new_state, step_key
from maxpipe.training.trainer import canonical_sharding, like_parameter

_CHUNK = re.compile(r"\['chunks'\]\[(\d+)\]")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageState:
    """What one stage owns; names as in `TrainState`.

    Attributes:
      step: int32 scalar, finished steps.
      key: uint32 key data of the run.
      params: {"chunks": {global chunk: layers}} and, where it is the stage's, "embed" and "head".
      opt_state: the optimizer's state of `params`.
    """

    step: jax.Array
    key: jax.Array
    params: Params
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MpmdState:
    """Live state of a run over all stages.

    Attributes:
      stages: what each stage owns.
      copies: for each stage, parameters that it reads and another one owns.
      skips, history: as in `TrainState`, on the stage of the loss.
    """

    stages: tuple[StageState, ...]
    copies: tuple[ArraysByPath, ...]
    skips: jax.Array
    history: History | None


class MpmdTrainer:
    """See `trainer.Trainer`.

    Args:
      program_specs: {"embed", "layers", "head"} of `ModelProgram.specs`.
      pipeline: losses and gradients.
      meshes: sub-mesh of each stage.
      rules: logical axis rules on the mesh of all stages.
      make_optimizer: the update rule for a tree of `ParamSpec`s.
    """

    def __init__(
        self,
        program_specs: Any,
        pipeline: MpmdEngine,
        meshes: Sequence[Mesh],
        rules: AxisRules,
        make_optimizer: Callable[[Any], Optimizer],
    ):
        self._specs = program_specs
        self._rules = rules
        self.pipeline = pipeline
        self.batch_spec = pipeline.batch_spec
        self._whole = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
        self._optimizer = make_optimizer(program_specs)
        self._optimizers = [make_optimizer(pipeline.model.specs(s)) for s in range(len(meshes))]
        key = jax.random.key(0)
        self._abstract = [
            jax.eval_shape(partial(self._new_stage, s), key) for s in range(len(meshes))
        ]
        self._shardings = [
            map_by_parameter(partial(like_parameter, whole), abstract, params, None)
            for abstract, params, whole in zip(
                self._abstract, pipeline.abstract, self._whole, strict=True
            )
        ]
        self._step_key = jax.jit(step_key)
        self._squares = jax.jit(partial(optax.tree.norm, squared=True))
        self._judge = jax.jit(partial(judge_step, self._optimizer))
        self._update = [
            jax.jit(partial(_update, optimizer), out_shardings=shardings, donate_argnums=0)
            for optimizer, shardings in zip(self._optimizers, self._shardings, strict=True)
        ]

    def init(self, key: jax.Array) -> MpmdState:
        """State before the first step, each stage's part initialised on its devices."""
        stages = []
        for s, whole in enumerate(self._whole):
            make = jax.jit(partial(self._new_stage, s), out_shardings=self._shardings[s])
            stages.append(make(jax.device_put(key, whole)))
        return self._state(stages, jnp.zeros((), jnp.int32), self._optimizer.spike_filter.init())

    def step(self, state: MpmdState, batch: Batch) -> tuple[MpmdState, Metrics]:
        keys = [
            self._step_key(stage.key, stage.step) if self.pipeline.needs_key else None
            for stage in state.stages
        ]
        params = [stage.params for stage in state.stages]
        loss, gradients = self.pipeline.loss_and_gradients(params, state.copies, batch, keys)
        end = self.pipeline.loss_stage
        squares = jax.device_put([self._squares(g) for g in gradients], self._whole[end])
        accept, skips, history, metrics = self._judge(
            loss,
            jnp.sqrt(sum(squares[1:], squares[0])),
            state.stages[end].step,
            state.skips,
            state.history,
        )
        stages = []
        for s, update in enumerate(self._update):
            norm, accepted = jax.device_put((metrics["grad_norm"], accept), self._whole[s])
            stages.append(update(state.stages[s], gradients[s], norm, accepted))
        copies = self.pipeline.copies([stage.params for stage in stages])
        return MpmdState(tuple(stages), tuple(copies), skips, history), metrics

    def forward(self, state: MpmdState, batch: Batch) -> Metrics:
        return self.pipeline.evaluate([stage.params for stage in state.stages], state.copies, batch)

    def to_canonical(self, state: MpmdState) -> TrainState:
        """The state as on disk, moved to the host leaf by leaf."""
        live = [named(part) for part in (*state.stages, replace(state, stages=(), copies=()))]

        def convert(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path)
            if "['layers']" not in name:
                return to_host(next(stage[name] for stage in live if name in stage))
            chunks = (
                self._chunk_leaf(live, name, c) for c in range(len(self.pipeline.model.layers))
            )
            return np.concatenate([np.asarray(chunk) for chunk in chunks])

        return jax.tree_util.tree_map_with_path(convert, self.abstract_canonical())

    def from_canonical(self, state: TrainState) -> MpmdState:
        """The live state from what a checkpoint held."""
        leaves = named(state)

        def convert(path: Any, sharding: NamedSharding) -> jax.Array:
            name = jax.tree_util.keystr(path)
            chunk = _CHUNK.search(name)
            if chunk is None:
                return jax.device_put(leaves[name], sharding)
            rows = self.pipeline.model.layers[int(chunk[1])]
            leaf = leaves[_CHUNK.sub("['layers']", name)]
            return jax.device_put(leaf[int(rows[0]) : int(rows[-1]) + 1], sharding)

        stages = [
            jax.tree_util.tree_map_with_path(convert, shardings) for shardings in self._shardings
        ]
        return self._state(stages, state.skips, state.history)

    def abstract_canonical(self) -> TrainState:
        """Shapes and dtypes of `to_canonical`'s result, and shardings over the devices of all stages."""
        num_layers = sum(map(len, self.pipeline.model.layers))
        mesh = self._rules.mesh

        def param(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, self._rules.spec(spec.axes, spec.shape))
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

        def layers(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(
                mesh, PartitionSpec("stage", *self._rules.spec(spec.axes, spec.shape))
            )
            return jax.ShapeDtypeStruct((num_layers, *spec.shape), spec.dtype, sharding=sharding)

        live = {
            n: map_specs(layers if n == "layers" else param, specs)
            for n, specs in self._specs.items()
        }
        whole = NamedSharding(mesh, PartitionSpec())
        abstract = jax.eval_shape(partial(self._new_canonical, num_layers), jax.random.key(0))
        is_layer = {n: jax.tree.map(lambda _, n=n: n == "layers", tree) for n, tree in live.items()}
        shardings = map_by_parameter(partial(like_parameter, whole), abstract, live, None)
        in_layers = map_by_parameter(lambda leaf, layer: layer, abstract, is_layer, False)

        def one(
            leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, layer: bool
        ) -> jax.ShapeDtypeStruct:
            sharding = canonical_sharding(sharding, 1, leaf.shape) if layer else sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(one, abstract, shardings, in_layers)

    def _state(self, stages: Sequence[StageState], skips: Any, history: Any) -> MpmdState:
        copies = self.pipeline.copies([stage.params for stage in stages])
        skips, history = jax.device_put((skips, history), self._whole[self.pipeline.loss_stage])
        return MpmdState(tuple(stages), tuple(copies), skips, history)

    def _new_stage(self, stage: int, key: jax.Array) -> StageState:
        params = self.pipeline.model.init(stage, key)
        opt_state = self._optimizers[stage].init(params)
        return StageState(jnp.zeros((), jnp.int32), jax.random.key_data(key), params, opt_state)

    def _new_canonical(self, num_layers: int, key: jax.Array) -> TrainState:
        params = parameters.init_params({n: self._specs[n] for n in ("embed", "head")}, key)
        params["layers"] = parameters.init_layers(
            self._specs["layers"], key, jnp.arange(num_layers)
        )
        return new_state(
            params, self._optimizer.init(params), key, self._optimizer.spike_filter.init()
        )

    def _chunk_leaf(self, live: Sequence[dict[str, Any]], name: str, chunk: int) -> jax.Array:
        name = name.replace("['layers']", f"['chunks'][{chunk}]", 1)
        return next(stage[name] for stage in live if name in stage)


def _update(
    optimizer: Optimizer, stage: StageState, gradients: Params, norm: jax.Array, accept: jax.Array
) -> StageState:
    params, opt_state = optimizer.update(
        stage.params, gradients, stage.opt_state, stage.step, norm, accept
    )
    return StageState(stage.step + 1, stage.key, params, opt_state)
