// Cost against quality, for runs of one protocol. No library: scales, ticks, marks.
const MARKERS = [
  "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z",
  "M-4.4-4.4H4.4V4.4H-4.4Z",
  "M0-5.6L5.4 4.2H-5.4Z",
  "M0-6L6 0L0 6L-6 0Z",
  "M0 5.6L5.4-4.2H-5.4Z",
  "M-1.8-5.4H1.8V-1.8H5.4V1.8H1.8V5.4H-1.8V1.8H-5.4V-1.8H-1.8Z",
  "M-5.2-2.8L-2.8-5.2L0-2.4L2.8-5.2L5.2-2.8L2.4 0L5.2 2.8L2.8 5.2L0 2.4L-2.8 5.2L-5.2 2.8L-2.4 0Z",
  "M0-6L1.6-2L5.8-1.9L2.5.8L3.6 4.9L0 2.5L-3.6 4.9L-2.5.8L-5.8-1.9L-1.6-2Z",
];
// A method has the colour that it has in figures; its variants share it, each with a marker that no other of that colour has.
const looks = new Map();
const markersUsed = new Map();
for (const run of [...data.runs].sort((a, b) => natural(a.name, b.name))) {
  if (looks.has(run.name)) continue;
  const { colour } = data.methods[run.method];
  const marker = markersUsed.get(colour) ?? 0;
  looks.set(run.name, { colour, marker, family: run.method.split("/")[0], variant: run.variant });
  markersUsed.set(colour, marker + 1);
}

function coloured(node, name) {
  node.style.setProperty("--c", looks.get(name).colour);
  return node;
}

function markOf(name) {
  const { marker, variant } = looks.get(name);
  return svg("path", { d: MARKERS[marker % MARKERS.length], class: variant ? "series hollow" : "series" });
}

function byFamily(a, b) {
  const [one, other] = [looks.get(a), looks.get(b)];
  return natural(one.family, other.family) || one.variant - other.variant || natural(a, b);
}

function costs(runs) {
  const names = new Set(runs.flatMap((run) => [...run.metrics.keys()]));
  return [...SIZE_COLUMNS, ...[...names].filter((name) => /(^|_)(bits|bytes)$/.test(name)).sort()]
    .filter((name, place, all) => names.has(name) && all.indexOf(name) === place);
}

function qualities(runs) {
  const names = new Set(runs.flatMap((run) => [...run.metrics.keys()]));
  const ordered = [...Object.keys(data.metrics).filter((name) => known(name).better), ...[...names].sort()];
  const sizes = new Set(costs(runs));
  return [...new Set(ordered)].filter((name) => names.has(name) && !sizes.has(name) && !name.endsWith("_se"));
}

function preferred(names) {
  return ["delta_nll", "accuracy", "score"].find((name) => names.includes(name)) ?? names[0] ?? null;
}

function fill(select, options, value) {
  select.replaceChildren(...options.map(([key, label]) => el("option", { value: key, selected: key === value }, label)));
  select.value = value ?? "";
  select.disabled = options.length < 2;
}

// What the plot shows now: its protocol, its two quantities, its runs.
function chosenPlot() {
  const runs = filtered().filter((run) => !run.baseline && run.status === "done");
  const counts = new Map();
  for (const run of runs) counts.set(run.protocol, (counts.get(run.protocol) ?? 0) + 1);
  const protocols = [...counts.keys()].sort((a, b) => a - b);
  let protocol = state.plot.protocol;
  // The page opens on the main model, of its protocols on that with most points.
  const rank = (place) => (data.protocols[place].main ? 1e9 : 0) + counts.get(place);
  if (!counts.has(protocol)) protocol = protocols.reduce((best, next) => (best === null || rank(next) > rank(best) ? next : best), null);
  const here = runs.filter((run) => run.protocol === protocol);
  const [xs, ys] = [costs(here), qualities(here)];
  const x = xs.includes(state.plot.x) ? state.plot.x : xs.includes("effective_bits") ? "effective_bits" : (xs[0] ?? null);
  const y = ys.includes(state.plot.y) ? state.plot.y : preferred(ys);
  const points = here.filter((run) => run.metrics.has(x) && run.metrics.has(y)).map((run) => ({
    run,
    x: run.metrics.get(x) * known(x).scale,
    y: run.metrics.get(y) * known(y).scale,
    error: (run.metrics.get(`${y}_se`) ?? 0) * known(y).scale,
  }));
  return { counts, protocols, protocol, xs, ys, x, y, points };
}

