"""KVCache in a model: what attention reads, what is counted, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import kvq
from kvq.cache import CacheSide, KVCache
from kvq.cache.store import UNIT, TokenStore
from kvq.config.method import Policy, PrefillBlock, ResidualSide
from tests.cache.states import NaiveSide, states
from tests.properties import examples
from tests.random_models import llama, token_ids


def method(name="nsn", bits=3, size=8, head_dim=128, overrides=()):
    return kvq.build_method(name, bits=bits, head_dim=head_dim, overrides=[f"residual.size={size}", *overrides])


@pytest.fixture(scope="module")
def model():
    return llama()


def logits(model, cache, tokens, bounds=(0, None), **settings):
    """Logits of the last chunk when `tokens` are fed between `bounds`."""
    bounds = [*bounds[:-1], tokens.shape[1] if bounds[-1] is None else bounds[-1]]
    out = None
    for start, end in itertools.pairwise(bounds):
        out = model(tokens[:, start:end], past_key_values=cache, **settings).logits
    return out


@pytest.mark.parametrize("name", ["fp16", "identity"])
@pytest.mark.parametrize("residual", ["block", "none"])
def test_identity_and_full_precision_are_transformers_own_cache(model, name, residual):
    tokens = token_ids(30)
    cache = KVCache(model, method(name, overrides=[f"residual={residual}"]))
    plain = DynamicCache(config=model.config)
    for bounds in ((0, 13), (13, 14), (14, 30)):
        piece = tokens[:, slice(*bounds)]
        assert torch.equal(logits(model, cache, piece), logits(model, plain, piece))


@pytest.mark.parametrize("size", [4, 8])
def test_decoding_reads_exactly_the_naive_cache(model, size):
    """A transformers cache fed by hand with decode(encode(block)): the logits agree bit for bit."""
    tokens = token_ids(21)
    chosen = method("oscar", size=size)
    cache = KVCache(model, chosen)
    plain = DynamicCache(config=model.config)
    for start in range(21):
        piece = tokens[:, start : start + 1]
        assert torch.equal(logits(model, cache, piece), logits(model, plain, piece))
        if (start + 1) % size == 0:
            last = slice(start + 1 - size, start + 1)
            for layer in plain.layers:
                for codec, held in ((chosen.key, layer.keys), (chosen.value, layer.values)):
                    held[:, :, last] = codec.decode(codec.encode(held[:, :, last]))


def test_one_side_alone(model):
    """`key=null`: keys in full precision; their bits say so, and count in the mean."""
    chosen = method("oscar", overrides=["key=null"])
    assert chosen.key is None
    cache = KVCache(model, chosen)
    logits(model, cache, token_ids(16))
    assert cache.side_bits("key") == 32
    assert cache.side_bits("value") == 3 + 1
    assert cache.bits_per_element == (32 + 4) / 2
    assert cache.effective_bits == (32 + 4) / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_oscars_bits_at_4096_tokens(dtype):
    """Packed 3.0625; with 128 of the tokens in the residual, 3.47 (one block of 3968, so that 128 are left)."""
    model = llama(layers=1)
    for size, left in ((3968, 128), (128, 0)):
        cache = KVCache(model, method("oscar", 2, size=size))
        cache._update(states(4096, 1, 8, 128).to(dtype), states(4096, 1, 8, 128, seed=1).to(dtype), 0)
        assert cache.get_seq_length() == 4096
        assert cache.layers[0].key.residual_tokens == left
        assert cache.bits_per_element == 3.0625
        assert (cache.side_bits("key"), cache.side_bits("value")) == (3.125, 3.0)
        assert cache.effective_bits == ((4096 - left) * 3.0625 + left * 16) / 4096
        assert left == 0 or cache.effective_bits == pytest.approx(3.47, abs=0.005)


def test_many_caches_leave_one_hook_on_the_model(model):
    before = None
    for _ in range(3):
        KVCache(model, method())
        count = sum(len(module._forward_pre_hooks) for module in model.modules())
        assert before in (None, count)
        before = count


def test_a_prefill_reads_full_precision(model):
    tokens = token_ids(20)
    exact = logits(model, DynamicCache(config=model.config), tokens)
    assert torch.equal(logits(model, KVCache(model, method("oscar")), tokens), exact)


# Tokens that leave together from a residual of 5 tokens.
GROUPS = {
    "kivi": ("key.quantizer.group_size=4", "key", 4),
    "kivi_values": ("value.quantizer.group_size=null", "value", 1),
    "nsn": ("label=nsn", "key", 5),
    "oscar_values": ("label=oscar", "value", 1),
    "identity": ("label=identity", "key", 1),
    "zero": ("label=zero", "value", 1),
    "rtn": ("label=rtn", "key", 1),
}


def codec(name, bits=3):
    override, side, _ = GROUPS[name]
    return getattr(kvq.build_method(name.removesuffix("_values"), bits=bits, head_dim=32, overrides=[override]), side)


def side(name, keep_decoded=False, whole=False, size=5, bits=3):
    prefill = PrefillBlock.whole if whole else PrefillBlock.size
    return CacheSide(codec(name, bits), ResidualSide(Policy.sliding, size, prefill), "layer 0 values", keep_decoded)


@pytest.mark.parametrize("name", GROUPS)
@settings(max_examples=examples(12))
@given(whole=st.booleans(), keep=st.booleans(), chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_reads_are_the_naive_ones(name, whole, keep, chunks):
    """The newest tokens stay, whole groups before them leave after the attention that sees them."""
    x = states(sum(chunks), batch=2)
    group = GROUPS[name][2]
    real = side(name, keep, whole)
    naive = NaiveSide(codec(name), "sliding", 5, whole and group > 1, group)
    for start, end in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        read, expected = real.append(x[:, :, start:end]), naive.append(x[:, :, start:end])
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=0)  # products of other sizes round otherwise
        assert (real.tokens, real.residual_tokens) == (end, len(naive.waiting))
        assert real.residual_bytes == naive.residual_bytes


@pytest.mark.thin(3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("tokens", [1, 5, 31, 32, 33, 64, 100])
def test_tokens_that_leave_one_by_one_share_bytes(bits, tokens):
    """Not a byte for the 1 or 2 bits of a channel: the bytes are those of one block of as many tokens."""
    x = states(tokens)
    one = side("rtn", bits=bits)
    for token in torch.cat([x, states(5, seed=1)], 2).split(1, 2):
        one.append(token)
    assert one.packed_tokens == tokens
    assert one.packed_bytes == codec("rtn", bits).encode(x).nbytes
    together = side("rtn", bits=bits)
    together.append(torch.cat([x, states(5, seed=1)], 2))
    assert one.packed_bytes == together.packed_bytes
    assert torch.equal(one.append(x[:, :, :1]), together.append(x[:, :, :1]))


@pytest.mark.parametrize("keep", [False, True])
def test_a_store_of_tokens_forks_and_selects(keep):
    x = states(50, batch=3)
    one = TokenStore(codec("oscar_values"), keep)
    one.add(x[:, :, :40], None, None)
    fork = one.fork()
    one.add(x[:, :, 40:43], None, None)
    fork.add(x[:, :, 43:50], None, None)
    alone = TokenStore(codec("oscar_values"), keep)
    alone.add(torch.cat([x[:, :, :40], x[:, :, 43:50]], 2), None, None)
    assert torch.equal(fork.past(None), alone.past(None))
    assert (one.tokens, fork.tokens) == (43, 47)
    assert [packed.tokens for packed in fork.packed] == [UNIT, 47 - UNIT]
    index = torch.tensor([2, 0])
    before = fork.past(None)
    fork.select(index)
    assert torch.equal(fork.past(None), before[index])
    assert torch.equal(one.past(None)[:, :, :40], before[:, :, :40])


@pytest.mark.parametrize("name", GROUPS)
@settings(max_examples=examples(12))
@given(start=st.integers(0, 30), count=st.integers(1, 30))
def test_one_by_one_says_what_each_query_reads(name, start, count):
    """Token for token: the announced moves, what is read before them and after them."""
    x = states(start + count)
    fed, single = side(name), side(name)
    if start:
        fed.append(x[:, :, :start])
        single.append(x[:, :, :start])
    moves = fed.moves(count)
    first, decoded = fed.append_in_steps(x[:, :, start:])
    assert len(moves.queries) == (0 if decoded is None else decoded.shape[2])
    for query in range(count):
        expected = single.append(x[:, :, start + query : start + query + 1])
        read = first[:, :, : start + query + 1].clone()
        for offset, at in enumerate(moves.queries):
            if at <= query:
                read[:, :, moves.start + offset] = decoded[:, :, offset]
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=0)
    assert (fed.packed_bytes, fed.residual_tokens) == (single.packed_bytes, single.residual_tokens)


@pytest.mark.parametrize(("sizes", "expected"), [((5, 1), (5, 1)), ((5, 32), (5, 32)), ((5, None), (5, 5))])
def test_what_stays_and_what_leaves_together(sizes, expected):
    size, group = sizes
    assert ResidualSide(Policy.sliding, size, PrefillBlock.size).schedule(group) == expected
    assert ResidualSide(Policy.block, size, PrefillBlock.size).schedule(group) == (0, size)


def test_full_precision_beside_a_method_that_keeps_nothing():
    """The baseline of such a method has its residual and no codec."""
    held = CacheSide(None, ResidualSide(Policy.sliding, 0, PrefillBlock.size), "layer 0 values")
    x = states(9)
    for start in (0, 4, 8):
        seen = held.append(x[:, :, start : start + 4])
    assert torch.equal(seen, x)
    assert held.packed_tokens == 0
