"""Plans: a pool of outlier tokens that competes with each block, and bits by the attention received."""

import math

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.codecs import unpack
from kvq.errors import ConfigError, Unsupported
from kvq.methods.mixed_precision import Saliency
from tests.families import family, generates_greedily
from tests.random_models import llama, token_ids


@pytest.fixture(scope="module")
def model():
    return llama(head_dim=32)


def ott(*overrides, size=16):
    given = [f"residual.size={size}", "token_policy.exempt_layers=0", *overrides]
    return kvq.build_method("ott", bits=2, head_dim=32, overrides=given)


def zipcache(*overrides, size=16, name="zipcache"):
    return kvq.build_method(name, head_dim=32, overrides=[f"residual.size={size}", *overrides])


def full_states(model, tokens):
    cache = KVCache(model, kvq.build_method("fp16", head_dim=32))
    model(tokens, past_key_values=cache)
    return [(layer.key._full.view, layer.value._full.view) for layer in cache.layers]


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
def test_blocks_are_those_of_token_by_token(model, length):
    tokens = token_ids(50)
    one, pieces = KVCache(model, ott()), KVCache(model, ott())
    given = full_states(model, tokens)[0]
    for cache, size in ((one, 1), (pieces, length)):
        for at in range(0, 50, size):
            cache.layers[0].update(*(part[:, :, at : at + size] for part in given))
    for side in ("key", "value"):
        assert torch.equal(getattr(one.layers[0], side)._visible(), getattr(pieces.layers[0], side)._visible())


def test_exempt_layers_have_no_pool(model):
    cache = KVCache(model, ott("token_policy.exempt_layers=1"))
    model(token_ids(40), past_key_values=cache)
    assert [layer.key.packed_tokens for layer in cache.layers] == [32, 29]
    assert cache.layers[1].key.residual_tokens == 3 + 8


def test_keys_and_values_change_places_together_or_not_at_all(model):
    key, value = "full_precision_layers.key=[1]", "full_precision_layers.value=[1]"
    for one in (key, value, "key=null"):
        with pytest.raises(ConfigError, match="change places; quantize both"):
            KVCache(model, ott(one))
    cache = KVCache(model, ott(key, value))
    model(token_ids(40), past_key_values=cache)
    assert [layer.value.packed_tokens for layer in cache.layers] == [29, 0]


def test_probes_are_the_last_queries_and_some_at_random():
    policy = Saliency(recent=0.05, random=0.05)
    probes = policy.probes(300, 100)
    assert probes[-5:].tolist() == [95, 96, 97, 98, 99]
    assert len(set(probes.tolist())) == 10
    assert torch.equal(probes, policy.probes(300, 100))
    assert not torch.equal(probes, policy.probes(400, 100))
    assert policy.probes(0, 3).tolist() == [2]


def test_divisors_are_the_probes_that_see_a_token():
    both = Saliency(0.1, 0.1)
    assert len(both.probes(40, 20)) == 4
    seen = [sum(probe >= token for probe in both.probes(40, 20).tolist()) for token in range(20)]
    assert both.divisors(40, 20).tolist() == seen
    assert min(seen) >= 1


def test_a_mask_per_head_is_a_bit_per_token_and_head(model):
    bits = []
    for given in ([], ["key.quantizer.per_head=true"]):
        cache = KVCache(model, kvq.build_method("zipcache", head_dim=32, overrides=given))
        model(token_ids(104), past_key_values=cache)
        bits.append(cache.side_bits("key"))
    assert bits[1] - bits[0] == pytest.approx(8 * 13 / (104 * 32) - 8 * 13 / (104 * 2 * 32))


def test_salient_tokens_are_closer_and_every_byte_counts(model):
    tokens, method = token_ids(100), zipcache(size=100)
    cache = KVCache(model, method)
    model(tokens, past_key_values=cache)
    for (key, value), layer in zip(full_states(model, tokens), cache.layers, strict=True):
        mask = kvq.codecs.unpack([layer.key._store._store.packed.parts["mask"]], 1, 100)[0, 0, :, 0].bool()
        for full, side in ((key, layer.key), (value, layer.value)):
            error = (side._visible() - full).square().sum(-1).mean((0, 1))
            assert float(error[mask].mean()) < 0.2 * float(error[~mask].mean())
    codes, mask_bits = (60 * 4 + 40 * 2) / 100, 8 * 13 / (100 * 2 * 32)
    assert cache.side_bits("key") == pytest.approx(codes + 2 * 32 / 100 + mask_bits)
    assert cache.side_bits("value") == pytest.approx(codes + 32 / 32 + 16 / 100 + mask_bits)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi3"])
@pytest.mark.parametrize("make", [ott, zipcache])
def test_generate_on_every_family_that_can(name, make):
    loaded = family(name)
    cache = generates_greedily(loaded, lambda: make(size=8), token_ids(17, batch=2), 6)
    assert cache.get_seq_length() == 22
    assert cache.layers[0].key.packed_tokens > 0


@pytest.mark.parametrize(("make", "name"), [(ott, "bloom"), (ott, "falcon_alibi"), (zipcache, "gptj")])
def test_other_attentions_are_refused_by_name(make, name):
    loaded = family(name)
    with pytest.raises(Unsupported, match=r"ALiBi|outside"):
        loaded.model(token_ids(20), past_key_values=KVCache(loaded.model, make()))


def test_a_window_that_a_pool_would_not_keep_is_refused():
    loaded = family("mistral")
    cache = KVCache(loaded.model, ott(size=8))
    loaded.model(token_ids(20), past_key_values=cache)
    with pytest.raises(Unsupported, match="sees 24 tokens back"):
        loaded.model(token_ids(6), past_key_values=cache)


def test_what_cannot_be_is_refused(model):
    cache = KVCache(model, ott(size=8))
    cache.token_by_token = True
    with pytest.raises(Unsupported, match="beyond the end of a block"):
        model(token_ids(12), past_key_values=cache)
    cache = KVCache(model, ott(size=8))
    model(token_ids(18), past_key_values=cache)
    cache.crop(-2)
    with pytest.raises(Unsupported, match="cannot remove"):
        cache.crop(-1)


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
