"""One side of one layer against a word-by-word re-implementation of the residual policies."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache import CacheSide
from kvq.config.method import Policy, PrefillBlock, ResidualSide
from kvq.errors import DataError, Unsupported
from tests.cache.states import NaiveSide, states
from tests.properties import examples

METHODS = ["kivi", "nsn", "oscar", "oscar/token_scope", "quarot", "identity"]


def codec(name="nsn", side="key", dim=32):
    return getattr(kvq.build_method(name, bits=3, head_dim=dim), side)


def residual(policy="block", size=8, whole=False):
    return ResidualSide(Policy(policy), size, PrefillBlock.whole if whole else PrefillBlock.size)


def side(name="nsn", keep_decoded=False, **settings_):
    return CacheSide(codec(name), residual(**settings_), "layer 0 keys", keep_decoded)


def fed(name, x, bounds, **settings_):
    """A side that got `x` in chunks between `bounds`, and what attention read last."""
    out = side(name, **settings_)
    read = None
    for start, end in itertools.pairwise(bounds):
        read = out.append(x[:, :, start:end])
    return out, read


@settings(max_examples=examples(40))
@given(
    name=st.sampled_from(METHODS),
    policy=st.sampled_from(["block", "none"]),
    size=st.integers(1, 9),
    whole=st.booleans(),
    keep=st.booleans(),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_reads_and_bytes_are_the_naive_ones(name, policy, size, whole, keep, chunks):
    """Any chunking, bit for bit: a block is encoded alone, after the attention that sees its last token."""
    x = states(sum(chunks), batch=2)
    real = side(name, keep, policy=policy, size=size, whole=whole)
    naive = NaiveSide(codec(name), policy, size, whole)
    start = 0
    for chunk in chunks:
        piece = x[:, :, start : start + chunk]
        start += chunk
        assert torch.equal(real.append(piece), naive.append(piece))
        assert (real.packed_bytes, real.residual_bytes) == (naive.packed_bytes, naive.residual_bytes)
        assert real.tokens == start
        assert real.residual_tokens == len(naive.waiting)


@pytest.mark.parametrize("policy", ["none", "block"])
def test_size_zero_means_everything_not_nothing(policy):
    """A residual of no tokens: each update is encoded as it comes, and attention reads only decoded states."""
    x = states(6)
    one = side("oscar", policy=policy, size=0)
    read = one.append(x)
    assert (one.packed_tokens, one.residual_tokens) == (6, 0)
    assert torch.equal(read, codec("oscar").decode(codec("oscar").encode(x)))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_what_was_given_can_change_afterwards(name, keep):
    """The cache holds its own copy, also of what it stores as it is."""
    x = states(16)
    mine = x.clone()
    one = side(name, keep, size=8)
    one.append(mine)
    before = one.append(x[:, :, :1]).clone()
    mine.zero_()
    assert torch.equal(one.append(x[:, :, :1])[:, :, :17], before)


@settings(max_examples=examples(15))
@given(
    name=st.sampled_from(["nsn", "oscar/token_scope"]),
    keep=st.booleans(),
    start=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=8),
)
def test_forks_are_independent_runs(name, keep, start, steps):
    """Three handles on one prefix, appended to in any order, are three caches of their own."""
    x = states(start)
    first = side(name, keep, size=4)
    first.append(x)
    handles = [first, first.fork(), first.fork()]
    alone = [side(name, keep, size=4) for _ in handles]
    for one in alone:
        one.append(x)
    for seed, (which, count) in enumerate(steps):
        more = states(count, seed=100 + seed)
        assert torch.equal(handles[which].append(more), alone[which].append(more))
    for handle, one in zip(handles, alone, strict=True):
        assert (handle.packed_bytes, handle.residual_bytes) == (one.packed_bytes, one.residual_bytes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("policy", ["block", "none"])
def test_states_that_are_not_finite_are_refused_by_name(bad, policy):
    x = states(8)
    x[0, 1, 3, 5] = bad
    with pytest.raises(DataError, match="layer 7 values: NaN or infinite") as caught:
        CacheSide(codec(), residual(policy=policy), "layer 7 values").append(x)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("other", [{"batch": 3}, {"heads": 1}, {"dim": 16}])
def test_states_of_another_shape_are_refused(other, keep):
    """Also where broadcasting would accept them."""
    one = side("rtn", keep, size=4)
    one.append(states(6))
    with pytest.raises(DataError, match=r"layer 0 keys: .* after \(1, 2, 32\)"):
        one.append(states(1, **other))


@pytest.mark.parametrize("keep", [False, True])
def test_select_reset_and_crop(keep):
    x = states(11, batch=3)
    one, _ = fed("oscar", x, [0, 11], keep_decoded=keep)
    index = torch.tensor([2, 0, 0, 1])
    one.select(index)
    other, _ = fed("oscar", x[index], [0, 11], keep_decoded=keep)
    more = states(1, batch=4, seed=5)
    assert torch.equal(one.append(more), other.append(more))
    one.crop(1)
    assert torch.equal(one.append(more), other.append(more)[:, :, :-1])
    with pytest.raises(Unsupported, match="layer 0 keys: cannot remove 5 tokens, only 4"):
        one.crop(5)
    one.reset()
    assert (one.tokens, one.packed_bytes, one.residual_bytes, one.elements_per_token) == (0, 0, 0, 0)
    assert torch.equal(one.append(more), more)
