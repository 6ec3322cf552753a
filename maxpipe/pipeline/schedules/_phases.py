"""Phases of a table: what one loop of a compiled program can cover."""

from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules._table import IDLE, Table


class Phase(NamedTuple):
    """Ticks [start, stop) in which some stage uses each slot kind of `kinds` and none uses another."""

    start: int
    stop: int
    kinds: tuple[str, ...]


def phases(table: Table) -> list[Phase]:
    """Runs of ticks with the same set of active slot kinds, in order, covering all ticks."""
    active = np.stack([(table.microbatch[kind] != IDLE).any(axis=1) for kind in table.kinds], axis=1)
    starts = [0, *(1 + np.flatnonzero((active[1:] != active[:-1]).any(axis=1))).tolist()]
    stops = [*starts[1:], table.num_ticks]
    return [
        Phase(start, stop, tuple(k for k, on in zip(table.kinds, active[start], strict=True) if on))
        for start, stop in zip(starts, stops, strict=True)
    ]
