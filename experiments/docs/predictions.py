"""Do errors of states order methods as their losses do? And what rotating keys costs a layer.

`task=error` on two windows of 1,024 tokens against `task=ppl`, both at 2 bits; statistics of layers, and errors with
the newest tokens kept as in generation, from results/bench/state_statistics.json, which
`experiments/models/state_statistics.py` writes. `python experiments/docs/predictions.py` draws docs/order.png.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.models.state_statistics import mean_of
from kvq.report.figures.drawing import COLUMN, colour, image_of, panels, style
from kvq.results import Record, Store
from kvq.results.statistics import spearman

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
STATISTICS = ROOT / "results" / "bench" / "state_statistics.json"
CAUSES = ROOT / "results" / "bench" / "causes.json"
PICTURE = ROOT / "docs" / "order.png"
REAL = {"smollm2_135m": "SmolLM2-135M", "gemma3_270m": "Gemma 3 270M"}
MODELS = {**REAL, **{name: name for name in ("tiny", "tiny_outliers", "tiny_sinks", "tiny_hard")}}
SCORINGS = {"parallel": ("disjoint", None), "generation": ("sliding", 512)}
"""Windows and stride of each scoring."""


def errors(records: Iterable[Record], model: str, metric: str) -> dict[str, float]:
    """A metric of `task=error` by method, at 2 bits, on two windows of 1,024 tokens; `*_generation`: a statistic."""
    if metric.endswith("_generation"):
        names = [name for name in statistics(model)["layers"][0] if name.endswith(f".{metric}")]
        return {name.partition(".")[0]: mean_over_layers(model, name) for name in names}
    protocol = {"name": "error", "context": 1024, "windows": 2, "arms": "prefixes"}
    return {
        record.label: record.metrics[metric]
        for record in records
        if _is_of(record, model, protocol) and metric in record.metrics
    }


def losses(records: Iterable[Record], model: str, scoring: str) -> dict[str, float]:
    """Measured losses in nats per token by method, at 2 bits, in the protocol of the model's table."""
    windows, stride = SCORINGS[scoring]
    protocol = {"name": "ppl", "scoring": scoring, "windows": windows, "stride": stride}
    protocol |= {"context": 1024, "max_windows": 12} if model in REAL else {"context": 2048, "max_windows": None}
    return {
        record.label: record.metrics["delta_nll"]
        for record in records
        if _is_of(record, model, protocol) and "delta_nll" in record.metrics
    }


def _is_of(record: Record, model: str, protocol: dict[str, object]) -> bool:
    return (
        record.model == model
        and record.dataset == ("wikitext2" if model in REAL else "pydocs")
        and record.bits in ("2", "fixed")
        and not record.from_presets.method
        and "round_weights" not in record.config["model"]
        and all(record.config["task"].get(name) == value for name, value in protocol.items())
    )


def predicted(records: Sequence[Record], model: str, metric: str, scoring: str) -> tuple[float, int]:
    """Spearman's ρ of an error of states with the loss, over the methods that have both; and how many they are."""
    found, lost = errors(records, model, metric), losses(records, model, scoring)
    both = [name for name in found if name in lost]
    return spearman([found[name] for name in both], [lost[name] for name in both]).rho, len(both)


def cause(model: str, kind: str, form: str) -> float:
    """Error of attention outputs of OScaR over KIVI's in layers of a kind, keys and values in another form.

    `kind` and `form`: as `experiments/models/separate_causes.py` names them, with `_` for spaces; after a form
    `_of_kivi` asks for KIVI's error itself.
    """
    form, alone = form.removesuffix("_of_kivi"), form.endswith("_of_kivi")
    errors = json.loads(CAUSES.read_text(encoding="utf-8"))[model][kind.replace("_", " ")]
    oscar, kivi = (float(errors[f"{form.replace('_', ' ')}: {method}"]) for method in ("oscar", "kivi"))
    return kivi if alone else oscar / kivi


@functools.cache
def statistics(model: str) -> dict[str, Any]:
    """`layers`: statistics of a model's states by layer; `kinds` of layers, None where they do not differ."""
    found: dict[str, Any] = json.loads(STATISTICS.read_text(encoding="utf-8"))[model]
    return found


def mean_over_layers(model: str, name: str) -> float:
    """The mean over layers of a statistic of a model's states."""
    return mean_of(statistics(model)["layers"], name)


def rotation_noise(model: str) -> tuple[list[float], list[str]]:
    """By layer: predicted noise of logits with rotated keys over that without, 2 bits per channel; and its kind."""
    known = statistics(model)
    ratios = [layer["logit_noise_rotated"] / layer["logit_noise_raw"] for layer in known["layers"]]
    return ratios, known["kinds"] or ["full_attention"] * len(ratios)


def draw(records: Sequence[Record]) -> Figure:
    """Left: what rotating keys does to the noise of logits, by layer. Right: error of attention outputs and loss."""
    with style():
        made, (noise, order) = panels(2, 2.6, 1, 2)
        for index, (model, name) in enumerate(REAL.items()):
            ratios, kinds = rotation_noise(model)
            noise.plot(ratios, color=colour(index), lw=0.8, label=name)
            for kind, face in (("full_attention", colour(index)), ("sliding_attention", "white")):
                at = [layer for layer, found in enumerate(kinds) if found == kind]
                noise.plot(at, [ratios[i] for i in at], "o", ms=4, mec=colour(index), mfc=face)
        noise.axhline(1, color="0.6", lw=0.6)
        noise.set(yscale="log", xlabel="Layer (open: attends to a window)", ylabel="Noise of logits, rotated / not")
        for index, (model, name) in enumerate(MODELS.items()):
            found, lost = errors(records, model, "both_output_error"), losses(records, model, "parallel")
            both = [method for method in found if method in lost]
            points = [[values[method] for method in both] for values in (found, lost)]
            order.plot(*points, "os^vD*"[index], ms=4, color=colour(index), label=name)
        order.set(xscale="log", yscale="log", xlabel="Relative error of attention outputs, 2 windows")
        order.set_ylabel("Loss (nats/token), all at once")
        for axis in (noise, order):
            axis.legend(fontsize=6, frameon=False)
        made.set_size_inches(2 * COLUMN, 2.6)
    return made


def main() -> None:
    """Draw the picture of docs/findings.md."""
    records = [record for record in Store(ROOT / "results").scan()[0] if record.status == "done"]
    PICTURE.write_bytes(image_of(draw(records)))


if __name__ == "__main__":
    main()
