"""`task=tni`: token-norm imbalance of queries, keys and values, and the error it causes where tokens share scales.

Published claims under test: OScaR (arXiv 2605.19660), sections 3 and 4; nsn's value dispersion in layer 0.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from kvq import diagnostics
from kvq.codecs import Codec, UniformQuantizer
from kvq.config.diagnostics import TniConfig
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.tasks import measurement
from kvq.tasks.measurement import Baseline, LayerStates, Measurement, Task

SIDES = ("query", "key", "value")
_MOST = 0.9  # of a head's attention, above which it is that of one token (NSNQuant, section 3.1)
_UNITS = {
    "largest_*_share": "fraction",
    "heads_of_one_token": "heads",
    "*_error_share_of_sinks": "fraction",
    "*_sinks": "positions",
    "*_layers_*": "layers",
    "*_vs_error": "Spearman's rho over groups, mean over layers",
    "windows": "windows",
    "context": "tokens",
}


def positions_of(tokens: int, count: int) -> list[int]:
    """The first 16 positions, and others up to the last, evenly spread on a logarithmic scale."""
    spread = torch.logspace(0, torch.tensor(float(tokens)).log10().item(), count).long() - 1
    return sorted({*range(min(16, tokens)), *(int(p) for p in spread if p < tokens), tokens - 1})  # 16 first


class NormStatistics:
    """Norm statistics of every layer and side, collected window by window."""

    def __init__(self, task: TniConfig, by_token: TokenShares | None = None) -> None:
        self.task, self.positions, self._by_token = task, positions_of(task.context, task.positions), by_token
        self._rows: dict[tuple[int, str], list[dict[str, Tensor]]] = defaultdict(list)
        self.relative: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._received: dict[int, list[Tensor]] = defaultdict(list)
        self._low: dict[tuple[int, str], Tensor] = {}

    def add(self, layer: LayerStates) -> None:
        """Take one layer of one window."""
        received = diagnostics.attention_received(layer.attention, layer.query, layer.key).cpu()
        if self._by_token is not None:
            self._by_token.add(layer.index, received)
        for side in SIDES:
            norms, place = diagnostics.token_norms(getattr(layer, side)), (layer.index, side)
            ratios, spread = diagnostics.over_median(norms)[0], diagnostics.imbalance(norms)
            heads = received.unflatten(0, (norms.shape[1], -1)).mean(1)  # the query heads of a KV head as one
            row = {**vars(spread), "median": norms[0].quantile(0.5, -1).cpu(), "first": norms[0, :, 0].cpu()}
            row |= {"first_over_median": ratios[:, 0].cpu(), "first_attention": heads[:, 0]}
            self._rows[place].append(row | {"norms": norms[0][:, self.positions].cpu()})
            low = (ratios < self.task.sink_below).short().cpu()
            self._low[place] = self._low[place] + low if place in self._low else low
            self.relative[place].append(diagnostics.relative_norms(norms)[0].cpu())
        self._received[layer.index].append(received.mean(0))

    def sinks(self, layer: int, side: str) -> list[dict[str, Any]]:
        """Low-norm positions over windows, with the attention they receive."""
        found = diagnostics.find_sinks(torch.stack(self.relative[layer, side]), self.task.sink_below)
        received = torch.stack(self._received[layer]).mean(0)
        return [{**vars(sink), "attention": float(received[sink.position])} for sink in found]

    def samples(self) -> list[dict[str, Any]]:
        """`kind` layer (per head), positions (norms per head at some positions, mean over windows) and sink.

        Rows of layers have the median norm, that of position 0 as it is and over the median, the mean attention that it
        gets from later queries, and `low`: the positions below `sink_below` medians in at least half of the windows.
        """
        out: list[dict[str, Any]] = []
        for (layer, side), windows in self._rows.items():
            mean = {name: torch.stack([window[name] for window in windows]).double().mean(0) for name in windows[0]}
            for head in range(len(mean["variation"])):
                statistics = {name: float(mean[name][head]) for name in mean if name != "norms"}
                low = torch.nonzero(2 * self._low[layer, side][head] >= len(windows)).flatten().tolist()
                out.append({"kind": "layer", "side": side, "layer": layer, "head": head, **statistics, "low": low})
            relative = torch.stack(self.relative[layer, side]).double().quantile(0.5, 0)
            row = {"kind": "positions", "side": side, "layer": layer, "positions": self.positions}
            row |= {"norms": mean["norms"].T.tolist(), "relative": relative[self.positions].tolist()}
            out.append(row | {"attention": torch.stack(self._received[layer]).mean(0)[self.positions].tolist()})
            out += [{"kind": "sink", "side": side, "layer": layer, **sink} for sink in self.sinks(layer, side)]
        return out + (self._by_token.samples() if self._by_token is not None else [])


class TokenShares:
    """Attention by what tokens are: of what queries give to earlier tokens, the share of each token of the vocabulary.

    The first token of a window stands by itself, as `first`: heads look at it whatever it is.

    Source: NSNQuant (arXiv 2505.18231), section 3.1: a comma receives more than 90% in certain heads.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._most = inputs.config.task.by_token
        windows = measurement.windows_of(inputs)
        self._windows = [torch.cat([window.new_full((1,), -1), window[1:]]) for window in windows]
        self._tokens = torch.cat(self._windows).unique()
        self._sums: dict[int, Tensor] = {}
        self._seen: dict[int, int] = defaultdict(int)
        self._name = inputs.tokenizer.decode

    def add(self, layer: int, received: Float[Tensor, "heads tokens"]) -> None:
        """Add to each vocabulary token's sum what it receives in the next window (means over the queries behind it)."""
        places = torch.searchsorted(self._tokens, self._windows[self._seen[layer]])
        self._seen[layer] += 1
        weight = received * torch.arange(received.shape[1] - 1, -1, -1, dtype=received.dtype)
        sums = self._sums.setdefault(layer, weight.new_zeros(len(weight), len(self._tokens)))
        sums.index_add_(1, places, weight)

    def samples(self) -> list[dict[str, Any]]:
        """`kind` token: the tokens of largest share of every query head, largest first."""
        out: list[dict[str, Any]] = []
        for layer, sums in sorted(self._sums.items()):
            shares = sums / sums.sum(1, keepdim=True)
            for head, row in enumerate(shares):
                for place in row.argsort(descending=True)[: self._most].tolist():
                    token = int(self._tokens[place])
                    text = "first" if token < 0 else self._name([token])
                    named = {"layer": layer, "head": head, "token": token, "text": text}
                    out.append({"kind": "token", **named, "share": float(row[place])})
        return out


