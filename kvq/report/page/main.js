// Put together: build what is clicked, show what is chosen.
const THEMES = ["auto", "light", "dark"];

function buildTheme() {
  const button = $("theme");
  let place = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    place = (place + 1) % THEMES.length;
    button.textContent = `Theme: ${THEMES[place]}`;
    if (place) document.documentElement.dataset.theme = THEMES[place];
    else delete document.documentElement.dataset.theme;
  });
}

function buildFigures() {
  for (const image of document.querySelectorAll("#figures img")) {
    const button = el("button", { type: "button", class: "enlarge", "aria-pressed": "false", "aria-label": `Enlarge ${image.alt}`,
      onclick: () => button.setAttribute("aria-pressed", String(image.closest("figure").classList.toggle("large"))) });
    image.replaceWith(button);
    button.append(image);
  }
}

// A heading that is jumped to stands below the bar, however many lines the bar has.
function keepHeadingsClear() {
  const bar = $("filters");
  new ResizeObserver(() => {
    const height = getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0;
    document.documentElement.style.scrollPaddingTop = `${height + 16}px`;
  }).observe(bar);
}

function openForPrint() {
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details.protocol")) details.open = true;
  });
}

readAddress();
const asked = state.run;
for (const hidden of document.querySelectorAll(".scripted")) hidden.hidden = false;
$("filters").hidden = false;
buildTasks();
buildFacets();
buildInputs();
buildRuns();
buildDetail();
buildTheme();
buildFigures();
openForPrint();
keepHeadingsClear();
for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
listeners.push(showFacets, showRuns, showPlot);
for (const listener of listeners) listener();
buildPlot();
if (asked) openRun(asked);
document.documentElement.dataset.ready = "true";
