"""The layout of an experiment's table: which run belongs to which published value; no part of a run's key."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from typing import Any

from kvq.errors import ConfigError, check_choice

AXES = ("model", "method", "setting", "dataset", "metric")
"""Columns of the published figures that tell them apart."""


@dataclass
class LayoutConfig:
    """A table of a paper, or of one's own: every combination of the labels of its `axes` is a cell.

    Attributes:
        paper: as `results/reference/paper_results.csv` names it; None: no experiment with a table.
        table: as that file names it; None: nothing is published.
        title: of the table.
        common: overrides of every run, separated by spaces.
        axes: labels along each column of the published figures, as they are printed.
        names: label -> overrides (a list: the runs that a cell pools; null: no run, `reasons` says why).
        metric: what is read from a record; `{method}` stands for the piece that `metrics` gives the cell's label.
        metrics: axis -> label -> piece of the metric's name; such an axis may lead to no run of its own.
        rows: axes whose labels begin a row.
        sections: axes with a table of their own for each label.
        units: of what is shown.
        scale: a record's value times this is what the paper prints.
        pool: how the runs of a cell become one figure: `mean` or `sum`.
        reasons: label -> why it cannot be measured.
        own: labels that the paper does not print, shown in addition.
        small: override of the experiment -> the overrides that replace it when the model is an embedded one.
        real: what differs from `small` for a model that an installed distribution carries (`model=smollm2_135m`).
    """

    paper: str | None = None
    table: str | None = None
    title: str | None = None
    common: str = ""
    axes: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    metric: str = "perplexity"
    metrics: dict[str, Any] = field(default_factory=dict)
    rows: list[str] = field(default_factory=lambda: ["method"])
    sections: list[str] = field(default_factory=list)
    units: str = ""
    scale: float = 1.0
    pool: str = "mean"
    reasons: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    small: dict[str, str] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.paper is None:
            return
        pieces = [piece for _, piece, _, _ in string.Formatter().parse(self.metric) if piece is not None]
        without_runs = [label for label, run in self.names.items() if run is None]
        for setting, given, known in (
            *((f"layout.{name}", getattr(self, name), AXES) for name in ("axes", "metrics")),
            *((f"layout.{name}", getattr(self, name), self.labels) for name in ("rows", "sections")),
            ("layout.own", self.own, [label for labels in self.labels.values() for label in labels]),
            ("layout.pool", [self.pool], ("mean", "sum")),
            ("layout.axes", [label for labels in self.axes.values() for label in labels], self.names),
            ("layout.names with a reason for null", without_runs, self.reasons),
            ("layout.metric", pieces, self.metrics),
        ):
            for name in given:
                check_choice(setting, name, known)
        if not self.title or not self.labels:
            raise ConfigError(f"layout.{'axes' if self.title else 'title'}: an experiment's table needs it")

    @property
    def labels(self) -> dict[str, list[str]]:
        """Labels by axis: those of `axes`, then of `metrics`, in the order of `AXES`."""
        read = {axis: list(pieces) for axis, pieces in self.metrics.items()}
        known = read | self.axes
        return {axis: known[axis] for axis in AXES if axis in known}
