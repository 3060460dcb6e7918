"""Stores grow without changing what they hold, and forks never see each other's rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codecs import BlockRun, Codec, Growable, Hadamard, Packed, PackedStore, TokenNorm, UniformQuantizer, merge_runs
from tests.properties import examples


def codec():
    stages = {"hadamard": Hadamard(), "norm": TokenNorm("token")}
    return Codec(stages, ["hadamard", "norm"], UniformQuantizer(3, "per_channel", 4))


def states(tokens, batch=2, seed=0):
    return torch.randn(batch, 2, tokens, 8, generator=torch.Generator().manual_seed(seed))


def rows(*counts):
    """Tensors `[2, count, 3]` of distinct numbers."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    every = torch.arange(2 * sum(counts) * 3).view(2, -1, 3)
    return [every[:, end - count : end] for count, end in zip(counts, ends, strict=True)]


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_many_appends_are_one_concatenation(counts):
    pieces = rows(*counts)
    grown = Growable(pieces[0])
    for i, piece in enumerate(pieces[1:], start=2):
        grown.append(piece)
        assert torch.equal(grown.view, torch.cat(pieces[:i], 1))
        assert grown.rows == sum(counts[:i]) <= grown.capacity


def test_appends_copy_seldom():
    """Geometric capacity: 2000 rows one by one move the data a few times, not 2000."""
    grown = Growable(torch.zeros(1, 1, 4))
    places = set()
    for _ in range(2000):
        grown.append(torch.zeros(1, 1, 4))
        places.add(grown.view.data_ptr())
    assert len(places) < 25
    assert grown.capacity < 1.6 * grown.rows


@given(
    start=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from(["append", "fork"]), st.integers(0, 4), st.integers(1, 5)), max_size=20),
)
def test_forks_of_forks_in_any_order(start, steps):
    """Against plain lists: every handle keeps exactly its own rows."""
    first = torch.arange(start)[:, None].clone()
    handles, expected, fresh = [Growable(first)], [list(range(start))], 1000
    for what, which, count in steps:
        which %= len(handles)
        if what == "fork":
            handles.append(handles[which].fork())
            expected.append(list(expected[which]))
        else:
            more = list(range(fresh, fresh + count))
            fresh += count
            handles[which].append(torch.tensor(more)[:, None])
            expected[which] += more
        for handle, numbers in zip(handles, expected, strict=True):
            assert handle.view.flatten().tolist() == numbers


def test_a_fork_shares_until_someone_else_has_written():
    base = Growable(torch.zeros(4, 2))
    base.append(torch.ones(1, 2))  # grown: rows are free now
    fork, place = base.fork(), base.view.data_ptr()
    assert fork.view.data_ptr() == place
    fork.append(torch.full((1, 2), 2.0))
    assert fork.view.data_ptr() == place  # the free row was its own to take
    base.append(torch.full((1, 2), 3.0))
    assert base.view.data_ptr() != place
    assert (fork.view[-1, 0], base.view[-1, 0]) == (2, 3)


@settings(max_examples=examples(50))
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_store_of_blocks_is_the_blocks(sizes):
    """Also of unequal sizes, whose codes do not fill their last byte."""
    blocks = [codec().encode(states(size, seed=i)) for i, size in enumerate(sizes)]
    store = PackedStore(blocks[0])
    for piece in blocks[1:]:
        store.append(piece)
    packed = store.packed
    assert packed.tokens == sum(sizes)
    assert packed.nbytes == sum(piece.nbytes for piece in blocks)
    assert torch.equal(codec().decode(packed), torch.cat([codec().decode(piece) for piece in blocks], 2))
    assert sum(run.count for run in packed.runs) == len(sizes)


def test_equal_blocks_are_one_run():
    """So that a long past is decoded at once."""
    store = PackedStore(codec().encode(states(16), 8))
    for seed in range(5):
        store.append(codec().encode(states(8, seed=seed)))
    assert [(run.tokens, run.count) for run in store.packed.runs] == [(8, 7)]
    store.append(codec().encode(states(3)))
    store.append(codec().encode(states(8)))
    assert [(run.tokens, run.count) for run in store.packed.runs] == [(8, 7), (3, 1), (8, 1)]


def test_runs_merge_only_when_alike():
    one, more, other = BlockRun(8, 2, {"a": 1}), BlockRun(8, 3, {"a": 1}), BlockRun(8, 1, {"a": 2})
    assert merge_runs((one,), (more, other)) == (BlockRun(8, 5, {"a": 1}), other)
    assert merge_runs((), (one,)) == (one,)
    assert merge_runs((one,), ()) == (one,)
    assert one.count == 2


@settings(max_examples=examples(30))
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=8))
def test_forked_stores_are_independent(steps):
    first = PackedStore(codec().encode(states(8)))
    handles = [first, first.fork(), first.fork()]
    seen = [[codec().encode(states(8))] for _ in handles]
    for seed, (which, size) in enumerate(steps):
        more = codec().encode(states(size, seed=seed + 1))
        handles[which].append(more)
        seen[which].append(more)
    for handle, blocks in zip(handles, seen, strict=True):
        assert handle.packed.nbytes == sum(piece.nbytes for piece in blocks)
        decoded = torch.cat([codec().decode(piece) for piece in blocks], 2)
        assert torch.equal(codec().decode(handle.packed), decoded)


@pytest.mark.parametrize("index", [[1, 0], [0], [1, 1, 0, 1]])
def test_select_keeps_those_sequences(index):
    x, more = states(13), states(5, batch=len(index), seed=1)
    store = PackedStore(codec().encode(x, 4)).select(torch.tensor(index))
    alone = PackedStore(codec().encode(x[index], 4))
    for one in (store, alone):
        one.append(codec().encode(more))
    assert store.packed.batch == len(index)
    assert store.packed.nbytes == alone.packed.nbytes
    assert torch.equal(codec().decode(store.packed), codec().decode(alone.packed))


def test_selecting_leaves_the_original():
    store = PackedStore(codec().encode(states(8)))
    before = codec().decode(store.packed)
    chosen = store.select(torch.tensor([1, 1]))
    chosen.append(codec().encode(states(8, seed=1)))
    assert torch.equal(codec().decode(store.packed), before)


def test_packed_counts_what_it_holds():
    parts = {"codes.0": torch.zeros(1, 2, 3, 4, dtype=torch.uint8), "scale": torch.zeros(1, 2, 1, 4).half()}
    packed = Packed(parts, (BlockRun(3, 1, {"codes.0": 3, "scale": 1}),), 1, 2, 4, torch.float32)
    assert packed.nbytes == 24 + 16
    assert packed.bits_per_element == 8 * 40 / 24
