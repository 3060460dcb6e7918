"""Adaptive tiers: scores, tiers and recompression token by token, what is stored, and kvquant-plus-plus's figures."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache import KVCache
from kvq.cache.observe import Attended
from kvq.codecs import Codec, TokenTiers, UniformQuantizer
from kvq.errors import ConfigError, Unsupported
from kvq.methods.tiers import AdaptiveTiers, TierStore
from kvq.results.metrics import units_of
from kvq.tasks.measurement import storage_metrics
from tests.families import family, generates_greedily
from tests.properties import examples
from tests.random_models import llama, token_ids

DIM = 32


@pytest.fixture(scope="module")
def model():
    return llama(head_dim=DIM)


def tiers(*overrides, size=16, dim=DIM):
    given = [f"residual.size={size}", *overrides]
    return kvq.build_method("kvquant_plus_plus/tiers", head_dim=dim, overrides=given)


def gaussian(*shape, seed):
    """Of a stream that no rotation has."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def score(weights, decay):
    """The exponential mean, newest last."""
    factors = [decay**age for age in range(len(weights))]
    return sum(f * w for f, w in zip(factors, reversed(weights), strict=True)) / sum(factors)


def moved(tier, value, levels, hysteresis):
    """Up while the score is above a threshold by the hysteresis, down while it is below one by it."""
    while tier > 0 and value >= levels[tier - 1] * (1 + hysteresis):
        tier -= 1
    while tier < len(levels) and value < levels[tier] * (1 - hysteresis):
        tier += 1
    return tier


class ByHand:
    """One KV head with two query heads: lists of weights, of tiers and of decoded tokens."""

    def __init__(self, method):
        self.policy, self.size = method.policy("token_policy"), method.residual.key.size
        self.codecs = [list(codec.quantizer.codecs.values()) for codec in (method.key, method.value)]
        self.states, self.weights, self.tiers, self.moves = ([], []), [], [], 0

    def add(self, key, value, queries):
        for held, token in zip(self.states, (key, value), strict=True):
            held.append(token)
        self.weights.append([])
        both = []
        for query in queries:
            logits = [float(query @ k) / math.sqrt(DIM) for k in self.states[0]]
            mass = [math.exp(x - max(logits)) for x in logits]
            both.append([x / sum(mass) for x in mass])
        for token, received in enumerate(self.weights):
            received.append((both[0][token] + both[1][token]) / 2)
        if len(self.weights) % self.size == 0:
            self.revise(len(self.weights))
        elif self.policy.every_step:
            self.revise(len(self.tiers))

    def revise(self, count):
        total = len(self.weights)
        for token, weights in enumerate(self.weights[:count]):
            value = score(weights, self.policy.decay)
            levels = [threshold / total for threshold in self.policy.thresholds]
            fresh = token >= len(self.tiers)
            new = sum(value < level for level in levels) if fresh else None
            new = moved(self.tiers[token], value, levels, self.policy.hysteresis) if new is None else new
            if fresh or new != self.tiers[token]:
                self.moves += 2 * (not fresh)
                for codecs, held in zip(self.codecs, self.states, strict=True):
                    held[token] = codecs[new].decode(codecs[new].encode(held[token][None, None, None]))[0, 0, 0]
            self.tiers[token : token + 1] = [new]


@pytest.mark.parametrize("every_step", [False, True])
def test_tokens_move_as_their_definition_says(model, every_step):
    """60 tokens in blocks of 12, one forward each, in fp64: tiers, decoded tokens, and how many moved."""
    method = tiers(size=12)
    method.policy("token_policy").every_step = every_step
    layer = KVCache(model, method).layers[0]
    keys, values, queries = (gaussian(1, heads, 60, DIM, seed=400 + heads + at) for at, heads in enumerate((2, 2, 4)))
    hands = [ByHand(method), ByHand(method)]
    for token in range(60):
        read, _ = layer.update(keys[:, :, token : token + 1], values[:, :, token : token + 1])
        layer.observe(Attended(3 * queries[:, :, token : token + 1], read, None, 1 / math.sqrt(DIM), None))
        for head, hand in enumerate(hands):
            hand.add(keys[0, head, token], values[0, head, token], 3 * queries[0, 2 * head : 2 * head + 2, token])
    assert layer.key.store.tiers[0].tolist() == [hand.tiers for hand in hands]
    assert {0, 1, 2, 3} == {tier for hand in hands for tier in hand.tiers}
    for side, at in ((layer.key, 0), (layer.value, 1)):
        expected = torch.stack([torch.stack(hand.states[at]) for hand in hands])
        torch.testing.assert_close(side._visible()[0], expected, rtol=1e-9, atol=1e-9)
    assert sum(side.recompression.moves for side in (layer.key, layer.value)) == sum(hand.moves for hand in hands) > 0


def test_recompression_loses_and_promotion_does_not_restore():
    """4 to 3 to 4 bits, a rotation of its own in each tier: .0093, .043, .049; with one rotation .0093, .037, .055."""
    x = gaussian(1, 2, 1500, 128, seed=4242).float()
    for seeds, expected in (((14, 13), (0.0093, 0.0428, 0.0492)), ((14, 14), (0.0093, 0.0367, 0.0545))):
        method = tiers(dim=128)
        for number, seed in enumerate(seeds):
            dict(method.key.quantizer.codecs[f"tier{number}"].stages)["rotation"].seed = seed
        store = TierStore(method.key, False)
        found = []
        for tier, states in ((0, x), (1, x[:, :, :0]), (0, x[:, :, :0])):
            store.revise(states, torch.full(x.shape[:3], tier, dtype=torch.uint8))
            found.append(float((store.past(None) - x).square().sum() / x.square().sum()))
        print(f"rotation seeds {seeds}: relative MSE at 4, then 3, then 4 bits:", [round(error, 4) for error in found])
        assert found == pytest.approx(expected, abs=0.0006)
        assert store.moves == 2 * 2 * 1500
        assert 0 < store.lost / store.energy < 0.05


