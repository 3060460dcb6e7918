"""TriAttention: scores by plain loops over distances and bands, what is kept, and prompts in chunks."""

from __future__ import annotations

import cmath
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache import KVCache
from kvq.cache.observe import Attended
from kvq.codecs import Rope
from kvq.errors import ConfigError
from kvq_zoo.triattention import TriAttention
from tests.families import family
from tests.random_models import llama, token_ids

MODEL = llama(head_dim=32)
SPEED = 100.0
"""Base of the frequencies of bands in `rotations`."""


def method(name: str = "triattention", *overrides: str, head_dim: int = 32) -> Any:
    given = ["eviction.budget=24", "eviction.least=9", "eviction.every=8", *overrides]
    return kvq.build_method(name, bits=4, head_dim=head_dim, overrides=given)


def rotations(tokens: int, pairs: int, interleaved: bool) -> Rope:
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * SPEED ** (-torch.arange(pairs) / max(pairs, 1))
    return Rope(angles.cos()[None], angles.sin()[None], interleaved)


def pair(row: np.ndarray, band: int, pairs: int, interleaved: bool) -> complex:
    first, second = (2 * band, 2 * band + 1) if interleaved else (band, band + pairs)
    return complex(row[first], row[second])


def series(
    queries: np.ndarray, keys: np.ndarray, speeds: list[float], interleaved: bool, reach: int
) -> list[list[float]]:
    """Normalized scores per query head `[heads][tokens]`, of queries and keys of one KV head before RoPE."""
    tokens, pairs, out = len(keys), len(speeds), []
    distances = [2**power for power in range(64) if 2**power <= reach]
    for head in queries:
        found = []
        for place, key in enumerate(keys):
            total = 0.0
            for distance in distances:
                for band, speed in enumerate(speeds):
                    at = [pair(row, band, pairs, interleaved) for row in head]
                    centre, size = sum(at) / len(at), sum(map(abs, at)) / len(at)
                    k = pair(key, band, pairs, interleaved)
                    turn = cmath.exp(1j * speed * (tokens - place + distance))
                    total += (centre * k.conjugate() * turn).real + (size - abs(centre)) * abs(k)
                for channel in range(2 * pairs, keys.shape[1]):
                    centre, size = head[:, channel].mean(), abs(head[:, channel]).mean()
                    total += centre * key[channel] + (size - abs(centre)) * abs(key[channel])
            found.append(total / len(distances))
        mean = sum(found) / tokens
        deviation = (sum((one - mean) ** 2 for one in found) / tokens) ** 0.5
        out.append([(one - mean) / max(deviation, 1e-6) for one in found])
    return out


