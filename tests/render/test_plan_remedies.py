"""Why nothing fits, in words that hold for one and for many, and advice that is no circle."""

import dataclasses

import pytest
from helpers.small_plan import small_plan

from maxpipe.planning.search.plan import Remedies
from maxpipe.planning.search.rows import Proof
from maxpipe.render.plan_remedies import nothing_fits_lines

REFUSAL = Proof(1e12, None, False, "", 1.0)


@pytest.fixture(scope="module")
def plan():
    return small_plan("v5e:2x2")


def refused(plan, count, **changes):
    """Return the plan after so many of its rows were compiled, and none fits."""
    misfits = [dataclasses.replace(row, proof=REFUSAL) for row in plan.rows[:count]]
    return dataclasses.replace(plan, rows=(), misfits=misfits, **changes)


def test_what_was_not_compiled_is_said_of_one_and_of_many(plan):
    for count, uncompiled, end in (
        (
            1,
            0,
            "the one that was compiled does not fit; no other mesh and schedule fits by closed ",
        ),
        (2, 1, "none of the 2 that were compiled fits; 1 other was not compiled: --compile 4"),
    ):
        (line,) = nothing_fits_lines(refused(plan, count, uncompiled=uncompiled))
        assert line.startswith(end)


def test_remedies_in_vain_are_named_next_to_what_would_fit(plan):
    found = Remedies(["more chips: --topology v5e:2x4"], ["fewer tokens"], ["offloading"])
    _, *lines = nothing_fits_lines(refused(plan, 1, remedies=found))
    assert lines == [
        "what would fit by closed forms:",
        "  more chips: --topology v5e:2x4",
        "none of these helps by itself: fewer tokens",
        "not tried to the end, for lack of time: offloading",
    ]
