"""Report what a step of the mpmd engine costs, or some units, from the compiled programs.

The memory of a stage is its state and what the schedule keeps in flight there, both from shapes,
and the working memory of its largest program, from the compiler. Residuals in the host's memory
take device memory while a program uses them; so do those of one more program, during the copy. On
TPUs every program is timed, and the simulator composes the times in the order of the schedule.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from maxpipe.compile.collectives import Collective, summed
from maxpipe.compile.knobs import knobs
from maxpipe.compile.prediction.predict import (
    basis_of,
    is_predictable,
    prediction_of,
    speed_of,
    time_program,
    unknowns,
)
from maxpipe.compile.prediction.prediction import Basis, Prediction
from maxpipe.compile.prediction.stage_timeline import predict_stages, stage_words, unit_costs
from maxpipe.compile.prediction.unit_times import chunk_share, times_taken
from maxpipe.compile.prediction.walk import Timeline
from maxpipe.compile.programs import UPDATE, CompiledProgram, StagesTrainer, compile_programs
from maxpipe.compile.report import StepReport, collective_line, in_bytes, plain, size
from maxpipe.compile.step import OutOfMemory
from maxpipe.compile.topology import neighbour_bandwidth
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.config.terminal import Note
from maxpipe.devices.chips import (
    Chip,
    chip_for,
    device_memory,
    devices_per_chip,
    short_name,
    tpu_of,
)
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.auto_stages import run_table
from maxpipe.plan.choices import with_gather_mode
from maxpipe.plan.footprint import itemsize, microbatch_tokens, on_platform
from maxpipe.plan.search.memory import StageMemory
from maxpipe.plan.search.patterns import units_in_flight


@dataclass(frozen=True)
class StageBytes:
    """Bytes on one device of a stage.

    Attributes:
      state: parameters, optimizer state and sums of gradients, from shapes.
      in_flight: values that wait for later units, from shapes.
      working: temporary memory and code of its largest program, from the compiler, with offloaded
        residuals of two programs.
      reduction: temporary memory, code and results of what runs after the units: the largest sum of
        gradients over devices, which exist twice while it runs, or the optimizer's update.
      host: bytes of the host's memory per device, of residuals that wait there for later units.
    """

    state: float
    in_flight: float
    working: float
    reduction: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.state + max(self.in_flight + self.working, self.reduction)


@dataclass(frozen=True, kw_only=True)
class StagesReport(StepReport):
    """A step in separate programs; `needed` is of the fullest stage, or what does not fit.

    Attributes:
      programs: the compiled programs, in order of their dependencies.
      too_large: name of the program that does not fit; those after it were not compiled.
      program_seconds: predicted time of a run of each program; empty where nothing is predicted.
      schedule_words: predicted times of stages, as `maxpipe.schedule` takes them.
    """

    compile_seconds: float = 0.0
    programs: Sequence[CompiledProgram] = ()
    stages: Sequence[StageBytes] = ()
    too_large: str | None = None
    program_seconds: Mapping[UnitName, float] = field(default_factory=dict)
    schedule_words: str | None = None

    def collectives(self, stage: int) -> list[Collective]:
        """Return one device's collectives of a stage in a step."""
        of_stage = (program for program in self.programs if program.stage == stage)
        return summed((p.runs, c) for p in of_stage for c in p.collectives)

    def as_json(self) -> dict[str, object]:
        """Return plain data, see `StepReport.as_json`."""
        return super().as_json() | {
            "too_large": self.too_large,
            "compile_seconds": self.compile_seconds,
            "stages": [
                in_bytes(asdict(stage)) | {"collectives": plain(self.collectives(number))}
                for number, stage in enumerate(self.stages)
            ],
            "programs": [
                {"stage": program.stage, "name": str(program.name), "runs": program.runs}
                | in_bytes(asdict(program.memory) | {"offloaded": program.offloaded})
                | {"predicted_seconds": self.program_seconds.get(program.name)}
                | {"collectives": plain(program.collectives)}
                for program in self.programs
            ],
            "schedule_words": self.schedule_words,
        }

    def lines(self) -> list[str]:
        lines = [*self.first_lines(), f"compiled    in {self.compile_seconds:.0f} s"]
        for number, stage in enumerate(self.stages):
            parts = f"state {size(stage.state)}, in flight {size(stage.in_flight)} (from shapes)"
            title = "memory" if number == 0 else ""
            lines.append(
                f"{title:<12}stage {number}: {size(stage.total)}: {parts}, "
                f"working {size(stage.working)} (from the compiler)"
            )
            if stage.reduction > stage.in_flight + stage.working:
                lines.append(
                    f"            summing gradients over devices, or the update, at the end needs "
                    f"{size(stage.reduction)} instead of the last two"
                )
            if stage.host:
                lines.append(
                    f"            and {size(stage.host)} of the host's memory for each device, "
                    "for offloaded residuals"
                )
        for number in range(len(self.stages)):
            collectives = self.collectives(number)
            none = "" if collectives else " none"
            lines.append(f"collectives of one device of stage {number} in a step:{none}")
            lines += map(collective_line, collectives)
        if self.predicted:
            lines += self.predicted.lines()
            lines.append("  parts are means of all stages")
            lines += [f"  without {part}" for part in self.predicted.leaves_out]
            if self.schedule_words:
                lines.append(f"  units of each stage, for maxpipe.schedule: {self.schedule_words}")
        return [*lines, self._verdict(), *self.knob_lines()]

    def _verdict(self) -> str:
        if self.capacity is None:
            return f"verdict     needs {size(self.needed)} on a device, whose memory is not known"
        sizes = f"{size(self.needed)} of {size(self.capacity)}"
        if self.too_large:
            program = f"{self.too_large} needs {sizes}"
            return f"verdict     does NOT fit: {program}; later programs were not compiled"
        return (
            f"verdict     {'fits' if self.fits else 'does NOT fit'}: {sizes} on the fullest stage"
        )


