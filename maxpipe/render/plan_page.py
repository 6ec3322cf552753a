"""Show a plan on one HTML page: its table, with bars of time and memory, and what is said of it."""

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from maxpipe.config.shipped import locate_config
from maxpipe.plan.search.best import Plan
from maxpipe.plan.search.written import versions
from maxpipe.render.html import document, shipped, table
from maxpipe.render.plan_text import (
    HEADER,
    basis_lines,
    nothing_fits_lines,
    slice_lines,
    summary_lines,
    table_cells,
    table_rows,
)

PARTS = {"computation": "--comp", "communication": "--comm", "bubble": "--idle"}


def page_html(plan: Plan, words: Sequence[str]) -> str:
    """Return the page of a plan, made by these words after the command."""
    title = (
        f"Plan for {Path(locate_config(plan.request.path)).stem} on {plan.request.machine.topology}"
    )
    command = shlex.join(["python", "-m", "maxpipe.plan", *words])
    lines = [*summary_lines(plan), *basis_lines(plan)]
    if isinstance(plan.own, str) and plan.own:
        lines.append(plan.own)
    if plan.slices:
        lines += ["", "by closed forms:", *slice_lines(plan.slices)]
    misfit = ""
    if reasons := nothing_fits_lines(plan):
        misfit = f"<h2>Why nothing fits, and what would</h2>\n{_pre(reasons)}"
    body = f"""<h1>{escape(title)}</h1>
<p>{escape(command)}; {escape(versions())}</p>
{misfit}{_table(plan) if table_rows(plan) else ""}
{_pre(lines)}"""
    return document(title, body, shipped("render/plan.css"), "")


def _pre(lines: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>\n"


def _table(plan: Plan) -> str:
    (header, *texts), rows = table_cells(plan), table_rows(plan)
    longest = max(row.per_sequence for row in rows)
    capacity = plan.request.machine.capacity or 0.0
    most = max(capacity, *(row.memory for row in rows))
    cells = [[*map(escape, row)] for row in texts]
    for row, marked in zip(rows, cells, strict=True):
        # The bar of time is as long as the time of a sequence.
        parts = zip(PARTS.items(), row.parts, strict=True)
        shares = [(name, colour, float(part / row.parts.step)) for (name, colour), part in parts]
        scale = row.per_sequence / longest
        marked[HEADER.index("seconds")] += _bar(
            (scale * share, colour, f"{name}: {share:.1%} of the step")
            for name, colour, share in shares
        )
        colour = "--bad" if 0 < capacity < row.memory else "--mem"
        marked[HEADER.index("GiB")] += _bar([(row.memory / most, colour, "memory")])
    colours = {**PARTS, "memory": "--mem", "more memory than there is": "--bad"}
    legend = "".join(
        f'<span style="background:var({colour})"></span>{name}' for name, colour in colours.items()
    )
    return f"""<h2>The best of each mesh and schedule, and why the others are not chosen</h2>
<p class="legend">{legend}</p>
<div class="wide">{table(header, cells, "" if plan.winner is None else "chosen")}</div>
"""


def _bar(parts: Iterable[tuple[float, str, str]]) -> str:
    """Return a bar of parts: the share of the width, the colour and the text of each."""
    inner = "".join(
        f'<div style="width:{100 * width:.3g}%;background:var({colour})" title="{text}"></div>'
        for width, colour, text in parts
    )
    return f'<div class="bar">{inner}</div>'