@given(
    tokens=st.integers(2, 5),
    heads=st.integers(1, 2),
    shared=st.integers(1, 2),
    pairs=st.integers(0, 2),
    rest=st.integers(1, 2),
    interleaved=st.booleans(),
    reach=st.integers(1, 300),
    cut=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_scores_are_the_series_by_loops(
    tokens: int, heads: int, shared: int, pairs: int, rest: int, interleaved: bool, reach: int, cut: int, seed: int
) -> None:
    """In fp64, over shapes, layouts of RoPE, channels without it, and queries of one forward or of two."""
    draw, dim = torch.Generator().manual_seed(seed), 2 * pairs + rest
    queries = torch.randn(1, heads * shared, tokens, dim, generator=draw, dtype=torch.float64)
    keys = torch.randn(1, heads, tokens, dim, generator=draw, dtype=torch.float64)
    rope = rotations(tokens, pairs, interleaved)
    given = method("triattention", "eviction.every=1000", f"eviction.reach={reach}")
    layer: Any = KVCache(MODEL, given).layers[0]
    turned = rope.rotate(queries)
    for start, end in ((0, min(cut, tokens)), (min(cut, tokens), tokens)):
        layer.key.rope = types.SimpleNamespace(rope=rope.narrow(0, end))
        if end > start:
            layer.observe(Attended(turned[:, :, start:end], keys, None, 1.0, None))
    found = layer._scores(rope.rotate(keys))
    speeds = [SPEED ** (-band / max(pairs, 1)) for band in range(pairs)]
    for head in range(heads):
        own = queries[0, head * shared : (head + 1) * shared].numpy()
        rows = series(own, keys[0, head].numpy(), speeds, interleaved, reach)
        np.testing.assert_allclose(found[0, head].numpy(), np.max(rows, 0), rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(head_dim=32).double()


def test_a_model_keeps_the_keys_of_the_highest_series(model: Any) -> None:
    """Queries and keys before RoPE are those of the model's own projections; each KV head chooses by itself."""
    tokens, seen = token_ids(40), {}
    hooks = [
        getattr(block.self_attn, name).register_forward_hook(
            lambda _module, _given, out, at=(index, name): seen.__setitem__(at, out)
        )
        for index, block in enumerate(model.model.layers)
        for name in ("q_proj", "k_proj")
    ]
    plain = KVCache(model, kvq.build_method("fp16", head_dim=32))
    model(tokens, past_key_values=plain)
    for hook in hooks:
        hook.remove()
    cache = KVCache(model, method("triattention/prompt", "eviction.reach=64"))
    model(tokens, past_key_values=cache)
    speeds = [model.config.rope_parameters["rope_theta"] ** (-band / 16) for band in range(16)]
    for index, (layer, full) in enumerate(zip(cache.layers, plain.layers, strict=True)):
        q, k = (seen[index, name][0].unflatten(-1, (-1, 32)).transpose(0, 1).numpy() for name in ("q_proj", "k_proj"))
        for head in range(len(k)):
            own = q[head * len(q) // len(k) : (head + 1) * len(q) // len(k)]
            scores = np.max(series(own, k[head], speeds, False, 64), 0)
            kept = sorted(np.argsort(-scores)[:24].tolist())
            assert torch.equal(layer.key._full.view[0, head], full.key._full.view[0, head, kept])
            assert torch.equal(layer.value._full.view[0, head], full.value._full.view[0, head, kept])


def test_chunks_that_end_where_it_evicts_are_token_by_token(model: Any) -> None:
    """Also from a prompt of several chunks; between two evictions the cache holds more than the budget."""
    tokens, logits, caches = token_ids(56), [], []
    for cuts in ([1] * 56, [8] * 7, [16, 8, 1, 7, 3, 5, 8, 8]):
        cache = KVCache(model, method("triattention"))
        logits.append(torch.cat([model(part, past_key_values=cache).logits for part in tokens.split(cuts, 1)], 1))
        caches.append(cache)
    assert caches[0].layers[0].key.tokens == 24
    assert caches[0].get_seq_length() == 56
    for cache, others in zip(caches[1:], logits[1:], strict=True):
        torch.testing.assert_close(others, logits[0], rtol=1e-9, atol=1e-9)
        for one, other in zip(caches[0].layers, cache.layers, strict=True):
            torch.testing.assert_close(one.key._full.view, other.key._full.view, rtol=1e-9, atol=1e-9)
    step = model(token_ids(5, seed=4), past_key_values=caches[0]).logits
    assert caches[0].layers[0].key.tokens == 29
    assert bool(torch.isfinite(step).all())


def test_sequences_of_a_batch_have_centres_of_their_own(model: Any) -> None:
    tokens = torch.cat([token_ids(40), token_ids(40, seed=3)])
    both = KVCache(model, method("triattention"))
    model(tokens, past_key_values=both)
    for row in range(2):
        alone = KVCache(model, method("triattention"))
        model(tokens[row : row + 1], past_key_values=alone)
        for one, other in zip(alone.layers, both.layers, strict=True):
            torch.testing.assert_close(one.key._full.view[0], other.key._full.view[row], rtol=1e-9, atol=1e-9)


def test_forks_go_their_own_way_and_reset_forgets(model: Any) -> None:
    cache = KVCache(model, method("triattention"))
    model(token_ids(40), past_key_values=cache)
    fork, more = cache.fork(), token_ids(9, seed=7)
    expected = [model(token, past_key_values=fork).logits for token in more.split(1, 1)]
    for token, logits in zip(more.split(1, 1), expected, strict=True):
        assert torch.equal(model(token, past_key_values=cache).logits, logits)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.layers[0]._received) == (0, 0, None)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox", "phi3", "gemma2"])
@pytest.mark.parametrize("evicting", ["triattention", "triattention/kivi"])
def test_generate_on_families_with_and_without_rope(name: str, evicting: str) -> None:
    loaded = family(name)
    given = ["eviction.budget=10", "eviction.least=9", "eviction.every=1"]
    cache = KVCache(loaded.model, kvq.build_method(evicting, bits=4, head_dim=32, overrides=given))
    tokens = token_ids(16, batch=2)
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    out = loaded.model.generate(tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens), **more)
    assert out.shape == (2, 22)
    assert cache.layers[1].key.tokens == (10 if evicting == "triattention" else 15)


@pytest.mark.parametrize("setting", ["every", "reach"])
def test_bad_settings_are_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}=0"):
        TriAttention(**{setting: 0})
