"""Figures of `task=distribution`: Table 1, moments, Lemma 1, correlations, codeword cosines, t-SNE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvq.report.figures.error import rows_of
from kvq.report.figures.style import colour, figure, marker, style, whole_numbers
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = ("N", "NS", "NSN")
_MOST_VECTORS, _FEWEST_VECTORS = 10_000, 8  # of a side: as many as NSNQuant draws of five corpora


def closeness_table(record: Record) -> pd.DataFrame:
    """Table 1 of NSNQuant from a run's metrics: KL in nats by step, side and rotation, and the oracle."""
    lines = [
        {"side": side, "step": step, "hadamard": rotated, "kl": record.metrics[f"kl_{side}_{step}{suffix}"]}
        for side in ("key", "value")
        for step in STEPS
        for rotated, suffix in ((True, "_hadamard"), (False, ""))
    ]
    return pd.DataFrame([*lines, {"side": "oracle", "step": "", "hadamard": False, "kl": record.metrics["kl_oracle"]}])


def closeness_figure(table: pd.DataFrame, title: str) -> Figure:
    """Bars on a logarithmic scale, the oracle as a line."""
    from matplotlib.ticker import LogLocator, NullFormatter

    with style():
        made = figure(1, 2.4)
        axis = made.subplots()
        place, ticks = 0.0, []
        for side in ("key", "value"):
            for step in STEPS:
                for index, rotated in enumerate((False, True)):
                    found = table[(table["side"] == side) & (table["step"] == step) & (table["hadamard"] == rotated)]
                    name = "with Hadamard" if rotated else "without"
                    axis.bar(
                        place + 0.4 * index - 0.2,
                        found["kl"],
                        0.38,
                        color=colour(index),
                        label=name if place == 0 else None,
                    )
                ticks.append((place, f"{step}\n{side}s" if step == "NS" else f"{step}\n"))
                place += 1
            place += 0.6
        oracle = float(table[table["side"] == "oracle"]["kl"].iloc[0])
        axis.axhline(oracle, color="black", linestyle="--", linewidth=0.8, label=f"oracle {oracle:.4f}")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks([where for where, _ in ticks], [text for _, text in ticks])
        axis.set_ylabel("mean KL to N(0, 1) (nats)")
        made.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, columnspacing=1)
        axis.set_title(title)
    return made


def layers_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side and layer: deviations of channels, Lemma 1's range and the measured one, correlation, cosines."""
    lemma, correlation = rows_of(record, store, "lemma"), rows_of(record, store, "correlation")
    moments, cosines = rows_of(record, store, "moments"), rows_of(record, store, "vq")
    lines = []
    for (side, layer), part in lemma.groupby(["side", "layer"], sort=True):
        line = {"side": side, "layer": layer}
        for name in ("low", "variance_min", "covariance_min"):
            line[name] = part[name].min()
        for name in ("high", "variance_max", "covariance_max"):
            line[name] = part[name].max()
        line |= {name: part[name].mean() for name in ("epsilon", "gamma", "inside")}
        here = correlation[(correlation["side"] == side) & (correlation["layer"] == layer)]
        line["correlation"] = here["correlation"].mean()
        for stage in ("input", "NSN", "NSN+Hadamard"):
            at = moments[(moments["side"] == side) & (moments["layer"] == layer) & (moments["stage"] == stage)]
            values = np.concatenate([np.asarray(row) for row in at["deviation"]])
            line |= {
                f"deviation {stage} {name}": float(np.quantile(values, q)) for name, q in (("5%", 0.05), ("95%", 0.95))
            }
            line[f"|mean| {stage}"] = float(np.mean([np.abs(row).mean() for row in at["mean"]]))
        for _, row in cosines[(cosines["side"] == side) & (cosines["layer"] == layer)].iterrows():
            line[f"cosine {row['codebook']} {row['bits']} bit"] = row["cosine"]
        lines.append(line)
    return pd.DataFrame(lines)


