"""Hold style and script of the page of runs: curves that can be zoomed, smoothed and hidden."""

STYLE = """
h1{margin-bottom:6px}
.wide{overflow-x:auto;margin:0 0 14px}
.figures button{font:inherit;color:inherit;background:none;border:0;padding:2px 0;cursor:pointer;
  text-align:left}
.figures button[aria-pressed=false]{opacity:.4;text-decoration:line-through}
.figures button:focus-visible{outline:2px solid var(--muted)}
.figures svg{margin-right:8px;vertical-align:middle}
.figures path,.curve{fill:none;stroke:var(--line-colour);stroke-width:1.6;stroke-linejoin:round}
details{margin:0 0 18px}
summary{cursor:pointer;color:var(--muted);margin-bottom:6px}
.controls{position:sticky;top:0;z-index:1;background:var(--ground);display:flex;flex-wrap:wrap;
  gap:6px 22px;align-items:center;padding:8px 0 10px;border-bottom:1px solid var(--line);
  margin-bottom:16px}
.controls label{display:flex;gap:7px;align-items:center}
.controls select,.controls button{font:inherit;color:var(--ink);background:var(--idle);
  border:1px solid var(--line);border-radius:6px;padding:2px 8px}
.charts{display:grid;gap:18px;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr))}
figure{margin:0;border:1px solid var(--line);border-radius:10px;padding:10px 10px 4px;min-width:0}
figcaption{font-weight:500;margin:0 0 4px 4px}
figure svg{display:block;width:100%;height:260px;touch-action:pan-y;cursor:crosshair;
  user-select:none}
figure text{font-size:11px;fill:var(--muted)}
.grid{stroke:var(--line)}
.raw{opacity:.25;stroke-width:1}
.dot{fill:var(--line-colour);stroke:none}
.cursor{stroke:var(--muted);stroke-dasharray:3 3}
.selection{fill:var(--muted);opacity:.22}
@media(max-width:600px){body{padding:16px 14px 32px}figure svg{height:220px}}
"""

