"""Show a predicted step on one HTML page that loads nothing else."""

from collections.abc import Sequence
from html import escape

from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.profile import (
    COMPUTATION,
    CONDITIONAL,
    LOOP,
    WAIT,
    Row,
    Span,
    merged,
    operation_name,
    spans,
    table,
)
from maxpipe.compile.prediction.walk import Timeline
from maxpipe.render.chart import round_values
from maxpipe.render.columns import numbers
from maxpipe.render.html import document, shipped
from maxpipe.render.html import table as html_table

MAX_LOOPS = 6
SHORTEST = 1 / 3000  # share of a timeline; shorter neighbours are joined
COLOURS = {
    Part.MATRIX_PRODUCTS.value: "#3574d4",
    Part.ATTENTION.value: "#17917c",
    Part.LOOP_FUSIONS.value: "#d98a1f",
    Part.COPIES.value: "#8b66d0",
    Part.COLLECTIVES.value: "#c8486f",
    WAIT: "#e08aa3",
    CONDITIONAL: "#7c8896",
    LOOP: "#a9b3be",
}


def page_html(prediction: Prediction, timeline: Timeline, title: str) -> str:
    """Return a page with a step's time by phase, scope, source line and operation, and timelines.

    The first timeline is the whole step, with a span for each loop; iterations of loops follow.
    """
    tables = (
        ("By part of the step", table(timeline, lambda spent: spent.place.phase)),
        ("By part of the model", table(timeline, lambda spent: spent.origin.scope)),
        ("By source line", table(timeline, lambda spent: spent.origin.source, 30)),
        ("By operation", table(timeline, operation_name, 30)),
    )
    longest = sorted(timeline.loops, key=lambda loop: -loop.iterations * loop.seconds)[:MAX_LOOPS]
    whole = list(spans(timeline, timeline.entry, opens_loops=False))
    figures = _figure(f"The whole step: {_time(timeline.seconds)}", whole, timeline.seconds)
    for loop in sorted(longest, key=timeline.loops.index):  # in the order in which they run
        name = f"One of {loop.iterations:.0f} iterations of {loop.phase}: {_time(loop.seconds)}"
        figures += _figure(name, list(spans(timeline, loop.body)), loop.seconds)
    key = "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(name)}'
        for name, colour in COLOURS.items()
    )
    summary = "\n".join(prediction.lines())
    body = f"""<h1>Predicted step: {escape(title)}</h1>
<p>Predicted from the compiler's estimates, not measured. Copies and collectives count where
computation waits for them.</p>
<pre>{escape(summary)}</pre>
<p>{key}</p>
{figures}
{"".join(_table(name, rows) for name, rows in tables)}"""
    style, script = (shipped(f"compile/prediction/profile.{kind}") for kind in ("css", "js"))
    return document(title, body, style, script)


def _table(title: str, rows: Sequence[Row]) -> str:
    total = sum(row.seconds for row in rows) or 1.0
    widest = max((row.seconds for row in rows), default=0.0) or 1.0
    cells = []
    for row in rows:
        name = f'<span title="{escape(row.name)}">{escape(row.name)}</span>'
        bar = "".join(
            f'<div style="width:{100 * seconds / widest:.3g}%;background:{COLOURS[part.value]}" '
            f'title="{part.value} {_time(seconds)}"></div>'
            for part, seconds in row.parts.items()
            if seconds
        )
        share = f"{100 * row.seconds / total:.1f} %"
        cells.append((name, _time(row.seconds), share, f'<div class="bar">{bar}</div>'))
    return f"<h2>{title}</h2>\n{html_table(('', 'time', 'share', ''), cells)}\n"


def _figure(title: str, shown: Sequence[Span], seconds: float) -> str:
    """Draw spans over `seconds`: a lane for computation, one for each kind of transfer."""
    if not seconds:
        return ""
    rectangles = merged(shown, SHORTEST * seconds)
    lanes = list(dict.fromkeys([COMPUTATION, *(span.lane for span in rectangles)]))
    boxes = "".join(_box(span, lanes.index(span.lane), seconds) for span in rectangles)
    names = "".join(f"<div>{escape(lane)}</div>" for lane in lanes)
    unit, factor = _unit(seconds)
    times = round_values(0.95 * factor * seconds, 10)  # a label beyond has no room
    axis = "".join(
        f'<span style="left:{100 * time / factor / seconds:.4g}%">{text} {unit}</span>'
        for time, text in zip(times, numbers(times, 6), strict=True)
    )
    return f"""<div><h2>{escape(title)}</h2>
<p><label>zoom <input type="range" min="0" max="6" step="0.25" value="0"></label></p></div>
<div class="lanes"><div class="names">{names}</div><div class="scroll"><div class="wide">
<svg viewBox="0 0 10000 {24 * len(lanes)}" height="{24 * len(lanes)}" preserveAspectRatio="none"
 role="img" aria-label="{escape(title)}">{boxes}</svg><div class="axis">{axis}</div>
</div></div></div>
"""


def _box(span: Span, row: int, seconds: float) -> str:
    words = [span.name, f"{span.kind}, {_time(span.end - span.start)}", span.scope, span.source]
    text = escape("\n".join(word for word in words if word))
    x, width = 1e4 * span.start / seconds, 1e4 * (span.end - span.start) / seconds
    return (
        f'<rect x="{x:.2f}" y="{24 * row + 3}" width="{max(width, 0.8):.2f}" height="18" '
        f'fill="{COLOURS[span.kind]}" fill-opacity=".85" data-t="{text}"/>'
    )


def _time(seconds: float) -> str:
    unit, factor = _unit(seconds)
    return f"{seconds * factor:.3g} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is at least 1, and how many of them a second has."""
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    return next((unit for unit in units if seconds * unit[1] >= 1), units[-1])
