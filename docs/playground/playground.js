"use strict";
// Simulates the tables of tables.js, by the rules of maxpipe/plan/simulate.py, and draws one of them.

const KINDS = ["F", "B", "I", "W"];
const HUES = { F: [212, 72], B: [28, 88], I: [338, 65], W: [162, 60] };
const STAGES = ["#7456d6", "#2f86d0", "#22a08c", "#d39828"];

// Every key with its default and its choices, or the range of its slider.
const KEYS = {
  schedule: { text: "schedule", value: "lockstep_1f1b", choices: Object.keys(SCHEDULES) },
  stages: { text: "stages", value: 4, choices: SIZES.stages },
  microbatches: { text: "microbatches", value: 8, choices: SIZES.microbatches },
  repeats: { text: "repeats (chunks per stage)", value: 2, choices: SIZES.repeats },
  forward: { text: "time of F", value: 1, most: 3 },
  input_gradient: { text: "time of I", value: 1, most: 3 },
  weight_gradient: { text: "time of W", value: 1, most: 3 },
  comm: { text: "time of a transfer", value: 0, most: 1 },
  head: { text: "time of loss and head", value: 0, most: 2 },
  memory: { text: "memory limit, in microbatches", value: 0, most: 16, step: 0.5 },
  offload: { text: "share offloaded to the host", value: 0, most: 1 },
};

// The table of a schedule: {kinds, lockstep, stages S, microbatches M, repeats V, chunks G, stageOf [G],
// ticks: kind -> [M * G], -1 where there is no such unit}.
function tableOf(name, keys) {
  const { repeats: own, lockstep, placement } = SCHEDULES[name];
  const S = keys.stages, M = keys.microbatches, V = own || keys.repeats, G = S * V;
  const text = TABLES[[name, S, M, V].join(" ")];
  const ticks = {};
  for (const part of text.split(" ")) {
    const cells = part.slice(1).match(/../g);
    ticks[part[0]] = cells.map((cell) => (cell === ".." ? -1 : parseInt(cell, 36)));
  }
  const stageOf = Array.from({ length: G }, (_, g) => {
    const turn = Math.floor(g / S), place = g % S;
    return placement === "v" && turn % 2 ? S - 1 - place : place;
  });
  return { name, kinds: KINDS.filter((kind) => kind in ticks), lockstep, S, M, V, G, stageOf, ticks };
}

// Times of a chunk's units.
function costsOf(keys, V) {
  const I = keys.input_gradient / V, W = keys.weight_gradient / V;
  return { F: keys.forward / V, B: I + W, I, W, comm: keys.comm, head: keys.head };
}

// A simulated step: start and end of every unit, by kind, [M * G]; heads; makespan; work [S].
function simulate(table, costs) {
  const run = (table.lockstep ? runLockstep : runFree)(table, costs);
  run.work = new Array(table.S).fill(0);
  for (const kind of table.kinds)
    table.ticks[kind].forEach((tick, unit) => {
      if (tick >= 0) run.work[table.stageOf[unit % table.G]] += costs[kind];
    });
  if (table.lockstep) run.work = run.work.map((work) => work + (costs.head * table.M) / table.S);
  else run.work[table.stageOf[table.G - 1]] += costs.head * table.M;
  const busy = run.work.reduce((a, b) => a + b) / table.S;
  run.bubble = run.makespan > 0 ? Math.max(0, 1 - busy / run.makespan) : 0;
  run.inFlight = Array.from({ length: table.S }, (_, stage) => inFlight(table, run, stage));
  run.peaks = run.inFlight.map((curve) => Math.max(0, ...curve.map(([, count]) => count)));
  return run;
}

