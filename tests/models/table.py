"""`python -m tests.models.table [FAMILY ...]`: measures the families and writes the tables of docs/models.md.

Of every family a random small model reads 43 tokens in double precision under KIVI at 2 bits with a sliding residual of
8 tokens, of both sides (`both`), of keys alone (`key`) and of values alone (`value`), the other side in blocks: one by
one, in whole residuals at a time, and in chunks of 7 tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import kvq
from kvq.models.layers import kv_layers_of, state_layers_of
from kvq.tasks.scoring import forward_bounds, scoring_bounds
from tests.families import FAMILIES, MORE, family
from tests.random_models import in_double_precision, token_ids
from tests.tasks.test_scoring import chunked

MEASURED = Path(__file__).with_name("families.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- made by `python -m tests.models.table` -->"
_TWO = ("key", "value")
SIDES = ("both", *_TWO)
LIMIT = 1e-9
"""Largest difference of a log-probability that counts as exact."""


def measure(name: str) -> dict[str, float]:
    """Largest differences from token by token, by side, and from full precision, of log-probabilities in nats."""
    with pytest.MonkeyPatch.context() as patch:
        loaded, tokens = in_double_precision(family(name, seed=3), patch), token_ids(43)
        found: dict[str, float] = {}
        for sliding in SIDES:
            apart = [f"residual.{side}.policy={'sliding' if sliding in (side, 'both') else 'block'}" for side in _TWO]
            given = ["residual.size=8", *apart, "key.quantizer.group_size=4"]
            one = kvq.build_method("kivi", bits=2, head_dim=32, overrides=given)
            single = chunked(loaded, one, tokens, scoring_bounds(one, 42, 1))
            cuts = scoring_bounds(one, 42), scoring_bounds(one, 42, 7), forward_bounds(loaded, one, 42)
            others = [chunked(loaded, one, tokens, bounds) for bounds in cuts]
            found[sliding] = max(float((other - single).abs().max()) for other in others)
        exact = chunked(loaded, kvq.build_method("fp16"), tokens, [(0, 42)])
        return found | {"quantized": float((exact - single).abs().max())}


def held(config: Any) -> str:
    """What the layers of a model cache, in words."""
    layers, count = kv_layers_of(config), config.num_hidden_layers
    whole = [layer for layer in layers if layer.window is None]
    kind = "the latent and the rotated part of keys" if getattr(config, "kv_lora_rank", None) else "keys and values"
    words = [f"{kind} of all tokens ({len(whole)})"] if whole else []
    if len(layers) > len(whole):
        words.append(f"{kind} of a window ({len(layers) - len(whole)})")
    states, own = state_layers_of(config), [layer.index for layer in layers]
    both = len(set(states) & set(own))
    if states:
        words.append(f"a state of fixed size ({len(states)}{', beside keys and values' if both else ''})")
    if rest := count - len(set(states) | set(own)):
        shared = getattr(config, "num_kv_shared_layers", None)
        words.append(f"{'nothing: they read earlier layers' if shared else 'nothing'} ({rest})")
    return "; ".join(words)


def rows() -> str:
    """The table, from the committed measurements."""
    measured = json.loads(MEASURED.read_text("utf-8"))
    head = [
        f"{MARK}",
        "",
        f"Measured with transformers {measured['transformers']}.",
        "",
        "| family | what its layers cache (how many) | Δ, both slide | Δ, keys | Δ, values | Δ to full precision |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines = [
        f"| `{name}` | {row['held']} | {' | '.join(f'{row[side]:.0e}' for side in SIDES)} | {row['quantized']:.2f} |"
        for name, row in sorted(measured["families"].items())
    ]
    missing = [f"`{name}`" for name in (*FAMILIES, *MORE) if name not in measured["families"]]
    rest = ["", f"Families of the tests that are not in the table yet: {', '.join(missing)}."] if missing else []
    return "\n".join([*head, *lines, *rest])


def main() -> None:
    """Measure the families named, or all, and write data and page."""
    for name in sys.argv[1:] or [*FAMILIES, *MORE]:
        row: dict[str, Any] = {"held": held(family(name).text_config), **measure(name)}
        print(name, row, flush=True)
        data = json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {"families": {}}
        data["families"][name], data["transformers"] = row, transformers.__version__
        MEASURED.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", "utf-8")
    before, after = PAGE.read_text("utf-8").split(MARK)[0], PAGE.read_text("utf-8").partition("\n## What is refused")[2]
    PAGE.write_text(f"{before}{rows()}\n\n## What is refused{after}", "utf-8")


if __name__ == "__main__":
    main()
