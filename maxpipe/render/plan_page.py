"""Draw a plan: where the best rows' time goes next to their memory, and memory against time."""

import shlex
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from maxpipe.devices.chips import GIB
from maxpipe.planning.search.candidate import Candidate
from maxpipe.planning.search.plan import SHOWN, Plan, Row
from maxpipe.planning.search.written import versions
from maxpipe.render.html import document
from maxpipe.render.plan_table import basis_lines, summary_lines

PARTS = (("computation", "--comp"), ("communication", "--comm"), ("bubble", "--idle"))
STYLE = """
:root{--comp:#3f7fd1;--comm:#e0902c;--idle:#b9c0cb;--mem:#6d55c9;--bad:#d0453c}
@media(prefers-color-scheme:dark){:root{--idle:#5a6472;--mem:#9c8cf0}}
h2{font-size:15px;margin:26px 0 8px}
svg{display:block;max-width:1060px;width:100%;height:auto}
svg text{font-size:12px;fill:var(--ink)}
svg .quiet{fill:var(--muted)}
svg .axis{stroke:var(--line)}
.legend span{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 6px 0 16px}
.plot{max-width:760px}
pre{font-size:12px;color:var(--muted);white-space:pre-wrap}
"""
SCRIPT = """
for (const mark of document.querySelectorAll("[data-text]")) {
  mark.addEventListener("pointermove", (event) => show(event, mark.dataset.text));
  mark.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
"""
_ROW, _LABEL, _TIME, _MEMORY, _GAP = 34, 300, 480, 170, 56


class Point(NamedTuple):
    """A candidate in the picture of memory against time."""

    seconds: float
    memory: float
    text: str


def page_html(plan: Plan, words: Sequence[str]) -> str:
    """Return the page.

    Args:
      plan: what is drawn.
      words: the command line after the command.
    """
    rows = [*plan.rows[:SHOWN]] or [*plan.misfits]
    machine = plan.request.machine
    title = f"Plan for {machine.topology}"
    legend = "".join(
        f'<span style="background:var({colour})"></span>{name}' for name, colour in PARTS
    )
    command = shlex.join(["python", "-m", "maxpipe.plan", *words])
    summary = "\n".join([*summary_lines(plan), *basis_lines(plan)])
    body = f"""<h1>{escape(title)}</h1>
<p>{escape(command)}; {escape(versions())}</p>
<h2>The best of each mesh and schedule: time of a step, and memory of a device</h2>
<p class="legend">{legend}<span style="background:var(--mem)"></span>memory</p>
{bars_svg(plan, rows)}
<h2>Memory against time; the line joins those that nothing beats in both</h2>
{scatter_svg(plan)}
<pre>{escape(summary)}</pre>"""
    return document(title, body, STYLE, SCRIPT)


def bars_svg(plan: Plan, rows: Sequence[Row]) -> str:
    """Return stacked bars of the rows, each with its memory next to it."""
    machine, limit = plan.request.machine, plan.request.limit
    longest = max((row.per_sequence for row in rows), default=1.0)
    most = max([row.memory for row in rows] + [machine.capacity or 0.0, 1.0])
    left = _LABEL + _TIME + _GAP
    parts = []
    for number, row in enumerate(rows):
        y, x = 8 + number * _ROW, float(_LABEL)
        parts.append(_label(row, y, is_chosen=number == 0 and bool(plan.rows)))
        # Parts are closed forms; where the compiler knows the whole, they are drawn to its length.
        scale = _TIME * row.per_sequence / longest / float(row.candidate.seconds.step)
        for (name, colour), value in zip(PARTS, row.candidate.seconds, strict=True):
            width = float(value) * scale
            share = float(value) / float(row.candidate.seconds.step)
            parts.append(_bar(x, y, width, colour, f"{name}: {share:.1%} of the step"))
            x += width
        relative = f"{row.per_sequence / longest:.3g}"
        seconds = f"{row.seconds:.3g} s" if machine.is_timed else relative
        parts.append(f'<text class="quiet" x="{x + 5:.1f}" y="{y + 14}">{seconds}</text>')
        text = f"{row.memory / GIB:.3g} GiB"
        colour = "--bad" if limit is not None and row.memory > (machine.capacity or 0) else "--mem"
        parts.append(_bar(left, y, _MEMORY * row.memory / most, colour, text))
        at = left + _MEMORY * row.memory / most + 5
        parts.append(f'<text class="quiet" x="{at:.1f}" y="{y + 14}">{text}</text>')
    height = 8 + len(rows) * _ROW + 22
    for line, name in ((limit, "usable"), (machine.capacity, "memory")):
        if line:
            parts.append(_limit_line(left + _MEMORY * line / most, height, name))
    return f'<svg viewBox="0 0 {left + _MEMORY + 80} {height}">{"".join(parts)}</svg>'


