"""Attention-weighted bits (kvquant-plus-plus, section 3.1): what ranking by one query is worth to it, and to others."""

import math

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.codecs import unpack
from kvq.diagnostics import weighted_mse
from kvq.errors import ConfigError
from kvq.methods.mixed_precision import Saliency
from kvq.tasks.scoring import generation_bounds
from tests.random_models import in_double_precision, llama, random_llama, token_ids
from tests.tasks.test_scoring import chunked, token_by_token

NAMES = ["kvquant_plus_plus/attention", "kvquant_plus_plus/attention_mse"]
PLAIN = {NAMES[0]: "turboquant/prod_keys", NAMES[1]: "turboquant"}
"""The same forms with equal bits for all tokens."""


def method(name, dim=32, size=16, bits=3):
    return kvq.build_method(name, bits=bits, head_dim=dim, overrides=[f"residual.size={size}"])


def by_hand(query, keys):
    """Attention weights of one query."""
    logits = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    mass = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(mass) for x in mass]


def test_a_block_is_ranked_by_its_last_query_alone():
    policy = Saliency(recent=0, random=0)
    for start, length in ((0, 16), (32, 16), (0, 1)):
        assert policy.probes(start, length).tolist() == [length - 1]
        assert policy.divisors(start, length).tolist() == [1] * length
    with pytest.raises(ConfigError, match="recent=-1, random=0: shares, together at most 1"):
        Saliency(recent=-1, random=0)


@pytest.mark.parametrize("name", NAMES)
def test_half_of_the_tokens_have_one_bit_more(name):
    """Two blocks: the tokens of each KV head with the largest weights of the block's last query."""
    model, tokens = llama(head_dim=32), token_ids(32)
    cache = KVCache(model, method(name))
    seen = []
    cache.layers[0].observe = spied(cache.layers[0], seen)
    for chunk in tokens.split(16, 1):
        model(chunk, past_key_values=cache)
    for side in (cache.layers[0].key, cache.layers[0].value):
        stored = side._store._store.packed.parts["mask"].split(2, 2)  # 16 tokens are two bytes
        for block, (query, keys) in enumerate(seen):
            mask = unpack([stored[block]], 1, 16)[0, :, :, 0]
            for head in range(2):
                both = [by_hand(query[0, 2 * head + other, -1], keys[0, head]) for other in range(2)]
                mean = [(a + b) / 2 for a, b in zip(*both, strict=True)][16 * block :]
                wanted = sorted(range(16), key=lambda token, mean=mean: -mean[token])[:8]
                assert mask[head].nonzero().flatten().tolist() == sorted(wanted)


def spied(layer, seen):
    observe = type(layer).observe

    def both(attended):
        seen.append((attended.query, attended.key))
        observe(layer, attended)

    return both


@pytest.mark.parametrize("name", NAMES)
def test_generation_is_token_by_token_in_fp64(name, monkeypatch):
    loaded, tokens = in_double_precision(random_llama(), monkeypatch), token_ids(75)
    expected = token_by_token(loaded, method(name), tokens)
    for chunk in (None, 7):
        got = chunked(loaded, method(name), tokens, generation_bounds(method(name), 74, chunk))
        assert (got - expected).abs().max() < 1e-9, chunk


@pytest.mark.parametrize("bits", [3, 5])
def test_bits(bits):
    """b on average, norms (two in the inner-product form), and the mask of each head."""
    model = llama(head_dim=32)
    for name, norms in zip(NAMES, (2, 1), strict=True):
        cache = KVCache(model, method(name, size=32, bits=bits))
        model(token_ids(64), past_key_values=cache)
        assert cache.side_bits("key") == bits + 16 * norms / 32 + 1 / 32
        assert cache.side_bits("value") == bits + 16 / 32 + 1 / 32


def draw(seed, tokens=2048, dim=128, sharpness=2.0):
    """Keys, and the weights of two queries that know nothing of each other; no rotation has this seed."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 1, tokens, dim, generator=generator)
    queries = sharpness * torch.randn(2, dim, generator=generator)
    return keys, torch.softmax(queries @ keys[0, 0].mT / math.sqrt(dim), -1)


def change(name, keys, weights, ranking):
    """The relative change of each query's weighted error against equal bits, keys ranked by the weights `ranking`."""
    ranked, plain = (kvq.build_method(one, bits=3, head_dim=keys.shape[-1]).key for one in (name, PLAIN[name]))
    with ranked.planned(ranked.quantizer.salient(ranking[None, None])):
        out = ranked.decode(ranked.encode(keys))
    equal = plain.decode(plain.encode(keys))
    return [
        float(weighted_mse(keys, out, w[None, None]) / weighted_mse(keys, equal, w[None, None])) - 1 for w in weights
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_ranking_query_gains_and_another_loses(name):
    """By up to 70%; a query that has half of its weight on tokens with fewer bits loses (hi + lo) / 2 to the middle."""
    found = [change(name, *(given := draw(seed)), given[1][0]) for seed in range(600, 612)]
    ranking, other = ([pair[at] for pair in found] for at in (0, 1))
    print(f"{name}: ranking query {max(ranking):+.0%} to {min(ranking):+.0%}")
    print(f"{name}: held-out query {min(other):+.0%} to {max(other):+.0%}, mean {sum(other) / len(other):+.0%}")
    assert all(-0.74 < gain < -0.55 for gain in ranking)
    middle = {NAMES[0]: 0.70, NAMES[1]: 0.845}[name]
    assert sum(other) / len(other) == pytest.approx(middle, abs=0.25)
    assert max(other) > 0.86
