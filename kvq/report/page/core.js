// The data, the state of the page, and small builders. Text from records only ever becomes a text node.
const data = JSON.parse(document.getElementById("data").textContent);
const DASH = "–";
const FACETS = [
  ["method", "Method"],
  ["paper", "Paper"],
  ["model", "Model"],
  ["dataset", "Data set"],
  ["bits", "Bits"],
  ["status", "Status"],
];
const byKey = new Map();
for (const run of data.runs) {
  const names = data.pool[run.names];
  run.metrics = new Map(names.map((name, place) => [name, run.values[place]]));
  run.paper = data.methods[run.method].paper;
  run.effective = run.metrics.get("effective_bits") ?? run.metrics.get("bits_per_element") ?? null;
  run.text = [run.name, data.methods[run.method].label, run.paper, run.model, run.dataset, run.task, run.bits, run.status, run.key, data.protocols[run.protocol].words]
    .join(" ").toLowerCase();
  byKey.set(run.key, run);
}

const state = {
  task: data.tasks[0].name,
  search: "",
  chosen: Object.fromEntries(FACETS.map(([name]) => [name, new Set()])),
  low: null,
  high: null,
  sort: null,
  descending: false,
  shown: 100,
  plot: { protocol: null, x: null, y: null, scale: "auto", hidden: new Set() },
  run: null,
};
const listeners = [];

function $(id) {
  return document.getElementById(id);
}

function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Halves go to the even digit, as in the tables; toFixed rounds them up.
function rounded(value, digits) {
  const longer = value.toFixed(digits + 1);
  const half = longer.endsWith("5") && Number.isInteger(value * 2 ** (digits + 1));
  return half && /[02468]\.?$/.test(longer.slice(0, -1)) ? longer.slice(0, -1).replace(/\.$/, "") : value.toFixed(digits);
}

// As the tables: from 10,000 on three significant digits.
function fixed(value, digits, signed = false) {
  const sign = signed && value >= 0 ? "+" : "";
  const text = Math.abs(value) >= 1e4 ? value.toPrecision(3) : rounded(value, digits);
  const plain = Number(text) === 0 ? text.replace("-", "") : text;
  return (signed && Number(text) === 0 ? "+" : sign) + plain;
}

function known(name) {
  if (Object.hasOwn(data.metrics, name)) return data.metrics[name];
  return { title: name, short: name, digits: 4, scale: 1, signed: false, better: "" };
}

function shownMetric(run, name, withError = true) {
  const value = run.metrics.get(name);
  if (value === undefined) return DASH;
  const { digits, scale, signed } = known(name);
  const error = withError ? run.metrics.get(`${name}_se`) : undefined;
  const spread = error === undefined ? "" : ` ± ${fixed(error * scale, digits)}`;
  return fixed(value * scale, digits, signed) + spread;
}

function facetValue(run, name) {
  return run[name];
}

// Runs that pass every filter; `except` names a facet that is left out, for its own counts.
function passes(run, except = null) {
  if (state.task !== "" && run.task !== state.task) return false;
  for (const [name] of FACETS) {
    if (name !== except && state.chosen[name].size && !state.chosen[name].has(facetValue(run, name))) return false;
  }
  if (state.low !== null && !(run.effective !== null && run.effective >= state.low)) return false;
  if (state.high !== null && !(run.effective !== null && run.effective <= state.high)) return false;
  return state.search.split(/\s+/).every((word) => run.text.includes(word));
}

function filtered() {
  return data.runs.filter((run) => passes(run));
}

function change(update) {
  update();
  for (const listener of listeners) listener();
  writeAddress();
}

// The address keeps the view, so that it can be sent and reloaded.
function writeAddress() {
  const words = new URLSearchParams();
  if (state.task !== data.tasks[0].name) words.set("task", state.task);
  if (state.search) words.set("search", state.search);
  for (const [name] of FACETS) for (const value of state.chosen[name]) words.append(name, value);
  for (const name of ["low", "high", "sort", "run"]) if (state[name] !== null) words.set(name, state[name]);
  if (state.descending) words.set("descending", "1");
  for (const name of ["protocol", "x", "y"]) if (state.plot[name] !== null) words.set(`plot-${name}`, state.plot[name]);
  if (state.plot.scale !== "auto") words.set("plot-scale", state.plot.scale);
  const text = words.toString();
  try {
    history.replaceState(null, "", text ? `#?${text}` : "#");
  } catch {
    // A page without an address of its own (a preview in a mail program) still works.
  }
}

function readAddress() {
  if (!location.hash.startsWith("#?")) return;
  const words = new URLSearchParams(location.hash.slice(2));
  const task = words.get("task");
  if (task !== null && (task === "" || data.tasks.some((found) => found.name === task))) state.task = task;
  state.search = (words.get("search") ?? "").toLowerCase();
  for (const [name] of FACETS) state.chosen[name] = new Set(words.getAll(name));
  for (const name of ["low", "high"]) {
    const value = Number.parseFloat(words.get(name));
    state[name] = Number.isFinite(value) ? value : null;
  }
  state.sort = words.get("sort");
  state.descending = words.get("descending") === "1";
  for (const name of ["x", "y"]) state.plot[name] = words.get(`plot-${name}`);
  const protocol = Number.parseInt(words.get("plot-protocol"), 10);
  state.plot.protocol = data.protocols[protocol] ? protocol : null;
  if (["linear", "log"].includes(words.get("plot-scale"))) state.plot.scale = words.get("plot-scale");
  state.run = byKey.has(words.get("run")) ? words.get("run") : null;
}
