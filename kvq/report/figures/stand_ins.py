"""Are embedded models good stand-ins for a real one? Losses of the same methods on both, and their rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.stats

from kvq.config.files import DISTRIBUTION, EMBEDDED
from kvq.report.figures.style import figure, lines_of, style
from kvq.report.labels import label
from kvq.report.presets import presets
from kvq.results import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCORINGS = {"generation": "decoding", "parallel": "all at once"}
_FEWEST = 8
"""Methods, without which a rank correlation says nothing."""
_NAMED = 4
"""Methods that a panel names: those whose ranks differ most."""
_SEED = 0
_BOOTSTRAP: dict[str, Any] = {"n_resamples": 1000, "method": "percentile"}


def stand_in_table(records: Sequence[Record]) -> pd.DataFrame:
    """Losses of each method (with its bits) on a real model and on an embedded one, one line per pair and scoring.

    Of a model and scoring, the protocol with most runs counts. Columns `rho`, `low`, `high`, `methods`: Spearman's rank
    correlation of the two models' losses over methods and its 95% interval, by bootstrap over methods (percentiles).
    """
    losses = pd.DataFrame([_line(record) for record in records if _counts(record)])
    if losses.empty:
        return losses
    size = losses.groupby(["model", "scoring", "protocol"])["method"].transform("size")
    largest = size.groupby([losses["model"], losses["scoring"]]).transform("max")
    losses = losses[size == largest].drop_duplicates(["model", "scoring", "method"])
    joined = losses[losses["real"]].merge(losses[~losses["real"]], on=["scoring", "method"], suffixes=("", "_stand_in"))
    parts = [
        _correlated(part)
        for _, part in joined.groupby(["model", "scoring", "model_stand_in"], sort=True)
        if len(part) >= _FEWEST
    ]
    return pd.concat(parts, ignore_index=True) if parts else joined.iloc[:0]


def _counts(record: Record) -> bool:
    task = record.config.get("task")
    scoring = task.get("scoring") if isinstance(task, dict) else None
    ours = record.task == "ppl" and record.status == "done" and scoring in _SCORINGS
    return (
        ours
        and "delta_nll" in record.metrics
        and presets().model_path(record.model).startswith((EMBEDDED, DISTRIBUTION))
    )


def _line(record: Record) -> dict[str, Any]:
    task: dict[str, Any] = record.config["task"]
    return {
        "model": record.model,
        "real": presets().model_path(record.model).startswith(DISTRIBUTION),
        "scoring": task["scoring"],
        "protocol": f"{record.dataset} {[task.get(name) for name in ('windows', 'context', 'stride', 'max_windows')]}",
        "method": f"{label(record)} {record.bits}".strip(),
        "loss": record.metrics["delta_nll"],
    }


def _correlated(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of two models with the correlation of their ranks, and by how many ranks each method differs."""

    def rho(x: np.ndarray, y: np.ndarray) -> float:
        return float(scipy.stats.spearmanr(x, y).statistic)

    first, second = pairs["loss"].to_numpy(), pairs["loss_stand_in"].to_numpy()
    rng = np.random.default_rng(_SEED)
    found = scipy.stats.bootstrap((first, second), rho, paired=True, vectorized=False, **_BOOTSTRAP, rng=rng)
    ranks = scipy.stats.rankdata(second) - scipy.stats.rankdata(first)
    interval = found.confidence_interval
    columns = {"rho": rho(first, second), "low": interval.low, "high": interval.high, "methods": len(pairs)}
    return pairs[["scoring", "model", "model_stand_in", "method", "loss", "loss_stand_in"]].assign(
        ranks=ranks, **columns
    )


def stand_in_figure(table: pd.DataFrame, title: str) -> Figure:
    """Loss on the real model over loss on each embedded one, a row of panels per scoring; the farthest are named."""
    from matplotlib.ticker import LogLocator

    models = list(dict.fromkeys(table["model_stand_in"]))
    scorings = [scoring for scoring in _SCORINGS if scoring in set(table["scoring"])]
    looks = lines_of(table["method"])
    # Losses below this are noise, and a logarithm has no place for gains.
    drawn = table.assign(**table[["loss_stand_in", "loss"]].clip(lower=1e-3))
    with style():
        made = figure(2, 0.6 + 1.9 * len(scorings))
        axes = made.subplots(len(scorings), len(models), squeeze=False, sharex=True, sharey=True)
        for row, scoring in enumerate(scorings):
            for axis, model in zip(axes[row], models, strict=True):
                part = drawn[(drawn["scoring"] == scoring) & (drawn["model_stand_in"] == model)]
                named = set(part["ranks"].abs().nlargest(_NAMED).index)
                for index, method, *place in part[["method", "loss_stand_in", "loss"]].itertuples():
                    axis.plot(*place, looks[method].marker, color=looks[method].color, alpha=0.8)
                    if index in named:
                        aside: Any = {"xytext": (-3, 2), "ha": "right"} if place[0] > 0.03 else {"xytext": (3, 2)}
                        note = axis.annotate(method, place, textcoords="offset points", fontsize=5, **aside)
                        note.set_in_layout(False)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.xaxis.set_major_locator(LogLocator(numticks=6))
                axis.grid(linewidth=0.3)
                if len(part):
                    first = part.iloc[0]
                    said = f"ρ {first['rho']:.2f} [{first['low']:.2f}, {first['high']:.2f}], {first['methods']} methods"
                    axis.set_title(f"{model}\n{said}" if row == 0 else said, fontsize=6)
            axes[row][0].set_ylabel(f"{table['model'].iloc[0]}, {_SCORINGS[scoring]}")
        made.supxlabel("ΔNLL on the embedded model (nats/token)", fontsize=8)
        made.suptitle(title, fontsize=8)
    return made
