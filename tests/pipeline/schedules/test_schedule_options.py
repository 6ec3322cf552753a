from fnmatch import fnmatch

import pytest

from maxpipe.config.engine_options import SPLIT_BACKWARD
from maxpipe.config.layout import ENGINE_SCHEDULES, FIXED_REPEATS
from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import ScheduleError


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_schedule_knows_the_engines_that_run_it(name):
    schedule = SCHEDULES.get(name)
    assert issubclass(schedule, Schedule)
    assert schedule.name() == name
    able = [engine for engine, patterns in ENGINE_SCHEDULES.items() if any(fnmatch(name, p) for p in patterns)]
    assert list(schedule.engines) == able
    assert schedule.fixed_repeats == FIXED_REPEATS.get(name)
    assert ("W" in schedule.build(2, 4, schedule.repeats_for(2)).kinds) == (name in SPLIT_BACKWARD)


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
        ("circular", (2, 4, 1), {"slack": 1}, "pipeline.overlap_slots=true: no tick of schedule circular"),
    ],
)
def test_what_a_schedule_does_not_have_is_refused(name, sizes, options, message):
    with pytest.raises(ScheduleError, match=message):
        SCHEDULES.get(name).build(*sizes, **options)
