"""The table of a plan, as lines and on a page, and what is said of its figures."""

import dataclasses
import re

import pytest
from helpers.small_plan import small_plan

from maxpipe.plan.search.best import Remedies
from maxpipe.plan.search.candidate import Proof
from maxpipe.render.plan_page import page_html
from maxpipe.render.plan_text import (
    basis_lines,
    nothing_fits_lines,
    table_cells,
    table_lines,
    table_rows,
)


@pytest.fixture(scope="module")
def plan():
    return small_plan("v5p:2x2x1")


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


def refused(plan, count, **changes):
    misfits = [dataclasses.replace(row, proof=REFUSAL) for row in plan.rows[:count]]
    return dataclasses.replace(plan, rows=(), misfits=misfits, **changes)


def test_why_nothing_fits_is_said_with_what_was_not_compiled_and_what_would_help(plan):
    assert nothing_fits_lines(plan) == []
    (line,) = nothing_fits_lines(refused(plan, 1))
    assert line == "none of the 1 compiled fits"
    found = Remedies(["more chips: --topology v5e:2x4"], ["fewer tokens"], ["offloading"])
    assert nothing_fits_lines(refused(plan, 2, uncompiled=1, remedies=found)) == [
        "none of the 2 compiled fits; 1 not compiled: --compile 4",
        "what would fit by closed forms:",
        "  more chips: --topology v5e:2x4",
        "none of these helps by itself: fewer tokens",
        "not tried to the end, for lack of time: offloading",
    ]