def test_thresholds_scale_with_the_number_of_tokens():
    """Uniform attention: absolute thresholds put every token of 2048 into the last tier, whatever suited 16 tokens."""
    bits = {True: [], False: []}
    for relative, thresholds in ((True, [2, 0.5, 0.125]), (False, [0.1, 0.03, 0.01])):
        policy = AdaptiveTiers(thresholds=thresholds, relative=relative)
        for count in (16, 64, 2048):
            uniform = torch.full((1, 2, count), 1 / count)
            found = policy.tiers(uniform, count).unique()
            assert len(found) == 1
            bits[relative].append(4 - int(found))
    print(f"bits under uniform attention at T=16, 64, 2048: relative {bits[True]}, absolute {bits[False]}")
    assert bits == {True: [3, 3, 3], False: [3, 2, 1]}


@settings(max_examples=examples(60))
@given(
    start=st.integers(0, 3),
    values=st.lists(st.floats(0, 6), min_size=1, max_size=6),
    hysteresis=st.sampled_from([0, 0.25, 0.9]),
)
def test_hysteresis_by_its_definition(start, values, hysteresis):
    policy = AdaptiveTiers(hysteresis=hysteresis)
    now, expected = torch.tensor([start], dtype=torch.uint8), start
    for value in values:
        now = policy.tiers(torch.tensor([value / 100], dtype=torch.float64), 100, now)
        expected = moved(expected, value, [2, 0.5, 0.125], hysteresis)
        if all(abs(value - t * (1 + side * hysteresis)) > 1e-9 for t in (2, 0.5, 0.125) for side in (-1, 1)):
            assert now.tolist() == [expected]
        expected = int(now)


def test_every_byte_counts(model):
    """Codes of each tier in whole bytes over all heads and sequences, a norm and 2 bits for each token of a head."""
    cache = KVCache(model, tiers())
    model(token_ids(100, batch=2), past_key_values=cache)
    for layer in cache.layers:
        counts = layer.key.store.tiers.flatten().bincount(minlength=4).tolist()
        assert sum(counts) == 2 * 2 * 96
        planes = {4: [4], 3: [2, 1], 2: [2], 1: [1]}
        codes = sum(-(-n * w // 8) for bits, n in zip((4, 3, 2, 1), counts, strict=True) for w in planes[bits])
        for side in (layer.key, layer.value):
            assert side.packed_bytes == DIM * codes + 2 * 4 * 96 + 4 * 24
            assert side.residual_bytes == 4 * 2 * 2 * 4 * DIM


def test_the_record_has_what_recompression_lost(model):
    """Relative to the decoded tokens before, over all that moved; other methods have no such metric."""
    cache, plain = KVCache(model, tiers()), KVCache(model, kvq.build_method("turboquant", head_dim=DIM))
    for token in token_ids(60, batch=2).split(1, 1):
        model(token, past_key_values=cache)
    stored = storage_metrics(cache, 2)
    done = cache.recompression
    assert stored["recompressed_tokens"] == done.moves / 2 > 0
    assert 0.001 < stored["recompression_error"] == done.lost / done.energy < 0.5
    assert units_of(stored)["recompressed_tokens"] == "tokens/sequence"
    model(token_ids(60), past_key_values=plain)
    assert not {"recompressed_tokens", "recompression_error"} & set(storage_metrics(plain, 1))


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["mistral", "qwen3", "gemma3", "gpt2"])
def test_generate_on_families(name):
    loaded = family(name)
    cache = generates_greedily(loaded, lambda: tiers(size=8), token_ids(17, batch=2), 8)
    assert cache.layers[0].key.packed_tokens == 24


PER_CHANNEL = Codec({}, [], UniformQuantizer(2, "per_channel"))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda m: AdaptiveTiers(decay=1), ConfigError, "decay=1: a share, 0 to below 1"),
        (lambda m: AdaptiveTiers(hysteresis=-1), ConfigError, "hysteresis=-1: a share, 0 to below 1"),
        (lambda m: AdaptiveTiers(thresholds=[1, 1]), ConfigError, r"thresholds=\[1, 1\]: positive and falling"),
        (lambda m: TokenTiers([PER_CHANNEL] * 2), Unsupported, r"tiers.0: its tokens share statistics"),
        (lambda m: TokenTiers([PER_CHANNEL]), ConfigError, "tiers: 1 codecs; 2 to 4"),
        (
            lambda m: KVCache(m, tiers("token_policy.thresholds=[1]")),
            ConfigError,
            r"method.token_policy.thresholds=\[1\]: one less than the 4 tiers",
        ),
        (
            lambda m: KVCache(m, dataclasses.replace(tiers(), key=kvq.build_method("turboquant", head_dim=DIM).key)),
            ConfigError,
            "AdaptiveTiers needs codecs without stages over TokenTiers",
        ),
        (lambda m: tiers("residual.key.size=8"), ConfigError, "plans keys and values together"),
        (lambda m: KVCache(m, tiers(), attention="packed"), Unsupported, "token_policy of .* use cache.att"),
    ],
)
def test_what_it_refuses(make, kind, message, model):
    with pytest.raises(kind, match=message):
        make(model)


def test_a_crop_is_refused(model):
    cache = KVCache(model, tiers())
    model(token_ids(20), past_key_values=cache)
    with pytest.raises(Unsupported, match="attention received cannot be taken back"):
        cache.crop(-1)
