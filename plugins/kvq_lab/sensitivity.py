"""`task=sensitivity`: what the bits of each layer's keys and values cost.

Each side of each layer is quantized while all others stay in full precision; then all at once; then
random sets of them, whose cost is compared with the sum of their parts; where asked, each KV head by itself. `kvq
allocate` gives layers bits by these costs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from scipy.stats import spearmanr

from kvq.codecs import HeadsCodec, check_single_heads
from kvq.config.tasks import PplConfig, Windows
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.layers import kv_layers_of
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task, journaled
from kvq.tasks.ppl import check_scoring, ppl_windows, reference_of, run_ppl, window_texts
from kvq.tasks.scoring import without_codecs
from kvq_lab.settings import SensitivityConfig

SIDES = ("key", "value")

Place = tuple[str, int]
"""A side and a layer."""


def ppl_settings(task: SensitivityConfig) -> PplConfig:
    """The settings of `task=ppl` with the same windows and scoring."""
    same = {name: getattr(task, name) for name in ("context", "scoring", "bos", "batch_size")}
    return PplConfig(windows=Windows.disjoint, max_windows=task.windows, **same)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` where a layer's keys or values are not quantized independently of all others."""
    task: SensitivityConfig = inputs.config.task
    inputs.check_context()
    method.check_needs("task=sensitivity", "sides_apart")
    check_scoring(method, ppl_settings(task))
    if task.heads:
        check_heads(inputs, method)


