"""Dispersion of token norms and what quantizing costs, over models (nsn, Sato 2026, section 5.3): lists, a scatter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.config.files import EMBEDDED
from kvq.report.figures.style import figure, lines_of, marker, style, symlog
from kvq.report.labels import begins_otherwise, label
from kvq.report.palette import FIRST
from kvq.report.presets import presets
from kvq.results import Record, run_key
from kvq.results.metrics import METRICS
from kvq.results.statistics import spearman

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPREADS = ("key_cv_layer0", "value_cv_layer0", "key_cv", "value_cv")
_PROTOCOL = ("task", "method", "residual", "seed")
_DRAWN = {"key_cv_layer0": "keys", "value_cv_layer0": "values"}
_ARMS = "nsn/arm_"  # of the paper, whose naive arm B fails where values' norms are spread
_FEWEST = 3
"""Models, without which there is no rank correlation."""


def dispersion_table(records: Sequence[Record]) -> pd.DataFrame:
    """Pairs of a model's dispersion of norms (`task=tni`) and what a method costs it (`task=ppl`), one line per pair.

    A pair has the same weights, implants and text. Several runs of `task=tni` on them count once, the last by key.
    """
    spread = {_states(record): record for record in records if record.task == "tni" and _SPREADS[0] in record.metrics}
    lines = []
    for record in records:
        found = spread.get(_states(record))
        if record.task == "ppl" and found is not None and "delta_nll" in record.metrics:
            lines.append(
                {
                    "model": record.model,
                    "weights": run_key(_model(record))[:8],
                    "dataset": record.dataset,
                    "method": label(record),
                    "bits": record.bits,
                    "protocol": _protocol(record),
                    "stand_in": presets().model_path(record.model).startswith(EMBEDDED),
                    "measured": _measured(record),
                    **{name: found.metrics[name] for name in _SPREADS},
                    "delta_nll": record.metrics["delta_nll"],
                    "delta_perplexity": record.metrics["delta_perplexity"],
                }
            )
    return pd.DataFrame(lines)


def _protocol(record: Record, names: Sequence[str] = _PROTOCOL) -> str:
    """A hash of how a run was measured. Models begin their windows as they were trained, which parts no protocols."""
    parts = {name: record.config.get(name) for name in names}
    task = parts["task"]
    if isinstance(task, Mapping):
        parts["task"] = {name: value for name, value in task.items() if name != "bos"}
    return run_key(parts | {"begins": begins_otherwise(record)})[:6]


def _measured(record: Record) -> str:
    """What the runs of a figure share, whatever their method: scoring, windows, and what departs from presets."""
    task = record.config.get("task")
    scoring = task.get("scoring") if isinstance(task, Mapping) else None
    words = ", ".join(filter(None, [scoring and f"scoring {scoring}", *begins_otherwise(record)]))
    return f"{_protocol(record, ('task', 'seed'))}: {words}"


def _states(record: Record) -> str:
    return repr([sorted(part.items()) for part in (_model(record), record.config.get("dataset", {}))])


def _model(record: Record) -> dict[str, Any]:
    """The model's settings without the dtype of its cache, which `task=tni` does not fill."""
    return {name: value for name, value in record.config.get("model", {}).items() if name != "cache_dtype"}