// Every tick computes its slots on all stages, masked where they are idle, then sends.
function runLockstep({ kinds, S, M, G, ticks }, costs) {
  const N = 1 + Math.max(...kinds.map((kind) => Math.max(...ticks[kind])));
  const slot = {}, sends = new Array(N).fill(false), head = new Array(N).fill(0);
  for (const kind of kinds) {
    const used = ticks[kind].filter((tick) => tick >= 0);
    const first = Math.min(...used), last = Math.max(...used);
    slot[kind] = Array.from({ length: N }, (_, t) => (first <= t && t <= last ? costs[kind] : 0));
    if (kind !== "W" && S > 1) for (let t = first; t <= last; t++) sends[t] = true;
  }
  for (let m = 0; m < M; m++) head[ticks.F[m * G + G - 1]] += costs.head / S;
  const begin = [], offset = [];
  let now = 0, makespan = 0;
  for (let t = 0; t < N; t++) {
    const total = kinds.reduce((sum, kind) => sum + slot[kind][t], head[t]);
    begin.push(now);
    offset.push(now);
    makespan = now + total;
    now = makespan + (sends[t] ? costs.comm : 0);
  }
  const start = {}, end = {};
  let headStart;
  for (const kind of kinds) {
    start[kind] = ticks[kind].map((tick) => (tick < 0 ? NaN : offset[tick]));
    end[kind] = start[kind].map((time) => time + costs[kind]);
    for (let t = 0; t < N; t++) offset[t] += slot[kind][t];
    if (kind === "F") {
      headStart = Array.from({ length: M }, (_, m) => offset[ticks.F[m * G + G - 1]]);
      for (let t = 0; t < N; t++) offset[t] += head[t];
    }
  }
  return { start, end, headStart, headEnd: headStart.map((time) => time + costs.head / S), makespan };
}

// Each stage keeps its order of units; a unit starts when its stage is free and its input has arrived.
function runFree({ kinds, S, M, G, stageOf, ticks }, costs) {
  const units = [];
  for (const kind of kinds) ticks[kind].forEach((tick, unit) => tick >= 0 && units.push([tick, kind, unit]));
  units.sort((a, b) => a[0] - b[0]);
  const start = {}, end = {}, free = new Array(S).fill(0);
  for (const kind of kinds) {
    start[kind] = new Array(M * G).fill(NaN);
    end[kind] = new Array(M * G).fill(NaN);
  }
  const headStart = new Array(M).fill(0), headEnd = new Array(M).fill(0);
  for (const [, kind, unit] of units) {
    const g = unit % G, m = (unit - g) / G, stage = stageOf[g];
    let ready = 0, from = g;
    if (kind === "F") {
      if (g > 0) {
        from = g - 1;
        ready = end.F[unit - 1];
      }
    } else if (kind === "W") ready = end.I[unit];
    else if (g === G - 1) ready = headEnd[m];
    else {
      from = g + 1;
      ready = (ticks.B && ticks.B[unit + 1] >= 0 ? end.B : end.I)[unit + 1];
    }
    if (stageOf[from] !== stage) ready += costs.comm;
    start[kind][unit] = Math.max(free[stage], ready);
    free[stage] = end[kind][unit] = start[kind][unit] + costs[kind];
    if (kind === "F" && g === G - 1) {
      headStart[m] = free[stage];
      free[stage] = headEnd[m] = free[stage] + costs.head;
    }
  }
  return { start, end, headStart, headEnd, makespan: Math.max(...free) };
}

// How many chunks are in flight on a stage: [time, count] after every change; from F to the end of B or W.
function inFlight({ M, G, stageOf }, { start, end, makespan }, stage) {
  const changes = [];
  for (let unit = 0; unit < M * G; unit++) {
    if (stageOf[unit % G] !== stage) continue;
    changes.push([start.F[unit], 1]);
    const merged = end.B && !Number.isNaN(end.B[unit]);
    changes.push([(merged ? end.B : end.W)[unit], -1]);
  }
  // What ends when another begins is not in flight with it; rounding must not reorder the two.
  changes.sort((a, b) => (Math.abs(a[0] - b[0]) > 1e-9 * makespan ? a[0] - b[0] : a[1] - b[1]));
  let count = 0;
  const curve = changes.map(([time, change]) => [time, (count += change)]);
  // Several changes at one time are one step.
  return curve.filter(([time], i) => i + 1 === curve.length || curve[i + 1][0] - time > 1e-9 * makespan);
}

// The most that a stage holds, in microbatches of a whole stage.
function memoryOf(table, run, offload) {
  const chunks = run.peaks.map((peak) => (1 - offload) * peak + offload * Math.min(peak, 2));
  return Math.max(...chunks) / table.V;
}

const number = (value, digits = 4) => String(+value.toPrecision(digits));
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function fillOf(kind, chunk, V) {
  const [hue, saturation] = HUES[kind];
  const lightness = 46 + 30 * (V > 1 ? chunk / (V - 1) : 0.15);
  return `hsl(${hue} ${saturation}% ${lightness}%)`;
}

