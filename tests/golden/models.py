"""What models whose caches are not a llama's compute from a quantized one: windows, states, latents, learned sinks."""

from __future__ import annotations

import torch

from kvq.cache import KVCache
from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.methods.build import method_of
from kvq.results.record import versions_of
from tests.families import WINDOW, family
from tests.golden.held import Golden
from tests.random_models import VOCABULARY, token_ids

FAMILIES = {"windowed": "mistral", "hybrid": "olmo_hybrid", "latent": "deepseek_v3", "learned sink": "gpt_oss"}
_HEAD_DIM = 32
_CHUNKS = [2 * WINDOW + 5, 9, *[1] * 6]
"""Tokens of each forward: a prompt beyond the window, a chunk that crosses it, single tokens."""
_METHOD = ["method=kivi", "bits=2", "residual.size=8", "residual.policy=sliding", "method.key.quantizer.group_size=4"]


@torch.no_grad()
def golden_of(name: str) -> Golden:
    """A weighted sum of the logits at each token, and bytes, under KIVI with a residual shorter than the window."""
    config = resolve(compose(_METHOD))
    model = family(FAMILIES[name], _HEAD_DIM).model
    cache = KVCache(model, method_of(config, _HEAD_DIM))
    pieces = [model(ids, past_key_values=cache).logits[0] for ids in token_ids(sum(_CHUNKS)).split(_CHUNKS, 1)]
    weights = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1000), dtype=torch.float64)
    return Golden(
        versions=versions_of(canonical(config, "", "", None)),
        exact={"packed_bytes": cache.packed_bytes, "nbytes": cache.nbytes},
        numbers={"logits": (torch.cat(pieces).double() @ weights).tolist()},
    )
