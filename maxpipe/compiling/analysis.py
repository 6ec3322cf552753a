"""From a configuration and a mesh to a `Report`."""

from collections.abc import Callable
from dataclasses import replace

import jax
from jax.sharding import Mesh

from maxpipe.builder import build_trainer
from maxpipe.compiling.collectives import find_collectives
from maxpipe.compiling.hlo import parse
from maxpipe.compiling.jaxpr_flops import step_flops
from maxpipe.compiling.knobs import knobs
from maxpipe.compiling.report import CompilerMemory, Report
from maxpipe.compiling.step import OutOfMemory, compile_step
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.devices.chips import chip_for, device_memory, devices_per_chip
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.planning.bounds import bounds
from maxpipe.planning.estimate import estimate
from maxpipe.planning.flops import model_flops_per_token
from maxpipe.planning.simulate import simulate
from maxpipe.training.trainer import SpmdTrainer


def analyse(
    config: Config, written: Config, mesh: Mesh, say: Callable[[str], None]
) -> tuple[Report, jax.stages.Compiled | None]:
    """Compiles the train step and says what it costs; returns the report and the step, None if the compiler gave up.

    Args:
      config: resolved.
      written: what it was resolved from; alternatives are derived from it.
      mesh: of the devices to compile for.
      say: told of automatic decisions.
    """
    devices = mesh.devices.reshape(-1).tolist()
    chip, shared = chip_for(devices[0].device_kind), devices_per_chip(devices)
    slices = config.compile.num_slices
    pipelined = config.pipeline.engine != "sequential"
    shapes = estimate(config)
    tokens = config.data.global_batch_size * config.data.sequence_length
    model_flops = tokens * model_flops_per_token(config.model, config.data.sequence_length)
    capacity = device_memory(devices)
    compiler = flops = limits = None
    collectives, hlo = [], ""
    # The digest is a program of its own.
    engine = build_trainer(update(config, {"telemetry.batch_digest": False}), mesh, note=say)
    assert isinstance(engine, SpmdTrainer)
    seconds, executable = 0.0, None
    try:
        step = compile_step(config, mesh, engine)
    except OutOfMemory as error:
        needed, capacity = error.needed, error.available
    else:
        seconds, executable = step.seconds, step.executable
        found = executable.memory_analysis()
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        compiler = CompilerMemory(
            found.argument_size_in_bytes,
            found.temp_size_in_bytes,
            found.generated_code_size_in_bytes,
            results,
        )
        needed = float(compiler.total)
        hlo = step.text()
        runs = branch_runs(config, devices[0].platform)
        flops = step_flops(step.jaxpr, runs)
        collectives = find_collectives(parse(hlo), mesh, runs)
        if chip:
            limits = bounds(
                config,
                chip,
                num_chips=mesh.size // shared,
                flops=flops,
                model_flops=model_flops,
                memory=shapes,
                collectives=collectives,
            )
    report = Report(
        device_kind=devices[0].device_kind,
        num_devices=mesh.size,
        num_slices=slices,
        mesh=dict(mesh.shape),
        engine=config.pipeline.engine,
        schedule=config.pipeline.schedule,
        bubble=simulate(build_table(config)).bubble_fraction if pipelined else 0.0,
        shapes=shapes,
        compiler=compiler,
        needed=needed,
        capacity=capacity,
        flops=flops,
        model_flops=model_flops,
        collectives=collectives,
        bounds=limits,
        compile_seconds=seconds,
        hlo=hlo,
    )
    if not report.fits:
        report = replace(report, knobs=knobs(written, config, mesh.size, slices))
    return report, executable


def branch_runs(config: Config, platform: str) -> Callable[[float], float]:
    """How often a conditional of the scheduled engine does its work.

    Embedding, head and embedding gradient have one each, taken once a microbatch, however many
    ticks there are. Where idle slots are skipped, as on simulated devices, they are counted as if
    they were computed.
    """
    microbatches = config.pipeline.num_microbatches
    skips = config.pipeline.skip_idle == "true" or (
        config.pipeline.skip_idle == "auto" and platform == "cpu"
    )
    if config.pipeline.engine != "scheduled" or skips:
        return lambda runs: runs
    return lambda runs: min(runs, microbatches)
