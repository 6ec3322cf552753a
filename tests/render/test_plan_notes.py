"""What figures of a plan rest on, in words."""

import dataclasses

import pytest
from helpers.small_plan import small_plan

from maxpipe.render.plan_notes import basis_lines


@pytest.mark.parametrize(("topology", "is_unknown"), [("v4:2x2x1", True), ("v5p:2x2x1", False)])
def test_a_network_without_a_known_bandwidth_is_a_line_of_plans_over_several_slices(
    topology, is_unknown
):
    plan = small_plan(topology)
    several = dataclasses.replace(plan, request=plan.request.on(topology, 2))
    words = "the network of v4 is unknown"
    assert any(words in line for line in basis_lines(several)) is is_unknown
    assert not any(words in line for line in basis_lines(plan))