def check_heads(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a codec that does not encode each head by itself."""
    for layer in kv_layers_of(inputs.model.text_config):
        for side, dim in zip(SIDES, (layer.head_dim, layer.value_dim), strict=True):
            codec = method.codec_of(side, layer.index)
            if codec is not None:
                try:
                    check_single_heads(codec, dim)
                except Unsupported as error:
                    raise Unsupported(f"task.heads=true: method={method.name}, {side}s: {error}") from error


def count_layers(inputs: Inputs) -> int:
    """Number of layers of the model that cache keys and values."""
    return len(kv_layers_of(inputs.model.text_config))


def count_heads(inputs: Inputs) -> int:
    """Number of KV heads of a layer."""
    return int(inputs.model.text_config.num_key_value_heads)


def quantized_places(method: Method, layers: int) -> list[Place]:
    """The sides of layers that the method quantizes, layer by layer."""
    return [(side, layer) for layer, side in product(range(layers), SIDES) if method.codec(side, layer, layers)]


def quantize_only(method: Method, places: Collection[Place], layers: int) -> Method:
    """The method with only these sides of layers quantized, and all others in full precision."""
    whole = {side: [layer for layer in range(layers) if (side, layer) not in places] for side in SIDES}
    return replace(method, full_precision_layers=whole)


def quantize_only_head(method: Method, place: Place, head: int, heads: int, layers: int) -> Method:
    """The method with one head of one side of one layer quantized; all else stays in full precision."""
    side, layer = place
    codec = method.codec_of(side, layer)
    assert codec is not None
    codecs: Any = {side: HeadsCodec([codec if one == head else None for one in range(heads)])}
    return quantize_only(replace(method.without_policies("first_layers"), by_layer=(), **codecs), [place], layers)


def random_sets(places: list[Place], count: int, seed: int) -> list[list[Place]]:
    """Sets of at least two places, their sizes evenly drawn, each a sample without replacement."""
    draw = random.Random(f"sensitivity maps {seed}")
    return [sorted(draw.sample(places, draw.randint(2, len(places)))) for _ in range(count if len(places) > 1 else 0)]


@dataclass(frozen=True)
class Job:
    """What one pass quantizes: places, each a side and a layer, or one KV head of a single place."""

    places: list[Place]
    head: int | None = None

    def add_places(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the row with the job's side and layer, its head and `of` (side, layer), or its layers by side."""
        if self.head is not None:
            return {**row, "head": self.head, "of": list(self.places[0])}
        if len(self.places) == 1:
            return {**row, "side": self.places[0][0], "layer": self.places[0][1]}
        return {**row, "layers": {side: [layer for at, layer in self.places if at == side] for side in SIDES}}


def list_jobs(inputs: Inputs, method: Method) -> dict[str, Job]:
    """What each pass quantizes, by its name: single sides of layers, all, random sets and, if asked, single heads."""
    task: SensitivityConfig = inputs.config.task
    places = quantized_places(method, count_layers(inputs))
    heads = range(count_heads(inputs) if task.heads else 0)
    jobs = {f"layer {layer} {side}": Job([(side, layer)]) for side, layer in places}
    jobs["all"] = Job(places)
    jobs |= {f"map {index}": Job(subset) for index, subset in enumerate(random_sets(places, task.maps, task.seed))}
    return jobs | {f"layer {layer} {side} head {h}": Job([(side, layer)], h) for side, layer in places for h in heads}


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each side of each layer, one for all of them and one for each random set."""
    loaded, settings = inputs.model, ppl_settings(inputs.config.task)
    windows = ppl_windows(inputs.tokens.streams, settings, inputs.bos)
    reference, known = reference_of(inputs, method, windows, settings)
    full = known or run_ppl(loaded, without_codecs(method), windows, settings)
    if method.is_full_precision:
        metrics = {name: value for name, value in full.metrics().items() if name in ("nll", "windows", "scored_tokens")}
        return Measurement(metrics, units_of(metrics), full.samples())
    jobs, layers = list_jobs(inputs, method), count_layers(inputs)

    def score(item: str) -> dict[str, Any]:
        """KL and loss over full precision, in nats per token, and what is stored of the places."""
        places, head = jobs[item].places, jobs[item].head
        if head is None:
            one = quantize_only(method, places, layers)
        else:
            one = quantize_only_head(method, places[0], head, count_heads(inputs), layers)
        keep = inputs.config.cache.keep_decoded
        stats = run_ppl(loaded, one, windows, settings, reference, keep_decoded=keep).metrics()
        kept = {name: stats[name] for name in ("kl_mean", "key_bits", "value_bits", "bits_per_element", "packed_bytes")}
        return {"delta_nll": stats["nll"] - full.nll, **kept}

    rows = [jobs[row["item"]].add_places(row) for row in journaled(journal, jobs, score, method.label, "pass")]
    metrics = _metrics({row["item"]: row for row in rows}, jobs)
    return Measurement(metrics, units_of(metrics), rows)


def _metrics(rows: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Job]) -> dict[str, float]:
    """KL and loss of all places at once, sums of the KL of single ones, and how well sums rank the random sets."""
    whole = {item: job.places for item, job in jobs.items() if job.head is None}
    single = {places[0]: rows[item]["kl_mean"] for item, places in whole.items() if len(places) == 1}
    together, total = rows["all"], sum(single.values())
    keys = sum(kl for (side, _), kl in single.items() if side == "key")
    names = ("kl_mean", "delta_nll", "key_bits", "value_bits", "bits_per_element")
    metrics = {name: float(together[name]) for name in names}
    metrics |= {"kl_sum": total, "kl_sum_keys": keys}
    if of_heads := [rows[item]["kl_mean"] for item, job in jobs.items() if job.head is not None]:
        metrics["kl_sum_heads"] = sum(of_heads)
    maps = [
        (sum(single[place] for place in places), rows[item]["kl_mean"])
        for item, places in whole.items()
        if item.startswith("map")
    ]
    if len(maps) > 2:
        rho = float(spearmanr(*zip(*maps, strict=True)).statistic)
        metrics["sum_correlation"] = rho if math.isfinite(rho) else 0.0
    return metrics


TASK = Task(
    check,
    measure,
    settings=SensitivityConfig,
    texts=lambda inputs: window_texts(inputs, ppl_settings(inputs.config.task)),
)
