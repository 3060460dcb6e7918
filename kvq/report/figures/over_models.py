"""Token norms of `task=tni` and `task=modality`; what quantizing costs over models, against norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure

from kvq.config.run import DISTRIBUTION, EMBEDDED
from kvq.report.figures import drawing as draw
from kvq.report.figures.error import rows_of
from kvq.report.labels import FIRST, label, named
from kvq.results import Record, Store, run_key
from kvq.results.metrics import METRICS
from kvq.results.presets import departures_of, model_path, protocol_parts
from kvq.results.statistics import spearman

SIDES = ("query", "key", "value")
_LAYERS = 4  # columns of the figure by layer; of more layers, that many evenly spread
_BOX = ("least", "lower", "median", "upper", "largest")
_SERIES = (("text", 0), ("image", 1), ("video", 4), ("audio", 5))
_COLOURS = {name: draw.colour(index) for name, index in _SERIES} | {"all": draw.GREY}
_DRAWN = {"key_cv_layer0": "keys", "value_cv_layer0": "values"}
_FEWEST = 3
"""Models, without which there is no rank correlation."""
SCORINGS = {"generation": "decoding", "parallel": "all at once"}
_BOOTSTRAP: dict[str, Any] = {"n_resamples": 1000, "method": "percentile"}


def norms_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer, head and kept position: the norm."""
    lines = [
        (row["side"], row["layer"], head, position, norm)
        for _, row in rows_of(record, store, "positions").iterrows()
        for index, position in enumerate(row["positions"])
        for head, norm in enumerate(row["norms"][index])
    ]
    return pd.DataFrame(lines, columns=["side", "layer", "head", "position", "norm"])


def _lay_out_norms(table: pd.DataFrame, layers: Sequence[int]) -> tuple[Figure, Any, list[tuple[Any, ...]]]:
    """Lay out panels for norms: a row for each of queries, keys and values, a column for each layer."""
    sides, names = {side: f"{side} norm" for side in SIDES}, {layer: f"layer {layer}" for layer in layers}
    found = draw.multiples(4.4, table, ("side", sides), ("layer", names), sharex=True, sharey="row")
    found[0].supxlabel("position (token)", fontsize=8)
    return found


@draw.register_figure(
    "tni-layers", "Token norms by layer, a box over heads: {where}", norms_table, of="first", task="tni"
)
def layers_figure(table: pd.DataFrame) -> Figure:
    """Norms by layer, each token a box over its heads, of another colour where low (OScaR's figure 3)."""
    kept = sorted(table["position"].unique())
    chosen = [*kept[:8], *draw.evenly_spread(kept[8:], 4)]  # the first positions, and some of the others up to the last
    made, axes, parts = _lay_out_norms(table, draw.evenly_spread(sorted(table["layer"].unique()), _LAYERS))
    for axis, _, _, part in parts:
        data = [part[part["position"] == position]["norm"].to_numpy() for position in chosen]
        thin, marks = {"linewidth": 0.6}, {"medianprops": {"color": "black"}, "flierprops": {"markersize": 2}}
        drawn = axis.boxplot(data, widths=0.6, patch_artist=True, boxprops=thin, whiskerprops=thin, **marks)
        usual = float(part["norm"].median())
        for box, line, values in zip(drawn["boxes"], drawn["medians"], data, strict=True):
            low = float(np.median(values)) < 0.5 * usual  # stands apart in colour
            box.set_facecolor(draw.colour(0) if low else draw.colour(7))
            if low:  # its box is too thin for its colour to be seen
                box.set(edgecolor=draw.colour(0), linewidth=2)
                line.set_color(draw.colour(0))
    for row in axes:
        row[0].set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xticks(range(1, len(chosen) + 1), [str(position) for position in chosen], rotation=90, fontsize=6)
    return made


def modality_tokens_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer and position of the first prompt: its modality, the norms' quartiles over heads."""
    parts = [pd.DataFrame()]
    for _, row in rows_of(record, store, "tokens").iterrows():
        about = {"side": row["side"], "layer": int(row["layer"]), "position": range(len(row["norms"][0]))}
        about["modality"] = [name for name, count in row["spans"] for _ in range(int(count))]
        parts.append(pd.DataFrame(about | dict(zip(_BOX, row["norms"], strict=True))))
    return pd.concat(parts, ignore_index=True)


