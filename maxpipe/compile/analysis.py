"""Compile the step of a configuration and gather what it costs in a `Report`."""

from dataclasses import replace

import jax
from jax.sharding import Mesh

from maxpipe.compile.collectives import find_collectives, link_uses, network_seconds
from maxpipe.compile.hlo import parse
from maxpipe.compile.knobs import gains, knobs
from maxpipe.compile.prediction.predict import is_predictable, predict
from maxpipe.compile.report import Report
from maxpipe.compile.step import (
    CompiledStep,
    OutOfMemory,
    StepTrainer,
    compile_step,
    memory_of,
    text_of,
)
from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note
from maxpipe.devices.chips import chip_for, devices_per_chip, tpu_of
from maxpipe.pipeline.engines.scheduled.sharding import skips_idle
from maxpipe.plan.choices import with_context_strategy, with_gather_mode
from maxpipe.plan.estimate import Bounds, estimate, step_bounds
from maxpipe.plan.footprint import on_platform
from maxpipe.plan.jaxpr_flops import BranchRuns, every_time, program_flops
from maxpipe.plan.search.memory import Memory


def analyse(
    config: Config,
    written: Config,
    mesh: Mesh,
    trainer: StepTrainer,
    note: Note,
) -> tuple[Report, jax.stages.Compiled | None]:
    """Compile the train step and report what it costs.

    Args:
      written: the configuration before it was resolved; alternatives derive from it.
      mesh: the mesh of the devices to compile for.

    Returns:
      The report, and the compiled step, which is None if the compiler gave up.
    """
    tpu = tpu_of(mesh.devices.reshape(-1).tolist())
    # As the trainer has decided and reported.
    config = with_context_strategy(with_gather_mode(config, tpu), tpu)
    report = Report.of(config, mesh, shapes=_shapes(config, mesh))
    executable = None
    try:
        step = compile_step(config, mesh, trainer, note)
    except OutOfMemory as error:
        capacity = report.capacity or error.available
        report = replace(report, needed=error.needed, capacity=capacity)
    else:
        report, executable = _with_step(report, config, mesh, step), step.executable
    sizes = mesh.size, config.compile.num_slices
    if not report.fits:
        report = replace(report, knobs=knobs(written, config, sizes, tpu))
    elif report.bounds and report.capacity:

        def bound_mfu(changed: Config, flops_share: float) -> float:
            bounds = _bounds(report, changed, mesh, flops_share * (report.flops or 0.0))
            return bounds.mfu if bounds else 0.0

        room = report.needed, report.capacity
        report = replace(report, gains=gains(written, config, sizes, tpu, room, bound_mfu))
    return report, executable


def _shapes(config: Config, mesh: Mesh) -> Memory[float]:
    devices = mesh.devices.reshape(-1).tolist()
    return estimate(on_platform(config, devices[0].platform), tpu_of(devices))


def _with_step(report: Report, config: Config, mesh: Mesh, step: CompiledStep) -> Report:
    compiler = memory_of(step.executable, mesh)
    hlo = text_of(step.executable)
    runs = branch_runs(config, mesh)
    report = replace(
        report,
        compiler=compiler,
        needed=float(compiler.total),
        flops=program_flops(step.jaxpr, runs),
        collectives=find_collectives(parse(hlo), mesh, runs),
        compile_times=step.times,
        hlo=hlo,
    )
    chip = chip_for(report.device_kind)
    if chip is None:
        return report
    report = replace(report, links=link_uses(report.collectives, mesh, chip))
    report = replace(report, bounds=_bounds(report, config, mesh, report.flops or 0.0))
    if not is_predictable(mesh):
        return report
    predicted, timeline = predict(config, mesh, chip, hlo, report.model_flops)
    return replace(report, predicted=predicted, timeline=timeline)


def _bounds(report: Report, config: Config, mesh: Mesh, flops: float) -> Bounds | None:
    """Return the bounds of a step of `flops` FLOPs; None if the chip's figures are unknown."""
    chip = chip_for(report.device_kind)
    if chip is None:
        return None
    return step_bounds(
        config,
        chip,
        num_chips=mesh.size // devices_per_chip(mesh.devices.reshape(-1).tolist()),
        flops=flops,
        model_flops=report.model_flops,
        memory=_shapes(config, mesh),
        network=network_seconds(report.links, chip),
    )


def branch_runs(config: Config, mesh: Mesh) -> BranchRuns:
    """Return a map from how often a conditional is reached to how often it does its work.

    On the scheduled engine the embedding, the head and the embedding gradient have one conditional
    each, taken once per microbatch, however many ticks there are. Idle slots that are skipped, as
    on simulated devices, are counted as if they were computed.
    """
    is_lockstep = ENGINES[config.pipeline.engine].lockstep
    if not is_lockstep or skips_idle(config.pipeline, mesh):
        return every_time
    num_microbatches = config.pipeline.num_microbatches
    return lambda runs: min(runs, num_microbatches)
