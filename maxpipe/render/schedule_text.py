"""Show schedules: a table with ticks across and stages down, figures of several, a page."""

from collections.abc import Sequence
from html import escape

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.terminal import RESET
from maxpipe.pipeline.schedules.table import IDLE, Table, Unit, phases
from maxpipe.plan.simulate import Simulation
from maxpipe.render.chart import NAMES, STYLE, Rgb, chart_svg, fit_frame, ink, unit_colour
from maxpipe.render.columns import columns, numbers
from maxpipe.render.html import document, shipped
from maxpipe.render.html import table as html_table

MAX_BLOCKS = 6

HEADER = ("schedule", "repeats", "makespan", "bubble", "in flight", "sent", "runs on")
FOOTNOTES = (
    "bubble: idle share of all stages' time, from a step's first unit to its last",
    "in flight: the most; one microbatch's activations of a whole stage count as one",
    "sent: bytes of activations and gradients between stages",
)


def render_terminal(run: Simulation, *, colour: bool, width: int) -> str:
    """Return the table in blocks of ticks that fit a terminal's width, then what it costs.

    A lockstep stage has a line for each kind, a free-running one a single line. With ANSI colours,
    of the 256-colour palette, a cell shows the microbatch, without them the whole unit.
    """
    table = run.table
    lines = [(kind,) for kind in table.kinds] if table.lockstep else [table.kinds]
    example = Unit("F", table.num_microbatches - 1, table.num_chunks - 1)
    longest = len(str(example.microbatch) if colour else str(example))
    cell_width = 1 + max(longest, len(str(table.num_ticks - 1)))
    label_width = len(f"stage {table.num_stages - 1} F ")
    per_block = max((width - label_width) // cell_width, 1)
    starts = range(0, table.num_ticks, per_block)
    form = "lockstep" if table.lockstep else "free-running"
    repeats = "repeats" if table.num_repeats > 1 else "repeat"
    headline = (
        f"{table.name}: {table.num_stages} stages, {table.num_microbatches} microbatches, "
        f"{table.num_repeats} {repeats}, {table.num_ticks} {form} ticks"
    )
    text = [headline, _legend(table, colour)]
    for start in starts[:MAX_BLOCKS]:
        ticks = range(start, min(start + per_block, table.num_ticks))
        numbered = "".join(f"{t:>{cell_width}}" for t in ticks)
        text += ["", f"{'tick':<{label_width}}{numbered}"]
        for stage in range(table.num_stages):
            for index, kinds in enumerate(lines):
                label = f"stage {stage}" if index == 0 else ""
                label = f"{label:<{label_width - 2}}{kinds[0] if table.lockstep else ' '} "
                cells = (_cell(table, kinds, t, stage, cell_width, colour) for t in ticks)
                text.append(label + "".join(cells))
    if len(starts) > MAX_BLOCKS:
        hidden = table.num_ticks - MAX_BLOCKS * per_block
        text += ["", f"... {hidden} more ticks; --html FILE shows them all"]
    return "\n".join([*text, "", *_costs(run)]) + "\n"


def _cell(
    table: Table, kinds: tuple[str, ...], tick: int, stage: int, width: int, colour: bool
) -> str:
    for kind in kinds:
        microbatch, chunk = (int(of[kind][tick, stage]) for of in (table.microbatch, table.chunk))
        if microbatch == IDLE:
            continue
        if colour:
            fill = unit_colour(kind, chunk, table.num_repeats)
            return _painted(f"{microbatch:>{width}}", fill)
        return f"{Unit(kind, microbatch, int(table.global_chunk(chunk, stage)))!s:>{width}}"
    return ".".rjust(width)


def _painted(text: str, fill: Rgb) -> str:
    return f"\x1b[48;5;{_palette(fill)}m\x1b[38;5;{_palette(ink(fill))}m{text}{RESET}"


def _palette(colour: Rgb) -> int:
    """Return the nearest entry of the 6 x 6 x 6 cube of the 256-colour palette."""
    red, green, blue = (0 if c < 48 else 1 if c < 115 else (c - 35) // 40 for c in colour)
    return 16 + 36 * red + 6 * green + blue


def _legend(table: Table, colour: bool) -> str:
    if not colour:
        kinds = ", ".join(f"{k} {NAMES[k]}" for k in table.kinds)
        return f"cells: global chunk, kind, microbatch; kinds: {kinds}"
    chunks = range(table.num_repeats)
    entries = (
        f"{NAMES[kind]} "
        + "".join(_painted(f" {c} ", unit_colour(kind, c, table.num_repeats)) for c in chunks)
        for kind in table.kinds
    )
    return "cells: microbatch; shades: chunk    " + "   ".join(entries)


def _costs(run: Simulation) -> list[str]:
    """Return what the table costs, a line each; without colour, so that it can be searched."""
    table = run.table

    def peak(stages: np.ndarray) -> str:
        chunks = "chunks" if table.num_repeats > 1 else "microbatches"
        return f"{int(stages.max())} {chunks} (by stage: {' '.join(map(str, stages.tolist()))})"

    idle = f"{run.idle_in_span:.6g} (from a stage's first unit to its last)"
    ticks = (f"{p.start}-{p.stop - 1} {'+'.join(p.kinds) or 'idle'}" for p in phases(table))
    figures = {
        "makespan": f"{run.makespan:g}",
        "bubble": f"{run.bubble:.6g} a stage, {run.bubble_fraction:.1%} of all stages' time",
        "idle in a span": "" if table.lockstep else idle,
        "peak in flight": peak(run.peak_in_flight),
        "peak stash": f"{peak(run.peak_stash)} between I and W" if "W" in table.kinds else "",
        "bytes sent": f"{run.bytes_sent.sum():g} (most by a stage: {np.max(run.bytes_sent):g})",
        "ticks": ", ".join(ticks) if table.lockstep else "",
    }
    return [f"{name:<16}{text}" for name, text in figures.items() if text]


def comparison_rows(runs: Sequence[Simulation]) -> list[tuple[str, ...]]:
    """Return a row under `HEADER` for every run, the shortest first."""
    ordered = sorted(runs, key=lambda run: run.makespan)
    return [
        *zip(
            [run.table.name for run in ordered],
            [str(run.table.num_repeats) for run in ordered],
            numbers([run.makespan for run in ordered], 5),
            [f"{run.bubble_fraction:.1%}" for run in ordered],
            numbers([run.peak_in_flight.max() / run.table.num_repeats for run in ordered], 4),
            [f"{run.bytes_sent.sum():g}" for run in ordered],
            [", ".join(_engines(run.table)) or "-" for run in ordered],
            strict=True,
        )
    ]


def _engines(table: Table) -> Sequence[str]:
    """Return the engines of a named schedule, or those that run a file's or a solver's table."""
    # A configured schedule's name is followed by its numbers of layers.
    name = table.name.partition(" ")[0]
    if name in SCHEDULES and not table.source:
        return SCHEDULES[name].engines
    in_lockstep = table.lockstep and table.placement == "loop"
    return [e for e, facts in ENGINES.items() if facts.runs_csv and facts.lockstep <= in_lockstep]


def comparison_text(runs: Sequence[Simulation]) -> str:
    lines = columns([HEADER, *comparison_rows(runs)], left=(0, len(HEADER) - 1))
    return "\n".join([*lines, "", *FOOTNOTES]) + "\n"


def page_html(runs: Sequence[Simulation], subtitle: str) -> str:
    """Return an HTML page with a table of figures and a chart of every run, on one time scale."""
    frame = fit_frame(list(runs))
    # Charts stand side by side if that shrinks them little; on narrower screens they scroll.
    least, most = round(0.7 * frame.width), round(1.1 * frame.width)
    columns = f"grid-template-columns:repeat(auto-fill,minmax(min(100%,{least}px),1fr))"
    charts = "\n".join(
        f"<figure>{chart_svg(run, frame, standalone=False)}</figure>" for run in runs
    )
    names = ", ".join(run.table.name for run in runs)
    body = f"""<h1>{"Pipeline schedules" if len(runs) > 1 else "Pipeline schedule"}</h1>
<p>{escape(subtitle)}</p>
{figures_html(runs)}
<p>{"<br>".join(FOOTNOTES)}</p>
<div class="charts">
{charts}
</div>"""
    style = f"{STYLE}\n{shipped('render/schedule.css')}"
    style += f".chart{{min-width:{least}px;max-width:{most}px}}\n.charts{{{columns}}}"
    return document(names, body, style, f"\n{shipped('render/schedule.js')}")


def figures_html(runs: Sequence[Simulation]) -> str:
    return html_table(HEADER, ([*map(escape, row)] for row in comparison_rows(runs)))