function draw(table, run, limit) {
  const LEFT = 62, WIDTH = 1000, ROW = 26, CURVES = 110;
  const scale = (WIDTH - LEFT - 10) / (run.makespan || 1);
  const x = (time) => LEFT + scale * time, y = (stage) => 8 + stage * (ROW + 4);
  const bottom = y(table.S) + 46 + CURVES;
  const parts = [];
  for (let stage = 0; stage < table.S; stage++)
    parts.push(`<text class="end" x="${LEFT - 8}" y="${y(stage) + 17}">stage ${stage}</text>`,
      `<rect class="idle" x="${LEFT}" y="${y(stage)}" width="${scale * run.makespan}" height="${ROW}"/>`);
  for (const kind of table.kinds)
    table.ticks[kind].forEach((tick, unit) => {
      if (tick < 0) return;
      const g = unit % table.G, m = (unit - g) / table.G, chunk = Math.floor(g / table.S);
      const top = y(table.stageOf[g]), from = run.start[kind][unit], width = scale * (run.end[kind][unit] - from);
      const title = `${g}${kind}${m}: ${number(from)} to ${number(run.end[kind][unit])}`;
      parts.push(`<rect x="${x(from)}" y="${top}" width="${Math.max(width - 1, 0.3)}" height="${ROW}" rx="2"
        fill="${fillOf(kind, chunk, table.V)}"><title>${title}</title></rect>`);
      if (width > 15) {
        const ink = kind === "F" && chunk === 0 ? "#fff" : "#12161c";
        parts.push(`<text class="number" style="fill:${ink}" x="${x(from) + width / 2}" y="${top + 13}">${m}</text>`);
      }
    });
  run.headStart.forEach((from, m) => {
    const stages = table.lockstep ? [...Array(table.S).keys()] : [table.stageOf[table.G - 1]];
    const width = scale * (run.headEnd[m] - from);
    if (width > 0)
      for (const stage of stages)
        parts.push(`<rect class="head" x="${x(from)}" y="${y(stage)}" width="${width}" height="${ROW}"/>`);
  });
  parts.push(`<text class="end muted" x="${LEFT - 8}" y="${y(table.S) + 10}">time</text>`);
  for (let i = 0; i <= 5; i++) {
    const time = (run.makespan * i) / 5;
    parts.push(`<text class="${i < 5 ? "mid" : "end"} muted" x="${x(time)}" y="${y(table.S) + 10}">
      ${number(time, 3)}</text>`);
  }
  const peak = Math.max(...run.peaks, limit * table.V, 1), height = (count) => bottom - (CURVES * count) / peak;
  parts.push(`<text class="muted" x="${LEFT}" y="${bottom - CURVES - 10}">activations in flight on each stage, in
    microbatches; before offloading</text>`);
  for (const count of [0, peak])
    parts.push(`<text class="end muted" x="${LEFT - 8}" y="${height(count) + 4}">${number(count / table.V, 3)}</text>`);
  run.inFlight.forEach((curve, stage) => {
    const path = curve.map(([time, count]) => `H${x(time)}V${height(count)}`).join("");
    const colour = STAGES[Math.round((3 * stage) / Math.max(table.S - 1, 1))];
    parts.push(`<path class="curve" stroke="${colour}" d="M${LEFT} ${bottom}${path}"><title>stage ${stage}</title></path>`);
  });
  if (limit > 0)
    parts.push(`<path class="limit" d="M${LEFT} ${height(limit * table.V)}H${WIDTH - 10}"/>`);
  return `<svg viewBox="0 0 ${WIDTH} ${bottom + 8}" role="img">${parts.join("")}</svg>`;
}

// The command that draws the same; without times where they are those that it takes by itself.
function commandOf(keys) {
  const given = { stages: keys.stages, microbatches: keys.microbatches, repeats: keys.repeats, forward: keys.forward,
    backward: +(keys.input_gradient + keys.weight_gradient).toFixed(6), input_gradient: keys.input_gradient,
    weight_gradient: keys.weight_gradient, comm: keys.comm, head: keys.head };
  const usual = { forward: 1, backward: 2, input_gradient: 1, weight_gradient: 1, comm: 0, head: 0 };
  if (SCHEDULES[keys.schedule].repeats) delete given.repeats;
  const words = Object.entries(given).filter(([key, value]) => value !== usual[key]);
  return ["python -m maxpipe.schedule", keys.schedule, ...words.map((word) => word.join("="))].join(" ");
}

