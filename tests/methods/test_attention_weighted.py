"""Attention-weighted bits (kvquant-plus-plus, section 3.1): what ranking by one query is worth to it, and to others."""

import math

import pytest

import kvq
from kvq.cache import KVCache
from kvq.codecs import unpack
from kvq.errors import ConfigError
from kvq.methods.mixed_precision import Saliency
from tests.random_models import llama, token_ids

NAMES = ["kvquant_plus_plus/attention", "kvquant_plus_plus/attention_mse"]


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


@pytest.mark.parametrize("bits", [3, 5])
def test_bits(bits):
    """b on average, norms (two in the inner-product form), and the mask of each head."""
    model = llama(head_dim=32)
    for name, norms in zip(NAMES, (2, 1), strict=True):
        cache = KVCache(model, method(name, size=32, bits=bits))
        model(token_ids(64), past_key_values=cache)
        assert cache.side_bits("key") == bits + 16 * norms / 32 + 1 / 32
        assert cache.side_bits("value") == bits + 16 / 32 + 1 / 32
