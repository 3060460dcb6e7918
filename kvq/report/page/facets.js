// Task, facets, search and the range of bits.
const facetParts = new Map();

function natural(left, right) {
  return String(left).localeCompare(String(right), "en", { numeric: true });
}

function facetLabel(name, value) {
  if (name === "method" && data.methods[value].label !== value) return `${value} · ${data.methods[value].label}`;
  if (name === "paper") {
    const labels = Object.values(data.methods).filter((method) => method.paper === value).map((method) => method.label);
    return labels.length === 1 || value !== "no paper" ? `${labels.sort((a, b) => a.length - b.length)[0]} · ${value}` : value;
  }
  return value;
}

function buildTasks() {
  const tasks = [...data.tasks.map((task) => [task.name, task.name, task.runs])];
  if (tasks.length > 1) tasks.push(["", "all", data.runs.length]);
  $("tasks").replaceChildren(
    ...tasks.map(([value, label, runs]) =>
      el("button", { type: "button", "aria-pressed": "false", "data-task": value,
        onclick: () => change(() => { state.task = value; state.sort = null; state.descending = false; state.shown = 100; }) },
        label, " ", el("span", { class: "count" }, String(runs)))),
  );
}

function buildFacets() {
  for (const [name, title] of FACETS) {
    const values = [...new Set(data.runs.map((run) => facetValue(run, name)))].sort(natural);
    if (values.length < 2) continue;
    const boxes = values.map((value) => {
      const box = el("input", { type: "checkbox", value,
        onchange: () => change(() => {
          if (box.checked) state.chosen[name].add(value);
          else state.chosen[name].delete(value);
          state.shown = 100;
        }) });
      const count = el("span", { class: "count" });
      return { value, box, count, line: el("label", {}, box, el("span", { class: "facet-name" }, facetLabel(name, value)), count) };
    });
    const number = el("span", { class: "badge", hidden: true });
    const details = el("details", { class: "facet", "data-facet": name },
      el("summary", {}, title, " ", number),
      el("div", { class: "facet-values", role: "group", "aria-label": title }, ...boxes.map((part) => part.line)));
    facetParts.set(name, { boxes, number, details });
    $("facets").append(details);
  }
  const openOnes = () => [...facetParts.values()].map((part) => part.details).filter((details) => details.open);
  document.addEventListener("click", (event) => {
    for (const details of openOnes()) if (!details.contains(event.target)) details.open = false;
  });
  $("filters").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const details of openOnes()) {
      details.open = false;
      details.querySelector("summary").focus();
    }
  });
}

function buildInputs() {
  $("search").addEventListener("input", () => change(() => { state.search = $("search").value.trim().toLowerCase(); state.shown = 100; }));
  for (const name of ["low", "high"]) {
    $(name).addEventListener("input", () => change(() => {
      const value = Number.parseFloat($(name).value);
      state[name] = Number.isFinite(value) ? value : null;
    }));
  }
  $("reset").addEventListener("click", () => change(() => {
    state.search = "";
    state.low = state.high = null;
    state.shown = 100;
    state.plot.hidden.clear();
    for (const [name] of FACETS) state.chosen[name].clear();
  }));
}

function showFacets() {
  for (const button of $("tasks").children) button.setAttribute("aria-pressed", String(button.dataset.task === state.task));
  for (const [name, { boxes, number }] of facetParts) {
    const counts = new Map();
    for (const run of data.runs) {
      if (passes(run, name)) counts.set(facetValue(run, name), (counts.get(facetValue(run, name)) ?? 0) + 1);
    }
    for (const { value, box, count, line } of boxes) {
      box.checked = state.chosen[name].has(value);
      count.textContent = String(counts.get(value) ?? 0);
      line.classList.toggle("empty", !counts.has(value));
    }
    number.textContent = String(state.chosen[name].size);
    number.hidden = state.chosen[name].size === 0;
  }
  if (document.activeElement !== $("search")) $("search").value = state.search;
  for (const name of ["low", "high"]) if (document.activeElement !== $(name)) $(name).value = state[name] ?? "";
  const found = filtered().length;
  $("tally").textContent = `${found} of ${data.runs.length} runs`;
}
