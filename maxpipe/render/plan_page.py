"""Draw a plan: where the best rows' time goes next to their memory, and memory against time."""

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from maxpipe.config.shipped import locate_config
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import Plan
from maxpipe.plan.search.candidate import Row
from maxpipe.plan.search.written import versions
from maxpipe.render.html import document
from maxpipe.render.plan_notes import basis_lines
from maxpipe.render.plan_remedies import nothing_fits_lines
from maxpipe.render.plan_scatter import scatter_svg
from maxpipe.render.plan_table import (
    LEFT,
    batch_text,
    fastest,
    slice_lines,
    summary_lines,
    table_cells,
)

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
.plot{max-width:855px}
.wide{overflow-x:auto;font-size:12px}
.wide td,.wide th{padding:5px 6px}
.wide .text{text-align:left}
pre{font-size:12px;color:var(--muted);white-space:pre-wrap}
"""
SCRIPT = """
for (const mark of document.querySelectorAll("[data-text]")) {
  mark.addEventListener("pointermove", (event) => show(event, mark.dataset.text));
  mark.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
"""
_ROW, _LABEL, _TIME, _MEMORY, _GAP = 34, 300, 480, 170, 56
_LONGEST = 44  # characters of a label that fit; longer labels are squeezed into the space


def page_html(plan: Plan, words: Sequence[str]) -> str:
    """Return the page of a plan.

    Args:
      plan: the plan to draw.
      words: the command line after the command.
    """
    own = [plan.own] if isinstance(plan.own, Row) else []
    rows = [*(plan.shown or plan.misfits), *own]
    machine = plan.request.machine
    title = f"Plan for {Path(locate_config(plan.request.path)).stem} on {machine.topology}"
    command = shlex.join(["python", "-m", "maxpipe.plan", *words])
    lines = [*summary_lines(plan), *basis_lines(plan)]
    if isinstance(plan.own, str) and plan.own:
        lines.append(plan.own)
    if plan.slices:
        lines += ["", "by closed forms:", *slice_lines(plan.slices)]
    summary = "\n".join(lines)
    body = f"""<h1>{escape(title)}</h1>
<p>{escape(command)}; {escape(versions())}</p>
{_misfit(plan)}{_bars(plan, rows)}{_scatter(plan)}{_table(plan)}
<pre>{escape(summary)}</pre>"""
    return document(title, body, STYLE, SCRIPT)


def _misfit(plan: Plan) -> str:
    """Return why nothing fits, and what would; "" where something fits."""
    lines = "\n".join(nothing_fits_lines(plan))
    return (
        f"<h2>Why nothing fits, and what would</h2>\n<pre>{escape(lines)}</pre>\n" if lines else ""
    )


def _bars(plan: Plan, rows: Sequence[Row]) -> str:
    """Return the stacked bars under a heading and a legend; "" without rows."""
    if not rows:
        return ""
    legend = "".join(
        f'<span style="background:var({colour})"></span>{name}'
        for name, colour in (*PARTS, ("memory", "--mem"))
    )
    title = "The best of each mesh and schedule: time of a step, and memory of a device"
    return f'<h2>{title}</h2>\n<p class="legend">{legend}</p>\n{bars_svg(plan, rows)}\n'


def _scatter(plan: Plan) -> str:
    """Return the picture of memory against time under a heading; "" without points."""
    title = "Memory against time; the line joins those that nothing beats in both"
    picture = scatter_svg(plan)
    return f"<h2>{title}</h2>\n{picture}\n" if picture else ""


def _table(plan: Plan) -> str:
    """Return the table of `plan_table` in a box of its own, which scrolls; "" without rows."""
    header, *rows = table_cells(plan)
    if not rows:
        return ""

    def line(tag: str, cells: Sequence[str]) -> str:
        style = (' class="text"' if number in LEFT else "" for number in range(len(cells)))
        marked = zip(style, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{of}>{escape(cell)}</{tag}>' for of, cell in marked)}</tr>"

    body = line("th", header) + "".join(line("td", row) for row in rows)
    table = f'<div class="wide"><table>{body}</table></div>'
    return f"<h2>What each takes, and why it is not chosen</h2>\n{table}"


def bars_svg(plan: Plan, rows: Sequence[Row]) -> str:
    """Return stacked bars of the rows, each with its memory next to it."""
    machine, limit = plan.request.machine, plan.request.limit
    longest = max((row.per_sequence for row in rows), default=1.0)
    most = max([row.memory for row in rows] + [machine.capacity or 0.0, 1.0])
    left = _LABEL + _TIME + _GAP
    parts = []
    for number, row in enumerate(rows):
        y, x = 8 + number * _ROW, float(_LABEL)
        parts.append(_label(plan, row, y, is_chosen=number == 0 and bool(plan.rows)))
        # A bar is as long as the row's seconds, of which each part has its share.
        scale = _TIME * row.per_sequence / longest / float(row.parts.step)
        for (name, colour), value in zip(PARTS, row.parts, strict=True):
            width = float(value) * scale
            share = float(value) / float(row.parts.step)
            parts.append(_bar(x, y, width, colour, f"{name}: {share:.1%} of the step"))
            x += width
        relative = row.per_sequence / fastest(plan)
        seconds = f"{_three(row.seconds)} s" if machine.is_timed else _three(relative)
        parts.append(f'<text class="quiet" x="{x + 5:.1f}" y="{y + 14}">{seconds}</text>')
        text = f"{_three(row.memory / GIB)} GiB"
        colour = "--bad" if limit is not None and row.memory > (machine.capacity or 0) else "--mem"
        parts.append(_bar(left, y, _MEMORY * row.memory / most, colour, text))
        # In a column of its own, clear of the lines of the limits.
        parts.append(f'<text class="quiet" x="{left + _MEMORY + 8}" y="{y + 14}">{text}</text>')
    height = 8 + len(rows) * _ROW + 22
    for line, name in ((limit, "usable"), (machine.capacity, "memory")):
        if line:
            parts.append(_limit_line(left + _MEMORY * line / most, height, name))
    return f'<svg viewBox="0 0 {left + _MEMORY + 80} {height}">{"".join(parts)}</svg>'


def _three(value: float) -> str:
    """Return three significant digits, zeros included."""
    return f"{value:#.3g}".rstrip(".")


def _label(plan: Plan, row: Row, y: float, *, is_chosen: bool) -> str:
    candidate = row.candidate
    name = f"{row.name}: " if row.name else ""
    mesh = f"{name}{candidate.mesh_text()}{batch_text(plan, row)}"
    style = ' font-weight="700"' if is_chosen else ""
    if len(mesh) > _LONGEST:
        style += f' textLength="{_LABEL - 8}" lengthAdjust="spacingAndGlyphs"'
    sizes = f"M={candidate.microbatches}" + f" V={candidate.repeats}" * candidate.has_stages
    return (
        f'<text x="0" y="{y + 9}"{style}>{escape(mesh)}</text>'
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
