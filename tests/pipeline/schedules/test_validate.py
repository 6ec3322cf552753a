import dataclasses
from functools import partial

import numpy as np
import pytest
from helpers.random_tables import tables
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import IDLE, ScheduleError, forward_only
from maxpipe.pipeline.schedules.validate import validate


def changed(table, **cells):
    microbatch = {k: a.copy() for k, a in table.microbatch.items()}
    chunk = {k: a.copy() for k, a in table.chunk.items()}
    for name, value in cells.items():
        kind, tick, stage = name.split("_")
        microbatch[kind][int(tick), int(stage)], chunk[kind][int(tick), int(stage)] = value
    return dataclasses.replace(table, microbatch=microbatch, chunk=chunk)


@pytest.mark.parametrize("name", SCHEDULES)
def test_validate_of_every_schedule_passes(name):
    schedule = SCHEDULES[name]
    for S in (1, 2, 3, 4):
        for M in (1, 2, 3, 5, 8, 11):
            for V in {schedule.repeats_for(V) for V in (1, 2, 3)}:
                for delay in (1, 2) if schedule.delays else (1,):
                    for slack in (0, 1) if schedule.overlaps else (0,):
                        table = load_schedule(name, S, M, V, forwarding_delay=delay, slack=slack)
                        validate(table)
                        validate(forward_only(table))


@given(tables())
def test_validate_of_a_random_table_passes(table):
    validate(table)


@given(tables(), st.data())
def test_validate_of_a_dropped_unit_names_it(table, data):
    kind, tick, stage = pick(table, data)
    unit = changed(table, **{f"{kind}_{tick}_{stage}": (IDLE, IDLE)})
    with pytest.raises(ScheduleError, match=f"is missing on stage {stage}"):
        validate(unit)


def padded(table, ticks, **empty):
    return [
        {
            kind: np.pad(a, ((0, ticks), (0, 0)), constant_values=IDLE)
            for kind, a in {**arrays, **empty}.items()
        }
        for arrays in (table.microbatch, table.chunk)
    ]


@given(tables(), st.data())
def test_validate_of_a_doubled_unit_names_it(table, data):
    kind, tick, stage = pick(table, data)
    rows, chunks = padded(table, 1)
    for arrays in (rows, chunks):
        arrays[kind][-1, stage] = arrays[kind][tick, stage]
    with pytest.raises(ScheduleError, match=f"at tick {table.num_ticks}, stage {stage} is doubled"):
        validate(dataclasses.replace(table, microbatch=rows, chunk=chunks))


@given(tables())
def test_validate_of_a_unit_before_its_input_names_it(table):
    """All units but the first F move a tick forward, relative to it."""
    if table.num_chunks == 1 and table.lockstep:
        return
    first, late = int(table.ticks["F"][0, 0]), 1 + table.num_ticks
    rows, chunks = padded(table, late)
    rows["F"][first, 0] = chunks["F"][first, 0] = IDLE
    rows["F"][-1, 0], chunks["F"][-1, 0] = 0, 0
    with pytest.raises(
        ScheduleError, match=rf"needs 0F0 at tick {table.num_ticks + late - 1}, stage 0"
    ):
        validate(dataclasses.replace(table, microbatch=rows, chunk=chunks))


def pick(table, data):
    kind = data.draw(st.sampled_from(table.kinds))
    tick, stage, _, _ = table.units(kind)
    index = data.draw(st.integers(0, len(tick) - 1))
    return kind, int(tick[index]), int(stage[index])


def whole_and_split(table):
    rows, chunks = padded(table, 1, B=np.full_like(table.microbatch["F"], IDLE))
    rows["B"][-1, 0] = chunks["B"][-1, 0] = 0
    return dataclasses.replace(table, microbatch=rows, chunk=chunks)


@pytest.mark.parametrize(
    ("schedule", "change", "message"),
    [
        (
            ("1f1b", 1, 2),
            partial(changed, B_1_0=(IDLE, IDLE), B_2_0=(0, 0)),
            "0F1 at tick 2, stage 0 and 0B0 at tick 2, stage 0 are in one tick",
        ),
        (
            ("gpipe", 2, 2),
            partial(changed, F_0_0=(7, 0)),
            "0F7 at tick 0, stage 0 does not exist with 2 microbatches and 2 chunks",
        ),
        (("gpipe", 2, 2), partial(changed, F_0_0=(0, 1)), "2F0 at tick 0, stage 0 does not exist"),
        (
            ("gpipe", 2, 2),
            partial(changed, F_0_0=(0, -1)),
            "-2F0 at tick 0, stage 0 does not exist",
        ),
        (
            ("gpipe", 2, 2),
            partial(changed, F_0_0=(-2, 0)),
            "0F-2 at tick 0, stage 0 does not exist",
        ),
        (
            ("lockstep_1f1b", 2, 4),
            partial(dataclasses.replace, slack=1),
            "1B0 at tick 1, stage 1 is too early: it needs 1F0 at tick 1, stage 1",
        ),
        (
            ("lockstep_1f1b", 2, 4),
            partial(dataclasses.replace, forwarding_delay=2),
            "so the earliest possible is tick 2",
        ),
        (
            ("zb_h1", 1, 1),
            whole_and_split,
            "0B0 at tick 3, stage 0 and 0I0 at tick 1, stage 0 are the same work",
        ),
    ],
)
def test_validate_of_a_table_with_one_fault_names_it(schedule, change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(change(load_schedule(*schedule)))
