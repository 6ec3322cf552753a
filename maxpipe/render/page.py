"""Show several schedules on one HTML page that loads nothing else."""

from collections.abc import Sequence
from html import escape

from maxpipe.planning.simulate import Simulation
from maxpipe.render.chart import DARK, LIGHT, STYLE, chart_svg, fit_frame
from maxpipe.render.terminal import FOOTNOTE, HEADER, comparison_rows

PAGE_STYLE = """
*{box-sizing:border-box}
body{margin:0;padding:28px 32px 48px;background:var(--ground);color:var(--ink);
  font:14px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:20px;margin:0 0 2px}
p{margin:0 0 22px;color:var(--muted)}
table{border-collapse:collapse;margin:0 0 10px;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;text-align:right;border-bottom:1px solid var(--line);
  white-space:nowrap}
th{font-weight:500;color:var(--muted)}
th:first-child,td:first-child{text-align:left;font-weight:600}
.charts{display:grid;gap:26px}
.charts figure{margin:0;overflow-x:auto;border:1px solid var(--line);border-radius:10px;
  padding:14px 8px 6px}
.chart{display:block;width:100%;height:auto}
.chart [data-unit]{cursor:default}
.chart.tracing [data-unit]{opacity:.22}
.chart.tracing [data-unit].traced{opacity:1}
.cursor{stroke:var(--muted);stroke-dasharray:3 3;pointer-events:none}
#tip{position:fixed;display:none;pointer-events:none;z-index:1;max-width:340px;padding:7px 10px;
  border-radius:7px;
  background:var(--ink);color:var(--ground);font-size:12.5px;line-height:1.45;white-space:pre-line;
  box-shadow:0 4px 16px #0004}
"""

SCRIPT = """
const tip = document.getElementById("tip");
const names = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
const show = (event, text) => {
  tip.textContent = text;
  tip.style.display = "block";
  const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
  tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
};
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
    show(event, `in flight at time ${time.toFixed(1)}\\n` + counts.join("\\n"));
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
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{escape(names)}</title>
<style>
.chart{{min-width:{least}px;max-width:{most}px}}
.charts{{{columns}}}
:root{{{LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}
{STYLE}{PAGE_STYLE}</style>
</head>
<body>
<h1>{"Pipeline schedules" if len(runs) > 1 else "Pipeline schedule"}</h1>
<p>{escape(subtitle)}</p>
{_figures(runs)}
<div class="charts">
{charts}
</div>
<div id="tip" role="tooltip"></div>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _figures(runs: Sequence[Simulation]) -> str:
    cells = ["".join(f"<th>{text}</th>" for text in HEADER)]
    cells += [
        "".join(f"<td>{escape(value)}</td>" for value in row) for row in comparison_rows(runs)
    ]
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table>{rows}</table>\n<p>{FOOTNOTE}</p>"
