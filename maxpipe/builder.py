"""From a resolved configuration to a trainer: the one place where model and engine are picked."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.rules.engines import check_processes, check_split_backwards
from maxpipe.config.sections import Config
from maxpipe.model.kernels.choose import build_attention
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.engines.base import Engine, EngineInputs, SpmdEngine
from maxpipe.pipeline.engines.circular.engine import CircularEngine
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine, stage_meshes
from maxpipe.pipeline.engines.scheduled.engine import ScheduledEngine
from maxpipe.pipeline.engines.sequential import SequentialEngine
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.mpmd_trainer import MpmdTrainer
from maxpipe.training.optimizer import Optimizer
from maxpipe.training.stored_step import StoredStep
from maxpipe.training.trainer import SpmdTrainer, Trainer

SPMD_ENGINES: dict[str, type[SpmdEngine]] = {
    "sequential": SequentialEngine,
    "circular": CircularEngine,
    "scheduled": ScheduledEngine,
}
ENGINES: dict[str, type[Engine]] = {**SPMD_ENGINES, "mpmd": MpmdEngine}


def build_engine_inputs(
    config: Config, mesh: Mesh, *, note: Callable[[str], None] = lambda decision: None
) -> EngineInputs:
    """Build what an engine is built from; arguments as for `build_trainer`.

    The logical axis rules are bound to the mesh; for the MPMD engine, to an abstract mesh like that
    of every stage.
    """
    watch = {"show": print} if config.sharding.debug and jax.process_index() == 0 else {}
    per_stage = config.pipeline.engine == "mpmd"
    bound: Any = stage_meshes(mesh)[0].abstract_mesh if per_stage else mesh
    rules = AxisRules(config.sharding.logical_axis_rules, bound, note, **watch)
    table = None if config.pipeline.engine == "sequential" else build_table(config)
    attention = build_attention(config, rules, mesh.devices.flat[0].platform, note)
    return EngineInputs(
        ModelProgram(config.model, attention),
        rules,
        config.pipeline,
        build_layout(config),
        mesh,
        (config.data.global_batch_size, config.data.sequence_length),
        table,
    )


def build_trainer(
    config: Config, mesh: Mesh, *, note: Callable[[str], None] = lambda decision: None
) -> Trainer:
    """Build the trainer of a resolved configuration, with the engine that it names.

    Args:
      config: resolved; `pipeline.engine` is no longer auto.
      mesh: from `maxpipe.devices.mesh.build_mesh`.
      note: called with each automatic decision and its reason.

    Raises:
      ConfigError: the schedule cannot be built, does not run on this engine, or does not go with
        other options.
    """
    try:
        inputs = build_engine_inputs(config, mesh, note=note)
        build = build_mpmd_trainer if config.pipeline.engine == "mpmd" else build_spmd_trainer
        return build(config, mesh, inputs)
    except ScheduleError as error:
        raise ConfigError(Problem("", str(error))) from error  # the message begins with the key


def build_spmd_trainer(config: Config, mesh: Mesh, inputs: EngineInputs) -> Trainer:
    """Build a trainer with one program on all devices; arguments as for `build_trainer`.

    Raises:
      ConfigError: the schedule splits backwards, which another option does not allow.
    """
    specs = inputs.program.specs
    engine = SPMD_ENGINES[config.pipeline.engine](inputs)
    _check_split_backwards(config, inputs)
    return SpmdTrainer(
        specs,
        engine,
        inputs.rules,
        Optimizer(config.optimizer, specs),
        load_step=partial(StoredStep, config, mesh) if config.compile.load else None,
        adds_batch_digest=config.telemetry.batch_digest,
    )


def build_mpmd_trainer(config: Config, mesh: Mesh, inputs: EngineInputs) -> Trainer:
    """Build a trainer with programs per stage; arguments as for `build_trainer`.

    Raises:
      ConfigError: there are several processes, or the schedule splits backwards, which another
        option does not allow.
    """
    check_processes(config, jax.process_count())
    _check_split_backwards(config, inputs)
    return MpmdTrainer(
        inputs.program.specs,
        MpmdEngine(inputs),
        AxisRules(config.sharding.logical_axis_rules, mesh),
        partial(Optimizer, config.optimizer),
        adds_batch_digest=config.telemetry.batch_digest,
    )


def _check_split_backwards(config: Config, inputs: EngineInputs) -> None:
    if inputs.table is not None and "W" in inputs.table.kinds:
        check_split_backwards(config)
