"""Small runs give the recorded values, and stored runs are resumed with the recorded results.

`python tests/golden/record.py --help` says how to record and to compare bits.
"""

from pathlib import Path

import pytest
from golden.recording import NAMES, load, run_and_read, tolerance
from golden.values import above, differences

# Others, which CI adds, have the engine of one of these.
QUICK = {
    *("sequential", "circular_per_repeat", "lockstep_1f1b_experts"),
    *("stored_scheduled", "stored_mpmd"),
}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    items = [item for item in request.session.items if item.path == Path(__file__)]
    names = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    directory = tmp_path_factory.mktemp("golden")
    return run_and_read([name for name in NAMES if name in names], directory)


def marks_of(name):
    return [] if name in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in NAMES])
def test_run_gives_recorded_values(results, name):
    actual = results[name]
    assert not isinstance(actual, str), actual
    found = differences(load(name)["values"], actual)
    assert above(found, tolerance(name)) == {}
