"""Names of units on a command line, and whether a schedule has them."""

import pytest

from maxpipe.compile.unit_names import check_units, unit_names
from maxpipe.config import ConfigError, load, resolve


def test_units_are_named_by_kind_and_chunk():
    assert unit_names("F1,W10") == [("F", 1), ("W", 10)]
    for words in ("", "F", "X1", "F1,", "gather1", "F-1"):
        with pytest.raises(ConfigError, match=r"--units: .* is no unit; .* such as F1,B1"):
            unit_names(words)


@pytest.mark.parametrize(
    ("schedule", "known"), [("1f1b", "F0, F1, B1, B0"), ("zb_h1", "F0, F1, I1, W1, I0, W0")]
)
def test_units_are_those_of_the_schedule(schedule, known):
    words = ["pipeline.engine=mpmd", "pipeline.num_repeats=1", f"pipeline.schedule={schedule}"]
    config = resolve(load("configs/base.yml", words), 4)
    check_units(known.replace(" ", ""), config)
    with pytest.raises(ConfigError, match=f"there is no F2, B9; there are {known}"):
        check_units("F2,F0,B9", config)
