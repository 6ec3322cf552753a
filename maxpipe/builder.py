"""From configuration to a run: the one place where model, engine, data, checkpoints and telemetry meet."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh

import maxpipe
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.mirror import open_mirror
from maxpipe.checkpoint.steps import choose
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.rules.engines import check_split_backwards, one_process
from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO
from maxpipe.data.loader import Loader, make_loader
from maxpipe.devices import processes
from maxpipe.devices.chips import chip_for
from maxpipe.model.kernels.choose import build_attention
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.engines.base import Engine, EngineInputs, SpmdEngine
from maxpipe.pipeline.engines.circular.engine import CircularEngine
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine, stage_meshes
from maxpipe.pipeline.engines.scheduled.engine import ScheduledEngine
from maxpipe.pipeline.engines.sequential import SequentialEngine
from maxpipe.pipeline.layout import StageLayout
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.planning.flops import model_flops_per_token
from maxpipe.sharding.rules import AxisRules
from maxpipe.supervision.supervise import Supervision
from maxpipe.telemetry.profiler import Profiler
from maxpipe.telemetry.recorder import Recorder
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.loop import Run
from maxpipe.training.mpmd_trainer import MpmdTrainer
from maxpipe.training.optimizer import Optimizer
from maxpipe.training.run_directory import RunDirectory
from maxpipe.training.stored_step import StoredStep
from maxpipe.training.trainer import SpmdTrainer, Trainer

SPMD_ENGINES: dict[str, type[SpmdEngine]] = {
    "sequential": SequentialEngine,
    "circular": CircularEngine,
    "scheduled": ScheduledEngine,
}
ENGINES: dict[str, type[Engine]] = {**SPMD_ENGINES, "mpmd": MpmdEngine}

DEPENDENCIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def build_layout(config: Config) -> StageLayout:
    """Which layer lives on which stage, from a resolved configuration whose stages are chosen."""
    assert config.pipeline.layers_per_stage != AUTO, (
        "stages are not chosen; see pipeline.auto_stages"
    )
    pipeline, stages = config.pipeline, num_stages(config)
    if pipeline.engine == "sequential":
        return StageLayout.even(1, 1, config.model.num_layers)
    even = [pipeline.num_layers_per_stage] * (stages * pipeline.num_repeats)
    return StageLayout(
        stages,
        pipeline.num_repeats,
        tuple(pipeline.layers_per_stage or even),
        num_outside=config.model.num_layers - pipeline.parallel_layers,
        outside_first=pipeline.outside_layers == "before",
        placement=build_table(config).placement if pipeline.engine == "mpmd" else "loop",
    )


def build_engine_inputs(
    config: Config, mesh: Mesh, *, say: Callable[[str], None] = lambda text: None
) -> EngineInputs:
    """What a pipeline is built from; arguments as for `build_trainer`.

    The rules are bound to the mesh, for the MPMD engine to an abstract one like that of every
    stage.
    """
    watch = {"show": print} if config.sharding.debug and jax.process_index() == 0 else {}
    per_stage = config.pipeline.engine == "mpmd"
    local: Any = stage_meshes(mesh)[0].abstract_mesh if per_stage else mesh
    rules = AxisRules(config.sharding.logical_axis_rules, local, say, **watch)
    table = None if config.pipeline.engine == "sequential" else build_table(config)
    attention = build_attention(config, rules, mesh.devices.flat[0].platform, say)
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
    config: Config, mesh: Mesh, *, say: Callable[[str], None] = lambda text: None
) -> Trainer:
    """The engine of a resolved configuration.

    Args:
      config: resolved; `pipeline.engine` is no longer auto.
      mesh: from `maxpipe.mesh.build_mesh`.
      say: called with each automatic decision.

    Raises:
      ConfigError: the schedule cannot be built, does not run on this engine, or does not go with
        other options.
    """
    try:
        parts = build_engine_inputs(config, mesh, say=say)
        build = build_mpmd_trainer if config.pipeline.engine == "mpmd" else build_spmd_trainer
        return build(config, mesh, parts)
    except ScheduleError as error:
        raise ConfigError(Problem("", str(error))) from error  # the message begins with the key


def build_spmd_trainer(config: Config, mesh: Mesh, parts: EngineInputs) -> Trainer:
    """One program on all devices; arguments as for `build_trainer`.

    Raises:
      ConfigError: the schedule splits backwards, and another option is in the way.
    """
    specs = parts.program.specs
    engine = SPMD_ENGINES[config.pipeline.engine](parts)
    _check_split_backwards(config, parts)
    return SpmdTrainer(
        specs,
        engine,
        parts.rules,
        Optimizer(config.optimizer, specs),
        load_step=partial(StoredStep, config, mesh) if config.compile.load else None,
        adds_batch_digest=config.telemetry.batch_digest,
    )


def build_mpmd_trainer(config: Config, mesh: Mesh, parts: EngineInputs) -> Trainer:
    """Programs per stage; arguments as for `build_trainer`.

    Raises:
      ConfigError: there are several processes, or the schedule splits backwards and another option
        is in the way.
    """
    one_process(config, jax.process_count())
    _check_split_backwards(config, parts)
    return MpmdTrainer(
        parts.program.specs,
        MpmdEngine(parts),
        AxisRules(config.sharding.logical_axis_rules, mesh),
        partial(Optimizer, config.optimizer),
        adds_batch_digest=config.telemetry.batch_digest,
    )


def _check_split_backwards(config: Config, parts: EngineInputs) -> None:
    if parts.table is not None and "W" in parts.table.kinds:
        check_split_backwards(config)


def open_run_directory(
    config: Config, say: Callable[[str], None]
) -> tuple[RunDirectory, Checkpointer]:
    """The run's directory and checkpoints, not yet written to.

    Raises:
      ConfigError: the directory belongs to another configuration, or its mirror cannot be read.
    """
    mirror = open_mirror(config)
    directory = RunDirectory(config, mirror)
    directory.claim(config, write=False)
    return directory, Checkpointer(directory.checkpoints, config.checkpoint, mirror=mirror, say=say)


def build_run(
    config: Config,
    mesh: Mesh,
    directory: RunDirectory,
    checkpointer: Checkpointer,
    say: Callable[[str], None],
    supervision: Supervision | None = None,
) -> Run:
    """Everything the loop needs, standing where the run left off.

    Args:
      config: resolved.
      mesh: the device mesh.
      directory, checkpointer: from `open_run_directory`.
      say: prints a line.
      supervision: of this process; inert if None.

    Raises:
      ConfigError: data, run directory or mirror do not fit the configuration; nothing but
        `config.yml` has been written then.
    """
    engine = build_trainer(config, mesh, say=say)
    place = BatchPlacer(mesh, engine.batch_spec, config.data.global_batch_size)
    place_eval = BatchPlacer(mesh, engine.batch_spec, config.eval.global_batch_size)
    loader = make_loader(config, "train", place.rows)
    eval_loader = make_loader(config, "eval", place_eval.rows) if config.eval.every else None
    resume_from = choose(config.checkpoint.resume, checkpointer.steps(), checkpointer.place)
    directory.claim(config)
    if not processes.share(directory.root):
        message = f"not all processes see the same {directory.root}: give a file system that they share, such as NFS"
        raise ConfigError(Problem("output_dir", message))
    if jax.process_index() == 0:
        directory.publish(config)
    state, step = None, 0
    if resume_from is None:
        state = engine.init(jax.random.key(config.seed))
    else:
        asked = None if config.checkpoint.resume in ("auto", "must") else resume_from
        # The spike filter may be switched on, off, or to another window between starts.
        restored = checkpointer.restore(engine.abstract_canonical(), asked, optional=("history",))
        state, step = engine.from_canonical(restored.state), restored.step
        loader = _continue(loader, config, place, restored.iterator)
    return Run(
        config,
        engine,
        state,
        step,
        loader,
        place,
        place_eval,
        checkpointer,
        recorder=build_recorder(config, mesh, directory, step),
        profiler=Profiler(config.telemetry.profile_steps, directory.root / "profile"),
        meta={"config": asdict(config), "versions": _versions()},
        supervision=supervision or Supervision(),
        eval_loader=eval_loader,
    )


def build_recorder(config: Config, mesh: Mesh, directory: RunDirectory, step: int) -> Recorder:
    """Telemetry of a run that continues after `step`."""
    tokens = config.data.global_batch_size * config.data.sequence_length
    chip = chip_for(mesh.devices.flat[0].device_kind)
    return Recorder(
        config,
        directory.root,
        start_step=step,
        tokens_per_step=tokens,
        flops_per_step=tokens * model_flops_per_token(config.model, config.data.sequence_length),
        peak_flops=chip.peak_flops[config.model.dtype] * mesh.size if chip else None,
        is_main=jax.process_index() == 0,
    )


def _versions() -> dict[str, str]:
    # The package speaks for itself: run from a checkout, it need not be installed.
    return {"maxpipe": maxpipe.__version__} | {
        name: metadata.version(name) for name in DEPENDENCIES
    }


def _continue(loader: Loader, config: Config, place: BatchPlacer, position: Any) -> Loader:
    loader.close()
    return make_loader(config, "train", place.rows, position[place.rows])
