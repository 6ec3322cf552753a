// Draws the curves of runs with uPlot. Every control draws all charts again.
const runs = JSON.parse(document.getElementById("data").textContent);
const [along, smooth, log, reset] = ["along", "smooth", "log", "reset"].map(
  (id) => document.getElementById(id));
const figures = [...document.querySelectorAll("figure")];
const hidden = new Set();
let charts = [], zoom = null; // [from, to] along x, of all charts

const short = (value) => {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(1).replace("e+", "e");
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return +(value / (name === "k" ? 1e3 : unit)).toPrecision(4) + name;
  return String(+value.toPrecision(4));
};
// uPlot begins a logarithmic axis with its lower end, whatever number that is.
const label = (value) => value === null || (log.checked && value !== +value.toPrecision(3)) ? "" :
  short(value);
// Without its configuration the tokens of a run are not known.
const places = (part) => part[along.value].map((place, i) => place ?? part.step[i]);
// The mean of the past, newer values counting more, over about `window` points.
const smoothed = (values, window) => {
  let mean = 0, weight = 0;
  const keep = 1 - 1 / window;
  return values.map((value) => {
    if (value === null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
};
const everything = () => {
  const all = runs.filter((_, number) => !hidden.has(number)).flatMap((run) =>
    [run, run.evaluation].flatMap((part) => places(part)));
  const first = all.reduce((a, b) => Math.min(a, b), Infinity);
  const last = all.reduce((a, b) => Math.max(a, b), -Infinity);
  if (first < last) return [along.value === "hours" ? 0 : first, last];
  return all.length ? [first - 1, first + 1] : [0, 1];
};
// uPlot's own range of a logarithmic scale is whole decades.
const logarithmic = {distr: 3,
  range: (_, low, high) => low > 0 ? [low / 1.1, high * 1.1] : [0.1, 1]};
const setZoom = (range) => { zoom = range; draw(); };

// The value of a curve nearest to the pointer: runs have points at other places.
const nearest = (chart, curve, index) => {
  const values = chart.data[curve];
  for (let away = 0; away < values.length; away++)
    for (const i of [index - away, index + away]) if (Number.isFinite(values[i])) return i;
  return index;
};
const point = (chart) => {
  if (chart.cursor.idx == null || !chart.cursor.event) { tip.style.display = "none"; return; }
  const lines = chart.series.flatMap(({name, show}, curve) => {
    const index = chart.cursor.idxs[curve];
    if (!name || !show || !Number.isFinite(chart.data[curve][index])) return [];
    const x = short(chart.data[0][index]);
    const place = along.value === "step" ? `step ${x}` : `${x} ${along.value}`;
    return `${name}: ${+chart.data[curve][index].toPrecision(5)} at ${place}`;
  });
  show(chart.cursor.event, lines.join("\n"));
};

const drawOne = (figure, window) => {
  const metric = figure.dataset.metric, isEval = metric === "eval_loss";
  const colour = (name) => getComputedStyle(figure).getPropertyValue(name);
  const axis = {stroke: colour("--muted"), grid: {stroke: colour("--line"), width: 1},
    ticks: {show: false}, font: "11px system-ui", values: (_, values) => values.map(label)};
  const tables = [], series = [{}];
  runs.forEach((run, number) => {
    const part = isEval ? run.evaluation : run;
    const values = part[metric].map((value) => log.checked && value <= 0 ? null : value);
    const lines = window > 1 && !isEval ? [values, smoothed(values, window)] : [values];
    tables.push([places(part), ...lines]);
    lines.forEach((_, i) => series.push({name: i === lines.length - 1 ? run.name : "",
      stroke: run.colour, dash: run.dash, width: 1.6, show: !hidden.has(number),
      alpha: i === lines.length - 1 ? 1 : 0.25, points: isEval ? {} : {show: false}}));
  });
  return new uPlot({
    width: figure.clientWidth - 20, height: 260, series, legend: {show: false},
    axes: [{...axis, grid: {show: false}, size: 28}, {...axis, size: 58}],
    padding: [10, 14, 0, 0],
    scales: {
      x: {time: false, range: () => zoom ?? everything()},
      y: log.checked ? logarithmic : {},
    },
    cursor: {y: false, dataIdx: nearest, drag: {setScale: false},
      bind: {dblclick: () => () => setZoom(null)}},
    hooks: {setCursor: [point], setSelect: [(chart) => {
      const {left, width} = chart.select;
      if (width > 3) setZoom([left, left + width].map((x) => chart.posToVal(x, "x")));
    }]},
  }, uPlot.join(tables), figure);
};
const draw = () => {
  for (const chart of charts) chart.destroy();
  tip.style.display = "none";
  const window = Math.round(1.4 ** +smooth.value);
  charts = figures.map((figure) => drawOne(figure, window));
  document.getElementById("smooth-text").textContent =
    window > 1 ? `over ${window} points` : "none";
  reset.disabled = zoom === null;
};

along.addEventListener("change", () => setZoom(null));
smooth.addEventListener("input", draw);
log.addEventListener("change", draw);
reset.addEventListener("click", () => setZoom(null));
for (const button of document.querySelectorAll("[data-run]"))
  button.addEventListener("click", () => {
    const number = +button.dataset.run;
    if (!hidden.delete(number)) hidden.add(number);
    button.setAttribute("aria-pressed", !hidden.has(number));
    draw();
  });
if (runs.some((run) => run.step.length > 300)) smooth.value = 9;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe(document.querySelector(".charts"));
