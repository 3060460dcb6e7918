"""Rotations are orthonormal and exactly undone; token norms are what they say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.codecs import Codec, Hadamard, Passthrough, RandomizedHadamard, RandomRotation, TokenNorm
from kvq.codecs.rotations import hadamard_matrix as paley
from kvq.codecs.rotations import has_hadamard as has_order
from tests.codecs.oracles import block, hadamard

ROTATIONS = {"hadamard": Hadamard, "randomized": RandomizedHadamard, "haar": RandomRotation}
POWERS = [1, 2, 8, 64, 128, 256]


def matrix(stage, dim, dtype=torch.float64):
    """What the stage does to the unit vectors: row i is the image of channel i."""
    return stage.forward(torch.eye(dim, dtype=dtype)[None, None])[0][0, 0]


@pytest.mark.parametrize("kind", ROTATIONS)
@given(heads=st.integers(1, 3), tokens=st.integers(1, 9), dim=st.sampled_from(POWERS), seed=st.integers(0, 99))
def test_rotations_are_undone(kind, heads, tokens, dim, seed):
    stage = ROTATIONS[kind]() if kind == "hadamard" else ROTATIONS[kind](seed=seed)
    x = block(heads, tokens, dim, seed)
    y, side = stage.forward(x)
    assert side == {}
    torch.testing.assert_close(stage.inverse(y, side), x, atol=1e-12 * float(x.abs().max() + 1), rtol=0)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


def test_randomized_hadamard_is_a_sign_per_channel_then_a_hadamard():
    rows = matrix(RandomizedHadamard(seed=3), 128)
    signs = rows[:, :1].sign()  # the first column of a Sylvester matrix is all ones
    torch.testing.assert_close(signs * rows, torch.from_numpy(hadamard(128)), atol=1e-14, rtol=0)
    assert 40 < int((signs > 0).sum()) < 88


@pytest.mark.parametrize("kind", ["randomized", "haar"])
def test_seeds(kind):
    first, again, other = (matrix(ROTATIONS[kind](seed=seed), 64) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=0.1)


@pytest.mark.parametrize("dim", [3, 4])
def test_haar_rotations(dim):
    """Determinant +1; over SO(n), entries have mean 0 and mean square 1/n, the trace mean 0 and mean square 1."""
    count = 600
    draws = torch.stack([matrix(RandomRotation(seed=seed), dim) for seed in range(count)])
    torch.testing.assert_close(torch.linalg.det(draws), torch.ones(count, dtype=torch.float64), atol=1e-9, rtol=0)
    five_sigma = 5 / count**0.5
    assert float(draws.mean(0).abs().max()) < five_sigma / dim**0.5
    assert float((draws.square().mean(0) - 1 / dim).abs().max()) < five_sigma * (2**0.5 / dim)
    trace = draws.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(float(trace.mean())) < five_sigma
    assert abs(float(trace.square().mean()) - 1) < five_sigma * 2**0.5


@pytest.mark.parametrize("scope", ["head", "token"])
@pytest.mark.parametrize("rms", [False, True])
def test_token_norm_against_loops(scope, rms):
    x = block(3, 5, 8)
    y, side = TokenNorm(scope, rms).forward(x)
    for token in range(5):
        for head in range(3):
            numbers = x[0, head if scope == "head" else slice(None), token].flatten()
            norm = sum(float(v) ** 2 for v in numbers) ** 0.5 / (len(numbers) ** 0.5 if rms else 1)
            torch.testing.assert_close(y[0, head, token], x[0, head, token] / norm)
            assert float(side["scale"][0, head if scope == "head" else 0, token, 0]) == pytest.approx(norm)
    assert side["scale"].shape == (1, 3 if scope == "head" else 1, 5, 1)
    torch.testing.assert_close(TokenNorm(scope, rms).inverse(y, side), x)


@pytest.mark.parametrize("scope", ["head", "token"])
def test_a_zero_token_is_stored_as_zero_and_comes_back_as_zeros(scope):
    x = block(2, 6, 16)
    x[:, :, 2] = 0
    codec = Codec({"norm": TokenNorm(scope)}, ["norm"], Passthrough())
    packed = codec.encode(x)
    assert not bool(packed.parts["norm.scale"][:, :, 2].any())
    out = codec.decode(packed)
    assert not bool(out[:, :, 2].any())
    torch.testing.assert_close(out, x, rtol=2**-11, atol=0)


def test_a_norm_beyond_fp16_saturates():
    x = torch.full((1, 1, 2, 128), 1e5)
    codec = Codec({"norm": TokenNorm()}, ["norm"], Passthrough())
    assert float(codec.encode(x).parts["norm.scale"].max()) == 65504
    assert bool(torch.isfinite(codec.decode(codec.encode(x))).all())


ORDERS = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_orthogonal_signs(order):
    h = paley(order)
    assert has_order(order)
    assert bool((h.abs() == 1).all())
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


def test_powers_of_two_are_sylvesters():
    h = torch.tensor([[1.0, 1], [1, -1]]).double()
    assert torch.equal(paley(8), torch.kron(h, torch.kron(h, h)))
    for order in (2, 16, 128):
        assert torch.equal(paley(order), paley(order).T)


@pytest.mark.parametrize("order", [-4, 0, 3, 6, 10, 36, 44, 60, 72, 100])
def test_other_orders_are_refused(order):
    assert not has_order(order)
    with pytest.raises(ValueError, match=f"order {order} here"):
        paley(order)
