"""The page of a plan, in parts that the command's own tests do not see."""

import dataclasses
import re

import pytest
from helpers.small_plan import small_plan

from maxpipe.render.plan_page import bars_svg, page_html
from maxpipe.render.plan_table import table_cells, table_lines


@pytest.fixture(scope="module")
def plan():
    return small_plan("v5p:2x2x1")


def test_bars_without_seconds_are_multiples_of_the_same_row_as_in_the_table():
    plan = small_plan("cpu:4")
    own = dataclasses.replace(plan.rows[0], name="your configuration", scale=0.75)
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
