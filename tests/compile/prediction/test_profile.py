"""Where a predicted step goes: tables, spans of a tick, the page and the trace."""

import json
import re
from itertools import pairwise

import pytest
from helpers.hand_timed import BASIS, NANOSECOND, PROGRAM, TICK, walked

from maxpipe.compile.prediction.predict import parts_of
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.profile import COMPUTATION, WAIT, spans, table, trace_json
from maxpipe.compile.prediction.profile_page import page_html


def nanoseconds(span):
    return span.lane, span.kind, round(span.start / NANOSECOND), round(span.end / NANOSECOND)


def test_spans_of_a_tick_have_a_lane_for_computation_and_for_each_transfer():
    timeline = walked()
    assert {*map(nanoseconds, spans(timeline, "body"))} == {
        ("collective-permute stage", "collectives", 0, 100),
        (COMPUTATION, "matrix products", 0, 60),
        (COMPUTATION, WAIT, 60, 100),
        ("all-gather fsdp", "collectives", 100, 200),
        (COMPUTATION, WAIT, 100, 200),
        (COMPUTATION, "loop fusions", 200, 250),
    }


def test_spans_of_the_step_repeat_the_tick_and_fill_the_computations_lane():
    timeline = walked()
    lane = [span for span in spans(timeline, "main") if span.lane == COMPUTATION]
    assert sum(span.end - span.start for span in lane) == pytest.approx(timeline.seconds)
    starts = [span.start for span in lane if span.kind == "matrix products"]
    assert starts == pytest.approx([n * (TICK + 50) * NANOSECOND for n in range(3)])


def test_spans_show_a_conditional_that_is_taken_at_times_by_its_expected_length():
    timeline = walked(times_taken=lambda origin, reached: 1 if origin.scope == "head" else reached)
    (head,) = [span for span in spans(timeline, "body") if span.kind == "conditional"]
    assert head.name == "head, in 33 % of the iterations"
    assert head.end - head.start == pytest.approx((50 + 2 * 2) / 3 * NANOSECOND)


def test_table_adds_up_to_the_step_and_keeps_the_largest_rows():
    timeline = walked()
    rows = table(timeline, lambda spent: spent.origin.scope)
    assert sum(row.seconds for row in rows) == pytest.approx(timeline.seconds)
    seconds = {row.name: row.seconds / NANOSECOND for row in rows}
    assert seconds["mlp"] == pytest.approx(3 * 60)
    assert seconds["optimizer"] == pytest.approx(90 + 300)
    short = table(timeline, lambda spent: spent.name, limit=1)
    assert [row.name for row in short] == ["fetch", "6 others"]
    assert sum(row.seconds for row in short) == pytest.approx(timeline.seconds)


def test_page_loads_nothing_and_names_phase_line_scope_and_lanes():
    timeline = walked()
    prediction = Prediction(timeline.seconds, BASIS, parts_of(timeline))
    html = page_html(prediction, timeline, "a <run>")
    assert "Predicted step: a &lt;run&gt;" in html
    for text in ("phase_1", "maxpipe/model/layers.py:52", "optimizer", "all-gather fsdp"):
        assert text in html
    assert "One of 3 iterations of phase_1" in html
    assert html.count("<svg") == 2
    zero, first, *_ = map(float, re.findall(r'%">([\d.]+) \S*s</span>', html))
    assert zero == 0
    assert first == float(f"{first:.0e}")  # round: one digit
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", html)


def test_trace_has_a_thread_for_each_lane_and_the_whole_step():
    document = json.loads(trace_json(walked()))
    events = document["traceEvents"]
    lanes = {COMPUTATION, "copies", "collective-permute stage", "all-gather fsdp"}
    assert lanes == {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    run = [e for e in events if e["ph"] == "X"]
    end = max(e["ts"] + e["dur"] for e in run)
    assert end == pytest.approx(1e6 * walked().seconds)
    (mlp, *others) = [e for e in run if e["name"] == "mlp"]
    assert len(others) == 2
    assert mlp["args"] == {"source": "maxpipe/model/layers.py:52", "scope": "mlp"}


def runs_by_thread(timeline):
    events = json.loads(trace_json(timeline))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    runs = {name: [] for name in names.values()}
    for event in (e for e in events if e["ph"] == "X"):
        start, length = int(1000 * event["ts"]), int(1000 * event["dur"])
        runs[names[event["tid"]]].append((start, start + length, event["name"]))
    return {name: sorted(spans) for name, spans in runs.items()}


def test_trace_gives_spans_that_overlap_threads_of_their_own():
    """A second permute, to another neighbour, starts 30 ns later."""
    first, done = (
        next(line for line in PROGRAM.splitlines() if f"%{name} =" in line)
        for name in ("send", "got")
    )
    second = first.replace("%send", "%send.2").replace("{{0,2},{1,3}}", "{{2,0},{3,1}}")
    cycles = '{"window_config":{"estimated_cycles":"30"}}'
    between = f"  %pre = f32[25] negate(%g), backend_config={cycles}"
    later = done.replace("%got", "%got.2").replace("%send", "%send.2")
    text = PROGRAM.replace(first, f"{first}\n{between}\n{second}")
    timeline = walked(text.replace(done, f"{done}\n{later}"))
    threads = runs_by_thread(timeline)
    starts = {
        name: next(start for start, _, operation in runs if operation.startswith("send"))
        for name, runs in threads.items()
        if name.startswith("collective-permute")
    }
    assert starts == {"collective-permute stage": 0, "collective-permute stage 2": 30}
    for runs in threads.values():
        assert all(end <= start for (_, end, _), (start, _, _) in pairwise(runs))
    assert sum(map(len, threads.values())) == len(list(spans(timeline, "main")))