@draw.register_figure(
    "modality-tokens",
    "Token norms by modality, from the least to the largest head: {where}",
    modality_tokens_table,
    of="first",
    task="modality",
)
def modality_tokens_figure(table: pd.DataFrame) -> Figure:
    """Norms of tokens by layer and modality: range, quartiles and median over heads (OScaR, Figures 19-21)."""
    made, axes, parts = _lay_out_norms(table, sorted(table["layer"].unique()))
    for axis, _, _, here in parts:
        for name in here["modality"].unique():
            part, hue = here[here["modality"] == name], _COLOURS[name]
            axis.vlines(part["position"], part["least"], part["largest"], color=hue, linewidth=0.5, alpha=0.35)
            axis.vlines(part["position"], part["lower"], part["upper"], color=hue, linewidth=1.2, alpha=0.7)
            axis.plot(part["position"], part["median"], ".", color=hue, markersize=2)
    for row in axes:
        row[0].set_ylim(bottom=0)
    names = table["modality"].unique()
    handles = [draw.handle(f"{name} tokens", color=_COLOURS[name], linewidth=3) for name in names]
    made.legend(handles=handles, loc="outside lower right", ncols=len(handles))
    return made


def dispersion_table(records: Sequence[Record]) -> pd.DataFrame:
    """A model's dispersion of norms (`task=tni`, the last by key) and what a method costs it, one line per pair."""
    spread = {_states_key(one): one for one in records if one.task == "tni" and "key_cv_layer0" in one.metrics}
    pairs = [(record, spread.get(_states_key(record))) for record in records]
    lines = [
        {name: getattr(record, name) for name in ("model", "dataset", "bits")}
        | {"method": label(record), "weights": run_key(_model_settings(record))[:8]}
        | {"protocol": _hash_protocol(record), "measured": _say_protocol(record)}
        | {"stand_in": model_path(record.model).startswith(EMBEDDED)}
        | {name: found.metrics[name] for name in _DRAWN}
        | {name: record.metrics[name] for name in ("delta_nll", "delta_perplexity")}
        for record, found in pairs
        if record.task == "ppl" and found is not None and "delta_nll" in record.metrics
    ]
    return pd.DataFrame(lines)


def _hash_protocol(record: Record, names: Sequence[str] = ("task", "method", "residual", "seed")) -> str:
    """A hash of how a run was measured. How a model's windows begin is left out where it is as it was trained."""
    parts = {name: record.config.get(name) for name in names}
    parts["task"] = {name: value for name, value in (parts["task"] or {}).items() if name != "bos"}
    return run_key(parts | {"begins": departures_of(record).first_token})[:6]


def _say_protocol(record: Record) -> str:
    """What the runs of a figure share, whatever their method: scoring, windows, and what departs from presets."""
    scoring = (record.config.get("task") or {}).get("scoring")
    words = ", ".join(filter(None, [scoring and f"scoring {scoring}", *departures_of(record).first_token]))
    return f"{_hash_protocol(record, ('task', 'seed'))}: {words}"


def _states_key(record: Record) -> str:
    """A text that is equal for runs on the same states: of one model's weights and one data set."""
    return repr([sorted(part.items()) for part in (_model_settings(record), record.config.get("dataset", {}))])


def _model_settings(record: Record) -> dict[str, Any]:
    """The model's settings without the dtype of its cache, which `task=tni` does not fill."""
    return {name: value for name, value in record.config.get("model", {}).items() if name != "cache_dtype"}