SCRIPT = """
const runs = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const form = Object.fromEntries(["along", "smooth", "log", "reset"].map(
  (id) => [id, document.getElementById(id)]));
const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;
let zoom = null;  // [from, to] along x, of all charts
let pending = false;

const short = (value) => {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(1).replace("e+", "e");
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return +(value / (unit === 1e4 ? 1e3 : unit)).toPrecision(4) + name;
  return String(+value.toPrecision(4));
};
// Texts of the values of an axis, with equally many decimals.
const evenly = (values) => {
  const texts = values.map(short), last = texts.at(-1)?.replace(/[-\\d.]/g, "");
  const places = Math.max(0, ...texts.map((text) =>
    /\\.(\\d+)/.exec(text)?.[1].length ?? 0));
  const even = new RegExp(`^(-?\\\\d+)(?:\\\\.(\\\\d+))?${last}$`);
  return places === 0 ? texts : texts.map((text) => text.replace(even, (_, whole, part = "") =>
    `${whole}.${part.padEnd(places, "0")}${last}`));
};
const place = (run, steps, hours) => form.along.value === "hours" ? hours :
  form.along.value === "tokens" ? steps.map((step) => step * (run.tokensPerStep ?? 1)) : steps;
// [x, y] of what is known, with null where a value is missing so that the line breaks.
const points = (run, metric) => {
  const part = metric === "eval_loss" ? run.evaluation : run;
  const xs = place(run, part.step, part.hours);
  return xs.map((x, i) => part[metric][i] === null ? null : [x, part[metric][i]]);
};
// The mean of the past, newer values counting more, over about `window` points.
const smoothed = (line, window) => {
  let mean = 0, weight = 0;
  const keep = 1 - 1 / window;
  return line.map((point) => {
    if (point === null) return null;
    mean = keep * mean + (1 - keep) * point[1];
    weight = keep * weight + (1 - keep);
    return [point[0], mean / weight];
  });
};
const windowOf = () => Math.round(1.4 ** +form.smooth.value);
const ticks = (low, high, wanted) => {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const distance = [1, 2, 5, 10].map((f) => f * power).find((d) => d >= raw * 0.999);
  const count = Math.floor(high / distance + 1e-9) - Math.ceil(low / distance - 1e-9) + 1;
  const first = Math.ceil(low / distance - 1e-9);
  return Array.from({length: Math.max(count, 0)}, (_, i) => (first + i) * distance);
};
const logTicks = (low, high) => {
  const decades = Math.log10(high) - Math.log10(low);
  if (decades < 0.7) return ticks(low, high, 4);
  const factors = decades < 2 ? [1, 2, 5] : [1];
  const every = Math.ceil(decades / 6), all = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e += every)
    for (const factor of factors) all.push(factor * 10 ** e);
  return all.filter((value) => value >= low && value <= high);
};
const node = (parent, name, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};

class Chart {
  constructor(figure) {
    this.metric = figure.dataset.metric;
    this.svg = node(figure, "svg", {role: "img",
      "aria-label": figure.querySelector("figcaption").textContent});
    this.from = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      this.from = event.clientX;
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => { this.from = null; this.clear(); });
    this.svg.addEventListener("pointerleave", () => this.clear());
    this.svg.addEventListener("dblclick", () => { zoom = null; draw(); });
  }
  draw(range) {
    const box = this.svg.getBoundingClientRect();
    this.width = Math.max(box.width, 120);
    this.height = Math.max(box.height, 100);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren();
    this.range = range;
    const lines = [];
    runs.forEach((run, number) => {
      if (hidden.has(number)) return;
      const raw = points(run, this.metric);
      const window = this.metric === "eval_loss" ? 1 : windowOf();
      lines.push({run, number, raw, line: window > 1 ? smoothed(raw, window) : raw});
    });
    const isLog = form.log.checked;
    const inside = (point) => point && point[0] >= range[0] && point[0] <= range[1] &&
      (!isLog || point[1] > 0);
    const heights = lines.flatMap(({raw}) => raw.filter(inside).map((point) => point[1]));
    let low = heights.reduce((a, b) => Math.min(a, b), Infinity);
    let high = heights.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!heights.length) [low, high] = [isLog ? 0.1 : 0, 1];
    if (isLog) {
      const margin = (high / low) ** 0.05 * (high === low ? 1.1 : 1);
      [low, high] = [low / margin, high * margin];
    } else {
      const margin = 0.05 * (high - low) || Math.abs(0.1 * high) || 0.5;
      [low, high] = [low - margin, high + margin];
    }
    const scale = isLog ? Math.log : (value) => value;
    const share = (value) => (scale(value) - scale(low)) / (scale(high) - scale(low));
    this.y = (value) => TOP + (1 - share(value)) * (this.height - TOP - BOTTOM);
    this.x = (value) => LEFT + (value - range[0]) / (range[1] - range[0] || 1) *
      (this.width - LEFT - RIGHT);
    this.lines = lines;
    this.axes(low, high, isLog);
    const clip = `clip-${this.metric}`;
    node(node(this.svg, "clipPath", {id: clip}), "rect", {x: LEFT - 4, y: 0,
      width: Math.max(this.width - LEFT - RIGHT, 1) + 8, height: this.height});
    const group = node(this.svg, "g", {"clip-path": `url(#${clip})`});
    for (const {number, raw, line} of lines) {
      if (line !== raw) node(group, "path", {class: `curve raw run${number}`, d: this.path(raw)});
      node(group, "path", {class: `curve run${number}`, d: this.path(line)});
      const known = line.filter(inside);
      if (known.length <= 60 && (this.metric === "eval_loss" || known.length === 1))
        for (const point of known) node(group, "circle", {class: `dot run${number}`, r: 3,
          cx: this.x(point[0]).toFixed(1), cy: this.y(point[1]).toFixed(1)});
    }
    this.marks = node(this.svg, "g", {});
  }
  axes(low, high, isLog) {
    const bottom = this.height - BOTTOM, right = this.width - RIGHT;
    const heights = isLog ? logTicks(low, high) : ticks(low, high, 4);
    const texts = isLog ? heights.map(short) : evenly(heights);
    for (const [i, value] of heights.entries()) {
      const y = this.y(value).toFixed(1);
      node(this.svg, "path", {class: "grid", d: `M${LEFT} ${y}H${right}`});
      node(this.svg, "text", {x: LEFT - 7, y: +y + 4, "text-anchor": "end"}, texts[i]);
    }
    const unit = {step: "", tokens: "", hours: " h"}[form.along.value];
    const shown = ticks(...this.range, Math.max(2, Math.floor(this.width / 110)));
    const along = evenly(shown);
    for (const [i, value] of shown.entries()) {
      const x = this.x(value).toFixed(1);
      const anchor = +x > right - 20 ? "end" : "middle";
      node(this.svg, "text", {x, y: bottom + 17, "text-anchor": anchor}, along[i] + unit);
    }
  }
  path(line) {
    const [from, to] = this.range, isLog = form.log.checked;
    let text = "", pen = "M";
    line.forEach((point, i) => {
      if (point === null || (isLog && point[1] <= 0)) { pen = "M"; return; }
      const next = line[i + 1] ?? point, before = line[i - 1] ?? point;
      if (next[0] < from || before[0] > to) { pen = "M"; return; }
      text += `${pen}${this.x(point[0]).toFixed(1)} ${this.y(point[1]).toFixed(1)}`;
      pen = "L";
    });
    return text;
  }
  at(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const share = Math.min(1, Math.max(0, (x - LEFT) / (this.width - LEFT - RIGHT)));
    return this.range[0] + share * (this.range[1] - this.range[0]);
  }
  clear() {
    this.marks?.replaceChildren();
    tip.style.display = "none";
  }
  move(event) {
    this.clear();
    const at = this.at(event), bottom = this.height - BOTTOM;
    if (this.from !== null) {
      const [a, b] = [this.at({clientX: this.from}), at].sort((p, q) => p - q).map(this.x);
      node(this.marks, "rect", {class: "selection", x: a, y: TOP, width: b - a,
        height: bottom - TOP});
      return;
    }
    const nearest = [];
    for (const {run, number, line} of this.lines) {
      let best = null;
      for (const point of line) {
        if (point && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)))
          best = point;
      }
      if (best === null || best[0] < this.range[0] || best[0] > this.range[1]) continue;
      nearest.push({run, best});
      node(this.marks, "circle", {class: `dot run${number}`, r: 3.5,
        cx: this.x(best[0]), cy: this.y(best[1])});
    }
    const x = this.x(at);
    node(this.marks, "path", {class: "cursor", d: `M${x} ${TOP}V${bottom}`});
    const unit = {step: "step", tokens: "tokens", hours: "hours"}[form.along.value];
    const lines = nearest.map(({run, best}) =>
      `${run.name}: ${+best[1].toPrecision(5)} at ${short(best[0])}`);
    show(event, [`${unit} ${short(at)}`, ...lines].join("\\n"));
  }
  release(event) {
    if (this.from === null) return;
    const isDrag = Math.abs(event.clientX - this.from) > 4;
    const range = [this.at({clientX: this.from}), this.at(event)].sort((p, q) => p - q);
    this.from = null;
    this.clear();
    if (isDrag && range[1] > range[0]) { zoom = range; draw(); }
  }
}

const charts = [...document.querySelectorAll("figure")].map((figure) => new Chart(figure));
const everything = () => {
  let first = Infinity, last = -Infinity;
  runs.forEach((run, number) => {
    if (hidden.has(number)) return;
    for (const part of [run, run.evaluation])
      for (const x of place(run, part.step, part.hours)) {
        first = Math.min(first, x);
        last = Math.max(last, x);
      }
  });
  return first < last ? [form.along.value === "hours" ? 0 : first, last] :
    [Math.min(first, 1) - 1, Math.max(last, 1) + 1].map((x) => Number.isFinite(x) ? x : 1);
};
const draw = () => {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    const range = zoom ?? everything();
    for (const chart of charts) chart.draw(range);
    const window = windowOf();
    document.getElementById("smooth-text").textContent =
      window > 1 ? `over ${window} points` : "none";
    form.reset.disabled = zoom === null;
  });
};
form.along.addEventListener("change", () => { zoom = null; draw(); });
form.smooth.addEventListener("input", draw);
form.log.addEventListener("change", draw);
form.reset.addEventListener("click", () => { zoom = null; draw(); });
for (const button of document.querySelectorAll("[data-run]"))
  button.addEventListener("click", () => {
    const number = +button.dataset.run;
    if (!hidden.delete(number)) hidden.add(number);
    button.setAttribute("aria-pressed", !hidden.has(number));
    draw();
  });
if (runs.some((run) => run.step.length > 300)) form.smooth.value = 9;
new ResizeObserver(draw).observe(document.body);
draw();
"""
