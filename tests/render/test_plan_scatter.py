"""The picture of memory against time: how far its axis goes, and where its label is."""

import dataclasses
import re

import pytest
from helpers.small_plan import small_plan

from maxpipe.planning.search.seconds import Seconds
from maxpipe.render.plan_scatter import scatter_svg


@pytest.fixture(scope="module")
def plan():
    return small_plan("v5p:2x2x1")


def with_points(plan, *points):
    """Return the plan with candidates that take so many times the chosen one's seconds and bytes.

    Args:
      plan: whose chosen one is the first candidate.
      points: times, and shares of the chosen one's bytes.
    """
    chosen = plan.winner.candidate
    others = [
        dataclasses.replace(
            chosen,
            seconds=Seconds(*(times * part for part in chosen.seconds)),
            memory=share * chosen.memory,
        )
        for times, share in points
    ]
    outcome = dataclasses.replace(plan.outcome, fitting=[chosen, *others], misfits=[])
    return dataclasses.replace(plan, outcome=outcome)


def test_a_slow_tail_of_the_front_does_not_squeeze_the_picture(plan):
    for points, longest, drawn in (
        ([(2.0, 0.9), (9.0, 0.5)], "2.5", 2),
        ([(1.5, 0.9)], "1.8", 2),
        ([(1.1, 0.9)], "1.5", 2),
    ):
        svg = scatter_svg(with_points(plan, *points))
        assert re.findall(r'text-anchor="middle">([\d.]+)<', svg)[-1] == longest, (points, longest)
        (line,) = re.findall(r'polyline points="([^"]*)"', svg)
        assert len(line.split()) == svg.count('r="4"') == drawn, (points, longest)


def test_the_chosen_point_has_a_ring_and_a_label(plan):
    svg = scatter_svg(with_points(plan, (1.2, 0.9)))
    (ring,) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="8"', svg)
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4"', svg)
    assert points.index(ring) == 0  # the first is the chosen one, the fastest
    assert svg.count(">chosen<") == 1
