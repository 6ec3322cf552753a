"""What is searched where the user fixes or narrows keys."""

from maxpipe.config import Config, replace
from maxpipe.plan.search.space import Space

CONFIG = replace(Config(), **{"model.num_layers": 8, "pipeline.num_repeats": 1})


def space_of(choices, fixed=None):
    return Space(CONFIG, 4, 1, choices, fixed=tuple(choices if fixed is None else fixed))


def test_unkept_names_the_fixed_key_that_an_engine_cannot_have():
    for key, value, engine, schedule, reason in (
        ("pipeline.schedule", "lockstep_1f1b", "sequential", "circular", "not for sequential"),
        ("pipeline.schedule", "lockstep_1f1b", "scheduled", "lockstep_1f1b", ""),
        ("pipeline.num_repeats", 4, "sequential", "circular", "not for sequential"),
        ("pipeline.num_repeats", 1, "sequential", "circular", ""),
        ("pipeline.num_repeats", 4, "mpmd", "1f1b", "not for 1f1b"),
        ("pipeline.num_repeats", 4, "circular", "circular", ""),
        ("pipeline.fsdp_gather", "once", "sequential", "circular", "not for sequential"),
        ("pipeline.fsdp_gather", "once", "circular", "circular", ""),
        ("pipeline.scan_layers", False, "circular", "circular", "not for circular"),
        ("pipeline.scan_layers", True, "circular", "circular", ""),
        ("pipeline.scan_layers", False, "sequential", "circular", ""),
        ("pipeline.remat_policy", "full", "sequential", "circular", ""),
    ):
        expected = f"--fix {key}: {reason}" if reason else ""
        assert space_of({key: [value]}).unkept(engine, schedule) == expected
        assert space_of({key: [value]}, fixed=()).unkept(engine, schedule) == "", "it is only tried"


def test_repeats_that_a_schedule_does_not_have_are_counted_if_fixed_and_not_tried_else():
    choices = {"pipeline.num_repeats": [4]}
    assert space_of(choices).repeats("1f1b", 2) == [1]
    assert space_of(choices, fixed=()).repeats("1f1b", 2) == []
