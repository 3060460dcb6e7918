"""Stores grow without changing what they hold, and forks never see each other's rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codecs import (
    BlockRun,
    Codec,
    Growable,
    Hadamard,
    PackedStore,
    TokenNorm,
    UniformQuantizer,
    merge_runs,
    pack,
    plane_widths,
    unpack,
)
from kvq.errors import ConfigError
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


def test_selecting_leaves_the_original():
    store = PackedStore(codec().encode(states(8)))
    before = codec().decode(store.packed)
    chosen = store.select(torch.tensor([1, 1]))
    chosen.append(codec().encode(states(8, seed=1)))
    assert torch.equal(codec().decode(store.packed), before)


BITS = st.integers(1, 16)


def codes(bits, *shape, seed=0):
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("bits", range(1, 17))
def test_plane_widths_add_up_to_the_bits_and_fit_bytes(bits):
    widths = plane_widths(bits)
    assert sum(widths) == bits
    assert set(widths) <= {1, 2, 4, 8}
    assert list(widths) == sorted(widths, reverse=True)


@pytest.mark.parametrize("bits", [0, -1, 17])
def test_other_bits_are_refused(bits):
    with pytest.raises(ConfigError, match=f"bits={bits}: .*1 to 16"):
        plane_widths(bits)


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_code_survives(bits):
    every = torch.arange(2**bits, dtype=torch.int32)[:, None].expand(-1, 3)
    out = unpack(pack(every, bits), bits, 2**bits)
    assert torch.equal(out.int(), every)


@given(bits=BITS, lead=st.lists(st.integers(1, 3), max_size=3), tokens=st.integers(0, 40), cols=st.integers(1, 9))
def test_round_trip_and_size(bits, lead, tokens, cols):
    given_codes = codes(bits, *lead, tokens, cols)
    planes = pack(given_codes, bits)
    assert torch.equal(unpack(planes, bits, tokens).int(), given_codes)
    rows = sum(math.ceil(tokens * width / 8) for width in plane_widths(bits))
    assert sum(plane.numel() * plane.element_size() for plane in planes) == rows * cols * math.prod(lead)


@given(bits=BITS, tokens=st.integers(1, 12))
def test_input_dtype_does_not_matter(bits, tokens):
    small = codes(bits, 2, tokens, 5)
    kinds = [torch.int32, torch.int64] + ([torch.uint8] if bits <= 8 else [])
    packed = [pack(small.to(kind), bits) for kind in kinds]
    for planes in packed[1:]:
        assert all(torch.equal(a, b) for a, b in zip(packed[0], planes, strict=True))


@given(bits=BITS, tokens=st.integers(1, 20))
def test_unpacked_codes_are_in_range_whatever_the_bytes(bits, tokens):
    """No byte pattern, not even a damaged one, gives a code that needs more than `bits` bits."""
    planes = [torch.full_like(plane, 255) for plane in pack(codes(bits, tokens, 3), bits)]
    out = unpack(planes, bits, tokens)
    assert out.shape == (tokens, 3)
    assert int(out.min()) == int(out.max()) == 2**bits - 1


def test_padding_of_a_last_byte_is_zero():
    planes = pack(torch.full((3, 1), 7), 3)
    assert [plane.flatten().tolist() for plane in planes] == [[0b00_11_11_11], [0b0000_0111]]
