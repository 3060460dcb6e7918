"""`python -m kvq_zoo.tests.presses`: as JSON, the tokens that kvpress's presses keep of given attention weights.

A process of its own, because importing kvpress replaces the attention functions of transformers.
"""

from __future__ import annotations

import json
import sys
import types

import torch


def kept(name: str, weights: torch.Tensor, keys: torch.Tensor, ratio: float, settings: dict[str, int]) -> list:
    """Tokens by KV head, ascending. `weights`: `[1, heads, queries, tokens]`; `ratio`: the share that is dropped."""
    import kvpress

    press = getattr(kvpress, name)(compression_ratio=ratio, **settings)
    config = types.SimpleNamespace(num_attention_heads=weights.shape[1], num_key_value_heads=keys.shape[1])
    module = types.SimpleNamespace(config=config, head_dim=keys.shape[-1])
    numbered = torch.arange(keys.shape[2]).view(1, 1, -1, 1).expand_as(keys).float()
    hidden = torch.zeros(1, keys.shape[2], 1)
    found, _ = press.compress(module, hidden, numbered, numbered, weights, {})
    return found[0, :, :, 0].long().sort(-1).values.tolist()


if __name__ == "__main__":
    asked = torch.load(sys.argv[1], weights_only=True)
    print(json.dumps(kept(**asked)))
