"""Do cheap statistics of keys and values predict which methods lose least? Two real models and the four embedded ones.

Of the first windows of a model's text, per layer, then the mean over layers and heads:

- spread of token norms (deviation / mean), of keys and values;
- outliers of channels before and after a Hadamard rotation: the kurtosis of all entries of a head (3: normal) and the
  largest channel's root mean square over the median channel's;
- logit noise: the variance that uniform quantization of keys at 2 bits adds to logits, from ranges of groups and the
  queries' mean squares by channel, raw, rotated, with unit norms, and both; and the alignment of the two;
- for each method its relative error of keys and values, the KL of attention weights and the error of attention outputs.

`python experiments/models/state_statistics.py --text wiki.test.jsonl` prints them beside the measured losses at 2 bits,
all keys and values at once, with Spearman's rho between each prediction and the losses.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor

from kvq.codecs.rotations import hadamard_matrix
from kvq.config import compose, resolve
from kvq.diagnostics import (
    attention_errors,
    group_ranges,
    imbalance,
    query_chunks,
    reconstruct,
    relative_mse,
    token_norms,
)
from kvq.methods.build import build_method
from kvq.models.inputs import Inputs
from kvq.results import Record, Store
from kvq.tasks.measurement import LayerStates, block_of, capture_windows

ROOT = Path(__file__).parents[2]
REAL = ("smollm2_135m", "gemma3_270m")
MODELS = (*REAL, "tiny", "tiny_outliers", "tiny_sinks", "tiny_hard")
METHODS = ("kivi", "oscar", "nsn", "nsnquant", "turboquant")
ABLATIONS = ("oscar/cr_only", "oscar/ots_only")
GROUP = 32
RESIDUAL = 128
WAYS = {"raw": (False, False), "rotated": (True, False), "unit": (False, True), "both": (True, True)}
"""Of keys before they are quantized: whether rotated, and whether scaled to unit norm."""
MEASURES = (
    "key_mse",
    "value_mse",
    "weight_kl",
    "output_error",
    "weight_kl_generation",
    "output_error_generation",
)

States = Float[Tensor, "1 heads tokens dim"]


def rotated(x: States) -> States:
    """Channels of each head rotated by a Hadamard matrix."""
    return x @ hadamard_matrix(x.shape[-1]).to(x) / x.shape[-1] ** 0.5


def unit(x: States) -> States:
    """Tokens of unit norm."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30)


def kurtosis(x: States) -> float:
    """Mean over heads of m4 / m2² of all entries, about zero."""
    squares = x.double().square()
    return float((squares.square().mean((2, 3)) / squares.mean((2, 3)).square()).mean())


def outlier(x: States) -> float:
    """Mean over heads of the largest channel's root mean square over the median channel's."""
    rms = x.double().square().mean(2).sqrt()
    return float((rms.amax(-1) / rms.quantile(0.5, -1)).mean())


def logit_noise(layer: LayerStates, rotate: bool, norms: bool) -> tuple[float, float]:
    """What uniform 2-bit keys in groups of 32 tokens do to logits, and how far queries look where the error is.

    Args:
        rotate: queries and keys are rotated by a Hadamard matrix first.
        norms: keys are scaled to unit norm, with exact norms.

    Returns:
        The variance of a logit's error, Σ_c E[q_c²] E[range_c²] / 12 / (2² - 1)², and that over what it would be if
        queries were equally large in all channels (below 1: they are small in the channels with large ranges).
    """
    key, query = layer.key.float(), layer.query.float()
    key, query = (rotated(key), rotated(query)) if rotate else (key, query)
    weights = query[0].square().mean(1).unflatten(0, (key.shape[1], -1)).mean(1)  # [kv_heads, dim]
    ranges = group_ranges(unit(key) if norms else key, GROUP)[0].square().mean(1)
    if norms:
        ranges = ranges * key[0].square().sum(-1).mean(1, keepdim=True)
    noise = layer.attention.scaling**2 * (weights * ranges).sum(-1) / 12 / 9
    return float(noise.mean()), float(((weights * ranges).mean(-1) / weights.mean(-1) / ranges.mean(-1)).mean())


