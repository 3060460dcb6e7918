"""`python -m kvq.papers.figures`: every figure that the records allow, and papers' numbers next to ours."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.papers.figures")

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.papers.expected import experiment_of
from kvq.report.figures import every
from kvq.report.figures.drawing import GREY, colour, handle, panels, register_figure
from kvq.report.tables.experiment_files import Filled, fill
from kvq.report.tables.experiments import Shown, by_signature
from kvq.report.tables.readings import read_reference
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN: Mapping[str, tuple[str, str]] = {"nsnquant/table2": ("LLaMA3.1-8B", "NSNQuant, Table 2")}
"""Experiments whose table a paper draws too: the model that it draws, and where its numbers are printed."""
main = every.main
_COLUMNS = ("model", "stand_in", "dataset", "method", "published", "measured", "stale")
_FULL = ("FP16", "BF16", "16-bit")


def published_table(filled: Filled, model: str) -> pd.DataFrame:
    """Both numbers, or one, per text and method of a paper's model, and of each stand-in that was run."""
    own = [cell for cell in filled.cells if cell.asked.labels.get("model") == model]
    lines = list(_lines_of(own, model, ""))
    for name, cells in filled.stand_ins.items():
        lines += _lines_of([cell for cell in cells if cell.value is not None], name, name)
    return pd.DataFrame(lines, columns=list(_COLUMNS))


def _lines_of(cells: Iterable[Shown], model: str, stand_in: str) -> Iterator[tuple[Any, ...]]:
    """Lines of `published_table` from cells of a model, which have a number in print or of ours."""
    for cell in cells:
        labels, printed = cell.asked.labels, None if cell.published is None else cell.published.value
        dataset = labels.get("dataset", "")
        if stand_in:  # the text of its run, which is not the one that the paper's label names
            words = [word.partition("=") for run in cell.asked.runs for word in run.command.split()]
            dataset = next((text for name, _, text in words if name == "dataset"), "")
        if printed is not None or cell.value is not None:
            yield model, stand_in, dataset, labels.get("method", ""), printed, cell.value, cell.stale


def published(records: Sequence[Record], _: Store) -> dict[tuple[str, str], pd.DataFrame]:
    """The table of each figure of published numbers (`DRAWN`) that a record answers, by file name and title."""
    if not any(record.task == "ppl" for record in records):  # as all of `DRAWN` are
        return {}
    present = frozenset((record.model, record.method) for record in records)
    answers, reference = by_signature(records), read_reference()
    found = {}
    for name, (model, source) in DRAWN.items():
        experiment = experiment_of(name, present)
        assert experiment is not None  # it has a table
        table = published_table(fill(experiment, answers, reference), model)
        if table["measured"].notna().any():
            found[name.replace("/", "-"), f"{experiment.layout.title}: {model} (published: {source})"] = table
    return found


@register_figure("published-{name}", "{what}", published, of="records")
def published_figure(table: pd.DataFrame) -> Figure:
    """A panel for each model and text: perplexity by method, hollow as it is published, filled as measured here."""
    groups = list(table.groupby(["stand_in", "model", "dataset"], sort=False))
    rows, methods = (len(groups) + 1) // 2, list(dict.fromkeys(table["method"]))
    made, axes = panels(2, 0.9 + rows * (0.5 + 0.16 * len(methods)), rows, 2, sharey=True, squeeze=False)
    for axis, ((stand_in, model, dataset), part) in zip(axes.flat, groups, strict=False):
        places = {method: -place for place, method in enumerate(methods)}
        height = part["method"].map(places)
        axis.set_xscale("log")
        axis.scatter(part["published"], height, s=28, marker="D", facecolors="none", edgecolors=colour(0), linewidths=1)
        axis.scatter(part["measured"], height, s=14, marker="o", color=colour(5))
        full = part[part["method"].isin(_FULL)]
        for value in full["measured"].fillna(full["published"]):
            axis.axvline(value, color=GREY, linewidth=0.8, linestyle="--")
        axis.set_yticks(list(places.values()), list(places))
        low, high = part[["published", "measured"]].min().min(), part[["published", "measured"]].max().max()
        ticks = [
            tick for tick in (5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500, 1000) if low * 0.95 <= tick <= high * 1.05
        ]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(axis="y", color="#EEEEEE", linewidth=0.6)
        axis.set_title(f"{model}{' (stand-in)' if stand_in else ''}, {dataset}")
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis in axes.flat[max(len(groups) - 2, 0) : len(groups)]:
        axis.set_xlabel("perplexity (dashed: full precision)")
    hollow = {"marker": "D", "fillstyle": "none", "linestyle": ""}
    shown = [
        handle("published", color=colour(0), **hollow),
        handle("measured here", color=colour(5), marker="o", linestyle=""),
    ]
    made.legend(handles=shown, loc="outside lower right", ncols=2)
    return made
