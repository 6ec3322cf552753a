"""The page of a plan and its picture of memory against time."""

import dataclasses
import re

import pytest
from helpers.small_plan import scaled, small_plan

from maxpipe.plan.search.seconds import Seconds
from maxpipe.render.plan_page import bars_svg, page_html
from maxpipe.render.plan_scatter import scatter_svg
from maxpipe.render.plan_table import table_cells, table_lines


@pytest.fixture(scope="module")
def plan():
    return small_plan("v5p:2x2x1")


def test_bars_without_seconds_are_multiples_of_the_same_row_as_in_the_table():
    plan = small_plan("cpu:4")
    own = dataclasses.replace(scaled(plan.rows[0], 0.75), name="your configuration")
    plan = dataclasses.replace(plan, own=own)
    header, *rows = table_cells(plan)
    in_table = [float(row[header.index("x fastest")]) for row in rows]
    assert (in_table[0], in_table[-1]) == (1, 0.75)
    texts = re.findall(r"<text[^>]*>([\d.e+]+)</text>", bars_svg(plan, [*plan.shown, own]))
    assert [float(text) for text in texts] == pytest.approx(in_table, rel=0.005)


def test_a_narrow_table_has_two_lines_a_row_and_the_reason_next_to_the_mesh(plan):
    wide, narrow = table_lines(plan), table_lines(plan, 80)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert len(narrow) == 2 * len(wide)
    header, row = table_cells(plan)[:2]
    for name in ("mesh", "seconds", "MFU", "why not chosen"):
        assert row[header.index(name)] in narrow[2]
    assert table_lines(plan, 200) == wide


def test_page_names_the_configuration_and_has_the_table_with_every_reason(plan):
    request = dataclasses.replace(plan.request, path="qwen3-0.6b")
    page = page_html(dataclasses.replace(plan, request=request), ["qwen3-0.6b"])
    assert "<title>Plan for qwen3-0.6b on v5p:2x2x1</title>" in page
    rows = table_cells(plan)
    assert len(rows) > 2
    assert page.count("<tr>") == len(rows)
    for row in rows:
        assert f"{row[-1]}</t" in page


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
