const names = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
const describe = (unit, at, stages) => {
  const [stage, start, end] = at.split(" ");
  const when = `\nstage ${stage}, time ${start} to ${end}`;
  if (unit[0] === "H") return `head of microbatch ${unit.slice(1)}` + when;
  const [, chunk, kind, microbatch] = unit.match(/(\d+)(\D)(\d+)/);
  return `${unit}: ${names[kind]} of microbatch ${microbatch}\n` +
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
    const microbatch = box.dataset.unit.match(/\d+$/)[0];
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
    trace(box ? box.dataset.unit.match(/\d+$/)[0] : null);
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
    show(event, `in flight at time ${+time.toPrecision(4)}\n` + counts.join("\n"));
  });
  chart.addEventListener("pointerleave", () => {
    trace(null);
    cursor.remove();
    tip.style.display = "none";
  });
}
