// One run, whole: what it measured, with which settings, made by what.
function parts(places) {
  return Object.fromEntries(Object.entries(places).map(([name, place]) => [name, data.pool[place]]));
}

// The record as it lies under runs/.
function recordOf(run) {
  const { record } = run;
  const fields = { ...parts(record.fields), key: run.key, metrics: Object.fromEntries(run.metrics), config: parts(record.config),
    provenance: { ...parts(record.provenance), ...record.own } };
  const whole = Object.fromEntries(Object.entries(fields).sort(([first], [second]) => (first < second ? -1 : 1)));
  return whole;
}

function leaves(value, prefix = "") {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    return Object.entries(value).flatMap(([name, part]) => leaves(part, prefix ? `${prefix}.${name}` : name));
  }
  return [[prefix, typeof value === "string" ? value : JSON.stringify(value)]];
}

function block(title, ...children) {
  return el("section", {}, el("h3", {}, title), ...children);
}

function pairs(lines) {
  return el("table", { class: "pairs" }, el("tbody", {}, ...lines.map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))));
}

function copyButton(words, content) {
  const button = el("button", { type: "button", class: "quiet", onclick: async () => {
    try {
      await navigator.clipboard.writeText(content());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy";
    }
    setTimeout(() => { button.textContent = words; }, 1500);
  } }, words);
  return button;
}

function saveButton(name, content) {
  return el("button", { type: "button", class: "quiet", onclick: () => {
    const address = URL.createObjectURL(new Blob([content()], { type: "application/json" }));
    el("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  } }, "Save");
}

function metricLines(run) {
  const units = data.pool[run.record.fields.units] ?? {};
  const names = [...run.metrics.keys()].filter((name) => !(name.endsWith("_se") && run.metrics.has(name.slice(0, -3))));
  const order = new Map(Object.keys(data.metrics).map((name, place) => [name, place]));
  names.sort((a, b) => (order.get(a) ?? 1e9) - (order.get(b) ?? 1e9) || natural(a, b));
  return el("table", { class: "pairs numbers" },
    el("thead", {}, el("tr", {}, ...["Quantity", "Value", "Standard error", "Unit"].map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, ...names.map((name) => el("tr", {}, el("th", { scope: "row" }, name),
      el("td", { class: "number" }, precise(run.metrics.get(name))),
      el("td", { class: "number" }, run.metrics.has(`${name}_se`) ? precise(run.metrics.get(`${name}_se`)) : ""),
      el("td", {}, Object.hasOwn(units, name) && units[name] !== "1" ? String(units[name]) : "")))));
}

function precise(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en").replaceAll(",", "\u202f");
  return Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(6))) : value.toExponential(4);
}

function chips(run) {
  const words = [run.status, run.task, run.model, run.dataset, `${run.bits} bits`].filter(Boolean);
  if (run.bits === "fixed") words[4] = "fixed rate";
  if (run.baseline) words[4] = run.bits;
  if (run.best) words.push("on the frontier");
  if (run.noise) words.push("within noise of full precision");
  if (run.stale) words.push("stale: its code has changed");
  const method = data.methods[run.method];
  const chip = (word) => el("li", { class: ["failed", "unsupported"].includes(word) ? "bad" : "" }, word);
  const list = el("ul", { class: "chips" }, ...words.map(chip));
  if (method.link) {
    list.append(el("li", {}, el("a", { href: method.link, rel: "noopener noreferrer", target: "_blank" }, `${method.label}, ${method.paper}`)));
  }
  return list;
}

function fillDetail(run) {
  const record = recordOf(run);
  const json = () => `${JSON.stringify(record, null, 2)}\n`;
  const baseline = record.baseline_key ?? null;
  $("detail-title").textContent = run.baseline ? run.name : `${run.name} · ${run.bits}`;
  const command = String(record.command ?? record.provenance.command ?? "");
  const settings = Object.entries(record.config).map(([name, part]) => block(name, pairs(leaves(part).map(([leaf, value]) => [leaf || name, value]))));
  $("detail-body").replaceChildren(
    chips(run),
    ...(run.reason ? [el("p", { class: "reason" }, run.reason)] : []),
    block("Measured", metricLines(run)),
    block("Command", el("pre", {}, el("code", {}, command)), copyButton("Copy", () => command)),
    el("section", {}, el("h3", {}, "Settings"), el("div", { class: "settings" }, ...settings)),
    block("Origin", pairs(leaves(record.provenance).filter(([name]) => name !== "command"))),
    block("Full precision", baseline === null ? el("p", {}, "This run is paired with none.")
      : byKey.has(baseline) ? el("button", { type: "button", class: "open", onclick: () => openRun(baseline) }, `run ${baseline.slice(0, 12)}`)
        : el("p", {}, `run ${baseline.slice(0, 12)}, which is not among these records`)),
    el("section", {}, el("details", {}, el("summary", {}, "Record as JSON"), el("pre", {}, el("code", {}, json()))),
      copyButton("Copy", json), " ", saveButton(`${run.key}.json`, json)),
  );
}

function openRun(key) {
  const run = byKey.get(key);
  if (!run) return;
  state.run = key;
  fillDetail(run);
  const dialog = $("detail");
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  writeAddress();
}

function stepRun(step) {
  const runs = visibleRuns();
  const place = runs.findIndex((run) => run.key === state.run);
  const next = runs[place + step];
  if (next && place >= 0) openRun(next.key);
}

function buildDetail() {
  const dialog = $("detail");
  $("close").addEventListener("click", () => dialog.close());
  $("previous").addEventListener("click", () => stepRun(-1));
  $("next").addEventListener("click", () => stepRun(1));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    if (event.target.closest?.("pre, input")) return;
    if (event.key === "ArrowLeft") stepRun(-1);
    if (event.key === "ArrowRight") stepRun(1);
  });
  dialog.addEventListener("close", () => {
    state.run = null;
    writeAddress();
  });
}