function niceStep(span, count) {
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999);
}

function linearScale(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const [from, to] = [low - span * 0.06, high + span * 0.06];
  const step = niceStep(to - from, count);
  const digits = Math.min(8, Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (step / 10 ** Math.floor(Math.log10(step)) === 2.5 ? 1 : 0)));
  const ticks = [];
  for (let place = Math.ceil(from / step); place * step <= to; place += 1) ticks.push([place * step, fixed(place * step, digits)]);
  return { at: (value) => (value - from) / (to - from), ticks };
}

function tickLabel(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const plain = size >= 1e-4 && size < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(0);
  return plain.replace("-", "−");
}

// Logarithmic; linear near 0 where there are values at or below it.
function logScale(low, high, values) {
  const sizes = values.map(Math.abs).filter((value) => value > 0).sort((a, b) => a - b);
  const positive = low > 0;
  const near = positive ? low : 10 ** Math.floor(Math.log10(sizes[Math.floor(sizes.length / 4)] ?? 1));
  const map = positive ? Math.log10 : (value) => Math.asinh(value / near);
  const [first, last] = [map(low), map(high)];
  const pad = (last - first || 1) * 0.06;
  const [from, to] = [first - pad, last + pad];
  const marks = new Set(positive ? [] : [0]);
  const decades = Math.log10(high / (positive ? low : near));
  for (let power = Math.floor(Math.log10(near)); power <= Math.ceil(Math.log10(Math.max(high, -low, near))); power += 1) {
    for (const factor of positive && decades < 2 ? [1, 1.5, 2, 3, 5, 7] : [1]) {
      marks.add(factor * 10 ** power);
      if (!positive) marks.add(-factor * 10 ** power);
    }
  }
  const ticks = [...marks].filter((value) => (!positive || value > 0) && map(value) >= from && map(value) <= to).sort((a, b) => a - b);
  const thin = Math.ceil(ticks.length / 9);
  return { at: (value) => (map(positive ? Math.max(value, low * 1e-3) : value) - from) / (to - from),
    ticks: ticks.filter((value, place) => value === 0 || place % thin === 0).map((value) => [value, tickLabel(value)]) };
}

// Bits by factors where they span many: few bits, of which most is to be told, would stand in a corner.
function xScale(values, count) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return low > 0 && high / low > 5 ? logScale(low, high, values) : linearScale(low, high, count);
}

function yScale(points, reference, count) {
  const ends = points.flatMap((point) => [point.y - point.error, point.y + point.error]);
  const values = points.map((point) => point.y);
  const all = reference === null ? ends : [...ends, reference];
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const sizes = values.map(Math.abs).filter((value) => value > 0).sort((a, b) => a - b);
  const wide = sizes.length > 2 && sizes.at(-1) / sizes[Math.floor(sizes.length / 2)] > 12;
  const log = state.plot.scale === "log" || (state.plot.scale === "auto" && wide);
  if (!log || !sizes.length) return linearScale(low, high, count);
  return logScale(low <= 0 && Math.min(...values, reference ?? Infinity) > 0 ? Math.min(...values, reference ?? Infinity) : low, high, values);
}

// What full precision has: measured, or 0 where the quantity is a distance to it.
function referenceOf(protocol, y) {
  if (/^(delta_|kl_)/.test(y)) return 0;
  const full = data.runs.find((run) => run.protocol === protocol && run.baseline && run.metrics.has(y));
  return full ? full.metrics.get(y) * known(y).scale : null;
}

function frontierPath(points, at, lower) {
  const best = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || (lower ? a.y - b.y : b.y - a.y))) {
    if (!best.length || (lower ? point.y < best.at(-1).y : point.y > best.at(-1).y)) best.push(point);
  }
  return best.map((point, place) => `${place ? `H${at.x(point.x)}V` : `M${at.x(point.x)} `}${at.y(point.y)}`).join("");
}

function showPlot() {
  const plot = chosenPlot();
  fill($("plot-protocol"), plot.protocols.map((place) => [String(place), `${data.protocols[place].title} (${plot.counts.get(place)})`]),
    plot.protocol === null ? null : String(plot.protocol));
  fill($("plot-x"), plot.xs.map((name) => [name, known(name).title]), plot.x);
  fill($("plot-y"), plot.ys.map((name) => [name, known(name).title]), plot.y);
  $("plot-scale").value = state.plot.scale;
  showLegend(plot.points);
  drawPlot(plot, plot.points.filter((point) => !state.plot.hidden.has(point.run.name)));
}

