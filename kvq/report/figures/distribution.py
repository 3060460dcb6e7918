"""Figures of `task=distribution`: Table 1 of NSNQuant, moments, Lemma 1, correlations, cosines, channels, t-SNE."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvq.report.figures import drawing as draw
from kvq.report.figures.error import rows_of
from kvq.report.labels import model_name
from kvq.results import Record, Store, run_key

SIDES = ("key", "value")
STEPS = ("N", "NS", "NSN")
STAGES = ("input", "NSN", "NSN+Hadamard")
_MOST_VECTORS, _FEWEST_VECTORS = 2_000, 8  # drawn of a corpus and side, as NSNQuant has it; fitted of a side
_LAYERS = 4  # columns of the scatter; of more layers, that many evenly spread
_TOKENS = 64  # rows of the images of magnitudes
_BY_LAYER = (
    *("channel deviation, 5% to 95%", "variance of rotated channels"),
    *("mean |correlation| in groups of 8", "cosine to the nearest codewords"),
)
_figure_of_run = functools.partial(draw.register_figure, of="first", task="distribution")


def closeness_table(record: Record, _: Store | None = None) -> pd.DataFrame:
    """Table 1 of NSNQuant from a run's metrics: KL in nats by step, side and rotation, and the oracle."""
    lines = [
        {"side": side, "step": step, "hadamard": bool(end), "kl": record.metrics[f"kl_{side}_{step}{end}"]}
        for side, step, end in itertools.product(SIDES, STEPS, ("_hadamard", ""))
    ]
    return pd.DataFrame([*lines, {"side": "oracle", "step": "", "hadamard": False, "kl": record.metrics["kl_oracle"]}])


@_figure_of_run("distribution-kl", "Closeness to N(0, 1): {where}", closeness_table)
def closeness_figure(table: pd.DataFrame) -> Figure:
    """Bars on a logarithmic scale, the oracle as a line."""
    places = {(side, step): i + 3.6 * j for j, side in enumerate(SIDES) for i, step in enumerate(STEPS)}
    made, axis = draw.panels(1, 2.4)
    for (side, step), place in places.items():
        for index, name in enumerate(("without", "with Hadamard")):
            here = (table["side"] == side) & (table["step"] == step) & (table["hadamard"] == bool(index))
            look: dict[str, Any] = {"color": draw.colour(index), "label": None if place else name}
            axis.bar(place + 0.4 * index - 0.2, table["kl"][here], 0.38, **look)
    oracle = float(table[table["side"] == "oracle"]["kl"].iloc[0])
    axis.axhline(oracle, color="black", linestyle="--", linewidth=0.8, label=f"oracle {oracle:.4f}")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    names = [f"{step}\n{side}s" if step == "NS" else f"{step}\n" for side, step in places]
    axis.set_xticks(list(places.values()), names)
    draw.legend_below(made, axis, 3, columnspacing=1)
    draw.dress(axis, y="mean KL to N(0, 1) (nats)")
    return made


def layers_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side and layer: deviations, Lemma 1's range and the measured one, correlation, cosines, synthetic too."""
    kinds = {kind: rows_of(record, store, kind) for kind in ("lemma", "correlation", "moments", "vq")}
    places = {kind: dict(list(rows.groupby(["side", "layer"]))) for kind, rows in kinds.items()}
    synthetic = rows_of(record, store, "synthetic")
    drawn = {
        f"synthetic {codebook} {bits} bit": part["cosine"].mean()
        for (codebook, bits), part in (synthetic.groupby(["codebook", "bits"]) if len(synthetic) else ())
    }
    lines = []
    for (side, layer), part in kinds["lemma"].groupby(["side", "layer"], sort=True):
        here = {kind: places[kind].get((side, layer), rows.iloc[:0]) for kind, rows in kinds.items()}
        line: dict[Any, Any] = {"side": side, "layer": layer}
        line |= part[["low", "variance_min", "covariance_min"]].min().to_dict()
        line |= part[["high", "variance_max", "covariance_max"]].max().to_dict()
        line |= part[["epsilon", "gamma", "inside"]].mean().to_dict()
        line["correlation"] = here["correlation"]["correlation"].mean()
        for stage in STAGES:
            at = here["moments"][here["moments"]["stage"] == stage]
            low, high = np.quantile(np.concatenate([np.asarray(row) for row in at["deviation"]]), (0.05, 0.95))
            line |= {f"deviation {stage} 5%": float(low), f"deviation {stage} 95%": float(high)}
            line[f"|mean| {stage}"] = float(np.mean([np.abs(row).mean() for row in at["mean"]]))
        cosines = here["vq"].to_dict("records")
        line |= {f"cosine {row['codebook']} {row['bits']} bit": row["cosine"] for row in cosines}
        lines.append(line | drawn)
    return pd.DataFrame(lines)