def _label(row: Row, y: float, *, is_chosen: bool) -> str:
    candidate = row.candidate
    weight = ' font-weight="700"' if is_chosen else ""
    sizes = f"M={candidate.microbatches}" + f" V={candidate.repeats}" * candidate.has_stages
    return (
        f'<text x="0" y="{y + 9}"{weight}>{escape(candidate.mesh_text())}</text>'
        f'<text class="quiet" x="0" y="{y + 22}">{escape(candidate.schedule_text())} {sizes} '
        f"{escape(candidate.policy)}</text>"
    )


def _bar(x: float, y: float, width: float, colour: str, text: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="20" '
        f'fill="var({colour})" data-text="{escape(text)}"/>'
    )


def _limit_line(x: float, height: float, name: str) -> str:
    dashes = ' stroke-dasharray="4 3"' if name == "usable" else ""
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 18}" stroke="var(--bad)"{dashes}/>'
        f'<text class="quiet" x="{x:.1f}" y="{height - (4 if dashes else 16)}" '
        f'text-anchor="{"end" if dashes else "start"}">{name}</text>'
    )


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both time and memory, the fastest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.memory)):
        if not best or point.memory < best[-1].memory:
            best.append(point)
    return best


def scatter_svg(plan: Plan) -> str:
    """Return the picture of memory against time of all candidates that were kept."""
    found = plan.found
    points = [_point(c) for c in [*found.fitting, *found.misfits]]
    if not points:
        return ""
    edge = front(points)
    # What is far slower than the slowest of the front would squeeze the rest together.
    latest = max(1.3 * edge[-1].seconds, 1.5 * edge[0].seconds)
    points = [p for p in points if p.seconds <= latest]
    capacity = plan.request.machine.capacity
    most = max(max(p.memory for p in edge), capacity or 0.0) * 1.25
    if capacity:
        most = min(most, 3 * capacity)
    points = [p for p in points if p.memory <= most]
    first = min(p.seconds for p in points)
    width, height, margin = 700.0, 320.0, 56.0

    def place(point: Point) -> tuple[float, float]:
        across = (point.seconds - first) / max(latest - first, 1e-12)
        return margin + across * (width - margin), height - point.memory / most * height + 10

    marks = []
    for point in points:
        x, y = place(point)
        colour = "--comp" if point in edge else "--idle"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var({colour})" '
            f'data-text="{escape(point.text)}"/>'
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(p)) for p in edge if p in points)
    marks.insert(0, f'<polyline points="{line}" fill="none" stroke="var(--comp)"/>')
    if limit := plan.request.limit:
        y = height - limit / most * height + 10
        marks.append(
            f'<line x1="{margin}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--bad)" '
            f'stroke-dasharray="4 3"/><text class="quiet" x="{margin + 4}" y="{y - 4:.1f}">usable '
            f"{limit / GIB:.3g} GiB</text>"
        )
    axes = _axes((width, height, margin), most / GIB, latest / first)
    box = f"0 0 {width + 20} {height + 50}"
    return f'<svg class="plot" viewBox="{box}">{axes}{"".join(marks)}</svg>'


def _axes(frame: tuple[float, float, float], most: float, longest: float) -> str:
    width, height, margin = frame
    bottom = height + 10
    ticks = "".join(
        f'<text class="quiet" x="{margin - 8}" y="{bottom - i / 4 * height + 4:.1f}" '
        f'text-anchor="end">{most * i / 4:.3g}</text>'
        for i in range(5)
    )
    ticks += "".join(
        f'<text class="quiet" x="{margin + i / 4 * (width - margin):.1f}" y="{bottom + 16}" '
        f'text-anchor="middle">{1 + (longest - 1) * i / 4:.2f}</text>'
        for i in range(5)
    )
    return (
        f'<line class="axis" x1="{margin}" x2="{width}" y1="{bottom}" y2="{bottom}"/>'
        f'<line class="axis" x1="{margin}" x2="{margin}" y1="10" y2="{bottom}"/>{ticks}'
        f'<text class="quiet" x="{width}" y="{bottom + 34}" text-anchor="end">time of a sequence, '
        "1 = the fastest, by closed forms</text>"
        f'<text class="quiet" x="0" y="{bottom + 34}">GiB a device</text>'
    )


def _point(candidate: Candidate) -> Point:
    seconds = float(candidate.seconds.step)
    text = (
        f"{candidate.mesh_text()}\n{candidate.schedule_text()} M={candidate.microbatches} "
        f"V={candidate.repeats} {candidate.policy} {candidate.gather}\n"
        f"{candidate.memory / GIB:.3g} GiB, {seconds:.3g} s"
    )
    return Point(seconds / candidate.batch, candidate.memory, text)
