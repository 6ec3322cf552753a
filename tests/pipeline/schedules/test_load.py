import numpy as np
import pytest

from maxpipe.config.catalog import SCHEDULES, Schedule
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.order import place
from maxpipe.pipeline.schedules.table import ScheduleError, from_ticks


@pytest.mark.parametrize("name", SCHEDULES)
def test_load_schedule_has_w_units_if_the_catalogue_says_so(name):
    schedule = SCHEDULES[name]
    table = load_schedule(name, 2, 4, schedule.repeats_for(2))
    assert table.name == name
    assert ("W" in table.kinds) == schedule.splits_backward


def test_load_schedule_of_an_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(
        ValueError, match=r"pipeline.schedule='2f2b' is neither .* nor one of circular, gp"
    ):
        load_schedule("2f2b", 2, 4, 1)


@pytest.mark.parametrize(
    ("name", "sizes", "options", "keys"),
    [
        ("1f1b", (0, 0, 2), {}, "mesh.ici.stage pipeline.num_microbatches pipeline.num_repeats"),
        ("1f1b", (2, 4), {"forwarding_delay": 2}, "pipeline.delay_activation_forwarding"),
        ("circular", (2, 4, 1), {"slack": 1}, "pipeline.overlap_slots"),
    ],
)
def test_load_schedule_with_what_it_does_not_have_gives_every_reason(name, sizes, options, keys):
    with pytest.raises(ScheduleError) as caught:
        load_schedule(name, *sizes, **options)
    assert [reason.partition("=")[0] for reason in caught.value.reasons] == keys.split()
    assert ("has one chunk per stage" in str(caught.value)) == ("num_repeats" in keys)


M, S = np.ogrid[:4, :2]
LOCKSTEP = {"F": M + S, "B": M + 2 - S}  # the ticks of a valid table of two stages
ORDERS = [[("F", 0, 0), ("B", 0, 0)], [("F", 0, 1), ("B", 0, 1)]]


def lockstep(**changed):
    ticks = {**LOCKSTEP, **changed}
    return lambda stages, microbatches: from_ticks("own", stages, 1, ticks, lockstep=True)


def ordered(*orders):
    return lambda stages, microbatches: place("own", stages, 1, 1, orders)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lockstep(), ""),
        (lockstep(B=M + S + 1), "0B0 at tick 1, stage 0 is too early: it needs 1B0 at tick 2"),
        (lockstep(B=0 * M + 2 - S), "0B0 is not alone at tick 2, stage 0"),
        (lockstep(X=M + S), "must have the same kinds, F and B"),
        (lockstep(B=M + 2), r"the ticks of B are int64\[4, 1\]"),
        (lockstep(B=(M + 2 - S) / 1), "the ticks of B are float64"),
        (lambda s, m: from_ticks("own", s, 1, {"F": M + S}), "with backward units"),
        (lambda s, m: from_ticks("own", s, 2, {}), "the ticks of F are float64"),
        (lambda s, m: from_ticks("own", s, 1, LOCKSTEP, placement="up"), "placement must be loop"),
        (ordered(*ORDERS), "must return a Table, .* and num_microbatches=4"),
        (lambda s, m: None, "own:function must return a Table"),
        (ordered(ORDERS[1], ORDERS[0]), "1F0 is no unit of stage 0"),
        (ordered(ORDERS[0], [*ORDERS[1], ("F", 7, 1)]), "1F7 .* microbatches 0 to 0"),
    ],
)
def test_table_of_an_own_function_is_validated(monkeypatch, build, message):
    own = Schedule("own:function", engines=("scheduled", "mpmd"))
    monkeypatch.setitem(SCHEDULES, "own", own)
    monkeypatch.setattr("maxpipe.pipeline.schedules.load.implementation", lambda facts: build)
    if not message:
        assert load_schedule("own", 2, 4).num_ticks == 6
        return
    with pytest.raises(ScheduleError, match=message):
        load_schedule("own", 2, 4)