function showLegend(points) {
  const methods = [...new Set(points.map((point) => point.run.name))].sort(byFamily);
  const focused = document.activeElement?.dataset?.method;
  $("legend").replaceChildren(...methods.map((method) =>
    el("button", { type: "button", "data-method": method, "aria-pressed": String(!state.plot.hidden.has(method)),
      onclick: () => change(() => { if (!state.plot.hidden.delete(method)) state.plot.hidden.add(method); }) },
      coloured(svg("svg", { viewBox: "-8 -8 16 16", width: 14, height: 14, "aria-hidden": "true" }, markOf(method)), method), method)));
  for (const button of $("legend").children) if (button.dataset.method === focused) button.focus();
}

function drawPlot(plot, points) {
  const frame = $("plot");
  $("tip").hidden = true;
  const notes = { none: "No runs with a measured cost and quality pass these filters." };
  $("plot-note").textContent = points.length ? "" : notes.none;
  if (!points.length) return frame.replaceChildren();
  const width = Math.max(frame.clientWidth, 280);
  const narrow = width < 560;
  const height = Math.round(Math.min(Math.max(width * 0.5, 320), 480));
  const reference = referenceOf(plot.protocol, plot.y);
  const xValues = points.map((point) => point.x);
  const scales = { x: xScale(xValues, narrow ? 4 : 8), y: yScale(points, reference, 6) };
  const longest = Math.max(...scales.y.ticks.map(([, words]) => words.length));
  const margin = { left: 30 + Math.ceil(6.6 * longest), right: 14, top: 14, bottom: 48 };
  const round = (value) => Math.round(value * 10) / 10;
  const at = {
    x: (value) => round(margin.left + scales.x.at(value) * (width - margin.left - margin.right)),
    y: (value) => round(height - margin.bottom - scales.y.at(value) * (height - margin.top - margin.bottom)),
  };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": `${known(plot.y).title} against ${known(plot.x).title}: ${points.length} runs of ${data.protocols[plot.protocol].title}` });
  drawAxes(root, scales, at, { width, height, margin, plot, reference });
  drawLines(root, points, at, known(plot.y).better);
  drawPoints(root, points, at, plot);
  frame.replaceChildren(root);
}

function drawAxes(root, scales, at, { width, height, margin, plot, reference }) {
  const label = (x, y, words, attributes = {}) => {
    const node = svg("text", { x, y, ...attributes });
    node.textContent = words;
    root.append(node);
  };
  for (const [value, words] of scales.y.ticks) {
    root.append(svg("line", { x1: margin.left, x2: width - margin.right, y1: at.y(value), y2: at.y(value), class: "grid" }));
    label(margin.left - 8, at.y(value), words, { class: "tick", "text-anchor": "end", "dominant-baseline": "middle" });
  }
  for (const [value, words] of scales.x.ticks) {
    root.append(svg("line", { x1: at.x(value), x2: at.x(value), y1: height - margin.bottom, y2: height - margin.bottom + 4, class: "axis" }));
    label(at.x(value), height - margin.bottom + 18, words, { class: "tick", "text-anchor": "middle" });
  }
  root.append(svg("line", { x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom, class: "axis" }));
  label((margin.left + width - margin.right) / 2, height - 8, known(plot.x).title, { class: "label", "text-anchor": "middle" });
  label(0, 0, known(plot.y).title, { class: "label", "text-anchor": "middle", transform: `translate(13 ${(height - margin.bottom + margin.top) / 2}) rotate(-90)` });
  if (reference !== null) {
    root.append(svg("line", { x1: margin.left, x2: width - margin.right, y1: at.y(reference), y2: at.y(reference), class: "reference" }));
    const below = at.y(reference) < height - margin.bottom - 24;
    label(margin.left + 4, at.y(reference) + (below ? 14 : -6), "full precision", { class: "tick" });
  }
}

function drawLines(root, points, at, better) {
  const groups = Map.groupBy ? Map.groupBy(points, (point) => point.run.name) : grouped(points, (point) => point.run.name);
  for (const group of groups.values()) {
    if (group.length < 2) continue;
    const ordered = [...group].sort((a, b) => a.x - b.x);
    const d = ordered.map((point, place) => `${place ? "L" : "M"}${at.x(point.x)} ${at.y(point.y)}`).join("");
    root.append(coloured(svg("path", { d, class: "thread" }), ordered[0].run.name));
  }
  const methods = points.filter((point) => !point.run.variant);
  if (better && methods.length > 1) root.append(svg("path", { d: frontierPath(methods, at, better === "lower"), class: "frontier" }));
}

