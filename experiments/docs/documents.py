"""List what the source documents print in docs/experiments.md, and what answers it: `experiments/docs/documents.py`.

A place is `<!-- document: nsnquant_paper -->` to `<!-- end -->`. results/reference/documents.yaml names the documents;
the tables of a paper come from the layouts of the experiments, counts from the records and the drawn figures.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.docs.places import ROOT, fill
from kvq.config.explain import COMPOSE_ERRORS, choices, explain
from kvq.papers.expected import experiment_of, layout_named, names, of_no_paper, resolved
from kvq.papers.sweep import Overrides, cells_of, is_embedded, jobs_of, missing_choices
from kvq.report.figures import every
from kvq.report.figures.drawing import INDEX
from kvq.report.tables.experiment_files import Filled
from kvq.report.tables.experiment_files import fill as fill_cells
from kvq.report.tables.experiments import NO_METRIC, Shown, by_signature, count_refused
from kvq.report.tables.formats import escape_markdown, markdown_table
from kvq.report.tables.layout import DASH
from kvq.report.tables.readings import read_reference, reference_path
from kvq.results import Store

PAGE = ROOT / "docs" / "experiments.md"
TITLES = ("in print", "here", "composes", "real models", "stand-ins", "what is not here, and why")
_NUMBERED = ("Table", "Figure", "Algorithm")


@dataclass(frozen=True)
class Item:
    """What a document prints: its name there, experiments and kinds of figures that stand for it, and what lacks."""

    name: str
    experiments: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    none: str = ""


def documents_of(text: str) -> dict[str, list[Item]]:
    """Items of every document: those that are written, and the tables of its paper that experiments' layouts name.

    A table is left out where an item names its experiment already; a figure does so only where the table has no name.

    Raises:
        SystemExit: an item of which nothing is said, or an experiment or kind of figure that there is none of.
    """
    written, known = yaml.safe_load(text), names()
    out = {name: [_item(name, *item, known) for item in about["items"].items()] for name, about in written.items()}
    claimed = {
        (one, item.name.startswith("Figure ")) for items in out.values() for item in items for one in item.experiments
    }
    for name, about in written.items():
        for experiment in known:
            layout = layout_named(experiment)
            title = layout.table or str(layout.title)
            ours = layout.paper is not None and layout.paper == about["paper"]
            listed = (experiment, False) in claimed or (layout.table is None and (experiment, True) in claimed)
            if ours and not listed and title not in about["items"]:
                out[name].append(Item(title, (experiment,)))
        out[name].sort(key=_order)
    return out


def _item(document: str, name: str, given: Mapping[str, Any], known: Sequence[str]) -> Item:
    if unknown := [one for one in given if one not in ("experiments", "figures", "none")]:
        raise SystemExit(f"documents.yaml: {document}, {name}: '{unknown[0]}': experiments, figures or none")
    item = Item(name, tuple(given.get("experiments", ())), tuple(given.get("figures", ())), given.get("none", ""))
    if unknown := [one for one in item.experiments if one not in known]:
        raise SystemExit(f"documents.yaml: {document}, {name}: no experiment '{unknown[0]}'")
    stems = every.stems()
    if unknown := [
        one for one in item.figures if not any(one.startswith(stem) or stem.startswith(one) for stem in stems)
    ]:
        raise SystemExit(f"documents.yaml: {document}, {name}: no kind of figure '{unknown[0]}'")
    if not (item.experiments or item.figures or item.none):
        raise SystemExit(f"documents.yaml: {document}, {name}: experiments, figures or the reason why there are none")
    return item


def _order(item: Item) -> tuple[int, int]:
    """Tables, then figures, by number; what has no number stays behind them in its order."""
    kind, _, number = item.name.partition(" ")
    numbered = kind in _NUMBERED and number.isdecimal()
    return (_NUMBERED.index(kind), int(number)) if numbered else (len(_NUMBERED), 0)


@functools.cache
def refusals(experiment: str) -> tuple[str, ...]:
    """Why runs of an experiment do not compose, each reason once; nothing where all do."""
    layout = layout_named(experiment)
    return tuple(dict.fromkeys(filter(None, map(_refusal, jobs_of(cells_of(layout), (), {})))))


def _refusal(run: Overrides) -> str:
    if missing := list(missing_choices(run, choices())):
        return f"{missing[0]} is not in this version"
    try:
        resolved(run)
    except COMPOSE_ERRORS as error:
        return explain(error, run)
    return ""


def counted(cells: Sequence[Shown], of: str = " of ") -> str:
    """How many of the cells have a number, of those whose runs give one; a cell that machines share counts once."""
    measurable = _apart(cell for cell in cells if not (cell.reason or "").startswith(NO_METRIC))
    return f"{_count_measured(cells)}{of}{len(measurable)}"


def _count_measured(cells: Iterable[Shown]) -> int:
    """How many of the cells have a number; a cell that machines share counts once."""
    return len(_apart(cell for cell in cells if cell.value is not None))


def _apart(cells: Iterable[Shown]) -> set[tuple[tuple[str, str], ...]]:
    """The labels of cells, each once."""
    return {tuple(cell.asked.labels.items()) for cell in cells}


class Rows:
    """Lines of the list, from the records and the figures of a results folder."""

    def __init__(self, results: Path) -> None:
        records = Store(results).scan()[0]
        self._answers, self._reference = by_signature(records), read_reference()
        self._present = frozenset((record.model, record.method) for record in records)
        index = results / "figures" / INDEX  # which lists what was drawn
        listed = index.read_text(encoding="utf-8") if index.is_file() else ""
        self._figures = sorted(re.findall(r"\[PNG\]\((.+?)\.png\)", listed))
        self._embedded = [model for model in choices()["model"] if is_embedded(model)]
        self._documents = documents_of(reference_path().with_name("documents.yaml").read_text(encoding="utf-8"))

    @property
    def documents(self) -> Mapping[str, Sequence[Item]]:
        """Items by document."""
        return self._documents

    def table(self, document: str) -> str:
        """The list of a document as a Markdown table.

        Raises:
            SystemExit: no such document.
        """
        if document not in self._documents:
            raise SystemExit(f"document: {document}: one of {', '.join(self._documents)}")
        rows = [self.row(item) for item in self._documents[document]]
        return "\n".join(markdown_table(TITLES, rows)) + "\n"

    def row(self, item: Item) -> list[str]:
        """Cells of an item's line, as Markdown."""
        found = [self._filled(name) for name in item.experiments]
        here = [f"`{name}`" for name in item.experiments] + [f"figures `{kind}`" for kind in item.figures]
        problems = [reason for name in item.experiments for reason in refusals(name)]
        composes = DASH if not any(one.experiment.runs for one in found) else "no" if problems else "yes"
        real = [counted(one.cells) for one in found if not _is_of_embedded(one)]
        small = [text for one in found for text in _stand_ins(one)]
        if item.figures:
            drawn = [sum(counts) for counts in zip(*map(self._drawn, item.figures), strict=True)]
            real, small = ([*texts, _figures(count)] for texts, count in zip((real, small), drawn, strict=True))
        refused = [(count, one, reason) for one in found for reason, count in count_refused(one.cells).items()]
        never = [f"{n} of {len(one.cells)}{' cells' * (not i)}: {reason}" for i, (n, one, reason) in enumerate(refused)]
        why = [item.none, *problems, *never]
        said = "; ".join(escape_markdown(reason) for reason in dict.fromkeys(filter(None, why)))
        cells = [escape_markdown(item.name), ", ".join(here), composes, ", ".join(real), "; ".join(small), said]
        return [cell or DASH for cell in cells]

    def _filled(self, name: str) -> Filled:
        return fill_cells(experiment_of(name, self._present), self._answers, self._reference)

    def _drawn(self, kind: str) -> tuple[int, int]:
        """Figures of a kind: of real models, of embedded ones."""
        stems = [stem for stem in self._figures if stem.startswith(kind)]
        embedded = [*self._embedded, "embedded"]  # the last: of several models, all of them embedded
        small = sum(any(f"-{model}-" in stem for model in embedded) for stem in stems)
        return len(stems) - small, small


def _is_of_embedded(filled: Filled) -> bool:
    return of_no_paper(jobs_of(cells_of(layout_named(filled.experiment.name)), (), {}))


def _stand_ins(filled: Filled) -> Iterator[str]:
    if _is_of_embedded(filled):
        yield counted(filled.cells)
    elif filled.experiment.runs and not filled.stand_ins:
        yield "0"
    most, models = 0, defaultdict[str, list[str]](list)  # models by their count
    for model, cells in filled.stand_ins.items():  # all of the real models; an embedded one only where it has more
        if not is_embedded(model) or _count_measured(cells) > most:
            most = max(most, _count_measured(cells))
            models[counted(cells, "/")].append(model)
    yield from (f"{', '.join(names)}: {count}" for count, names in models.items())


def _figures(count: int) -> str:
    return f"{count} figure{'s' * (count != 1)}"


if __name__ == "__main__":
    fill(PAGE, "document", Rows(ROOT / "results").table)
