"""Compile the separate programs of the stages, and count what they exchange in a step.

A unit of the schedule runs once for each microbatch. The programs that gather a chunk's weights
before its units and reduce its gradients after them run once a step, and so does the optimizer's
update of a stage, which is named after the stage's first chunk.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import jax
from jax.sharding import Mesh

from maxpipe.compile.collectives import Collective, find_collectives
from maxpipe.compile.hlo import parse
from maxpipe.compile.report import CompilerMemory, collective_line, size
from maxpipe.compile.step import memory_of, out_of_memory, text_of
from maxpipe.config import ConfigError, Problem
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.engines.mpmd.staged import NotCompiled

# Names of the files that `write_programs` writes.
_WRITTEN = re.compile(r"stage_\d+/(?:[FBIW]|gather|reduce|update)\d+\.(?:txt|hlo)")


class StagesTrainer(Protocol):
    """The compiled part of a trainer with programs per stage, `mpmd_trainer.MpmdTrainer`."""

    engine: MpmdEngine

    def compile_updates(self, meshes: Sequence[Mesh]) -> Iterator[jax.stages.Compiled]: ...


UPDATE = "update"


@dataclass(frozen=True)
class CompiledProgram:
    """One program of a training step on the mpmd engine, compiled for the devices of its stage.

    Attributes:
      name: kind and global chunk, such as F0 or reduce0.
      runs: how often a step runs it.
      memory: bytes on a device of the stage.
      collectives: the collectives of one device in one run.
      offloaded: bytes on a device that it reads from the host's memory or leaves there.
    """

    stage: int
    name: UnitName
    runs: int
    memory: CompilerMemory
    collectives: Sequence[Collective]
    offloaded: int
    hlo: str

    @property
    def working(self) -> int:
        """Return the bytes on a device besides arguments and results, offloaded ones included."""
        return self.memory.temp + self.memory.program + self.offloaded

    def lines(self) -> list[str]:
        """Return a line about the memory, and one for each kind of collective of a run."""
        memory = self.memory
        offloaded = f", offloaded {size(self.offloaded)}" if self.offloaded else ""
        sizes = (
            f"arguments {size(memory.arguments)}, results {size(memory.results)}, "
            f"temp {size(memory.temp)}{offloaded}; {self.runs} x a step"
        )
        head = f"{f'stage {self.stage}':<12}{self.name!s:<8} {sizes}"
        return [head, *map(collective_line, self.collectives)]


def compile_programs(
    trainer: StagesTrainer,
    meshes: Sequence[Mesh],
    names: Collection[UnitName] | None = None,
) -> Iterator[CompiledProgram]:
    """Compile the programs of a training step, or those of some names, one by one.

    Args:
      meshes: for each stage, the mesh to compile for; see `meshes_to_compile`.

    Raises:
      OutOfMemory: the compiler says that the program after the last one yielded does not fit.
      ConfigError: the compiler refuses that program for another reason.
    """
    num_microbatches = trainer.engine.table.num_microbatches
    updates = (
        (stage, UnitName(UPDATE, stage), compiled, 0)
        for stage, compiled in enumerate(trainer.compile_updates(meshes))
    )
    units = trainer.engine.compile(names, meshes)
    try:
        for stage, name, compiled, offloaded in chain(units, updates if names is None else ()):
            hlo, mesh = text_of(compiled), trainer.engine.meshes[stage]
            yield CompiledProgram(
                stage,
                name,
                name.runs(num_microbatches),
                memory_of(compiled, mesh),
                find_collectives(parse(hlo), mesh),
                offloaded,
                hlo,
            )
    except NotCompiled as error:
        if too_large := out_of_memory(error.reason, str(error.name)):
            raise too_large from None
        reason = error.reason.splitlines()[0]
        message = f"the compiler refuses program {error.name} of the mpmd engine: {reason}"
        raise ConfigError(Problem("compile.topology", message)) from None


def write_programs(
    programs: Iterable[CompiledProgram], texts: Mapping[UnitName, str], directory: Path
) -> Iterator[CompiledProgram]:
    """Write programs as they are compiled, and yield them.

    `stage_S/NAME.txt` is a program as sliced, from `texts`, `stage_S/NAME.hlo` as compiled.
    Programs that an earlier call has written there are removed; other files stay.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Earlier files may be of stages or units that this configuration does not have.
    for file in directory.glob("stage_*/*.*"):
        if _WRITTEN.fullmatch(f"{file.parent.name}/{file.name}"):
            file.unlink()
    for program in programs:
        folder = directory / f"stage_{program.stage}"
        folder.mkdir(exist_ok=True)
        if text := texts.get(program.name):  # the update is not sliced out of anything
            (folder / f"{program.name}.txt").write_text(text, encoding="utf-8")
        (folder / f"{program.name}.hlo").write_text(program.hlo, encoding="utf-8")
        yield program