def groups_of(method: Method, sinks: dict[tuple[int, str], list[int]], layer: LayerStates) -> Iterator[dict[str, Any]]:
    """Rows of a layer and window, means over heads, of `kind` range (per stage), group, without (sinks' groups)."""
    for side in ("key", "value"):
        codec: Codec | None = method.codec(side, layer.index, layer.count)
        if codec is None:
            continue
        block, place = measurement.block_of(getattr(method.residual, side), codec), {"side": side, "layer": layer.index}
        x, group, shares = getattr(layer, side), diagnostics.quantizer_group(codec), diagnostics.shares_tokens(codec)
        outputs = diagnostics.stage_outputs(codec, x, block, layer.rope)
        for stage, y in outputs:
            plain = float(diagnostics.group_ranges(y, group).mean())
            size = float(y.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny))
            norms = diagnostics.token_norms(y)
            means = {"range": plain, "relative_range": plain / size, "norm": float(norms.mean())}
            yield {"kind": "range", **place, "stage": stage, **means, "first_norm": float(norms[..., 0].mean())}
        x_hat, last = diagnostics.reconstruct(codec, x, block, layer.rope), outputs[-1][1]
        count = last.shape[2] // group
        kept = slice(0, count * group)
        error = (x_hat - x)[:, :, kept].double().square().unflatten(2, (count, group)).mean((3, 4)).sqrt()
        norms = diagnostics.token_norms(x)[:, :, kept]
        spread, deviation = diagnostics.group_spread(norms, group)
        row = {"error": error, "norm_range": spread, "norm_deviation": deviation}
        if isinstance(codec.quantizer, UniformQuantizer) and shares:
            scale = norms.mean() / diagnostics.token_norms(last).mean().clamp_min(1e-30)
            bound = diagnostics.step_bound(diagnostics.group_ranges(last, group), codec.quantizer.bits)
            row["bound"] = bound.mean(3) * scale
        by_group = {name: part[0].double().mean(0).tolist() for name, part in row.items()}
        for index in range(count):
            yield {"kind": "group", **place, "group": index, **{name: part[index] for name, part in by_group.items()}}
        if shares:
            positions = sinks[layer.index, side]
            found = diagnostics.without_tokens(codec, x, torch.tensor(positions), group, layer.rope)
            pair = dict(zip(("with_sinks", "without_sinks"), found, strict=True))
            yield {"kind": "without", **place, "positions": tuple(positions), **pair}


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Norms; for a method also ranges, bounds, errors of sinks, else of the position of lowest norm."""
    task: TniConfig = inputs.config.task
    norms = NormStatistics(task, TokenShares(inputs) if task.by_token else None)
    windows = measurement.capture_windows(inputs, norms.add)
    rows = norms.samples()
    if not method.is_full_precision:
        chosen = {}
        for layer, side in norms.relative:
            found = [sink["position"] for sink in norms.sinks(layer, side)]
            lowest = int(torch.stack(norms.relative[layer, side]).double().mean(0).argmin())
            chosen[layer, side] = found or [lowest]
        groups: list[dict[str, Any]] = []
        measurement.capture_windows(inputs, lambda layer: groups.extend(groups_of(method, chosen, layer)))
        for row in measurement.averaged(groups, "kind", "side", "layer", "stage", "group", "positions"):
            if row["kind"] == "without":
                whole = row["with_sinks"]
                row["share_removed"] = 1 - row["without_sinks"] / whole if whole else 0.0
            rows.append(row)
    metrics = summary(rows) | {"windows": float(windows), "context": float(task.context)}
    if task.by_token:
        metrics |= by_token(rows)
    return Measurement(metrics, measurement.units_like(metrics, _UNITS), rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the samples: means over layers and heads, and those of layer 0 by name."""
    out: dict[str, float] = {}
    for side in SIDES:
        out |= measurement.mean_metric(f"{side}_cv", rows, "variation", kind="layer", side=side)
        out |= measurement.mean_metric(f"{side}_cv_layer0", rows, "variation", kind="layer", side=side, layer=0)
        for name in ("max_over_min", "median_over_min"):
            out |= measurement.mean_metric(f"{side}_{name}", rows, name, kind="layer", side=side)
        sinks = [row for row in rows if row["kind"] == "sink" and row["side"] == side]
        out[f"{side}_sinks"] = float(len(sinks))
        out[f"{side}_layers_with_low_first_token"] = float(len({s["layer"] for s in sinks if s["position"] == 0}))
    for side in ("key", "value"):
        groups = [row for row in rows if row["kind"] == "group" and row["side"] == side]
        for name in ("bound", "norm_range", "norm_deviation"):
            rhos = []
            for layer in {row["layer"] for row in groups}:
                own = [row for row in groups if row["layer"] == layer and name in row]
                ranks = [_ranks([row[what] for row in own]) for what in (name, "error")] if len(own) > 2 else []
                if ranks and all(max(found) for found in ranks):
                    rhos.append(float(stats.spearmanr(*ranks).statistic))
            if rhos:
                out[f"{side}_{name}_vs_error"] = sum(rhos) / len(rhos)
        out |= measurement.mean_metric(f"{side}_error_share_of_sinks", rows, "share_removed", kind="without", side=side)
    return out


