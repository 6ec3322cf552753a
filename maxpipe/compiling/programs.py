"""Compile the separate programs of the stages, and count what they exchange in a step.

A unit of the schedule runs once for each microbatch. What gathers a chunk's weights before its
units, and what reduces its gradients after them, runs once a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import jax

from maxpipe.compiling.collectives import Collective, find_collectives
from maxpipe.compiling.hlo import parse
from maxpipe.compiling.report import collective_line, size
from maxpipe.compiling.step import out_of_memory
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine
from maxpipe.pipeline.schedules.table import KINDS


class StagesTrainer(Protocol):
    """What is compiled of a trainer with programs per stage, `mpmd_trainer.MpmdTrainer`."""

    engine: MpmdEngine


@dataclass(frozen=True)
class CompiledProgram:
    """One program of a stage.

    Attributes:
      stage: its index.
      name: of the program, such as F0 or reduce0.
      runs: how often a step runs it.
      arguments, results, temp: bytes on one device; results that reuse the arguments' memory are
        not counted.
      collectives: of one device in one run.
    """

    stage: int
    name: str
    runs: int
    arguments: int
    results: int
    temp: int
    collectives: Sequence[Collective]

    def lines(self) -> list[str]:
        """Return a line about the memory, and one for each collective of a run."""
        memory = (
            f"arguments {size(self.arguments)}, results {size(self.results)}, "
            f"temp {size(self.temp)}; {self.runs} x a step"
        )
        head = f"{f'stage {self.stage}':<12}{self.name:<8} {memory}"
        return [head, *map(collective_line, self.collectives)]


def compile_programs(trainer: StagesTrainer, directory: Path | None) -> Iterator[CompiledProgram]:
    """Compile every program of a training step for the devices of its stage.

    Args:
      trainer: of a configuration whose stages are chosen.
      directory: gets `stage_S/NAME.txt`, the computation as sliced, and `stage_S/NAME.hlo`, as
        compiled; it is made if it does not exist, and such files of earlier calls are removed. None
        writes nothing.

    Yields:
      The programs, one by one as they are compiled.

    Raises:
      OSError: something cannot be written.
      OutOfMemory: the compiler says that the program after the last one does not fit.
    """
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        # Earlier files may be of stages or units that this configuration does not have.
        for earlier in (*directory.glob("stage_*/*.txt"), *directory.glob("stage_*/*.hlo")):
            earlier.unlink()
    texts = trainer.engine.texts()
    num_microbatches = trainer.engine.table.num_microbatches
    try:
        for stage, name, compiled in trainer.engine.compile():
            hlo = compiled.as_text() or ""
            if directory is not None:
                folder = directory / f"stage_{stage}"
                folder.mkdir(exist_ok=True)
                (folder / f"{name}.txt").write_text(texts[name], encoding="utf-8")
                (folder / f"{name}.hlo").write_text(hlo, encoding="utf-8")
            memory = compiled.memory_analysis()
            assert memory is not None
            yield CompiledProgram(
                stage=stage,
                name=str(name),
                runs=num_microbatches if name.kind in KINDS else 1,
                arguments=memory.argument_size_in_bytes,
                results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
                temp=memory.temp_size_in_bytes,
                collectives=find_collectives(parse(hlo), trainer.engine.meshes[stage]),
            )
    except jax.errors.JaxRuntimeError as error:
        raise (out_of_memory(str(error)) or error) from None


def collectives_of_step(programs: Iterable[CompiledProgram]) -> dict[int, list[Collective]]:
    """Return for each stage the collectives of one device in a step, the largest sender first."""
    totals: dict[int, dict[tuple[str, str, str], Collective]] = {}
    for program in programs:
        stage = totals.setdefault(program.stage, {})
        for c in program.collectives:
            key = c.kind, c.axes, c.network
            total = stage.setdefault(key, replace(c, count=0.0, bytes=0.0, sent_bytes=0.0))
            total.count += program.runs * c.count
            total.bytes += program.runs * c.bytes
            total.sent_bytes += program.runs * c.sent_bytes
    return {
        stage: sorted(found.values(), key=lambda c: -c.sent_bytes)
        for stage, found in sorted(totals.items())
    }


def summary_lines(programs: Sequence[CompiledProgram]) -> list[str]:
    """Return the collectives of a step for people; those of the optimizer's update are left out."""
    lines = []
    for stage, found in collectives_of_step(programs).items():
        none = "" if found else " none"
        lines.append(f"collectives of one device of stage {stage} in a step:{none}")
        lines += map(collective_line, found)
    return lines


def as_json(programs: Sequence[CompiledProgram]) -> dict[str, object]:
    """Return programs and their collectives in a step as plain data, sizes in bytes."""
    steps = collectives_of_step(programs)
    return {
        "programs": [asdict(program) for program in programs],
        "stages": [
            {"stage": stage, "collectives": [asdict(c) for c in found]}
            for stage, found in steps.items()
        ],
    }