def analyse_stages(
    config: Config,
    written: Config,
    mesh: Mesh,
    trainer: StagesTrainer,
    programs: Iterable[CompiledProgram],
    began: float,
    note: Note,
) -> StagesReport:
    """Report what a step costs, compiling its programs one by one as they are consumed.

    Args:
      written: the configuration before it was resolved; alternatives derive from it.
      began: `time.perf_counter()` before the trainer was built.
    """
    devices = mesh.devices.reshape(-1).tolist()
    config = with_gather_mode(config, tpu_of(devices))  # as the trainer has decided and reported
    report = StagesReport.of(config, mesh)
    compiled: list[CompiledProgram] = []
    try:
        for program in programs:
            compiled.append(program)
            for line in program.lines():
                note(line)
    except OutOfMemory as error:
        capacity = report.capacity or error.available
        report = replace(report, too_large=error.program, needed=error.needed, capacity=capacity)
    report = replace(report, programs=compiled, compile_seconds=time.perf_counter() - began)
    if not report.too_large:
        on_devices = on_platform(config, devices[0].platform)
        stages = _stages(on_devices, trainer, compiled)
        report = replace(report, stages=stages, needed=max(stage.total for stage in stages))
        if is_predictable(mesh):
            report = _with_prediction(report, config, mesh, trainer)
    if report.fits:
        return report
    sizes = mesh.size, config.compile.num_slices
    return replace(report, knobs=knobs(written, config, sizes, tpu_of(devices)))


def _stages(
    config: Config, trainer: StagesTrainer, compiled: Sequence[CompiledProgram]
) -> list[StageBytes]:
    table = run_table(config)
    memory = StageMemory(config, table)
    stages = []
    for stage, of_stage in enumerate(_layers_of_chunks(trainer, table)):
        of_programs = [program for program in compiled if program.stage == stage]
        copied = max(program.offloaded for program in of_programs)
        working = copied + max(p.working for p in of_programs if p.name.kind != UPDATE)
        reductions = [
            program.memory.total - program.memory.arguments
            for program in of_programs
            if program.name.kind in ("reduce", UPDATE)
        ]
        state = memory.state_bytes(stage, sum(of_stage))
        in_flight = memory.in_flight_bytes(stage, of_stage)
        host = _host_bytes(table, stage, of_programs)
        stages.append(StageBytes(state, in_flight, working, max(reductions, default=0.0), host))
    return stages


def _layers_of_chunks(trainer: StagesTrainer, table: Table) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in range(table.num_stages)]
    chunks = zip(trainer.engine.layer_index(), table.stage_of_chunk.tolist(), strict=True)
    for layers, stage in chunks:
        stages[stage].append(len(layers))
    return stages


def _host_bytes(table: Table, stage: int, programs: Sequence[CompiledProgram]) -> float:
    """Return the most bytes of one device's residuals that are in the host's memory at once."""
    offloaded = {program.name: program.offloaded for program in programs}
    chunks = [int(table.global_chunk(repeat, stage)) for repeat in range(table.num_repeats)]
    # Residuals wait from F to the end of B, or of I; those that W reads too, to the end of W.
    bytes_of = [offloaded.get(UnitName(kind, chunk), 0) for kind in ("F", "W") for chunk in chunks]
    return float((units_in_flight(table)[stage] @ np.array(bytes_of)).max())