def layers_figure(table: pd.DataFrame, synthetic: pd.DataFrame, title: str) -> Figure:
    """By layer: channel deviations, rotated variances and Lemma 1's range, correlation in groups, cosines."""
    with style():
        made = figure(2, 4.8)
        axes = made.subplots(2, 2)
        for index, side in enumerate(("key", "value")):
            part = table[table["side"] == side]
            shift = 0.12 * (2 * index - 1)
            for stage, alpha in (("NSN", 0.4), ("NSN+Hadamard", 1.0)):
                low, high = part[f"deviation {stage} 5%"], part[f"deviation {stage} 95%"]
                axes[0, 0].vlines(
                    part["layer"] + shift + (0.1 if alpha == 1 else 0),
                    low,
                    high,
                    color=colour(index),
                    alpha=alpha,
                    linewidth=3,
                    label=f"{side}s, {stage}",
                )
            places = part["layer"] + shift
            axes[0, 1].vlines(
                places,
                part["low"].clip(lower=0),
                part["high"],
                color=colour(index),
                alpha=0.35,
                linewidth=4,
                label=f"{side}s: range of Lemma 1",
            )
            axes[0, 1].vlines(
                places,
                part["variance_min"],
                part["variance_max"],
                color=colour(index),
                linewidth=1.5,
                label=f"{side}s: measured",
            )
            axes[1, 0].plot(
                part["layer"], part["correlation"], marker(index) + "-", color=colour(index), label=f"{side}s"
            )
        _cosines(axes[1, 1], table, synthetic)
        texts = (
            (axes[0, 0], "channel deviation, 5% to 95%"),
            (axes[0, 1], "variance of rotated channels"),
            (axes[1, 0], "mean |correlation| in groups of 8"),
            (axes[1, 1], "cosine to the nearest codewords"),
        )
        for axis, text in texts:
            axis.set_xlabel("layer")
            axis.set_ylabel(text)
            whole_numbers(axis)
            axis.grid(linewidth=0.3)
            low, high = axis.get_ylim()
            axis.set_ylim(low, high + 0.45 * (high - low))
            axis.legend(loc="upper center", ncols=2, columnspacing=0.8, handlelength=1.2)
        axes[1, 0].set_ylim(bottom=0)
        made.suptitle(title, fontsize=8)
    return made


def _cosines(axis: object, table: pd.DataFrame, synthetic: pd.DataFrame) -> None:
    names = [name for name in table.columns if name.startswith("cosine ")]
    for index, name in enumerate(names):
        for side, line in (("key", "-"), ("value", ":")):
            part = table[table["side"] == side]
            text = name.removeprefix("cosine ") if side == "key" else None
            axis.plot(part["layer"], part[name], line, marker=marker(index), color=colour(index), label=text)  # type: ignore[attr-defined]
        _, codebook, bits, _ = name.split()
        found = synthetic[(synthetic["codebook"] == codebook) & (synthetic["bits"] == int(bits))]
        for value in found["cosine"]:
            axis.axhline(value, color=colour(index), linewidth=0.6, linestyle="--")  # type: ignore[attr-defined]


def kept_vectors(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """The tokens that runs kept, of sides with enough of them, behind the name of the corpus; thinned to some."""
    kept = []
    for record in records:
        rows = rows_of(record, store, "vector")
        if not rows.empty:
            kept.append(rows.assign(dataset=record.dataset))
    if not kept:
        return pd.DataFrame()
    sides = pd.concat(kept, ignore_index=True).groupby("side", sort=True)
    parts = [part.iloc[:: max(1, len(part) // _MOST_VECTORS)] for _, part in sides]
    parts = [part for part in parts if len(part) >= _FEWEST_VECTORS]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def embedding_table(kept: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """t-SNE in two dimensions of the kept tokens of several corpora, keys and values apart.

    Keys before RoPE, nothing normalized or rotated (NSNQuant, appendix G.2); one head of one layer. On one thread: the
    places depend on how many there are, and for some hundred tokens more of them are slower.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    out = []
    for _, part in kept.groupby("side", sort=True):
        fit = TSNE(perplexity=min(30, (len(part) - 1) / 3), init="pca", random_state=seed)
        with threadpool_limits(limits=1):
            places = fit.fit_transform(np.array(part["values"].tolist(), dtype=np.float32))
        out.append(part.assign(x=places[:, 0], y=places[:, 1])[["dataset", "side", "layer", "position", "x", "y"]])
    return pd.concat(out, ignore_index=True)


def embedding_figure(table: pd.DataFrame, title: str) -> Figure:
    """Keys and values side by side, a colour for each corpus."""
    with style():
        made = figure(2, 2.9)
        axes = made.subplots(1, 2)
        for axis, side in zip(axes, ("key", "value"), strict=True):
            for index, (dataset, part) in enumerate(table[table["side"] == side].groupby("dataset", sort=True)):
                axis.scatter(
                    part["x"],
                    part["y"],
                    s=6,
                    marker=marker(index),
                    color=colour(index),
                    alpha=0.6,
                    linewidths=0,
                    label=str(dataset),
                )
            axis.set_xlabel("t-SNE 1 (arbitrary unit)")
            axis.set_ylabel("t-SNE 2 (arbitrary unit)")
            axis.set_title(f"{side}s")
        made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, markerscale=2)
        made.suptitle(title, fontsize=8)
    return made
