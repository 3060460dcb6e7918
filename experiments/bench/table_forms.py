"""Predicted loss and bytes of forms of waterfill's tables: `python experiments/bench/table_forms.py smollm2_135m`.

Moments of a model on the calibration text (minutes), then for each form the tables at 1.25 and 2.25 bits; their
second-order loss on that text, (1/2) tr(F E[e eᵀ]) with the noise of the components that have bits and all that lies
outside of what their rows span; bytes; and bytes at the shape of a model of 8B parameters (32 layers, 8 heads of 128).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from kvq.calibration.budget import collect_joint, fit_sharing, joint_parts
from kvq.calibration.collect import Place
from kvq.calibration.text import load_text
from kvq.codecs import JointMoments, Tables, bind_codec
from kvq.codecs.second_moments import FOLDED
from kvq.config import compose, resolve
from kvq.methods.build import build_method
from kvq.models.inputs import Inputs

TRANSFORM = "key.stages.transform"
FORMS = {
    "exact, fp32, both matrices": (),
    "exact, folded": ("folded=true",),
    **{f"folded, {tables}": ("folded=true", f"tables={tables}") for tables in ("int8", "int6", "int4")},
    **{f"folded, width+{c}": ("folded=true", f"tables=width+{c}") for c in (1, 2, 3)},
    "two heads and one, exact, folded": ("folded=true", "with_values=true", "heads_together=2"),
    "two heads and one, width+2": ("folded=true", "with_values=true", "heads_together=2", "tables=width+2"),
    "heads apart, width+2": ("folded=true", "with_values=true", "heads_together=1", "tables=width+2"),
}
LARGER = (32, 8, 128)


def moments_of_text(model: str) -> dict[Place, JointMoments]:
    """Moments of keys with values of every layer on waterfill's calibration text."""
    config = resolve(compose([f"model={model}", "method=waterfill_kv", "bits=2.25", "dataset=pydocs"]))
    inputs = Inputs(config)
    text, settings = load_text(inputs), config.method.calibration
    assert text is not None
    found = collect_joint(inputs.model, text.windows, settings.tokens, settings.seed, 1, True, True)
    return {("key", layer): one for (_, layer), one in found.items()}


def outside(transform: object, moments: JointMoments) -> float:
    """Loss of what the rows of a bound transform do not span: (1/2) tr((1 - P) F (1 - P)ᵀ S), P what it keeps."""
    n, heads = len(moments.mean), moments.heads
    unit = torch.eye(n, dtype=torch.float64)
    states = unit.unflatten(1, (heads, -1)).transpose(0, 1) + moments.mean.view(heads, 1, -1)
    kept = transform.inverse(*transform.forward(states)).transpose(0, 1).flatten(1) - moments.mean  # type: ignore[attr-defined]
    left = unit - kept
    metric = moments.fisher + 0.01 * moments.fisher.diagonal().mean() * torch.eye(n)
    return float((moments.covariance @ left @ metric * left).sum() / 2)


def at_larger(tables: Mapping[Place, Tables], together: int | None, heads: int, dim: int) -> float:
    """Bytes of the matrices counted at the larger shape: they grow with layers and the squares of groups' channels."""
    size = sum(t.nbytes for own in tables.values() for name, t in own.items() if FOLDED not in name)

    def squares(count: int, channels: int) -> int:
        group = min(together or count, count)
        return (count // group) * (2 * group * channels) ** 2 + (2 * (count % group) * channels) ** 2

    layers, larger, wide = LARGER
    return size * layers / len(tables) * squares(larger, wide) / squares(heads, dim)


def main(model: str, moments: Mapping[Place, JointMoments] | None = None) -> None:
    """Print a line of a Markdown table for each form."""
    moments = moments or moments_of_text(model)
    print(
        "| form | 1.25 bits: predicted | MB | 8B: MB | bits at 32K | 2.25 bits: predicted | MB | 8B: MB | bits at 32K |"
    )
    for name, words in FORMS.items():
        cells = []
        for bits in (1.25, 2.25):
            first = next(iter(moments.values()))
            heads, dim = first.heads // 2, len(first.mean) // first.heads
            over = [f"+{TRANSFORM}.{w}" if w.startswith(("folded", "with")) else f"{TRANSFORM}.{w}" for w in words]
            codec = build_method("waterfill_kv", bits=str(bits), head_dim=dim, overrides=over).key
            assert codec is not None
            tables = fit_sharing(dict.fromkeys(moments, codec), moments)
            loss = 0.0
            for place, own in tables.items():
                bound = bind_codec(codec, own, 2 * heads, dim)
                parts = joint_parts(bound)
                assert parts is not None
                weights, widths = own["quantizer.weights"].double(), own["quantizer.widths"].long()
                errors = torch.tensor(parts[2].errors, dtype=torch.float64)
                loss += float((weights * errors[widths] * (widths > 0)).sum() / 2) + outside(parts[1], moments[place])
            size = sum(t.nbytes for own in tables.values() for key, t in own.items() if FOLDED not in key)
            together = next((int(w.partition("=")[2]) for w in words if w.startswith("heads_together")), None)
            if together is None and "folded=true" in words:
                together = 3 if heads == 3 else None
            larger = at_larger(tables, together, heads, dim)
            elements = 2 * LARGER[0] * LARGER[1] * LARGER[2] * 2**15
            cells += [f"{loss:.4f}", f"{size / 1e6:.2f}", f"{larger / 1e6:.1f}", f"{8 * larger / elements:.3f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
