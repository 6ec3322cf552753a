"""Show several schedules on one HTML page that loads nothing else."""

from collections.abc import Sequence
from html import escape

from maxpipe.plan.simulate import Simulation
from maxpipe.render.chart import STYLE, chart_svg, fit_frame
from maxpipe.render.html import document, table
from maxpipe.render.schedule_text import FOOTNOTES, HEADER, comparison_rows

PAGE_STYLE = """
th:first-child,td:first-child{font-weight:600}
.charts{display:grid;gap:26px}
.charts figure{margin:0;overflow-x:auto;border:1px solid var(--line);border-radius:10px;
  padding:14px 8px 6px}
.chart{display:block;width:100%;height:auto}
.chart [data-unit]{cursor:default}
.chart.tracing [data-unit]{opacity:.22}
.chart.tracing [data-unit].traced{opacity:1}
.cursor{stroke:var(--muted);stroke-dasharray:3 3;pointer-events:none}
"""

SCRIPT = """
const names = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
const describe = (unit, at, stages) => {
  const [stage, start, end] = at.split(" ");
  const when = `\\nstage ${stage}, time ${start} to ${end}`;
  if (unit[0] === "H") return `head of microbatch ${unit.slice(1)}` + when;
  const [, chunk, kind, microbatch] = unit.match(/(\\d+)(\\D)(\\d+)/);
  return `${unit}: ${names[kind]} of microbatch ${microbatch}\\n` +
    `chunk ${Math.floor(chunk / stages)} of the stage, ${chunk} of the model` + when;
};
const inFlight = (steps, time) => steps.map(([times, counts]) => {
  let low = 0, high = times.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (times[mid] <= time) low = mid + 1; else high = mid;
  }
  return low ? counts[low - 1] : 0;
});
for (const chart of document.querySelectorAll("svg.chart")) {
  const byMicrobatch = new Map();
  for (const box of chart.querySelectorAll("[data-unit]")) {
    const microbatch = box.dataset.unit.match(/\\d+$/)[0];
    if (!byMicrobatch.has(microbatch)) byMicrobatch.set(microbatch, []);
    byMicrobatch.get(microbatch).push(box);
  }
  const curves = chart.querySelector("[data-curves]");
  const steps = JSON.parse(curves.dataset.curves);
  const cursor = document.createElementNS(chart.namespaceURI, "line");
  cursor.setAttribute("class", "cursor");
  let traced = null;
  const trace = (microbatch) => {
    if (microbatch === traced) return;
    for (const box of byMicrobatch.get(traced) ?? []) box.classList.remove("traced");
    for (const box of byMicrobatch.get(microbatch) ?? []) box.classList.add("traced");
    chart.classList.toggle("tracing", microbatch !== null);
    traced = microbatch;
  };
  chart.addEventListener("pointermove", (event) => {
    const box = event.target.closest("[data-unit]");
    trace(box ? box.dataset.unit.match(/\\d+$/)[0] : null);
    cursor.remove();
    if (box) return show(event, describe(box.dataset.unit, box.dataset.at, chart.dataset.stages));
    if (event.target !== curves) return tip.style.display = "none";
    const across = (event.clientX - chart.getBoundingClientRect().left) / chart.clientWidth;
    const x = across * chart.viewBox.baseVal.width;
    const time = Math.max(0, (x - chart.dataset.left) / chart.dataset.scale);
    const y = curves.y.baseVal.value, height = curves.height.baseVal.value;
    const line = {x1: x, x2: x, y1: y, y2: y + height};
    for (const [key, value] of Object.entries(line)) cursor.setAttribute(key, value);
    chart.append(cursor);
    const counts = inFlight(steps, time).map((count, stage) => `stage ${stage}: ${count}`);
    show(event, `in flight at time ${+time.toPrecision(4)}\\n` + counts.join("\\n"));
  });
  chart.addEventListener("pointerleave", () => {
    trace(null);
    cursor.remove();
    tip.style.display = "none";
  });
}
"""


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
    style = (
        f"{STYLE}{PAGE_STYLE}.chart{{min-width:{least}px;max-width:{most}px}}\n.charts{{{columns}}}"
    )
    return document(names, body, style, SCRIPT)


def figures_html(runs: Sequence[Simulation]) -> str:
    """Return a table with a row for every run, the shortest first."""
    return table(HEADER, ([*map(escape, row)] for row in comparison_rows(runs)))
