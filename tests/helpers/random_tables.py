"""Hypothesis strategies for schedule tables."""

from collections.abc import Mapping

import numpy as np
from hypothesis import strategies as st

from maxpipe.pipeline.schedules.order import RawUnit, dependency
from maxpipe.pipeline.schedules.table import Table, from_ticks, stages_of_chunks


@st.composite
def tables(
    draw: st.DrawFn, placements: tuple[str, ...] = ("loop", "v"), lockstep: bool = True
) -> Table:
    """Draw a valid table: in each tick every stage runs any unit that is ready, or idles."""
    S = draw(st.integers(1, 4))
    M = draw(st.integers(1, 5))
    V = draw(st.integers(1, 3))
    placement = draw(st.sampled_from(placements))
    is_lockstep = draw(st.booleans()) if lockstep else False
    delay = draw(st.integers(1, 2)) if is_lockstep else 1
    kinds = draw(st.sampled_from(["FIW", "FB"]))
    random = draw(st.randoms(use_true_random=False))
    stage_of = stages_of_chunks(S, V, placement)
    last = S * V - 1
    todo = {(kind, m, g) for kind in kinds for m in range(M) for g in range(last + 1)}
    units = frozenset(todo)
    done: dict[tuple[str, int, int], int] = {}
    tick = 0
    while todo:
        for stage in range(S):
            for slot in kinds if is_lockstep else [kinds]:
                ready = [
                    u
                    for u in sorted(todo)
                    if stage_of[u[2]] == stage
                    and u[0] in slot
                    and is_ready(u, units, done, tick, last, delay, is_lockstep)
                ]
                if ready and random.random() < 0.8:
                    unit = random.choice(ready)
                    done[unit] = tick
                    todo.remove(unit)
        tick += 1
    ticks = {
        kind: np.array([[done[kind, m, g] for g in range(last + 1)] for m in range(M)])
        for kind in kinds
    }
    return from_ticks(
        "random", S, V, ticks, placement=placement, lockstep=is_lockstep, forwarding_delay=delay
    )


def is_ready(
    unit: RawUnit,
    units: frozenset[RawUnit],
    done: Mapping[RawUnit, int],
    tick: int,
    last: int,
    delay: int,
    lockstep: bool,
) -> bool:
    """Return whether the results that a unit needs have arrived by `tick`."""
    kind, microbatch, chunk = unit
    needs = dependency(unit, last, units)
    local = 0 if lockstep else 1
    if needs and not (
        needs in done and done[needs] + (local if needs[2] == chunk else delay) <= tick
    ):
        return False
    own = ("F", microbatch, chunk)
    return kind == "F" or (own in done and done[own] + local <= tick)
