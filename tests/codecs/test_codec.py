"""Chains: their order, their blocks, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.codecs import Codec, Hadamard, Passthrough, RandomRotation, TokenNorm, UniformQuantizer
from tests.codecs.oracles import block


def rounded(bits=3, axis="per_channel", **settings):
    return UniformQuantizer(bits, axis, **settings)


def oscar(order=("hadamard", "norm"), **dropped):
    return Codec({"hadamard": Hadamard(), "norm": TokenNorm(), **dropped}, list(order), rounded(group_size=4))


@pytest.mark.parametrize("order", [["hadamard", "norm"], ["hadamard"]])
def test_null_stages_are_dropped_whether_named_in_the_order_or_not(order):
    x = block(2, 8, 16)
    dropped = oscar(order, norm=None).encode(x)
    alone = Codec({"hadamard": Hadamard()}, ["hadamard"], rounded(group_size=4)).encode(x)
    assert set(dropped.parts) == set(alone.parts)
    assert all(torch.equal(dropped.parts[name], alone.parts[name]) for name in alone.parts)


def test_the_order_is_the_order():
    """A joint norm and a per-channel quantizer on either side of a rotation are different codecs."""
    x = block(2, 8, 16)
    x[..., 0] += 5
    for order in (["a", "b"], ["b", "a"]):
        stages = {"a": RandomRotation(1), "b": RandomRotation(2)}
        seen = x
        for name in order:
            seen = stages[name].forward(seen)[0]
        codec = Codec(stages, order, rounded())
        plain = Codec({}, [], rounded())
        for name, part in plain.encode(seen).parts.items():
            assert torch.equal(codec.encode(x).parts[name], part)


@given(
    tokens=st.integers(1, 30),
    size=st.integers(1, 40),
    heads=st.integers(1, 3),
    batch=st.integers(1, 2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_blocks_are_encoded_alone(tokens, size, heads, batch, dtype):
    """`encode(x, size)` is encoding each block by itself, bit for bit; a short tail is a block of its own."""
    x = torch.cat([block(heads, tokens, 16, seed) for seed in range(batch)]).to(dtype)
    codec = oscar()
    packed = codec.encode(x, size)
    alone = [codec.encode(x[:, :, start : start + size]) for start in range(0, tokens, size)]
    assert torch.equal(codec.decode(packed), torch.cat([codec.decode(piece) for piece in alone], 2))
    assert packed.nbytes == sum(piece.nbytes for piece in alone)
    assert packed.tokens == tokens
    assert sum(run.count for run in packed.runs) == len(alone)
    for name, part in packed.parts.items():
        assert torch.equal(part, torch.cat([piece.parts[name] for piece in alone], 2))


def test_views_encode_like_copies():
    """What a model hands over is a transposed view."""
    x = block(3, 9, 16).transpose(1, 2).contiguous().transpose(1, 2)
    assert not x.is_contiguous()
    assert torch.equal(oscar().decode(oscar().encode(x)), oscar().decode(oscar().encode(x.contiguous())))


def test_encoding_touches_neither_its_input_nor_later_changes_of_it():
    x = block(2, 8, 16)
    before = x.clone()
    for codec in (oscar(), Codec({}, [], Passthrough()), Codec({}, [], rounded(8))):
        packed = codec.encode(x)
        assert torch.equal(x, before)
        out = codec.decode(packed)
        x.zero_()
        assert torch.equal(codec.decode(packed), out)
        out.zero_()
        assert bool(codec.decode(packed).any())
        x.copy_(before)


@given(tokens=st.integers(1, 50), blocks=st.integers(1, 4))
def test_long_texts_are_coded_in_pieces_of_whole_blocks_as_at_once(tokens, blocks):
    x, codec = block(2, tokens, 16), oscar()
    at_once = codec.encode(x, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvq.codecs.codec.ELEMENTS_AT_ONCE", blocks * x[:, :, :8].numel())
        in_pieces = codec.encode(x, 8)
        assert in_pieces.runs == at_once.runs
        assert all(torch.equal(in_pieces.parts[name], at_once.parts[name]) for name in at_once.parts)
        decoded = codec.decode(in_pieces)
    assert torch.equal(decoded, codec.decode(at_once))