function show(keys) {
  const byId = (id) => document.getElementById(id);
  const runs = KEYS.schedule.choices.map((name) => {
    const table = tableOf(name, keys);
    const run = simulate(table, costsOf(keys, table.V));
    return { name, table, run, memory: memoryOf(table, run, keys.offload) };
  });
  const chosen = runs.find(({ name }) => name === keys.schedule);
  const fits = ({ memory }) => !(keys.memory > 0) || memory <= keys.memory + 1e-9;
  byId("figures").textContent =
    `bubble ${percent(chosen.run.bubble)}, makespan ${number(chosen.run.makespan)}, memory ${number(chosen.memory)}` +
    (fits(chosen) ? "" : ", over the limit");
  byId("chart").innerHTML = draw(chosen.table, chosen.run, keys.memory);
  byId("command").textContent = commandOf(keys);
  const rows = runs.sort((a, b) => a.run.makespan - b.run.makespan).map((it) => {
    const kind = `${it === chosen ? "chosen" : ""} ${fits(it) ? "" : "over"}`;
    const cells = [it.name, it.table.V, number(it.run.makespan), percent(it.run.bubble), number(it.memory)];
    return `<tr class="${kind}" data-name="${it.name}"><td>${cells.join("<td>")}</tr>`;
  });
  byId("all").innerHTML =
    `<thead><tr><th>schedule<th>repeats<th>makespan<th>bubble<th>memory</tr></thead><tbody>${rows.join("")}</tbody>`;
  for (const row of byId("all").tBodies[0].rows)
    row.onclick = () => change({ ...keys, schedule: row.dataset.name });
}

const wordsOfAddress = () => [...new URLSearchParams(location.hash.slice(1))];

// The value that a word gives a key; undefined if there is no such key or value.
function valueOf(key, word) {
  if (!Object.hasOwn(KEYS, key)) return undefined;
  const { value, choices, most } = KEYS[key], read = typeof value === "number" ? Number(word) : word;
  return (choices ? choices.includes(read) : read >= 0 && read <= most) ? read : undefined;
}

function keysOfAddress() {
  const keys = Object.fromEntries(Object.entries(KEYS).map(([key, { value }]) => [key, value]));
  for (const [key, word] of wordsOfAddress()) {
    const read = valueOf(key, word);
    if (read !== undefined) keys[key] = read;
  }
  return keys;
}

// A line for each word of the address that is not used, with what is legal.
function refusedOfAddress() {
  const refused = wordsOfAddress().filter(([key, word]) => valueOf(key, word) === undefined);
  return refused.map(([key, word]) => {
    if (!Object.hasOwn(KEYS, key)) return `${key}: unknown, only ${Object.keys(KEYS).join(", ")}`;
    const { value, choices, most } = KEYS[key];
    return `${key}=${word}: only ${choices ? choices.join(", ") : `0 to ${most}`}; ${value} is shown`;
  });
}

function change(keys) {
  const words = Object.entries(keys).filter(([key, value]) => value !== KEYS[key].value);
  history.replaceState(null, "", "#" + new URLSearchParams(words));
  update(keys);
}

// Puts the values into the form, and shows them.
function update(keys) {
  for (const [key, value] of Object.entries(keys)) {
    const field = document.forms.keys.elements[key];
    field.value = value;
    field.previousElementSibling.value = KEYS[key].choices ? "" : key === "memory" && !value ? "none" : value;
  }
  document.getElementById("refused").innerText = refusedOfAddress().join("\n");
  document.forms.keys.elements.repeats.disabled = Boolean(SCHEDULES[keys.schedule].repeats);
  show(keys);
}

function build() {
  const form = document.getElementById("keys");
  form.name = "keys";
  form.innerHTML = Object.entries(KEYS).map(([key, { text, choices, most, step }]) => {
    const field = choices
      ? `<select name="${key}">${choices.map((choice) => `<option>${choice}`).join("")}</select>`
      : `<input type="range" name="${key}" min="0" max="${most}" step="${step || 0.05}">`;
    return `<label>${text} <output></output>${field}</label>`;
  }).join("");
  form.oninput = () => {
    const keys = {};
    for (const [key, { value }] of Object.entries(KEYS)) {
      const word = form.elements[key].value;
      keys[key] = typeof value === "number" ? Number(word) : word;
    }
    change(keys);
  };
  form.onsubmit = () => false;
  window.onhashchange = () => update(keysOfAddress());
  update(keysOfAddress());
}

build();
