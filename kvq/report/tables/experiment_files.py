"""Tables of experiments on disk: Markdown, CSV, LaTeX and an index. Text of records and configurations is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvq.config.run import AXES
from kvq.report.command import write_files
from kvq.report.labels import ON_TEST_TEXT
from kvq.report.tables import formats
from kvq.report.tables.experiments import (
    Answers,
    Experiment,
    Shown,
    count_refused,
    labels_of,
    shown_cells,
    stand_in_cells,
)
from kvq.report.tables.layout import DASH, UNQUANTIZED, Sheet, fixed
from kvq.report.tables.notes import NOTES
from kvq.report.tables.readings import Reference

INDEX = "index.md"
_BEGIN = """\
# Experiments

Published figures and ours beside them, by `make tables`; changes here are overwritten.
"""
_INDEX = ("experiment", "table", "measured", "stand-ins", "runs in full", "not in this version", "cannot be measured")
_SHOWN_COMMANDS = 3
_BITS = ("published bits", "measured bits", "effective bits")
_OWN = ("Not measured: ", "Run: ", "The other ")


@dataclass(frozen=True)
class Filled:
    """An experiment with what its cells print, and those of the stand-ins that were run."""

    experiment: Experiment
    cells: list[Shown]
    stand_ins: dict[str, list[Shown]]


def fill(experiment: Experiment, records: Answers, reference: Reference) -> Filled:
    """Fill an experiment's cells from records and published figures."""
    small = {model: stand_in_cells(experiment, model, records) for model in experiment.stand_ins}
    cells = shown_cells(experiment, records, reference)
    return Filled(experiment, cells, {model: here for model, here in small.items() if here})


def grids_of(filled: Filled) -> list[Sheet]:
    """The experiment's tables, one for each section, then its stand-ins that were run."""
    experiment, grids, sections = filled.experiment, [], filled.experiment.layout.sections
    for machine, cells in _by_machine(filled.cells):
        for section in labels_of(cells, sections):
            here = [cell for cell in cells if labels_of([cell], sections) == [section]]
            grids.append(_make_grid(experiment, here, ", ".join(filter(None, [*section, machine]))))
    for model, small in filled.stand_ins.items():
        for machine, here in _by_machine(small):
            said = ", ".join(filter(None, [f"stand-in on {model}, not the paper's experiment", machine]))
            grids.append(_make_grid(experiment, here, said))
    return grids


def _by_machine(cells: Sequence[Shown]) -> list[tuple[str, list[Shown]]]:
    """Cells grouped by the machine on which their times were measured, with its title (empty: no times)."""
    machines = dict.fromkeys(cell.machine for cell in cells)
    return [(name and f"times on {name}", [cell for cell in cells if cell.machine == name]) for name in machines]


def _make_grid(experiment: Experiment, cells: Sequence[Shown], section: str) -> Sheet:
    """A table of an experiment, with the decimals that the paper prints, else three; `section`: in its title."""
    layout = experiment.layout
    rows = [axis for axis in layout.rows if any(cell.asked.labels.get(axis) for cell in cells)]
    others = [axis for axis in AXES if axis not in (*layout.rows, *layout.sections)]
    columns = [axis for axis in others if len(labels_of(cells, [axis])) > 1]
    constant = [label for axis in others if axis not in columns for (label,) in labels_of(cells, [axis])]
    printed = any(cell.published is not None for cell in cells)
    numbers: dict[str, int] = {}
    digits: dict[str, int] = {}
    for cell in cells:
        if cell.published is not None:
            decimals = f"{cell.published.value:.4f}".rstrip("0").partition(".")[2]
            digits[cell.asked.metric] = max(digits.get(cell.asked.metric, 0), len(decimals))
    titles, lines = labels_of(cells, columns), []
    for row in labels_of(cells, rows):
        here = [cell for cell in cells if labels_of([cell], rows) == [row]]
        places = {labels_of([cell], columns)[0]: cell for cell in here}
        shown = [
            _cell_text(one, numbers, digits.get(one.asked.metric, 3), printed) if (one := places.get(title)) else ""
            for title in titles
        ]
        bits = [[cell.published.avg_bits for cell in here if cell.published and cell.published.avg_bits]] * printed
        for own in ([cell.bits for cell in here], [cell.effective_bits for cell in here]):
            bits.append([fixed(one, 3) for one in own if one is not None])
        lines.append([*row, *(", ".join(dict.fromkeys(texts)) or DASH for texts in bits), *shown])
    what = ", ".join(filter(None, ["measured / published / difference" if printed else "measured", layout.units]))
    names = [", ".join(filter(None, title)) or what for title in titles]
    title = ": ".join(filter(None, [layout.title, "; ".join(filter(None, [section, *constant]))]))
    notes = [f"Cells: {what}."] if columns else []
    notes += _notes_of(experiment, cells, numbers)
    return Sheet(title, [*rows, *_BITS[not printed :], *names], lines, range(len(rows)), notes=notes)