@_figure_of_run(
    "distribution-layers", "NSN by layer: {where} (solid: keys, dotted: values, dashed: synthetic)", layers_table
)
def layers_figure(table: pd.DataFrame) -> Figure:
    """By layer: channel deviations, rotated variances and Lemma 1's range, correlation in groups, cosines."""
    made, axes = draw.panels(2, 4.8, 2, 2)
    for index, side in enumerate(SIDES):
        part = table[table["side"] == side]
        places = part["layer"] + 0.12 * (2 * index - 1)
        for stage, aside, alpha in (("NSN", 0, 0.4), ("NSN+Hadamard", 0.1, 1.0)):
            low, high = part[f"deviation {stage} 5%"], part[f"deviation {stage} 95%"]
            draw.draw_ranges(axes[0, 0], places + aside, low, high, index, 3, f"{side}s, {stage}", alpha=alpha)
        low, words = part["low"].clip(lower=0), f"{side}s: range of Lemma 1"
        draw.draw_ranges(axes[0, 1], places, low, part["high"], index, 4, words, alpha=0.35)
        draw.draw_ranges(
            axes[0, 1], places, part["variance_min"], part["variance_max"], index, 1.5, f"{side}s: measured"
        )
        look: Any = {"color": draw.colour(index), "marker": draw.marker(index), "label": f"{side}s"}
        axes[1, 0].plot(part["layer"], part["correlation"], **look)
    names = [name for name in table.columns if name.startswith("cosine ")]
    for index, name in enumerate(names):  # of codebooks
        for side, line in (("key", "-"), ("value", ":")):
            part = table[table["side"] == side]
            look = {"color": draw.colour(index), "marker": draw.marker(index), "linestyle": line}
            axes[1, 1].plot(part["layer"], part[name], **look, label=name[len("cosine ") :] if line == "-" else None)
        if (drawn := name.replace("cosine", "synthetic", 1)) in table:
            axes[1, 1].axhline(table[drawn].iloc[0], color=draw.colour(index), linewidth=0.6, linestyle="--")
    for axis, text in zip(axes.flat, _BY_LAYER, strict=True):
        draw.dress(axis, "layer", text, grid="both", whole=True)
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + 0.45 * (high - low))
        axis.legend(loc="upper center", ncols=2, columnspacing=0.8, handlelength=1.2)
    axes[1, 0].set_ylim(bottom=0)
    return made