function grouped(items, name) {
  const groups = new Map();
  for (const item of items) groups.set(name(item), [...(groups.get(name(item)) ?? []), item]);
  return groups;
}

// The points are one stop of the Tab key; arrows walk along the cost.
function drawPoints(root, points, at, plot) {
  const ordered = [...points].sort((a, b) => a.x - b.x || a.y - b.y);
  const labelled = ordered.length <= 60;
  const nodes = ordered.map((point, place) => {
    const { run } = point;
    const words = `${run.name} ${run.bits}`;
    const node = svg("g", { class: "point", tabindex: place ? "-1" : "0", role: "button", "data-key": run.key,
      transform: `translate(${at.x(point.x)} ${at.y(point.y)})`,
      "aria-label": `${words}: ${known(plot.x).short} ${fixed(point.x, 3)}, ${known(plot.y).short} ${shownMetric(run, plot.y)}` });
    coloured(node, run.name);
    if (point.error) {
      const [top, bottom] = [at.y(point.y + point.error) - at.y(point.y), at.y(point.y - point.error) - at.y(point.y)];
      node.append(svg("path", { d: `M0 ${round1(top)}V${round1(bottom)}`, class: "whisker" }));
    }
    node.append(svg("circle", { r: 11, class: "target" }));
    if (run.best) node.append(svg("circle", { r: 9, class: "ring" }));
    node.append(markOf(run.name));
    if (!run.best && labelled && run.bits.length <= 5) {
      const tag = svg("text", { x: 9, y: -7, class: "tag" });
      tag.textContent = run.bits;
      node.append(tag);
    }
    node.addEventListener("click", () => openRun(run.key));
    node.addEventListener("mouseenter", () => showTip(point, at, plot));
    node.addEventListener("focus", () => showTip(point, at, plot));
    for (const over of ["mouseleave", "blur"]) node.addEventListener(over, () => { $("tip").hidden = true; });
    return node;
  });
  nodes.forEach((node, place) => node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      openRun(ordered[place].run.key);
    }
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = step === undefined ? undefined : nodes[place + step];
    if (!next) return;
    event.preventDefault();
    node.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }));
  const named = $("plot").clientWidth < 560 ? [] : ordered.filter(({ run }) => run.best);
  root.append(svg("g", { class: "points" }, ...nodes), ...named.map((point) => nameTag(point, at)));
}

// The name of a run on the frontier: below to the left of it, where only what is better would be, if there is room.
function nameTag({ run, x, y }, at) {
  const words = `${run.name} ${run.bits}`;
  const room = at.x(x) > 7 * words.length + 80; // beside the axis' own words
  const tag = svg("text", { x: at.x(x) + (room ? -11 : 11), y: at.y(y) + (room ? 14 : -9), class: "tag", "text-anchor": room ? "end" : "start", "aria-hidden": "true" });
  tag.textContent = words;
  return tag;
}

function round1(value) {
  return Math.round(value * 10) / 10;
}

function showTip({ run, x, y }, at, plot) {
  const tip = $("tip");
  const line = (name) => el("div", {}, el("span", {}, known(name).short), " ", el("b", {}, shownMetric(run, name)));
  tip.replaceChildren(el("strong", {}, `${run.name} · ${run.bits}`), line(plot.x), line(plot.y),
    ...(run.best ? [el("em", {}, "on the frontier beyond noise")] : run.noise ? [el("em", {}, "within noise of full precision")] : []));
  tip.hidden = false;
  const left = Math.min(Math.max(at.x(x) - tip.offsetWidth / 2, 0), $("plot").clientWidth - tip.offsetWidth);
  const above = at.y(y) - tip.offsetHeight - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 0 ? at.y(y) + 16 : above}px`;
}

function buildPlot() {
  for (const [id, name] of [["plot-x", "x"], ["plot-y", "y"], ["plot-scale", "scale"]]) {
    $(id).addEventListener("change", () => change(() => { state.plot[name] = $(id).value; }));
  }
  $("plot-protocol").addEventListener("change", () => change(() => { state.plot.protocol = Number($("plot-protocol").value); }));
  let width = 0;
  new ResizeObserver(() => {
    if ($("plot").clientWidth !== width) {
      width = $("plot").clientWidth;
      showPlot();
    }
  }).observe($("plot"));
}
