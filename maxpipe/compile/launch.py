"""Compile what a configuration names, and print and write what it costs."""

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
from jax.sharding import Mesh

from maxpipe.compile import DOES_NOT_FIT, FITS
from maxpipe.compile.analysis import analyse
from maxpipe.compile.checks import SIMULATED, check_engine, check_libtpu, unit_names
from maxpipe.compile.prediction.profile import trace_json
from maxpipe.compile.prediction.profile_page import page_html
from maxpipe.compile.programs import StagesTrainer, compile_programs, write_programs
from maxpipe.compile.report import Report, size
from maxpipe.compile.stage_report import (
    StagesReport,
    UnitsReport,
    analyse_stages,
    compile_units,
)
from maxpipe.compile.step import StepTrainer
from maxpipe.compile.topology import devices_of, meshes_to_compile
from maxpipe.config import Config, ConfigError, Loaded, Problem, resolve
from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.outputs import write_file
from maxpipe.config.slices import explain_topology
from maxpipe.devices.chips import device_memory, explain_quantisation, short_name
from maxpipe.devices.mesh import build_mesh, stage_meshes
from maxpipe.devices.xla_flags import advice
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.plan.auto_stages import choose_stages

BuildTrainer = Callable[..., object]  # (config, mesh, note=...) -> trainer
StoreStep = Callable[[str, jax.stages.Compiled, Config, Mesh], int]


def launch(
    loaded: Loaded,
    flags: argparse.Namespace,
    build_trainer: BuildTrainer,
    store_step: StoreStep,
) -> int:
    """Compile a loaded configuration for `compile.topology`, and return the exit code.

    Args:
      build_trainer, store_step: `maxpipe.builder.build_trainer` and
        `maxpipe.training.stored_step.write`, passed in from above this package.
    """
    if understood := explain_topology(loaded.config.compile.topology):
        _print(understood)
    if loaded.config.compile.topology != SIMULATED:
        check_libtpu()
    devices = devices_of(loaded.config)
    config = resolve(loaded, len(devices), loaded.config.compile.num_slices)
    check_engine(config, flags)
    mesh = build_mesh(config, devices)
    for line in explain_quantisation(config.model.quantisation, devices[0]):
        _print(line)
    report: Report | StagesReport | UnitsReport
    if ENGINES[config.pipeline.engine].one_program:
        report = _compile_step(config, loaded.config, mesh, flags, build_trainer, store_step)
    else:
        report = _compile_stages(config, loaded.config, mesh, flags, build_trainer)
    if flags.json:
        write_file("--json", flags.json, json.dumps(report.as_json(), indent=1) + "\n")
    return FITS if report.fits else DOES_NOT_FIT


def _compile_step(
    config: Config,
    written: Config,
    mesh: Mesh,
    flags: argparse.Namespace,
    build_trainer: BuildTrainer,
    store_step: StoreStep,
) -> Report:
    """Compile a step in one program, print its report, and write what belongs to it."""
    trainer = cast(StepTrainer, build_trainer(_without_digest(config), mesh, note=_print))
    report, executable = analyse(config, written, mesh, trainer, _print)
    _print_report(report, mesh)
    if flags.hlo:
        write_file("--hlo", flags.hlo, report.hlo)
    _write_profile(report, config, flags)
    file = config.compile.save
    if file and executable:
        count = store_step(file, executable, config, mesh)
        print(f"stored      {file}, {size(count)}: train with compile.load={file}")
    elif file:
        print("stored      nothing, since the compiler gave up")
    return report


def _compile_stages(
    config: Config,
    written: Config,
    mesh: Mesh,
    flags: argparse.Namespace,
    build_trainer: BuildTrainer,
) -> StagesReport | UnitsReport:
    """Compile the separate programs of the stages, or some units; print the report."""
    config = choose_stages(config, device_memory(mesh.devices.reshape(-1).tolist()), _print)
    began = time.perf_counter()
    meshes = meshes_to_compile(config, stage_meshes(mesh))
    trainer = cast(StagesTrainer, build_trainer(_without_digest(config), mesh, note=_print))
    if flags.units:
        names = [UnitName(*name) for name in unit_names(flags.units)]
        units = compile_units(names, config.model, mesh, trainer, meshes, _print)
        print(*units.lines(), sep="\n")
        return units
    programs = compile_programs(trainer, meshes)
    if flags.programs:
        programs = write_programs(programs, trainer.engine.texts(), Path(flags.programs))
    try:
        report = analyse_stages(config, written, mesh, trainer, programs, began, _print)
    except OSError as error:
        message = f"cannot write to {flags.programs}: {error.strerror}"
        raise ConfigError(Problem("--programs", message)) from None
    if flags.programs:
        _print(
            f"{'written':<12}{flags.programs}: what each computation reads, writes and computes "
            "(.txt), and its HLO (.hlo)"
        )
    _print_report(report, mesh)
    return report


def _print_report(report: Report | StagesReport, mesh: Mesh) -> None:
    flags_for_overlap = advice(mesh.devices.flat[0], os.environ) if report.fits else []
    print(*report.lines(), *flags_for_overlap, sep="\n")


def _write_profile(report: Report, config: Config, flags: argparse.Namespace) -> None:
    """Write the profile that `flags` ask for, or say that there is none."""
    if not (flags.profile or flags.profile_trace):
        return
    if report.predicted is None or report.timeline is None or report.timeline.unpriced:
        print("profile     none, since there is no prediction")
        return
    name = report.schedule if ENGINES[report.engine].has_stages else report.engine
    title = f"{config.run_name}, {name}, {report.num_devices} x {short_name(report.device_kind)}"
    if flags.profile:
        write_file("--profile", flags.profile, page_html(report.predicted, report.timeline, title))
    if file := flags.profile_trace:
        trace = trace_json(report.timeline)
        content = trace if file.endswith(".json") else gzip.compress(trace, mtime=0)
        write_file("--profile-trace", file, content)


def _without_digest(config: Config) -> Config:
    """Return the configuration without the digest of batches, which is a program of its own."""
    return update(config, {"telemetry.batch_digest": False})


def _print(text: str) -> None:
    print(text, flush=True)