def _cell_text(cell: Shown, numbers: dict[str, int], digits: int, printed: bool) -> str:
    """A cell as text, with published number and difference if `printed`; `numbers` takes reasons for notes."""
    if cell.value is None:
        mark = f" [{numbers.setdefault(cell.reason, len(numbers) + 1)}]" if cell.reason else ""
        measured = f"{DASH}{mark}"
    else:
        digits += cell.error is not None and not printed  # so that the error has two significant digits
        error = "" if cell.error is None else f" ± {fixed(cell.error, digits)}"
        mark = "≈ " if cell.within_noise and not cell.unquantized else ""
        said = f" ({UNQUANTIZED})" if cell.unquantized else ""
        measured = f"{mark}{fixed(cell.value, digits)}{error}{said}{' †' * cell.stale}{' ‡' * cell.on_test_text}"
    if not printed:
        return measured
    number, published = cell.published, DASH
    if number is not None:  # without decimals that an approximate one does not have, and marked where there is a note
        published = f"~{number.value:g}" if number.note.startswith("approximate") else fixed(number.value, digits)
        published += "*" * bool(number.note)
    difference = DASH if cell.difference is None else fixed(cell.difference, digits, signed=True)
    return f"{measured} / {published} / {difference}"


def _notes_of(experiment: Experiment, cells: Sequence[Shown], numbers: Mapping[str, int]) -> Iterator[str]:
    """The notes below a table: reasons by their numbers, what its marks mean, and the commands of missing runs."""
    for reason, number in numbers.items():
        yield f"[{number}] {reason}"
    for note in dict.fromkeys(cell.published.note for cell in cells if cell.published and cell.published.note):
        yield f"* {note}"
    if any(cell.error is not None for cell in cells):
        yield "± standard error."
    if any(cell.within_noise and not cell.unquantized for cell in cells):
        yield "≈ within noise of full precision (of answers: by each run's p alone, not corrected for the other cells)."
    if any(cell.unquantized for cell in cells):
        yield f"{UNQUANTIZED}: every prompt or text was shorter than the residual, so no token left full precision."
    if any(cell.stale for cell in cells):
        yield NOTES["stale"]
    if any(cell.on_test_text for cell in cells):
        yield f"‡ {ON_TEST_TEXT}, as method.calibration.allow_test_text asks."
    missing = list(dict.fromkeys(line for cell in cells if not cell.reason for line in cell.missing))
    if missing:
        yield f"Not measured: {len(missing)} runs. All of the table: python run.py +experiment={experiment.name}"
        yield from (f"Run: {line}" for line in missing[:_SHOWN_COMMANDS])
        if len(missing) > _SHOWN_COMMANDS:
            yield f"The other {len(missing) - _SHOWN_COMMANDS} commands stand in the table's CSV file."


def markdown(experiment: Experiment, grids: Sequence[Sheet]) -> str:
    """All tables of an experiment as a section of its page."""
    lines = [formats.heading(slug(experiment.name), _title(experiment)), ""]
    more = f" and {experiment.baselines} of full precision beside them" if experiment.baselines else ""
    lines += [f"`python run.py +experiment={experiment.name}`, {experiment.runs} runs in full{more}."]
    for choice, runs in experiment.waiting.items():
        lines.append(f"\nNot in this version: `{choice}`, which {runs} of the runs need.")
    for grid in grids:
        lines += ["", f"### {formats.escape_markdown(grid.title)}", "", *formats.markdown_rows(grid), ""]
        lines += [f"- {_as_code(note)}" for note in grid.notes]
    return "\n".join(lines).rstrip() + "\n"


