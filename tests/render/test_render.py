import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.terminal import wants_colour
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.plan.simulate import Costs, simulate
from maxpipe.render.chart import chart_svg
from maxpipe.render.columns import columns
from maxpipe.render.schedule_text import (
    HEADER,
    comparison_rows,
    comparison_text,
    page_html,
    render_terminal,
)

SVG = "{http://www.w3.org/2000/svg}"


def run(name, *sizes, costs=None, **options):
    return simulate(load_schedule(name, *sizes, **options), costs)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_for_terminals_that_want_it():
    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert not wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})


def test_plain_text_shows_every_unit_once_and_what_it_costs():
    text = render_terminal(run("lockstep_1f1b", 4, 8, 2), colour=False, width=200)
    units = re.findall(r"\b\d+[FB]\d+\b", text)
    assert len(units) == len(set(units)) == 2 * 8 * 8
    assert "\x1b" not in text
    assert "bubble          9 a stage, 15.8% of all stages' time" in text
    assert "peak in flight  11 chunks (by stage: 11 9 7 5)" in text
    assert "ticks           0-6 F, 7-18 F+B, 19-25 B" in text
    assert "stash" not in text
    text = render_terminal(run("lockstep_zb", 3, 6, 2), colour=False, width=200)
    assert "peak stash      3 chunks (by stage: 1 2 3) between I and W" in text
    assert "ticks           0-4 F, 5-6 F+I, 7-13 F+I+W, 14-18 I+W" in text


def test_wide_tables_are_folded_to_the_terminal():
    for colour in (False, True):
        text = render_terminal(run("1f1b", 2, 12), colour=colour, width=60)
        assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()[3:]) <= 60
        assert sum(line.startswith("tick  ") for line in text.splitlines()) > 1, colour


def drawn(result, **options):
    return [*ElementTree.fromstring(chart_svg(result, **options)).iter(f"{SVG}rect")]


def boxes(result):
    titles = {box.findtext(f"{SVG}title"): box.attrib for box in drawn(result)}
    titles.pop(None)
    return titles


def test_a_chart_holds_a_box_for_every_unit_and_a_head_on_every_lockstep_stage():
    for name in SCHEDULES:
        result = run(name, 3, 5, SCHEDULES[name].repeats_for(1))
        units = sum(len(result.table.units(kind)[0]) for kind in result.table.kinds)
        titles = boxes(result)
        assert len(titles) == units, name
        start = "1F4: forward of microbatch 4, chunk 0 of stage 1, "
        assert any(title.startswith(start) for title in titles)
    heads = chart_svg(run("lockstep_1f1b", 3, 5, costs=Costs(head=3)))
    assert heads.count("<title>head of microbatch 2</title>") == 3


def test_times_in_a_chart_are_told_apart_in_every_unit_of_time():
    seconds = run("1f1b", 2, 3, costs=Costs(0.00123, 0.00246))
    assert "chunk 0 of stage 0, 0.00123 to 0.00246</title>" in chart_svg(seconds)
    shown = drawn(seconds, standalone=False)
    at = {box.get("data-unit"): box.get("data-at") for box in shown}
    assert at["1B2"] == "1 0.00984 0.0123"
    (curves,) = filter(None, (box.get("data-curves") for box in shown))
    assert json.loads(curves)[1] == [[0.00123, 0.00492, 0.00861, 0.0123], [1, 1, 1, 0]]


def test_boxes_are_where_their_times_are_and_no_two_on_a_stage_overlap():
    result = run("zb_h2", 3, 7, costs=Costs(1, 2, 1.5, 0.5, communication=0.2, head=0.3))
    rows = {}
    for box in boxes(result).values():
        x, width = float(box["x"]), float(box["width"])
        rows.setdefault(box["y"], []).append((x, x + width))
    assert len(rows) == 3
    for places in rows.values():
        places.sort()
        assert all(left[1] <= right[0] + 0.02 for left, right in pairwise(places))


def test_overlapping_slots_get_a_lane_each():
    slack = {"costs": Costs(collectives=0.25), "slack": 1}
    for name in ("lockstep_1f1b", "lockstep_zb"):
        plain, half = (
            {float(box["height"]) for box in boxes(run(name, 2, 4, **options)).values()}
            for options in ({}, slack)
        )
        assert (plain, half) == ({26}, {13})


def test_comparison_is_sorted_by_time_and_counts_whole_stages():
    halves = run("lockstep_1f1b", 4, 8, 2, costs=Costs(0.5, 1))
    runs = [run("gpipe", 4, 8), halves, run("1f1b", 4, 8)]
    rows = comparison_rows(runs)
    assert [row[0] for row in rows] == ["lockstep_1f1b", "gpipe", "1f1b"]
    assert [row[HEADER.index("in flight")] for row in rows] == ["5.5", "8.0", "4.0"]
    assert [row[-1] for row in rows] == ["scheduled", "circular, mpmd", "mpmd"]
    # A file runs on the engines that follow its ticks, even if it is called like a schedule.
    for name, engines in (("lockstep_zb", "scheduled, mpmd"), ("zb_v", "mpmd"), ("1f1b", "mpmd")):
        table = replace(run(name, 2, 4).table, name="gpipe", source="gpipe.csv")
        assert comparison_rows([simulate(table)])[0][-1] == engines
    lines = comparison_text(runs).splitlines()
    assert lines[1].split() == ["lockstep_1f1b", "2", "28.5", "15.8%", "5.5", "112", "scheduled"]
    # As wide as their widest cell; those to the left end without spaces.
    assert columns([["a", "b", "why"], ["1", "22", ""]], left=(0, 2)) == ["a   b  why", "1  22"]


def test_the_page_needs_nothing_but_itself():
    page = page_html([run("gpipe", 2, 3), run("1f1b", 2, 3)], "a < b")
    assert not re.search(
        r"""(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", page
    )
    assert "a &lt; b" in page
    assert page.count("<svg") == 2