def embedding_table(kept: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """t-SNE of all of the corpora's tokens by side, keys before RoPE; of each corpus `_MOST_VECTORS` places are kept.

    On one thread, to repeat. Source: NSNQuant, appendix G.2, which fits all tokens and draws 2,000 of each corpus.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    out = [pd.DataFrame()]
    for _, part in pd.concat(kept, ignore_index=True).groupby("side", sort=True):
        if len(part) >= _FEWEST_VECTORS:
            fit = TSNE(perplexity=min(30, (len(part) - 1) / 3), init="pca", random_state=0)
            with threadpool_limits(limits=1):
                places = fit.fit_transform(np.array(part["values"].tolist(), dtype=np.float32))
            part = part.assign(x=places[:, 0], y=places[:, 1])[["dataset", "side", "layer", "position", "x", "y"]]
            out += [of.iloc[:: -(-len(of) // _MOST_VECTORS)] for _, of in part.groupby("dataset", sort=True)]
    return pd.concat(out, ignore_index=True)


def embed_tokens(records: Sequence[Record], store: Store) -> dict[tuple[str, str], pd.DataFrame]:
    """`embedding_table` of the tokens that `task=distribution` kept, of every model with two corpora or more."""
    groups: dict[tuple[str, str], list[pd.DataFrame]] = defaultdict(list)
    for record in records:
        rows = rows_of(record, store, "vector") if record.task == "distribution" else pd.DataFrame()
        if not rows.empty:
            key = run_key({"model": record.config.get("model"), "task": record.config.get("task")})
            groups[record.model, key].append(rows.assign(dataset=record.dataset))
    return {
        (f"{model}-{key[:6]}", f"{model_name(model)}, layer {kept[0]['layer'].iloc[0]}"): embedding_table(kept)
        for (model, key), kept in groups.items()
        if len({rows["dataset"].iloc[0] for rows in kept}) > 1
    }


@draw.register_figure("distribution-tsne-{name}", "Tokens of {what}, one head", embed_tokens, of="records")
def embedding_figure(table: pd.DataFrame) -> Figure:
    """t-SNE of tokens, keys and values side by side, a point for each token and a colour for each corpus."""
    made, axes = draw.panels(2, 2.9, 1, 2)
    for axis, side in zip(axes, SIDES, strict=True):
        for index, (dataset, part) in enumerate(table[table["side"] == side].groupby("dataset", sort=True)):
            draw.draw_points(axis, part["x"], part["y"], index, str(dataset), s=6)
        draw.dress(axis, "t-SNE 1 (arbitrary unit)", "t-SNE 2 (arbitrary unit)", title=f"{side}s")
    draw.legend_below(made, axes[0], 4, markerscale=2)
    return made


def covariances_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side, layer and head, after NSN: Frobenius norm of the covariances off the diagonal, least and largest."""
    rows = rows_of(record, store, "lemma")
    return rows[["side", "layer", "head", "gamma", "covariance_min", "covariance_max"]].reset_index(drop=True)


@_figure_of_run("distribution-covariances", "Covariances of channels behind NSN: {where}", covariances_table)
def covariances_figure(table: pd.DataFrame) -> Figure:
    """The norm by layer, mean over heads (NSNQuant, Figure 6), and the range of covariances by head (its Figure 7)."""
    made, (norms, spans) = draw.panels(2, 2.6, 1, 2)
    for index, side in enumerate(SIDES):
        part = table[table["side"] == side].sort_values(["layer", "head"])
        means = part.groupby("layer")["gamma"].mean()
        norms.plot(means.index, means, color=draw.colour(index), marker=draw.marker(index), label=f"{side}s")
        heads = part["head"].max() + 1
        places = part["layer"] + part["head"] / heads + (index - 0.5) * 0.3 / heads
        draw.draw_ranges(spans, places, part["covariance_min"], part["covariance_max"], index, 3, f"{side}s")
    norms.set_ylim(bottom=0)
    spans.axhline(0, color="black", linewidth=0.6)
    draw.dress(norms, "layer (mean over heads)", "Frobenius norm off the diagonal", grid="both", whole=True)
    draw.dress(spans, "layer (a bar for each head)", "least to largest covariance", grid="both", whole=True)
    norms.legend(loc="best")
    spans.legend(loc="best")
    return made


def _explode_channels(rows: pd.DataFrame, names: list[str], quantities: list[str]) -> pd.DataFrame:
    """Samples that hold lists with a number for each channel, as one line per channel."""
    rows["channel"] = rows[quantities[0]].map(lambda values: list(range(len(values))))
    table = rows.explode(["channel", *quantities], ignore_index=True)
    return table[[*names, "channel", *quantities]].astype({"channel": int, **dict.fromkeys(quantities, float)})


def ranges_table(record: Record, store: Store) -> pd.DataFrame:
    """Least and largest covariance with others per side, head and channel of the first layer; empty: not kept."""
    rows = rows_of(record, store, "ranges")
    return rows if rows.empty else _explode_channels(rows, ["side", "layer", "head"], ["lowest", "highest"])


@_figure_of_run("distribution-ranges", "Covariances by channel behind NSN, layer {layer}: {where}", ranges_table)
def ranges_figure(table: pd.DataFrame) -> Figure:
    """Range of each channel's covariances, head after head: keys above, values below (NSNQuant's Figure 7)."""
    made, axes = draw.panels(2, 3.2, 2, 1, sharex=True, sharey=True)
    channels = int(table["channel"].max()) + 1
    for index, (axis, side) in enumerate(zip(axes, SIDES, strict=True)):
        part = table[table["side"] == side]
        draw.draw_ranges(axis, part["head"] * channels + part["channel"], part["lowest"], part["highest"], index, 0.8)
        for head in range(1, int(table["head"].max()) + 1):
            axis.axvline(head * channels - 0.5, color=draw.GREY, linewidth=0.6, linestyle="--")
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_ylabel(f"{side}s: least to\nlargest covariance")
    axes[-1].set_xlabel("channel, head after head")
    return made


def moments_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side, layer, head, stage and channel: mean and deviation over the tokens of the first window."""
    return _explode_channels(
        rows_of(record, store, "moments"), ["side", "layer", "head", "stage"], ["mean", "deviation"]
    )


def rotated_channels(table: pd.DataFrame) -> pd.DataFrame:
    """The channels after NSN and the Hadamard rotation, in some layers."""
    layers = draw.evenly_spread(sorted(table["layer"].unique()), _LAYERS)
    return table[(table["stage"] == STAGES[-1]) & table["layer"].isin(layers)].reset_index(drop=True)


@_figure_of_run(
    "distribution-channels",
    "Channels behind NSN and Hadamard: {where}",
    lambda record, store: rotated_channels(moments_table(record, store)),
)
def scatter_figure(table: pd.DataFrame) -> Figure:
    """A point for each channel, deviation over mean (NSNQuant, Figures 12 and 13); lines cross at those of N(0, 1)."""
    sides = {side: f"{side}s: deviation" for side in SIDES}
    layers = {layer: f"layer {layer}" for layer in sorted(table["layer"].unique())}
    pairs = (("side", sides), ("layer", layers))
    made, axes, parts = draw.multiples(3.4, table, *pairs, "mean of a channel", sharex=True, sharey=True)
    for axis, _, _, here in parts:
        draw.draw_level(axis, 1)
        axis.axvline(0, color=draw.GREY, linewidth=0.6)
        for head, part in here.groupby("head"):
            draw.draw_points(axis, part["mean"], part["deviation"], head, f"head {head}", s=5, rasterized=True)
        draw.dress(axis, grid="both")
    if table["head"].nunique() <= 8:
        draw.legend_below(made, axes[0, 0], 8, markerscale=2)
    return made


def magnitudes_table(record: Record, store: Store) -> pd.DataFrame:
    """A line per side and kept token, a column per channel: magnitudes; keys before RoPE, of one head of one layer."""
    rows, parts = rows_of(record, store, "vector"), []
    if rows.empty:
        return rows
    for side in SIDES:
        part = rows[rows["side"] == side]
        part = part.iloc[draw.evenly_spread(list(range(len(part))), _TOKENS)]
        values = np.abs(np.array(part["values"].tolist(), dtype=np.float64))
        columns = pd.DataFrame(values, columns=[f"channel {index}" for index in range(values.shape[1])]).round(3)
        parts.append(pd.concat([part[["side", "layer", "position"]].reset_index(drop=True), columns], axis=1))
    return pd.concat(parts, ignore_index=True)


@_figure_of_run("distribution-magnitudes", "Magnitudes, layer {layer}, head 0: {where}", magnitudes_table)
def magnitudes_figure(table: pd.DataFrame) -> Figure:
    """Keys and values as images, tokens over channels, each on its own scale (OScaR, Figure 2)."""
    made, axes = draw.panels(2, 2.8, 1, 2)
    for axis, side in zip(axes, SIDES, strict=True):
        part = table[table["side"] == side]
        image = draw.draw_heat(axis, part.filter(like="channel "), cmap="viridis", interpolation="nearest", vmin=0)
        made.colorbar(image, ax=axis, label=f"|{side}|")
        ticks = draw.evenly_spread(list(range(len(part))), 5)
        axis.set_yticks(ticks, [str(part["position"].iloc[tick]) for tick in ticks])
        draw.dress(axis, "channel", "position (token)", title=f"{side}s{', before RoPE' if side == 'key' else ''}")
    return made
