"""Build a trainer from a resolved configuration; model and engine are picked nowhere else."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import attribute_of, implementation
from maxpipe.config.rules.engines import check_offloading, check_processes, check_split_backwards
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices.chips import tpu_of
from maxpipe.devices.host_memory import has_host_memory
from maxpipe.devices.mesh import crossing_axes, has_whole_processes, stage_meshes
from maxpipe.devices.transfers import processes_of
from maxpipe.model.experts.split import build_experts
from maxpipe.model.kernels.choose import build_attention, choose_gating, choose_rotation
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import recomputes_rows
from maxpipe.pipeline.engines.base import EngineInputs
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.choices import (
    gathers_in_steps,
    with_context_strategy,
    with_gather_mode,
    with_remat_cheap,
)
from maxpipe.sharding.rules import AxisRules
from maxpipe.sharding.torus import Route, line_length
from maxpipe.training.trainer import Trainer


def build_engine_inputs(config: Config, mesh: Mesh, *, note: Note = ignore_note) -> EngineInputs:
    """Build the inputs of an engine; arguments as for `build_trainer`.

    The logical axis rules are bound to the mesh; for the MPMD engine, to an abstract mesh that has
    the shape of each stage's mesh.
    """
    tpu = tpu_of(list(mesh.devices.flat))
    config = with_context_strategy(with_gather_mode(config, tpu, note), tpu, note)
    config = with_remat_cheap(config, tpu, note)
    engine = ENGINES[config.pipeline.engine]
    line = line_length(mesh)
    if line > 1:
        what = "embedding and head" if gathers_in_steps(config, tpu) else "weights"
        note(
            f"{what} are gathered in two steps: first among {line} of the "
            f"{config.mesh.size('fsdp')} devices of mesh axis fsdp; along a whole torus TPU "
            "compilers make one step a sum of padded arrays"
        )
    rules = AxisRules(
        config.sharding.logical_axis_rules,
        mesh if engine.one_program else stage_meshes(mesh)[0].abstract_mesh,
        note,
        show=print if config.sharding.debug and jax.process_index() == 0 else None,
        route=Route(line, crossing_axes(mesh)),
    )
    table = build_table(config) if engine.has_stages else None
    if table and table.note:
        note(table.note)
    platform = mesh.devices.flat[0].platform
    attention = build_attention(config, rules, platform, note)
    model = replace(
        config.model,
        rotation=choose_rotation(config, platform, note),
        gating=choose_gating(config, platform, note),
    )
    recomputes = recomputes_rows(config.pipeline) and not (table and "W" in table.kinds)
    experts = build_experts(model, rules, platform, note, recomputes=recomputes)
    return EngineInputs(
        program=ModelProgram(model, attention, experts),
        rules=rules,
        config=config.pipeline,
        layout=build_layout(config),
        mesh=mesh,
        batch_shape=(config.data.global_batch_size, config.data.sequence_length),
        table=table,
        gathers_in_steps=gathers_in_steps(config, tpu, note),
    )


def build_engine(config: Config, inputs: EngineInputs) -> Any:
    """Build the engine that the configuration names; the catalogue has its class.

    Returns:
      An `SpmdEngine` where the catalogue says `one_program`, else an `MpmdEngine`.

    Raises:
      ConfigError: the engine cannot run this configuration.
    """
    return implementation(ENGINES[config.pipeline.engine])(inputs)


def build_trainer(config: Config, mesh: Mesh, *, note: Note = ignore_note) -> Trainer:
    """Build the trainer of a resolved configuration, with the engine that it names.

    Args:
      config: the resolved configuration; `pipeline.engine` is no longer auto.
      mesh: the device mesh, from `maxpipe.devices.mesh.build_mesh`.
      note: function that receives each automatic decision and its reason.

    Raises:
      ConfigError: the schedule cannot be built, does not run on this engine, or conflicts with
        other options; or the devices have no host memory to offload to.
    """
    device = mesh.devices.flat[0]
    if not has_host_memory(device):
        check_offloading(config, device.device_kind)
    facts = ENGINES[config.pipeline.engine]
    if ramp := config.data.batch_ramp:
        sizes = ", ".join(f"{size} after step {step}" for step, size in ramp)
        note(f"data.batch_ramp: {sizes}; figures here are those of {ramp[-1][1]} sequences")
    try:
        inputs = build_engine_inputs(config, mesh, note=note)
        if not facts.one_program:
            _check_whole_processes(config, mesh)
        engine = build_engine(config, inputs)
    except ScheduleError as error:
        # Every reason begins with its key.
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from error
    # The rules know the schedules of the catalogue but no CSV files.
    if inputs.table is not None and "W" in inputs.table.kinds:
        check_split_backwards(config)
    return attribute_of(facts.trainer).of_run(config, mesh, inputs, engine, note)


def _check_whole_processes(config: Config, mesh: Mesh) -> None:
    """Check that stages are whole processes, also when only compiling for the devices."""
    check_processes(config, len(processes_of(mesh)))
    if not has_whole_processes(mesh.devices):
        message = (
            "the processes have unequal numbers of devices, so that one has parts of several "
            "stages; give all the same number, or use pipeline.schedule=lockstep_1f1b with "
            "engine=auto"
        )
        raise ConfigError(Problem("mesh.ici.stage", message))