def _with_prediction(
    report: StagesReport, config: Config, mesh: Mesh, trainer: StagesTrainer
) -> StagesReport:
    chip = chip_for(report.device_kind)
    if chip is None:
        return report
    basis = basis_of(mesh, chip)
    timelines = {
        program.name: _timeline(program, trainer, config.model, chip, basis)
        for program in report.programs
    }
    for timeline in timelines.values():
        if timeline.unpriced:
            return replace(report, predicted=prediction_of(timeline, basis))
    assert basis.constants is not None
    table = run_table(config)
    width = config.model.embed_dim * itemsize(config.model.dtype)
    transfer_bytes = microbatch_tokens(config) * width
    constants = basis.constants
    report = replace(
        report, program_seconds={name: timeline.seconds for name, timeline in timelines.items()}
    )
    link = constants.link_bandwidth / devices_per_chip(mesh.devices.reshape(-1).tolist())
    bandwidth = neighbour_bandwidth(trainer.engine.meshes, link, constants.dcn_bandwidth)
    if bandwidth is None:
        unknown = ["transfers between stages, over a network of unknown bandwidth"]
        return replace(report, predicted=Prediction(None, basis, {}, unknown=unknown))
    communication = transfer_bytes / bandwidth
    predicted = predict_stages(table, timelines, basis, communication)
    speed = speed_of(config, mesh, chip, predicted.seconds, report.model_flops)
    costs = unit_costs(table, timelines, communication)
    offloads = any(program.offloaded for program in report.programs)
    left_out = ["transfers to the host"] * offloads
    return replace(
        report,
        predicted=replace(predicted, speed=speed, leaves_out=left_out),
        schedule_words=stage_words(table, costs),
    )


class TimedUnit(NamedTuple):
    program: CompiledProgram
    seconds: float | None
    unknown: Sequence[str]


@dataclass(frozen=True)
class UnitsReport:
    """What `maxpipe.compile --units` prints: units in order of their dependencies.

    Attributes:
      too_large: the unit after them, if it does not fit; those that follow were not compiled.
    """

    device_kind: str
    num_devices: int
    units: Sequence[TimedUnit]
    too_large: OutOfMemory | None = None

    @property
    def fits(self) -> bool:
        return self.too_large is None

    def as_json(self) -> dict[str, object]:
        too_large = self.too_large and {
            "name": self.too_large.program,
            "needed": self.too_large.needed,
            "available": self.too_large.available,
        }
        return {
            "device_kind": self.device_kind,
            "num_devices": self.num_devices,
            "engine": "mpmd",
            "fits": self.fits,
            "too_large": too_large,
            "units": [
                {
                    "name": str(unit.program.name),
                    "stage": unit.program.stage,
                    "seconds": unit.seconds,
                    "working_bytes": unit.program.working,
                    "unknown": list(unit.unknown),
                }
                for unit in self.units
            ],
        }

    def lines(self) -> list[str]:
        lines = [f"devices     {self.num_devices} x {short_name(self.device_kind)}"]
        for unit in self.units:
            seconds = "no time" if unit.seconds is None else f"{unit.seconds:.4g} s"
            reason = f": {'; '.join(unit.unknown)}" if unit.unknown else ""
            working = f"working {size(unit.program.working)}"
            lines.append(f"unit        {unit.program.name!s:<8} {seconds}, {working}{reason}")
        if large := self.too_large:
            sizes = f"{size(large.needed)} of {size(large.available)}"
            lines.append(f"verdict     does not fit: {large.program} needs {sizes}")
        return lines


def compile_units(
    names: Sequence[UnitName],
    model: ModelConfig,
    mesh: Mesh,
    trainer: StagesTrainer,
    meshes: Sequence[Mesh],
    note: Note,
) -> UnitsReport:
    """Compile units that the schedule has, one by one, and time each on TPUs."""
    devices = mesh.devices.reshape(-1).tolist()
    chip = chip_for(devices[0].device_kind) if is_predictable(mesh) else None
    units: list[TimedUnit] = []
    too_large = None
    try:
        for program in compile_programs(trainer, meshes, names):
            for line in program.lines():
                note(line)
            timeline = Timeline(unpriced="only TPUs' compiler estimates times")
            if chip:
                timeline = _timeline(program, trainer, model, chip, basis_of(mesh, chip))
            unknown = unknowns(timeline)
            units.append(TimedUnit(program, None if unknown else timeline.seconds, unknown))
    except OutOfMemory as error:
        available = device_memory(devices) or error.available
        too_large = OutOfMemory(error.needed, available, error.program)
    return UnitsReport(devices[0].device_kind, mesh.size, units, too_large)


def _timeline(
    program: CompiledProgram, trainer: StagesTrainer, model: ModelConfig, chip: Chip, basis: Basis
) -> Timeline:
    engine = trainer.engine
    share = chunk_share(model, engine.layer_index()[program.name.chunk])
    taken = partial(times_taken, [], share)
    return time_program(program.hlo, engine.meshes[program.stage], chip, basis, taken)
