"""Hypothesis strategies for schedule tables."""

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

    def is_ready(unit: RawUnit, tick: int) -> bool:
        """Return whether the results that a unit needs have arrived."""
        kind, microbatch, chunk = unit
        local = 0 if is_lockstep else 1
        arrivals = [] if kind == "F" else [(("F", microbatch, chunk), local)]
        if needs := dependency(unit, last, units):
            arrivals.append((needs, local if needs[2] == chunk else delay))
        return all(other in done and done[other] + wait <= tick for other, wait in arrivals)

    tick = 0
    while todo:
        for stage in range(S):
            for slot in kinds if is_lockstep else [kinds]:
                ready = [
                    u
                    for u in sorted(todo)
                    if stage_of[u[2]] == stage and u[0] in slot and is_ready(u, tick)
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
