"""What figures of a plan rest on, what they leave out, and why nothing fits, in words."""

import dataclasses

import pytest
from helpers.small_plan import small_plan

from maxpipe.plan.search.best import Remedies
from maxpipe.plan.search.candidate import Proof
from maxpipe.render.plan_notes import basis_lines, nothing_fits_lines


def test_a_network_without_a_known_bandwidth_is_a_line_of_plans_over_several_slices():
    for topology, is_unknown in (("v4:2x2x1", True), ("v5p:2x2x1", False)):
        plan = small_plan(topology)
        several = dataclasses.replace(plan, request=plan.request.on(topology, 2))
        words = "the network of v4 is unknown"
        assert any(words in line for line in basis_lines(several)) is is_unknown
        assert not any(words in line for line in basis_lines(plan))


def test_what_closed_forms_do_not_price_is_a_line_each():
    scores = "model.attention=dot_product"
    for values, words in (
        ({}, [f"{scores}: splash cannot be used, model.head_dim=64"]),
        ({"model.attention": "dot_product"}, [scores]),
        ({"model.num_query_heads": 2, "model.num_kv_heads": 2}, []),
        ({"model.quantisation": "fp8", "optimizer.name": "muon"}, [scores, "Muon's update", "fp8"]),
    ):
        lines = basis_lines(small_plan("v5p:2x2x1", **values))
        found = [line for line in lines if "scores" in line or line.startswith("closed forms ")]
        found = [line for line in found if "alone" not in line]
        assert len(found) == len(words), values
        assert all(word in line for word, line in zip(words, found, strict=True)), values


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