def statistics(layer: LayerStates) -> dict[str, float]:
    """Statistics of one layer that name no method."""
    key, value = layer.key.float(), layer.value.float()
    found = {}
    for name, x in (("key", key), ("value", value)):
        found[f"{name}_norms"] = float(imbalance(token_norms(x)).variation.mean())
        for way, y in (("raw", x), ("rotated", rotated(x))):
            found[f"{name}_kurtosis_{way}"], found[f"{name}_outlier_{way}"] = kurtosis(y), outlier(y)
    for way, (rotate, norms) in WAYS.items():
        found[f"logit_noise_{way}"], found[f"alignment_{way}"] = logit_noise(layer, rotate, norms)
    return found


def _recent_kept(layer: LayerStates, key: States, value: States) -> dict[str, float]:
    """Errors of attention as in generation: a query reads the tokens since the last multiple of `RESIDUAL` exactly."""
    kl, error, power = 0.0, 0.0, 0.0
    shared = layer.query.shape[1] // key.shape[1]
    for first, chunk in query_chunks(layer.query, RESIDUAL):
        end = first + chunk.shape[2]
        mixed = torch.cat([key[:, :, :first], layer.key[:, :, first:end]], 2)
        read = torch.cat([value[:, :, :first], layer.value[:, :, first:end]], 2)
        full = layer.attention.log_weights(chunk, layer.key[:, :, :end], first)
        found = layer.attention.log_weights(chunk, mixed, first)
        kl += float((full.exp() * (full - found).masked_fill(full == -torch.inf, 0)).double().sum())
        output = full.exp() @ layer.value[:, :, :end].repeat_interleave(shared, 1)
        error += float((found.exp() @ read.repeat_interleave(shared, 1) - output).double().square().sum())
        power += float(output.double().square().sum())
    return {"weight_kl_generation": kl / layer.query[0, :, :, 0].numel(), "output_error_generation": error / power}


class Statistics:
    """Sums over layers and windows, by name; of a method's errors `<method>.<measure>`."""

    def __init__(self, dims: list[int], layers: int) -> None:
        self.methods = {name: build_method(name, bits=2, head_dim=dims) for name in (*METHODS, *ABLATIONS)}
        self.by_layer: list[dict[str, float]] = [defaultdict(float) for _ in range(layers)]
        self.windows = 0

    def add(self, layer: LayerStates) -> None:
        """Take one layer of one window."""
        rows = statistics(layer)
        for name, method in self.methods.items():
            at_once, in_blocks = {}, {}
            for side in ("key", "value"):
                codec, x = method.codec_of(side, layer.index), getattr(layer, side)
                assert codec is not None
                block = block_of(getattr(method.residual, side))
                at_once[side] = reconstruct(codec, x, block, layer.rope)
                in_blocks[side] = at_once[side] if block == RESIDUAL else reconstruct(codec, x, RESIDUAL, layer.rope)
                rows[f"{name}.{side}_mse"] = float(relative_mse(x, at_once[side]).mean())
            states = layer.attention, layer.query, layer.key, layer.value
            (error,) = attention_errors(*states, [(at_once["key"], at_once["value"])])
            rows[f"{name}.weight_kl"] = float(error.weight_kl.mean())
            rows[f"{name}.output_error"] = float(error.output.mean())
            rows |= {f"{name}.{measure}": value for measure, value in _recent_kept(layer, **in_blocks).items()}
        for name, value in rows.items():
            self.by_layer[layer.index][name] += value
        self.windows += layer.index == 0

    def layers(self) -> list[dict[str, float]]:
        """Means over windows, layer by layer."""
        return [{name: value / self.windows for name, value in row.items()} for row in self.by_layer]


def context_of(model: str) -> int:
    """Tokens of a window, as in the tables of losses."""
    return 1024 if model in REAL else 2048


