// The table of runs. What a page has no room for is left out until it is asked for; a run's details have it.
const MINOR = new Set(["bits_per_element", "delta_perplexity", "kl_p99", "wrong_needle", "bit_mixing_random", "rouge_l"]);
const SIZE_COLUMNS = ["bits_per_element", "effective_bits"];

function text(title, value, cell = value) {
  return { id: title.toLowerCase(), title, short: title, numeric: false, value, cell };
}

function metricColumn(name) {
  const metric = known(name);
  return { id: name, title: metric.title, short: metric.short, numeric: true, minor: MINOR.has(name),
    value: (run) => run.metrics.get(name) ?? null,
    cell: (run) => {
      const difference = ["delta_nll", "delta_accuracy", "delta_score"].includes(name);
      if (run.unquantized && difference) return "nothing quantized";
      const shown = shownMetric(run, name);
      const close = run.noise && difference;
      if (run.best && name === "perplexity") return el("b", {}, shown);
      return close && shown !== DASH ? `≈ ${shown}` : shown;
    } };
}

function classes(column) {
  return [column.numeric ? "number" : "", column.minor ? "minor" : ""].filter(Boolean).join(" ");
}

function nameCell(run) {
  const button = el("button", { type: "button", class: "open", onclick: () => openRun(run.key) }, run.name);
  const marks = [run.stale ? " †" : "", run.status === "done" ? "" : ` ${run.status}`].join("");
  return el("span", { class: "name" }, button, marks ? el("span", { class: `mark ${run.status}` }, marks) : null);
}

function columnsNow() {
  const task = data.tasks.find((found) => found.name === state.task);
  const names = [...SIZE_COLUMNS, ...(task ? task.columns : mainColumns())];
  const measured = names.filter((name) => data.runs.some((run) => run.metrics.has(name) && (!task || run.task === task.name)));
  const list = [
    { id: "name", title: "Method", short: "Method", numeric: false, value: (run) => run.name, cell: nameCell },
    { ...text("Paper", (run) => data.methods[run.method].label), minor: true },
    { id: "bits", title: "Bits", short: "Bits", numeric: true, value: (run) => run.order, cell: (run) => run.bits },
    ...measured.map(metricColumn),
  ];
  if (data.runs.some((run) => run.p !== undefined && (!task || run.task === task.name))) {
    list.push({ id: "p", title: "p (Holm)", short: "p", numeric: true, value: (run) => run.p ?? null,
      cell: (run) => (run.p === undefined ? DASH : run.p < 1e-4 ? "<0.0001" : fixed(run.p, 4)) });
  }
  if (!task) list.push(text("Task", (run) => run.task));
  if (new Set(data.runs.map((run) => run.model)).size > 1) list.push(text("Model", (run) => run.model));
  if (new Set(data.runs.map((run) => run.dataset)).size > 1) list.push({ ...text("Data set", (run) => run.dataset), id: "dataset" });
  if (data.protocols.some((protocol) => protocol.words)) list.push(text("Protocol", (run) => data.protocols[run.protocol].words || "default"));
  list.push({ id: "started", title: "Measured on (UTC)", short: "Date", numeric: false, value: (run) => run.started, cell: (run) => run.started.slice(0, 10) });
  return list;
}

// Of all tasks together: the first number of each.
function mainColumns() {
  return [...new Set(data.tasks.map((task) => task.columns[0]).filter((name) => name !== undefined))].slice(0, 4);
}

// Empty cells last, whichever way; equal ones keep the order of the tables.
function sorted(runs, columns) {
  const column = columns.find((found) => found.id === state.sort);
  if (!column) return runs;
  const sign = state.descending ? -1 : 1;
  return [...runs].sort((left, right) => {
    const [a, b] = [column.value(left), column.value(right)];
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "number" ? a - b : natural(a, b));
  });
}

function sortButton(title, active, descending, onclick) {
  return el("button", { type: "button", class: "sort", onclick }, title,
    el("span", { class: "arrow", "aria-hidden": "true" }, active ? (descending ? "↓" : "↑") : ""));
}

function visibleRuns() {
  return sorted(filtered(), columnsNow());
}

function showRuns() {
  const columns = columnsNow();
  const runs = sorted(filtered(), columns);
  const focused = document.activeElement?.closest?.("#run-table th")?.dataset.column;
  const head = el("tr", {}, ...columns.map((column) => {
    const active = column.id === state.sort;
    const cell = el("th", { scope: "col", class: classes(column), title: column.title, "data-column": column.id },
      sortButton(column.short, active, state.descending, () => change(() => {
        state.descending = active ? !state.descending : false;
        state.sort = column.id;
      })));
    if (active) cell.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    return cell;
  }));
  const body = runs.slice(0, state.shown).map((run) => el("tr", { class: run.baseline ? "baseline" : "", "data-key": run.key },
    ...columns.map((column) => {
      const cell = el("td", { class: classes(column), "data-label": column.short }, column.cell(run));
      cell.classList.toggle("long", cell.textContent.length > 10);
      return cell;
    })));
  if (!body.length) body.push(el("tr", {}, el("td", { colSpan: columns.length, class: "nothing" }, "No run passes these filters.")));
  const table = $("run-table");
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...body);
  if (focused) table.querySelector(`th[data-column="${CSS.escape(focused)}"] button`)?.focus();
  const left = runs.length - state.shown;
  $("more").hidden = $("all").hidden = left <= 0;
  $("more").textContent = `Show ${Math.min(left, 100)} more`;
  $("all").textContent = `Show all ${runs.length}`;
}

function buildRuns() {
  $("columns").addEventListener("click", () => {
    const all = $("run-table").classList.toggle("all");
    $("columns").setAttribute("aria-pressed", String(all));
  });
  $("more").addEventListener("click", () => change(() => { state.shown += 100; }));
  $("all").addEventListener("click", () => change(() => { state.shown = data.runs.length; }));
}

// Tables that came with the page: their rows are moved, not made anew.
function makeSortable(table) {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  const number = (cell) => {
    const found = cell.textContent.replace("≈", "").trim().match(/^[+<-]?\d[\d.,]*(?:e[+-]?\d+)?/);
    return found ? Number.parseFloat(found[0].replace(/[<,]/g, "")) : null;
  };
  heads.forEach((head, place) => {
    const numeric = head.classList.contains("number");
    const title = head.textContent;
    const arrow = el("span", { class: "arrow", "aria-hidden": "true" });
    head.replaceChildren(el("button", { type: "button", class: "sort", onclick: () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) {
        other.removeAttribute("aria-sort");
        other.querySelector(".arrow").textContent = "";
      }
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      arrow.textContent = descending ? "↓" : "↑";
      const values = new Map(rows.map((row) => [row, numeric ? number(row.cells[place]) : row.cells[place].textContent]));
      table.tBodies[0].replaceChildren(...[...rows].sort((left, right) => {
        const [a, b] = [values.get(left), values.get(right)];
        if (a === null || b === null) return (a === null) - (b === null);
        return (descending ? -1 : 1) * (numeric ? a - b : natural(a, b));
      }));
    } }, title, arrow));
  });
  for (const row of rows) {
    const key = row.dataset.key;
    if (!byKey.has(key)) continue;
    const cell = row.cells[0];
    const button = el("button", { type: "button", class: "open", onclick: () => openRun(key) }, ...cell.childNodes);
    cell.replaceChildren(button);
  }
}
