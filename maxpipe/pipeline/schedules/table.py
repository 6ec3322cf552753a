"""Represent a schedule as a table: which unit of each kind a stage runs in each tick.

Letters: N ticks, S stages, M microbatches, V repeats (chunks per stage), G = V * S global
chunks.

Units of work, in the order of the slots within a lockstep tick:

    F  forward of one chunk for one microbatch
    B  backward of it, input and weight gradients together
    I  the input gradient only            I and W together replace one B
    W  the weight gradient only

Chunks are numbered per stage (`chunk`, 0..V-1, the repeat) or over the model (`global chunk`,
0..G-1). In `loop` placement chunk c of stage s is global chunk c*S + s. In `v` placement odd chunks
run back through the stages: c*S + (S-1-s), so that for V = 2 the second chunk of stage s is global
chunk 2S-1-s.

Tables come in two forms:

    lockstep      all stages move from tick to tick together, as one SPMD program does. A tick
                  has one slot of each kind, F before B (or I) before W, and the loss between F
                  and B.
    free-running  a tick holds at most one unit per stage. Only the order of units on each stage
                  matters, as in systems that dispatch every stage on its own.

An example with S=2, M=2, V=2 in `loop` placement, free-running. The cell `2F1` is global chunk 2,
which is chunk 1 of stage 0, forward, microbatch 1:

    tick    0   1   2   3   4   5   6   7   8   9
    stage 0 0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
    stage 1     1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

The same as arrays: `microbatch["F"]` [N, S] begins [[0, -1], [1, 0], [0, 1]], with -1 for idle, and
`chunk["F"]` begins [[0, -1], [0, 0], [1, 0]].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from maxpipe.config.errors import RefusedError

# In slot order, in which a lockstep tick runs them.
KINDS = ("F", "B", "I", "W")
IDLE = -1


class ScheduleError(RefusedError):
    """A schedule cannot be built, is invalid, or cannot run on the engine."""


class Unit(NamedTuple):
    """One unit of work; prints as `2F0`: global chunk, kind, microbatch."""

    kind: str
    microbatch: int
    global_chunk: int

    def __str__(self) -> str:
        return f"{self.global_chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule for given sizes, from `load_schedule`, `from_ticks` or `load_csv`; read-only.

    Attributes:
      name: the schedule's name, for messages and pictures.
      num_repeats: V, chunks per stage.
      microbatch: for each kind present, int32 [N, S]: the microbatch that runs there, `IDLE` (-1)
        if none.
      chunk: the same for the chunk index on that stage, 0..V-1.
      placement: `loop` or `v`.
      lockstep: whether ticks are lockstep or free-running, see above.
      forwarding_delay: ticks from sending an activation or a gradient to its first use, at least 1.
      slack: least number of ticks from the last chunk's F to its B; lockstep only, 0 allows the
        same tick.
      source: file that the table was read from; errors name it.
      note: how the file was read, if not cell by cell; for the user.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_repeats: int
    microbatch: Mapping[str, np.ndarray]
    chunk: Mapping[str, np.ndarray]
    placement: str = "loop"
    lockstep: bool = False
    forwarding_delay: int = 1
    slack: int = 0
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        # What users build: `validate` relies on it.
        arrays = [*self.microbatch.values(), *self.chunk.values()]
        legal = {
            "placement must be loop or v": self.placement in ("loop", "v"),
            "forwarding_delay must be at least 1": self.forwarding_delay >= 1,
            "slack must be at least 0": self.slack >= 0,
            "microbatch and chunk must have the same kinds, F and B, or F, I and W": (
                {"F"} <= self.microbatch.keys() == self.chunk.keys() <= {*KINDS}
            ),
            "microbatch and chunk must be integers [ticks, stages]": all(
                array.dtype.kind == "i" and array.shape == (len(arrays[0]), self.num_stages)
                for array in arrays
            ),
        }
        for requirement, holds in legal.items():
            if not holds:
                raise ScheduleError(f"pipeline.schedule={self.name}: {requirement}")
        for array in arrays:
            # What is cached below, and plans made from a table, must stay valid.
            array.flags.writeable = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that have a slot in this table, in slot order."""
        return tuple(k for k in KINDS if k in self.microbatch)

    @property
    def num_ticks(self) -> int:
        return len(self.microbatch["F"])

    @property
    def num_chunks(self) -> int:
        return self.num_repeats * self.num_stages

    def global_chunk(self, chunk: np.ndarray | int, stage: np.ndarray | int) -> np.ndarray:
        """Return the position in the model of a stage's chunk; broadcasts."""
        chunk, stage = np.asarray(chunk), np.asarray(stage)
        # Odd chunks of a V run back through the stages.
        back = (self.placement == "v") & (chunk % 2 == 1)
        return chunk * self.num_stages + np.where(back, self.num_stages - 1 - stage, stage)

    @cached_property
    def stage_of_chunk(self) -> np.ndarray:
        return stages_of_chunks(self.num_stages, self.num_repeats, self.placement)

    @cached_property
    def ticks(self) -> Mapping[str, np.ndarray]:
        """Return for each kind int [M, G]: the tick of each unit, -1 if it never runs.

        A unit that a table has twice by mistake has the later tick.
        """
        # -1 remains where the table lacks a unit, which validation reports.
        ticks = {}
        for kind in self.kinds:
            tick, stage, microbatch, chunk = self.units(kind)
            ticks[kind] = np.full((self.num_microbatches, self.num_chunks), -1)
            ticks[kind][microbatch, self.global_chunk(chunk, stage)] = tick
        return ticks

    def merged_ticks(self, kinds: str) -> np.ndarray:
        """Return int [M, G]: the tick of whichever of `kinds` runs, -1 if none.

        `BI` gives the ticks of input gradients, `BW` those of weight gradients.
        """
        merged = np.full((self.num_microbatches, self.num_chunks), -1)
        # A unit has at most one of the kinds, and -1 is below any tick.
        for kind in set(kinds) & self.ticks.keys():
            np.maximum(merged, self.ticks[kind], out=merged)
        return merged

    def units(self, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return tick, stage, microbatch and chunk of each unit of a kind, by tick, then stage."""
        tick, stage = np.nonzero(self.microbatch[kind] != IDLE)
        return tick, stage, self.microbatch[kind][tick, stage], self.chunk[kind][tick, stage]


def stages_of_chunks(num_stages: int, num_repeats: int, placement: str) -> np.ndarray:
    """Return int [G]: the stage that holds each global chunk."""
    # Global chunk g is the (g // S)-th of its stage in both placements.
    repeat, stage = np.divmod(np.arange(num_repeats * num_stages), num_stages)
    return np.where((placement == "v") & (repeat % 2 == 1), num_stages - 1 - stage, stage)


def from_ticks(
    name: str,
    num_stages: int,
    num_repeats: int,
    ticks: Mapping[str, np.ndarray],
    *,
    placement: str = "loop",
    lockstep: bool = False,
    forwarding_delay: int = 1,
    slack: int = 0,
) -> Table:
    """Build a table from the tick of every unit.

    Args:
      ticks: for each kind int [M, G], the tick at which the unit of that microbatch and global
        chunk runs, -1 if never. All other arguments are as in `Table`.

    Raises:
      ScheduleError: arrays have other shapes, or two units of a kind are in one tick of a stage.
    """
    num_microbatches = len(ticks.get("F", ()))
    shape = (num_microbatches, num_repeats * num_stages)
    for kind, tick in {"F": np.empty(0), **ticks}.items():
        if 0 in shape or tick.shape != shape or tick.dtype.kind != "i":
            raise ScheduleError(
                f"pipeline.schedule={name}: the ticks of {kind} are {tick.dtype}{[*tick.shape]}; "
                f"give integers [{num_microbatches} microbatches, {shape[1]} chunks], F among them"
            )
    num_ticks = 1 + max(int(t.max()) for t in ticks.values())
    stage = stages_of_chunks(num_stages, num_repeats, placement)
    microbatch, chunk = {}, {}
    for kind, tick in ticks.items():
        microbatch[kind] = np.full((num_ticks, num_stages), IDLE, np.int32)
        chunk[kind] = np.full((num_ticks, num_stages), IDLE, np.int32)
        # Scatter: [M, G] by microbatch and global chunk -> [N, S] by tick and stage.
        m, c = np.nonzero(tick >= 0)
        at = tick[m, c], stage[c]
        microbatch[kind][at], chunk[kind][at] = m, c // num_stages
        # Of several units at one place the scatter keeps one.
        lost = (microbatch[kind][at] != m) | (chunk[kind][at] != c // num_stages)
        for i in np.flatnonzero(lost)[:1]:
            raise ScheduleError(
                f"pipeline.schedule={name}: {Unit(kind, int(m[i]), int(c[i]))} is not alone at "
                f"tick {at[0][i]}, stage {at[1][i]}; give each {kind} of a stage its own tick"
            )
    return Table(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        microbatch=microbatch,
        chunk=chunk,
        placement=placement,
        lockstep=lockstep,
        forwarding_delay=forwarding_delay,
        slack=slack,
    )


def forward_only(table: Table) -> Table:
    """Return the table's F units alone, for evaluation, up to the tick of the last of them."""
    num_ticks = 1 + int(table.ticks["F"].max())
    return replace(
        table,
        microbatch={"F": table.microbatch["F"][:num_ticks]},
        chunk={"F": table.chunk["F"][:num_ticks]},
    )


class Phase(NamedTuple):
    """Ticks [start, stop) in which each of `kinds`, and no other kind, has a unit on some stage."""

    start: int
    stop: int
    kinds: tuple[str, ...]


def phases(table: Table) -> list[Phase]:
    """Return the runs of ticks with the same set of active slot kinds, in order, over all ticks."""
    # bool [N, kinds]: whether any stage has such a unit
    active = np.stack(
        [(table.microbatch[kind] != IDLE).any(axis=1) for kind in table.kinds], axis=1
    )
    # A phase begins wherever a row differs from the one before.
    starts = [0, *(1 + np.flatnonzero((active[1:] != active[:-1]).any(axis=1))).tolist()]
    stops = [*starts[1:], table.num_ticks]
    return [
        Phase(start, stop, tuple(k for k, on in zip(table.kinds, active[start], strict=True) if on))
        for start, stop in zip(starts, stops, strict=True)
    ]
