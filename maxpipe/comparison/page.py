"""Draw runs on one HTML page that loads nothing else: figures, differences, curves to zoom into.

The curves are drawn by uPlot (MIT), which is in `uplot/` and becomes a part of each page.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate

from maxpipe.comparison.recorded import Number, Recorded, differing_keys
from maxpipe.comparison.table import HEADER, figures, value_text
from maxpipe.render.html import document, shipped, table

# Legible on light and on dark ground; further runs repeat them with dashes.
COLOURS = ("#3f7fd1", "#e0902c", "#2f9e77", "#b65fc4", "#d0453c", "#8a8f98", "#a98b1d", "#2aa3b8")
DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3))
MOST_BUCKETS = 1000  # buckets of steps; three steps of each are drawn
CHARTS = {
    "loss": "training loss, nats per token",
    "eval_loss": "evaluation loss, nats per token",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
}


def page_html(runs: Sequence[Recorded]) -> str:
    title = f"{len(runs)} runs" if len(runs) > 1 else f"Run {runs[0].name}"
    lines = [{"colour": colour, "dash": dash} for colour, dash in map(_line, range(len(runs)))]
    curves = [run_data(run) | line for run, line in zip(runs, lines, strict=True)]
    # "</script>" in a name must not end the element.
    data = json.dumps(curves, allow_nan=False).replace("<", "\\u003c")
    charts = "\n".join(
        f'<figure data-metric="{metric}"><figcaption>{text}</figcaption></figure>'
        for metric, text in CHARTS.items()
        if any(_has(run, metric) for run in runs)
    )
    body = f"""<h1>{escape(title)}</h1>
<p>Click a run to hide or show it. Drag over a chart to zoom into all of them; a double click shows
everything again.</p>
<div class="wide">{_figures(runs)}</div>
{_differences(runs)}
<form class="controls">
<label>along <select id="along"><option value="step">steps</option>
<option value="tokens">tokens</option><option value="hours">hours of steps</option></select></label>
<label>smoothing <input id="smooth" type="range" min="0" max="20" value="0">
<output id="smooth-text">none</output></label>
<label><input id="log" type="checkbox"> logarithmic</label>
<button id="reset" type="button">show everything</button>
</form>
<div class="charts">
{charts}
</div>
<!-- uPlot, which draws the charts:
{shipped("comparison/uplot/LICENSE")}-->
<script type="application/json" id="data">{data}</script>"""
    style = shipped("comparison/uplot/uPlot.min.css", "comparison/curves.css")
    script = shipped("comparison/uplot/uPlot.iife.min.js", "comparison/curves.js")
    return document(title, body, style, script)


def run_data(run: Recorded) -> dict[str, object]:
    """Return a run's curves as JSON: the first step and both extremes of each bucket of steps.

    Numbers have five significant digits, which a screen cannot tell from more.
    """
    chosen = _chosen_rows(run.steps["loss"])
    steps = [int(step or 0) for step in run.steps["step"]]
    hours = [*accumulate((value or 0.0) / 3600 for value in run.steps["step_seconds"])]
    hours_at = dict(zip(steps, hours, strict=True))
    columns = [name for name in CHARTS if name != "eval_loss"]
    return {
        "name": run.name,
        "step": [steps[row] for row in chosen],
        "hours": [_rounded(hours[row]) for row in chosen],
        "tokens": [run.tokens(steps[row]) for row in chosen],
        **{name: [_rounded(run.steps[name][row]) for row in chosen] for name in columns},
        "evaluation": {
            "step": [*run.evaluations],
            "hours": [_rounded(hours_at.get(step, 0.0)) for step in run.evaluations],
            "tokens": [*map(run.tokens, run.evaluations)],
            "eval_loss": [*map(_rounded, run.evaluations.values())],
        },
    }


def _chosen_rows(losses: Sequence[Number]) -> list[int]:
    size = math.ceil(len(losses) / MOST_BUCKETS) or 1
    if size <= 3:
        return [*range(len(losses))]
    chosen: set[int] = {len(losses) - 1}
    for start in range(0, len(losses), size):
        rows = range(start, min(start + size, len(losses)))
        known = sorted((loss, row) for row in rows if (loss := losses[row]) is not None)
        chosen |= {rows[0], *(row for _, row in known[:1] + known[-1:])}
    return sorted(chosen)


def _rounded(value: Number) -> Number:
    return None if value is None else float(f"{value:.5g}")


def _has(run: Recorded, metric: str) -> bool:
    if metric == "eval_loss":
        return bool(run.evaluations)
    return any(value is not None for value in run.steps[metric])


def _line(number: int) -> tuple[str, tuple[int, ...]]:
    dashes, colour = divmod(number, len(COLOURS))
    return COLOURS[colour], DASHES[dashes % len(DASHES)]


def _figures(runs: Sequence[Recorded]) -> str:
    rows = []
    for number, run in enumerate(runs):
        name, *others = map(escape, figures(run))
        colour, dash = _line(number)
        swatch = (
            f'<svg width="26" height="8"><path d="M1 4h24" stroke="{colour}" '
            f'stroke-dasharray="{" ".join(map(str, dash))}"/></svg>'
        )
        button = f'<button type="button" data-run="{number}" aria-pressed="true">{swatch}{name}'
        rows.append([f"{button}</button>", *others])
    return table(HEADER, rows, "figures")


def _differences(runs: Sequence[Recorded]) -> str:
    keys = differing_keys(runs)
    if not keys:
        num_known = sum(bool(run.settings) for run in runs)
        text = "The configurations are the same, but for names and places."
        return f"<p>{text}</p>" if num_known > 1 else ""
    rows = [[escape(run.name), *(escape(value_text(run, key)) for key in keys)] for run in runs]
    return f"""<details open><summary>what differs between their configurations</summary>
<div class="wide">{table(("run", *keys), rows)}</div></details>"""