def of_model(model: str, text: str | None, windows: int) -> dict[str, Any]:
    """Statistics of a model's states on its text, and the kinds of its layers where they differ."""
    data = f"dataset=wikitext2 dataset.path={text}" if model in REAL else "dataset=pydocs"
    task = f"task=error task.context={context_of(model)} task.windows={windows} method=kivi"
    given = [f"model={model}", *data.split(), *task.split()]
    inputs = Inputs(resolve(compose(given)))
    config = inputs.model.text_config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sums = Statistics([dim] * config.num_hidden_layers, config.num_hidden_layers)
    with torch.no_grad():
        capture_windows(inputs, sums.add)
    return {"layers": sums.layers(), "kinds": getattr(config, "layer_types", None)}


def losses(model: str, records: list[Record], scoring: str) -> dict[str, float]:
    """Measured losses at 2 bits of the methods on a model, in the protocol of its table."""
    expected = {
        "context": context_of(model),
        "stride": 512 if scoring == "generation" else None,
        "max_windows": 12 if model in REAL else None,
        "scoring": scoring,
    }
    dataset = "wikitext2" if model in REAL else "pydocs"
    return {
        record.label: record.metrics["delta_nll"]
        for record in records
        if (record.model, record.dataset, record.task, record.bits) == (model, dataset, "ppl", "2")
        and record.status == "done"
        and record.label in (*METHODS, *ABLATIONS)
        and not record.from_presets.method
        and "round_weights" not in record.config["model"]
        and all(record.config["task"].get(name) == value for name, value in expected.items())
    }


def mean_of(rows: list[dict[str, float]], name: str) -> float:
    """The mean over layers."""
    return sum(row[name] for row in rows) / len(rows)


def predictions(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By predictor, a number for each method that grows with its loss; None of them has seen a loss."""
    found = {
        measure: {name: mean_of(rows, f"{name}.{measure}") for name in (*METHODS, *ABLATIONS)} for measure in MEASURES
    }
    ways = {"kivi": "raw", "oscar": "both", "oscar/cr_only": "rotated", "oscar/ots_only": "unit"}
    found["logit_noise"] = {name: mean_of(rows, f"logit_noise_{way}") for name, way in ways.items()}
    return found


def table(found: dict[str, dict[str, Any]], records: list[Record]) -> list[str]:
    """Lines: statistics of each model, then predicted and measured orders."""
    names = sorted({name for each in found.values() for name in each["layers"][0] if "." not in name})
    lines = ["| statistic | " + " | ".join(found) + " |", "|---|" + "---:|" * len(found)]
    for name in names:
        cells = " | ".join(f"{mean_of(each['layers'], name):.3g}" for each in found.values())
        lines += [f"| {name} | {cells} |"]
    for scoring in ("parallel", "generation"):
        lines += ["", f"{scoring}: rho over the methods that both have; the order, least loss first", ""]
        for model, each in found.items():
            measured = losses(model, records, scoring)
            lines.append(f"{model}: measured {_order(measured)}")
            for name, predicted in predictions(each["layers"]).items():
                both = [method for method in predicted if method in measured]
                if len(both) > 2:
                    rho = spearmanr([predicted[one] for one in both], [measured[one] for one in both]).statistic
                    lines.append(f"  {name}: rho {rho:+.2f}; {_order({one: predicted[one] for one in both})}")
    return lines


def _order(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {values[name]:.3g}" for name in sorted(values, key=values.__getitem__))


def main() -> None:
    """Measure, keep in a file of JSON, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="the WikiText-2 test split (jsonl), for the real models")
    parser.add_argument("--out", type=Path, help="a JSON file; models in it are not measured again")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--windows", type=int, default=2)
    given = parser.parse_args()
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out and given.out.is_file() else {}
    for model in given.models:
        if model not in found:
            found[model] = of_model(model, given.text, given.windows)
            if given.out:
                given.out.write_text(json.dumps(found), encoding="utf-8")
    records, _ = Store(ROOT / "results").scan()
    print("\n".join(table({model: found[model] for model in given.models}, records)))


if __name__ == "__main__":
    main()
