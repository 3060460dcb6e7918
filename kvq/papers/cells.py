"""The cells of an experiment's table and the overrides of their runs; nothing is composed here."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvq.config.layout import LayoutConfig

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One number of a table. `labels`: axis -> label; `runs`: overrides of each run it pools; `reason`: why none."""

    labels: Mapping[str, str]
    runs: tuple[Overrides, ...]
    metric: str
    reason: str | None = None


def cells_of(layout: LayoutConfig) -> list[Cell]:
    """Every combination of labels, the last axis fastest."""
    labels = layout.labels
    return [_cell(layout, dict(zip(labels, chosen, strict=True))) for chosen in itertools.product(*labels.values())]


def _cell(layout: LayoutConfig, labels: Mapping[str, str]) -> Cell:
    pieces = {axis: named[labels[axis]] for axis, named in layout.metrics.items()}
    metric = layout.metric.format(**pieces)
    reason = next((layout.reasons[label] for label in labels.values() if label in layout.reasons), None)
    named = [layout.names[labels[axis]] for axis in labels if axis in layout.axes]
    if None in named:
        return Cell(labels, (), metric, reason)
    choices = [[layout.common], *([given] if isinstance(given, str) else given for given in named)]
    runs = [_merged(word for part in parts for word in _words(part)) for parts in itertools.product(*choices)]
    return Cell(labels, tuple(runs), metric, reason)


@functools.cache
def _words(overrides: str) -> Overrides:
    """Overrides that are separated by spaces; few texts make up all runs of a table."""
    return tuple(shlex.split(overrides))


def _merged(words: Iterable[str]) -> Overrides:
    """Overrides of which a later one replaces an earlier one of the same setting."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


def placed(run: Overrides, given: Sequence[str], small: Mapping[str, str]) -> Overrides:
    """A run under the command line's overrides, which win; a choice that is replaced takes its settings with it.

    Args:
        run: overrides of the experiment.
        given: overrides of the command line.
        small: what stands in for an override of the experiment; empty when the run is the paper's.
    """
    replaced = (_words(small[word]) if word in small else (word,) for word in run)
    kept = {word.partition("=")[0]: word for words in replaced for word in words}
    mine = {word.partition("=")[0].lstrip("+~"): word for word in given}
    for name in mine:
        kept = {key: word for key, word in kept.items() if key != name and not key.startswith(f"{name}.")}
    return (*kept.values(), *given)


def jobs_of(cells: Iterable[Cell], given: Sequence[str], small: Mapping[str, str]) -> list[Overrides]:
    """The runs of a table, each once, under the command line's overrides."""
    return list(dict.fromkeys(placed(run, given, small) for cell in cells for run in cell.runs))


def missing_choices(run: Sequence[str], choices: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Choices of a run that this version does not have, such as `method=kvquant`."""
    for word in run:
        group, _, name = word.lstrip("+").partition("=")
        if group in choices and name not in choices[group]:
            yield f"{group}={name}"


def command(run: Sequence[str]) -> str:
    """The command that makes a run, as a shell takes it."""
    return f"python run.py {shlex.join(run)}"
