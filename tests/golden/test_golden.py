"""Small runs give the recorded values, and stored runs are resumed with the recorded results.

`python tests/golden/record.py --help` says how to record and to compare bits.
"""

from pathlib import Path

import pytest
from golden import record
from golden.recording import NAMES, load, run_and_read, tolerance
from golden.values import above, differences

# Runs that CI adds: others have the same engine.
SLOW = {
    "circular_per_iteration",
    "circular_once",
    "circular_uneven",
    "circular_outside_muon",
    "gpipe_dropout",
    "lockstep_1f1b_once",
    "lockstep_1f1b_bfloat16",
    "lockstep_1f1b_context",
    "lockstep_zb_tensor",
    "interleaved_1f1b_tied",
    "zb_v_dropout",
}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Name -> values with the current code, of the names that are asked for in this session."""
    items = [
        item
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    names = {item.callspec.params["name"] for item in items}
    return run_and_read(
        [name for name in NAMES if name in names], tmp_path_factory.mktemp("golden")
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES]
)
def test_run_gives_recorded_values(results, name):
    actual = results[name]
    assert not isinstance(actual, str), actual
    found = differences(load(name)["values"], actual)
    assert above(found, tolerance(name)) == {}


def test_recording_again_without_a_reason_is_refused():
    with pytest.raises(SystemExit, match="--reason"):
        record.main([NAMES[0]])
