import pytest

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import ScheduleError


@pytest.mark.parametrize("name", SCHEDULES)
def test_load_schedule_has_w_units_if_the_catalogue_says_so(name):
    schedule = SCHEDULES[name]
    table = load_schedule(name, 2, 4, schedule.repeats_for(2))
    assert table.name == name
    assert ("W" in table.kinds) == schedule.splits_backward


def test_load_schedule_of_a_path_reads_its_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(load_schedule("1f1b", 2, 3)))
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
