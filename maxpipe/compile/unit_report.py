"""Compile a few units of the mpmd engine alone, and report the time and memory of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh

from maxpipe.compile.prediction.activity import chunk_share, times_taken
from maxpipe.compile.prediction.predict import basis_of, is_predictable, time_program, unknowns
from maxpipe.compile.prediction.prediction import Basis
from maxpipe.compile.prediction.timeline import Timeline
from maxpipe.compile.programs import CompiledProgram, StagesTrainer, compile_programs
from maxpipe.compile.report import size
from maxpipe.compile.step import OutOfMemory
from maxpipe.config.sections import ModelConfig
from maxpipe.config.terminal import Note
from maxpipe.devices.chips import Chip, chip_for, device_memory, short_name
from maxpipe.pipeline.engines.mpmd.program import UnitName


class TimedUnit(NamedTuple):
    """A compiled unit, the seconds of one run or None, and what of it cannot be priced."""

    program: CompiledProgram
    seconds: float | None
    unknown: Sequence[str]


@dataclass(frozen=True)
class UnitsReport:
    """What `maxpipe.compile --units` prints.

    Attributes:
      device_kind, num_devices: what was compiled for.
      units: the compiled units, in order of their dependencies.
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
        """Return plain data: sizes in bytes, times in seconds, null for what is unknown."""
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
        """Return the report for people."""
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
    """Compile units one by one, and time each on TPUs.

    Args:
      names: names of units that the schedule has.
      model: the resolved model section.
      mesh: the mesh of all stages.
      trainer: the configuration's trainer.
      meshes: for each stage, the mesh to compile for; see `meshes_to_compile`.
      note: function that prints the lines about each unit.
    """
    devices = mesh.devices.reshape(-1).tolist()
    chip = chip_for(devices[0].device_kind) if is_predictable(mesh) else None
    units: list[TimedUnit] = []
    too_large = None
    try:
        for program in compile_programs(trainer, meshes, names):
            for line in program.lines():
                note(line)
            timeline: Timeline | str = "only TPUs' compiler estimates times"
            if chip:
                timeline = time_unit(program, trainer, model, chip, basis_of(mesh, chip))
            if isinstance(timeline, str):
                units.append(TimedUnit(program, None, [timeline]))
            else:
                unknown = unknowns(timeline)
                units.append(TimedUnit(program, None if unknown else timeline.seconds, unknown))
    except OutOfMemory as error:
        available = device_memory(devices) or error.available
        too_large = OutOfMemory(error.needed, available, error.program)
    return UnitsReport(devices[0].device_kind, mesh.size, units, too_large)


def time_unit(
    program: CompiledProgram, trainer: StagesTrainer, model: ModelConfig, chip: Chip, basis: Basis
) -> Timeline | str:
    """Walk through the program of a unit; return its timeline, or why there is none.

    Args:
      program: the compiled unit.
      trainer: the configuration's trainer.
      model: the resolved model section.
      chip, basis: the devices' chip, and what its predictions rest on.
    """
    engine = trainer.engine
    share = chunk_share(model, engine.layer_index()[program.name.chunk])
    taken = partial(times_taken, [], share)
    return time_program(program.hlo, engine.meshes[program.stage], chip, basis, taken)
