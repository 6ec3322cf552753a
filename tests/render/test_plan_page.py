"""The table of a plan, as lines and on a page."""

import dataclasses
import re

import pytest
from helpers.small_plan import small_plan

from maxpipe.render.plan_page import page_html
from maxpipe.render.plan_table import table_cells, table_lines, table_rows


@pytest.fixture(scope="module")
def plan():
    return small_plan("v5p:2x2x1")


def test_times_without_seconds_are_multiples_of_the_fastest_row(plan):
    plan = small_plan("cpu:4")
    own = dataclasses.replace(plan.rows[0], name="your configuration")
    header, *rows = table_cells(dataclasses.replace(plan, own=own))
    assert [rows[n][header.index("x fastest")] for n in (0, -1)] == ["1.000", "1.000"]


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
    assert page.count("<tr") == len(rows)
    assert all(f"{row[-1]}</t" in page for row in rows)
    best, *others = (row.per_sequence for row in table_rows(plan))
    bars = re.findall(r'<div class="bar">(.*?)</div></div>', page)
    widths = [sum(map(float, re.findall(r"width:([^%]*)%", bar))) for bar in bars[1::2]]
    assert widths[0] / widths[1] == pytest.approx(best / others[0], rel=0.02)
    assert 'title="computation: ' in page