def _as_code(note: str) -> str:
    """A note as Markdown: a command that kvq wrote becomes code, all other text is escaped."""
    said, begin, line = note.partition("python run.py ")
    if not (begin and said.startswith(_OWN)):  # a record's reason may look like a command
        return formats.escape_markdown(note)
    return f"{formats.escape_markdown(said)}`{begin}{formats.one_line(line).replace('`', '')}`"


def latex(experiment: Experiment, grids: Sequence[Sheet]) -> str:
    """The tables for a paper, with booktabs; commands of what is missing are comments."""
    lines = [formats.PREAMBLE]
    for index, grid in enumerate(grids):
        own = [note for note in grid.notes if note.startswith(_OWN)]
        label = f"tab:{slug(experiment.name)}" + (f"-{index + 1}" if len(grids) > 1 else "")
        notes = [note for note in grid.notes if note not in own]
        lines.append(formats.landscape(replace(grid, label=label, notes=notes, comments=own)))
    return "\n".join(lines).rstrip() + "\n"


def csv(filled: Filled) -> str:
    """One line per cell, numbers in full, with the commands of runs that are missing."""
    cells = [(cell, model) for model, here in ({"": filled.cells} | filled.stand_ins).items() for cell in here]
    units = filled.experiment.layout.units
    rows = [
        {axis: cell.asked.labels.get(axis, "") for axis in AXES}
        | {"stand_in": stand_in, "machine": cell.machine, "read": cell.asked.metric, "units": units}
        | {"measured": cell.value, "standard_error": cell.error}
        | {"published": cell.published.value if cell.published else None, "difference": cell.difference}
        | {"published_bits": cell.published.avg_bits if cell.published else "", "measured_bits": cell.bits}
        | {name: getattr(cell, name) for name in ("effective_bits", "within_noise", "unquantized", "stale")}
        | {"reason": " ".join((cell.reason or "").split()), "note": cell.published.note if cell.published else ""}
        | {"missing": " ; ".join(cell.missing)}
        for cell, stand_in in cells
    ]
    return formats.csv_of(rows)


def slug(name: str) -> str:
    """An experiment's name, or its group's, as a file's."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "experiment"


def _title(experiment: Experiment) -> str:
    """Title of an experiment as Markdown: its paper and table, and what it shows."""
    where = " ".join(filter(None, [experiment.layout.paper, experiment.layout.table]))
    return formats.escape_markdown(f"{where}: {experiment.layout.title}")


def write_experiments(
    experiments: Sequence[Experiment], records: Answers, reference: Reference, out_dir: Path
) -> list[Path]:
    """Write every experiment as CSV and LaTeX, a page of Markdown per group, and an index; return their paths."""
    files: dict[str, str] = {}
    rows, sections = [], []
    for experiment in experiments:
        filled = fill(experiment, records, reference)
        name, page, grids = slug(experiment.name), slug(experiment.name.partition("/")[0]), grids_of(filled)
        sections.append((page, markdown(experiment, grids)))
        files |= {f"{name}.tex": latex(experiment, grids), f"{name}.csv": csv(filled)}
        done = f"{sum(cell.value is not None for cell in filled.cells)} of {len(filled.cells)}"
        never = (f"{count}: {formats.escape_markdown(reason)}" for reason, count in count_refused(filled.cells).items())
        cells = [f"`{experiment.name}`", f"[{_title(experiment)}]({page}.md#{name})", done, ", ".join(filled.stand_ins)]
        cells += [str(experiment.runs), ", ".join(experiment.waiting), "; ".join(never)]
        rows.append([cell or DASH for cell in cells])
    table = "\n".join(formats.markdown_table(_INDEX, rows, numbers={2, 4}))
    return write_files("tables", out_dir, files | formats.pages(sections) | {INDEX: f"{_BEGIN}\n{table}\n"})
