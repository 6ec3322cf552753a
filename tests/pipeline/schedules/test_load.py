import numpy as np
import pytest

from maxpipe.config.catalog import SCHEDULES, Schedule
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.order import place
from maxpipe.pipeline.schedules.table import ScheduleError, from_ticks


@pytest.mark.parametrize("name", SCHEDULES)
def test_load_schedule_has_w_units_if_the_catalogue_says_so(name):
    schedule = SCHEDULES[name]
    table = load_schedule(name, 2, 4, schedule.repeats_for(2))
    assert table.name == name
    assert ("W" in table.kinds) == schedule.splits_backward


def test_load_schedule_of_a_path_reads_its_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(load_schedule("zb_v", 2, 3)))  # its own number of repeats, 2
    assert to_csv(load_schedule(path, 2, 3)) == path.read_text()


@pytest.mark.parametrize(
    ("name", "sizes", "options", "message"),
    [
        ("gpipe", (0, 4, 1), {}, "mesh.ici.stage=0: must be at least 1"),
        ("gpipe", (2, 0, 1), {}, "pipeline.num_microbatches=0: must be at least 1"),
        ("gpipe", (2, 4, 2), {}, "pipeline.num_repeats=2: schedule gpipe has one chunk per stage"),
        (
            "1f1b",
            (2, 4, 1),
            {"forwarding_delay": 2},
            "pipeline.delay_activation_forwarding=true: schedule 1f1b",
        ),
        (
            "circular",
            (2, 4, 1),
            {"slack": 1},
            "pipeline.overlap_slots=true: no tick of schedule circular",
        ),
    ],
)
def test_load_schedule_with_an_option_that_it_does_not_have_is_refused(
    name, sizes, options, message
):
    with pytest.raises(ScheduleError, match=message):
        load_schedule(name, *sizes, **options)


def test_load_schedule_with_several_problems_gives_every_reason():
    with pytest.raises(ScheduleError) as caught:
        load_schedule("1f1b", 0, 4, 2, forwarding_delay=2, slack=1)
    keys = [reason.partition("=")[0] for reason in caught.value.reasons]
    assert keys == [
        "mesh.ici.stage",
        "pipeline.num_repeats",
        "pipeline.delay_activation_forwarding",
        "pipeline.overlap_slots",
    ]


M, S = np.ogrid[:4, :2]
LOCKSTEP = {"F": M + S, "B": M + 2 - S}  # the ticks of a valid table of two stages
ORDERS = [[("F", 0, 0), ("B", 0, 0)], [("F", 0, 1), ("B", 0, 1)]]


def lockstep(**changed):
    return lambda stages, microbatches: from_ticks(
        "own", stages, 1, {**LOCKSTEP, **changed}, lockstep=True
    )


def without_last(ticks):
    return np.where(M < 3, ticks, -1)


def ordered(*orders):
    return lambda stages, microbatches: place("own", stages, 1, 1, orders)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lockstep(B=M + S + 1), "0B0 at tick 1, stage 0 is too early: it needs 1B0 at tick 2"),
        (lockstep(B=without_last(M + 2 - S)), "0B3 is missing on stage 0"),
        (lockstep(F=without_last(M + S)), "0F3 is missing on stage 0"),
        (lockstep(B=0 * M + 2 - S), "0B0 is not alone at tick 2, stage 0"),
        (lockstep(X=M + S), "must have the same kinds, F and B"),
        (lockstep(B=M + 2), r"the ticks of B are int64\[4, 1\]"),
        (lockstep(B=(M + 2 - S) / 1), "the ticks of B are float64"),
        (lambda s, m: from_ticks("own", s, 1, {"F": M + S}), "without backward units"),
        (lambda s, m: from_ticks("own", s, 2, {}), "the ticks of F are float64"),
        (lambda s, m: from_ticks("own", s, 1, LOCKSTEP, placement="up"), "placement must be loop"),
        (ordered(*ORDERS), "num_microbatches=1, but was asked for 4"),
        (lambda s, m: None, "returned NoneType; return a Table"),
        (ordered(ORDERS[0][::-1], ORDERS[1]), "wait for ever: .*1F0 for 0F0"),
        (ordered(ORDERS[0], ORDERS[1][:1]), "wait for ever: 0B0 for 1B0; .* missing"),
        (ordered([*ORDERS[0], ("F", 0, 0)], ORDERS[1]), "0F0 is doubled"),
        (ordered(ORDERS[1], ORDERS[0]), "1F0 is on stage 0; its chunk belongs to stage 1"),
        (ordered(ORDERS[0], [*ORDERS[1], ("F", 7, 1)]), "1F7 does not exist with 1 microbatches"),
    ],
)
def test_table_of_an_own_function_is_validated(monkeypatch, build, message):
    own = Schedule("own:function", engines=("scheduled", "mpmd"))
    monkeypatch.setitem(SCHEDULES, "own", own)
    monkeypatch.setattr("maxpipe.pipeline.schedules.load.implementation", lambda facts: build)
    with pytest.raises(ScheduleError, match=message):
        load_schedule("own", 2, 4)


def test_valid_table_of_an_own_function_is_returned(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "own", Schedule("own:function", engines=("scheduled",)))
    monkeypatch.setattr("maxpipe.pipeline.schedules.load.implementation", lambda facts: lockstep())
    assert load_schedule("own", 2, 4).num_ticks == 6
