"""Rotations of channel pairs against complex numbers, and what happens without them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.codecs import ApplyRope, Codec, Passthrough, Rope, UndoRope, rope_table
from kvq.errors import Unsupported
from tests.codecs.oracles import block


def turned(x, rope, back=False):
    """Each pair as a complex number times e^{±i angle}."""
    x = x.clone().numpy()
    pairs = rope.cos.shape[-1]
    for pair in range(pairs):
        first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + pairs)
        angle = (rope.cos[..., pair] + (-1 if back else 1) * 1j * rope.sin[..., pair]).numpy()[:, None]
        z = (x[..., first] + 1j * x[..., second]) * angle
        x[..., first], x[..., second] = z.real, z.imag
    return x


def rotations(tokens, pairs, interleaved=False, rows=1, seed=0):
    angle = 6 * torch.rand(rows, tokens, pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Rope(angle.cos(), angle.sin(), interleaved)


@given(
    pairs=st.sampled_from([0, 1, 4, 8]),
    interleaved=st.booleans(),
    back=st.booleans(),
    rows=st.sampled_from([1, 2]),
    tokens=st.integers(1, 9),
)
def test_it_turns_pairs(pairs, interleaved, back, rows, tokens):
    """Whole or part of the head dim, either layout of pairs, one table for the batch or one for each entry."""
    x = torch.cat([block(3, tokens, 16, seed) for seed in range(2)])
    rope = rotations(tokens, pairs, interleaved, rows)
    out = rope.blocks(tokens, 1).rotate(x[:, None], back)[:, 0]
    np.testing.assert_allclose(out.numpy(), turned(x, rope, back), atol=1e-12)
    torch.testing.assert_close(out[..., 2 * pairs :], x[..., 2 * pairs :], rtol=0, atol=0)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


def test_a_table_knows_only_distances():
    """Scores of turned keys and queries depend on the difference of their positions."""
    x, rope = block(1, 1, 16)[0], rope_table(40, 16)
    query, key = x, x.flip(-1)
    scores = [(rope.narrow(p + 5, 1).rotate(query) * rope.narrow(p, 1).rotate(key)).sum() for p in (0, 9, 30)]
    torch.testing.assert_close(scores, [scores[0]] * 3)
    shifted = rope_table(4, 16, start=9)
    torch.testing.assert_close(shifted.cos, rope.narrow(9, 4).cos)


@pytest.mark.parametrize("interleaved", [False, True])
def test_undone_and_redone(interleaved):
    """Between the two stages keys are what they were before their embedding; behind them all is as it was."""
    x, rope = block(2, 20, 16), rotations(20, 6, interleaved)
    keys = rope.blocks(20, 1).rotate(x[:, None])[:, 0]
    before, _ = UndoRope().forward(keys[:, None], rope.blocks(20, 1))
    torch.testing.assert_close(before[:, 0], x)
    codec = Codec({"undo": UndoRope()}, ["undo"], Passthrough())
    stored = codec.encode(keys, rope=rope).parts["values"]
    torch.testing.assert_close(stored, x)
    both = Codec({"undo": UndoRope(), "apply": ApplyRope()}, ["undo", "apply"], Passthrough())
    for chain in (codec, both):
        torch.testing.assert_close(chain.decode(chain.encode(keys, 8, rope), rope), keys)


def test_every_token_of_every_block_has_its_own_rotation():
    x, rope = block(2, 22, 16), rotations(22, 8)
    codec = Codec({"undo": UndoRope()}, ["undo"], Passthrough())
    whole = codec.encode(x, rope=rope).parts["values"]
    assert torch.equal(codec.encode(x, 5, rope).parts["values"], whole)


def test_missing_rotations_are_named():
    x = block(1, 6, 16)
    codec = Codec({"undo_rope": UndoRope()}, ["undo_rope"], Passthrough())
    with pytest.raises(Unsupported, match=r"stage 'undo_rope' needs the rotations \(rope\) of 6 tokens; given: none"):
        codec.encode(x)
    with pytest.raises(Unsupported, match="given: those of 5"):
        codec.encode(x, rope=rope_table(5, 16))
    packed = codec.encode(x, rope=rope_table(6, 16))
    with pytest.raises(Unsupported, match="needs the rotations"):
        codec.decode(packed)
    assert codec.uses_rope
    assert not Codec({}, [], Passthrough()).uses_rope