def split_scatters(table: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """Numbers of each scatter by name and title: main methods and nsn's arms at one width, a point a model."""
    scattered: dict[tuple[str, str], pd.DataFrame] = {}
    if table.empty:
        return scattered
    wanted = table[table["method"].isin(list(FIRST)) | table["method"].str.startswith("nsn/arm_")]  # naive arm B fails
    for (small, bits, measured), runs in wanted.groupby(["stand_in", "bits", "measured"], sort=True):
        parts = [_points_of(part, str(method)) for method, part in runs.groupby("method", sort=True)]
        found = [part for part in parts if len(part) >= _FEWEST]
        if found:
            key, _, words = str(measured).partition(": ")
            over = "embedded models" if small else "models"
            title = f"{bits} bits, over {over}: {words}".rstrip(": ")
            scattered[f"{over.split()[0]}-{bits}-{key}", title] = pd.concat(found, ignore_index=True)
    return scattered


def _points_of(runs: pd.DataFrame, method: str) -> pd.DataFrame:
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


@draw.register_figure(
    "dispersion-scatter-{name}",
    "Spread of token norms in layer 0 and loss at {what}",
    lambda records, _: split_scatters(dispersion_table(records)),
    of="records",
)
def scatter_figure(table: pd.DataFrame) -> Figure:
    """Δ perplexity over the spread of keys' and of values' norms: a colour for each method, a marker for each model."""
    made, axes = draw.panels(2, 4, 1, 2, sharey=True)
    models, looks = sorted(table["model"].unique()), draw.lines_of(table["method"])
    draw.scale_losses(axes[0], table["delta_perplexity"])  # before points, by which the axis is scaled
    for axis, (name, side) in zip(axes, _DRAWN.items(), strict=True):
        for _, point in table.iterrows():
            look = {"marker": draw.marker(models.index(point["model"])), "color": looks[point["method"]].color}
            axis.plot([point[name]], [point["delta_perplexity"]], linestyle="", alpha=0.8, **look)
        draw.dress(axis, f"deviation / mean of the norms of {side}, layer 0", grid="both")
    axes[0].set_ylabel(METRICS["delta_perplexity"].title)
    groups = table.groupby("method", sort=True)
    lines = [
        draw.handle(f"{name}: {_say_correlations(part)}", color=looks[str(name)].color, linewidth=3)
        for name, part in groups
    ]
    made.legend(handles=lines, loc="outside lower center", ncols=2, title="method: ρ of keys, values (p), over models")
    look = {"color": "#666666", "linestyle": ""}
    axes[0].legend(handles=[draw.handle(name, marker=draw.marker(i), **look) for i, name in enumerate(models)])
    return made


def _say_correlations(part: pd.DataFrame) -> str:
    """Both rank correlations and their p, which is unknown for fewer than four models."""
    first = part.iloc[0]
    rhos = ", ".join("unknown" if pd.isna(first[f"{name}_rho"]) else f"{first[f'{name}_rho']:.2f}" for name in _DRAWN)
    chances = [first[f"{name}_p"] for name in _DRAWN]
    return rhos if any(map(pd.isna, chances)) else f"{rhos} (p = {', '.join(f'{one:.2g}' for one in chances)})"


def stand_in_table(records: Sequence[Record]) -> pd.DataFrame:
    """Losses of each method (with its bits) on a real model and on another one, one line per pair and scoring.

    Of a model and scoring, the protocol with most runs counts. Columns `rho`, `low`, `high`, `methods`: Spearman's rank
    correlation of both models' losses over methods, and its 95% interval by bootstrap over methods (percentiles).
    """
    if (losses := losses_of(records)).empty:
        return losses
    joined = losses[losses["real"]].merge(losses, on=["scoring", "method"], suffixes=("", "_stand_in"))
    return rank_correlations(joined[~joined["real_stand_in"] | (joined["model"] < joined["model_stand_in"])])


def losses_of(records: Sequence[Record]) -> pd.DataFrame:
    """One line per model, scoring and method, of the protocol with most runs; without pairs of two methods."""
    losses = pd.DataFrame(filter(None, (_loss_line(record) for record in records if "+" not in record.method)))
    if losses.empty:
        return losses
    size = losses.groupby(["model", "scoring", "protocol"])["method"].transform("size")
    largest = size.groupby([losses["model"], losses["scoring"]]).transform("max")
    return losses[size == largest].drop_duplicates(["model", "scoring", "method"])


def rank_correlations(joined: pd.DataFrame) -> pd.DataFrame:
    """The pairs of models and scorings that have enough methods, with their rank correlations."""
    groups = joined.groupby(["model", "scoring", "model_stand_in"], sort=True)
    parts = [_correlate(part) for _, part in groups if len(part) >= 8]  # fewer say nothing
    return pd.concat(parts, ignore_index=True) if parts else joined.iloc[:0]


def _loss_line(record: Record) -> dict[str, Any] | None:
    """A record as a line of `losses_of`; None where it is no run of perplexity on a model that runs anywhere."""
    task, path = record.config.get("task") or {}, model_path(record.model)
    ours = record.task == "ppl" and record.status == "done" and "delta_nll" in record.metrics
    if not ours or task.get("scoring") not in SCORINGS or not path.startswith((EMBEDDED, DISTRIBUTION)):
        return None
    about = {"model": record.model, "real": path.startswith(DISTRIBUTION), "scoring": task["scoring"]}
    about |= {"method": named(record), "loss": record.metrics["delta_nll"]}
    return about | {"protocol": run_key(protocol_parts(record))}


def _correlate(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of two models with the correlation of their ranks, and by how many ranks each method differs."""

    def rho(x: np.ndarray, y: np.ndarray) -> float:
        return float(scipy.stats.spearmanr(x, y).statistic)

    first, second = pairs["loss"].to_numpy(), pairs["loss_stand_in"].to_numpy()
    rng = np.random.default_rng(0)
    found = scipy.stats.bootstrap((first, second), rho, paired=True, vectorized=False, **_BOOTSTRAP, rng=rng)
    ranks = scipy.stats.rankdata(second) - scipy.stats.rankdata(first)
    interval = found.confidence_interval
    columns = {"rho": rho(first, second), "low": interval.low, "high": interval.high, "methods": len(pairs)}
    return pairs[["scoring", "model", "model_stand_in", "method", "loss", "loss_stand_in"]].assign(
        ranks=ranks, **columns
    )