def dispersion_correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rho over models of each statistic with Δperplexity, for every method, width and protocol.

    A model is one point, the mean over its texts.
    """
    lines = []
    for (method, bits, protocol), runs in table.groupby(["method", "bits", "protocol"], sort=True):
        part = runs.groupby("weights")[[*_SPREADS, "delta_perplexity"]].mean()
        for name in _SPREADS:
            found = spearman(part[name].tolist(), part["delta_perplexity"].tolist())
            lines.append({"method": method, "bits": bits, "protocol": protocol, "statistic": name, **found._asdict()})
    return pd.DataFrame(lines)


def scatters(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Numbers of each scatter with its name and title: the main methods and nsn's arms at one width.

    A point is a model, the mean over its texts; embedded models, which are stand-ins, have figures of their own. Of a
    method's protocols the one with most models is drawn.
    """
    wanted = table[table["method"].isin(list(FIRST)) | table["method"].str.startswith(_ARMS)]
    for (small, bits, measured), runs in wanted.groupby(["stand_in", "bits", "measured"], sort=True):
        parts = [_points(part, str(method)) for method, part in runs.groupby("method", sort=True)]
        found = [part for part in parts if len(part) >= _FEWEST]
        if found:
            key, _, words = str(measured).partition(": ")
            where = "embedded" if small else "models"
            over = "embedded models" if small else "models"
            title = f"Spread of token norms in layer 0 and loss at {bits} bits, over {over}: {words}".rstrip(": ")
            yield f"dispersion-scatter-{where}-{bits}-{key}", title, pd.concat(found, ignore_index=True)


def _points(runs: pd.DataFrame, method: str) -> pd.DataFrame:
    """One line per model, with rho and p of the method over all of them."""
    protocol = runs.groupby("protocol")["weights"].nunique().sort_index().idxmax()
    chosen = runs[runs["protocol"] == protocol]
    numbers = [*_DRAWN, "delta_perplexity"]
    points = chosen.groupby(["model", "weights"])[numbers].mean().reset_index()
    for name in _DRAWN:
        known = spearman(points[name].tolist(), points["delta_perplexity"].tolist())
        points[f"{name}_rho"], points[f"{name}_p"] = known.rho, known.p
    points.insert(0, "method", method)
    return points


def scatter_figure(table: pd.DataFrame, title: str) -> Figure:
    """Δ perplexity over the spread of keys' and of values' norms: a colour for each method, a marker for each model."""
    with style():
        made = figure(2, 4)
        axes = made.subplots(1, 2, sharey=True)
        models, looks = sorted(table["model"].unique()), lines_of(table["method"])
        symlog(axes[0], table["delta_perplexity"])  # before points, by which the axis is scaled
        for axis, (name, side) in zip(axes, _DRAWN.items(), strict=True):
            for _, point in table.iterrows():
                shape = marker(models.index(point["model"]))
                look = looks[point["method"]]
                axis.plot([point[name]], [point["delta_perplexity"]], shape, color=look.color, alpha=0.8)
            axis.set_xlabel(f"deviation / mean of the norms of {side}, layer 0")
            axis.grid(linewidth=0.3)
        axes[0].set_ylabel(METRICS["delta_perplexity"].title)
        _legends(made, table, models)
        made.suptitle(title, fontsize=8)
    return made


def _legends(made: Figure, table: pd.DataFrame, models: Sequence[str]) -> None:
    """Models by marker, and methods with rho and p over models, of keys and of values."""
    from matplotlib.lines import Line2D

    looks = lines_of(table["method"])
    shapes = [
        Line2D([], [], color="#666666", marker=marker(index), linestyle="", label=name)
        for index, name in enumerate(models)
    ]
    lines = [
        Line2D([], [], color=looks[str(method)].color, linewidth=3, label=f"{method}: {_said(part)}")
        for method, part in table.groupby("method", sort=True)
    ]
    made.legend(handles=lines, loc="outside lower center", ncols=2, title="method: ρ of keys, values (p), over models")
    made.axes[0].legend(handles=shapes, loc="best")


def _said(part: pd.DataFrame) -> str:
    """Both rank correlations and their p, which is unknown for fewer than four models."""
    first = part.iloc[0]
    rhos = ", ".join("unknown" if pd.isna(first[f"{name}_rho"]) else f"{first[f'{name}_rho']:.2f}" for name in _DRAWN)
    chances = [first[f"{name}_p"] for name in _DRAWN]
    if any(map(pd.isna, chances)):
        return rhos
    return f"{rhos} (p = {', '.join(f'{chance:.2g}' for chance in chances)})"
