"""Prove that a table computes every unit once, in an order that the dependencies allow."""

from typing import NoReturn

import numpy as np

from maxpipe.pipeline.schedules.table import (
    IDLE,
    KINDS,
    ScheduleError,
    Table,
    Unit,
)


def validate(table: Table) -> None:
    """Check everything that an engine relies on.

    - every microbatch passes every chunk forward once, and backward once: as one B, or as one I and
      one W (a table with F units only is a table for evaluation);
    - the F of a chunk starts at least `forwarding_delay` ticks after the F of the chunk before it,
      and its B or I as many after the B or I of the next chunk;
    - the B or I of the last chunk starts at least `slack` ticks after its own F, in a free-running
      table at least 1;
    - W runs after its I, or in a lockstep table in the same tick;
    - in a free-running table no stage has two units in one tick.

    Raises:
      ScheduleError: the first violation, with tick, stage and unit.
    """
    _check_cells(table)
    for kind in table.kinds:
        _check_once(table, kind)
    _check_complete(table)
    if not table.lockstep:
        _check_one_per_tick(table)
    # A lockstep tick runs F, then B or I, then W, so these may follow each other in one tick.
    same_stage_gap = 0 if table.lockstep else 1
    _check_after(table, "F", "F", offset=-1, gap=table.forwarding_delay)
    _check_after(table, "BI", "BI", offset=1, gap=table.forwarding_delay)
    _check_after(table, "BI", "F", offset=0, gap=max(table.slack, same_stage_gap))
    _check_after(table, "W", "I", offset=0, gap=same_stage_gap)


def describe(table: Table, kind: str, tick: int, stage: int) -> str:
    """Return a cell and its place, `2F0 at tick 3, stage 2`."""
    chunk = int(table.global_chunk(table.chunk[kind][tick, stage], stage))
    unit = Unit(kind, int(table.microbatch[kind][tick, stage]), chunk)
    return f"{unit} at tick {tick}, stage {stage}"


def _fail(table: Table, message: str) -> NoReturn:
    raise ScheduleError(f"pipeline.schedule={table.source or table.name}: {message}")


def _check_cells(table: Table) -> None:
    for kind in table.kinds:
        microbatch, chunk = table.microbatch[kind], table.chunk[kind]
        idle = microbatch == IDLE
        legal = (microbatch >= 0) & (microbatch < table.num_microbatches)
        legal &= (chunk >= 0) & (chunk < table.num_repeats)
        for tick, stage in np.argwhere(~np.where(idle, chunk == IDLE, legal)):
            sizes = f"{table.num_microbatches} microbatches and {table.num_chunks} chunks"
            _fail(table, f"{describe(table, kind, tick, stage)} does not exist with {sizes}")


def _check_one_per_tick(table: Table) -> None:
    running = sum((units != IDLE).astype(int) for units in table.microbatch.values())
    for tick, stage in np.argwhere(np.asarray(running) > 1):
        kinds = [k for k in table.kinds if table.microbatch[k][tick, stage] != IDLE]
        units = " and ".join(describe(table, kind, tick, stage) for kind in kinds)
        _fail(table, f"{units} are in one tick of a free-running table; give each its own")


def _check_once(table: Table, kind: str) -> None:
    tick, stage, microbatch, chunk = table.units(kind)
    key = microbatch * table.num_chunks + table.global_chunk(chunk, stage)
    _, first, count = np.unique(key, return_index=True, return_counts=True)
    for index in first[count > 1][:1]:
        again = np.flatnonzero(key == key[index])[1]
        _fail(
            table,
            f"{describe(table, kind, tick[again], stage[again])} is doubled: "
            f"it runs already as {describe(table, kind, tick[index], stage[index])}; drop one",
        )


def _check_complete(table: Table) -> None:
    ran = {kind: table.merged_ticks(kind) >= 0 for kind in KINDS}
    for microbatch, chunk in np.argwhere(~ran["F"]):
        _fail_missing(table, Unit("F", int(microbatch), int(chunk)))
    if table.kinds == ("F",):
        return
    for microbatch, chunk in np.argwhere(ran["B"] & (ran["I"] | ran["W"])):
        other = "I" if ran["I"][microbatch, chunk] else "W"
        unit = Unit("B", int(microbatch), int(chunk))
        both = f"{_where(table, unit)} and {_where(table, unit._replace(kind=other))}"
        _fail(table, f"{both} are the same work; keep B alone, or I and W")
    for kind in "IW":
        for microbatch, chunk in np.argwhere(~ran["B"] & ~ran[kind]):
            split = ran["I"][microbatch, chunk] or ran["W"][microbatch, chunk]
            _fail_missing(table, Unit(kind if split else "B", int(microbatch), int(chunk)))


def _where(table: Table, unit: Unit) -> str:
    tick = table.ticks[unit.kind][unit.microbatch, unit.global_chunk]
    return describe(table, unit.kind, tick, int(table.stage_of_chunk[unit.global_chunk]))


def _fail_missing(table: Table, unit: Unit) -> NoReturn:
    _fail(table, f"{unit} is missing on stage {table.stage_of_chunk[unit.global_chunk]}")


def _check_after(table: Table, kinds: str, needed: str, offset: int, gap: int) -> None:
    """Check that units of `kinds` run at least `gap` ticks after those of `needed`.

    The needed unit is of the same microbatch, `offset` chunks further on.
    """
    end = table.num_chunks
    tick = table.merged_ticks(kinds)[:, max(0, -offset) : end - max(0, offset)]
    ready = table.merged_ticks(needed)[:, max(0, offset) : end + min(0, offset)] + gap
    early = np.argwhere((tick >= 0) & (tick < ready))
    if not len(early):
        return
    microbatch, column = (int(i) for i in early[np.argmin(tick[tuple(early.T)])])
    chunk, ran = column + max(0, -offset), table.ticks
    unit, needs = (
        Unit(next(k for k in choice if k in ran and ran[k][microbatch, at] >= 0), microbatch, at)
        for choice, at in ((kinds, chunk), (needed, chunk + offset))
    )
    _fail(
        table,
        f"{_where(table, unit)} is too early: it needs {_where(table, needs)}, so the earliest "
        f"possible is tick {ready[microbatch, column]}",
    )