def by_token(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics of `task.by_token`: shares of tokens other than the first, and norms in front of layer 0's quantizers."""
    shares = [row["share"] for row in rows if row["kind"] == "token" and row["token"] >= 0]
    commas = [row["share"] for row in rows if row["kind"] == "token" and row["text"].strip() == ","]
    out = {"largest_token_share": max(shares, default=0.0), "largest_comma_share": max(commas, default=0.0)}
    out["heads_of_one_token"] = float(sum(share > _MOST for share in shares))
    for side in ("key", "value"):
        stages = [row for row in rows if row["kind"] == "range" and row["side"] == side and row["layer"] == 0]
        if stages:
            out |= {f"{side}_coded_{name}_layer0": stages[-1][name] for name in ("first_norm", "norm")}
    return out


def _ranks(values: Sequence[float]) -> Float[np.ndarray, " values"]:
    """Ranks in ascending order, the same for values that only rounding in fp32 tells apart."""
    given = np.array(values)
    order = given.argsort(kind="stable")
    ranks = np.empty(len(given))
    ranks[order] = np.cumsum([0, *(np.diff(given[order]) > 1e-6 * np.abs(given).max())])  # of the largest value
    return ranks


TASK = Task(functools.partial(measurement.check_capture, needed=("all_layers", "all_tokens")), measure)
