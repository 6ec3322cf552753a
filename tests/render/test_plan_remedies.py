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


def test_where_something_fits_there_is_nothing_to_say(plan):
    assert nothing_fits_lines(plan) == []


@pytest.mark.parametrize(
    ("count", "uncompiled", "line"),
    [
        (
            1,
            0,
            "the one that was compiled does not fit; no other mesh and schedule fits by closed "
            "forms; other options of it were not compiled",
        ),
        (
            2,
            0,
            "none of the 2 that were compiled fits; no other mesh and schedule fits by closed "
            "forms; other options of these were not compiled",
        ),
        (
            2,
            1,
            "none of the 2 that were compiled fits; 1 other was not compiled: --compile 4",
        ),
    ],
)
def test_what_was_not_compiled_is_said_of_one_and_of_many(plan, count, uncompiled, line):
    assert nothing_fits_lines(refused(plan, count, uncompiled=uncompiled)) == [line]


def test_where_all_that_fits_was_compiled_no_other_options_are_named(plan):
    outcome = dataclasses.replace(plan.outcome, fitting=plan.outcome.fitting[:1])
    (line,) = nothing_fits_lines(refused(plan, 1, outcome=outcome))
    assert line.endswith("does not fit; no other mesh and schedule fits by closed forms")


def test_remedies_in_vain_are_named_next_to_what_would_fit(plan):
    found = Remedies(["more chips: --topology v5e:2x4"], ["fewer tokens"], ["offloading"])
    _, *lines = nothing_fits_lines(refused(plan, 1, remedies=found))
    assert lines == [
        "what would fit by closed forms:",
        "  more chips: --topology v5e:2x4",
        "none of these helps by itself: fewer tokens",
        "not tried to the end, for lack of time: offloading",
    ]


@pytest.mark.parametrize(
    ("chips", "advice"),
    [
        (256, "--topology v5e --smallest"),
        (257, "2 slices of v5e:16x16 or more"),
        (600, "3 slices of v5e:16x16 or more"),
    ],
)
def test_as_many_chips_as_hold_the_state_are_one_slice_or_several(plan, chips, advice):
    capacity = plan.facts.least_state_bytes() / ((1 - plan.request.margin) * (chips - 0.5))
    machine = plan.request.machine._replace(capacity=capacity)
    request = dataclasses.replace(plan.request, machine=machine)
    line = nothing_fits_lines(dataclasses.replace(plan, request=request, rows=()))[-1]
    assert line.endswith(f", at least {chips} v5e: {advice}")
    if "--smallest" in advice:  # which was searched, if more chips were in vain
        vain = dataclasses.replace(
            plan, request=request, rows=(), remedies=Remedies([], ["more chips"])
        )
        *_, line, last = nothing_fits_lines(vain)
        assert line.endswith(f"at least {chips} v5e")
        assert last == "none of these helps by itself: more chips"
