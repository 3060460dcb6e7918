"""The sliding residual of one side, and the storage of tokens that leave one by one."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache import CacheSide
from kvq.cache.store import UNIT, TokenStore
from kvq.config.residual import Policy, PrefillBlock, ResidualSide
from kvq.errors import Unsupported
from tests.cache.states import NaiveSide, states
from tests.properties import examples

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
@given(
    whole=st.booleans(),
    keep=st.booleans(),
    quantized=st.booleans(),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_reads_are_the_naive_ones(name, whole, keep, quantized, chunks):
    """The newest tokens stay, whole groups before them leave after the attention that sees them."""
    x = states(sum(chunks), batch=2)
    group = GROUPS[name][2]
    real = side(name, keep, whole)
    naive = NaiveSide(codec(name), "sliding", 5, whole and group > 1, group)
    for start, end in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        read, expected = real.append(x[:, :, start:end], quantized), naive.append(x[:, :, start:end], quantized)
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


def test_tokens_that_made_others_leave_cannot_be_taken_back():
    """Those that left would be in full precision, had these never come."""
    one = side("kivi_values")
    one.append(states(20))
    with pytest.raises(Unsupported, match="cannot remove 3 tokens, 3 of those before them were encoded"):
        one.crop(3)
    assert (one.tokens, one.residual_tokens) == (20, 5)


def test_crop_where_nothing_left_since():
    x, more = states(23), states(12, seed=2)
    one, short = side("kivi"), side("kivi")
    one.append(x)  # 16 leave, 7 stay: no other group of 4 until there are 9
    short.append(x[:, :, :21])
    one.crop(2)
    for token in more.split(1, 2):
        assert torch.equal(one.append(token), short.append(token))


def test_full_precision_beside_a_method_that_keeps_nothing():
    """The baseline of such a method has its residual and no codec."""
    held = CacheSide(None, ResidualSide(Policy.sliding, 0, PrefillBlock.size), "layer 0 values")
    x = states(9)
    for start in (0, 4, 8):
        seen = held.append(x[:, :, start : start + 4])
    assert torch.equal(seen, x)
    assert held.packed_tokens == 0
