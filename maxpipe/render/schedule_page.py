"""Show several schedules on one HTML page that loads nothing else."""

from collections.abc import Sequence
from html import escape

from maxpipe.plan.simulate import Simulation
from maxpipe.render.chart import STYLE, chart_svg, fit_frame
from maxpipe.render.html import document, shipped, table
from maxpipe.render.schedule_text import FOOTNOTES, HEADER, comparison_rows


def page_html(runs: Sequence[Simulation], subtitle: str) -> str:
    """Return a page with a table of figures and a chart of every run, on one scale of time.

    Args:
      runs: one or more simulated schedules.
      subtitle: sizes and costs, in words.
    """
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
    """Return a table with a row for every run, the shortest first."""
    return table(HEADER, ([*map(escape, row)] for row in comparison_rows(runs)))
