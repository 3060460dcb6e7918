"""The gains by their definitions, and where in a chain they are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.codecs import Codec, Hadamard, RandomizedHadamard, RandomRotation, TokenNorm, UniformQuantizer, gain_factor
from tests.codecs.oracles import FP16, block

GAINS = ["l2", "norm", "parallel", "unit"]


def pair(seed=0):
    x = block(2, 12, 16, seed)
    return x, x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)


def quantizer(gain="none", bits=2, axis="per_token"):
    return UniformQuantizer(bits, axis, gain=gain)


def build(stages, gain="none", **settings):
    return Codec(dict(stages), [name for name, _ in stages], quantizer(gain, **settings))


def reconstructed(codec, x):
    return codec.decode(codec.encode(x))


@pytest.mark.parametrize("gain", ["l2", "norm", "parallel"])
def test_nsnquants_motivating_example(gain):
    """(1, 2) with the codewords (0.8, 1.6) and (2, 3): the nearest is the first, and 1.25 times it is exact."""
    x, codewords = torch.tensor([1.0, 2.0]), torch.tensor([[0.8, 1.6], [2.0, 3.0]])
    nearest = codewords[(codewords - x).square().sum(-1).argmin()]
    assert (nearest - x).square().sum() == pytest.approx(0.2)
    factor = gain_factor(x[None], nearest[None], gain)
    assert float(factor) == pytest.approx(1.25)
    torch.testing.assert_close(factor * nearest, x[None])


@given(seed=st.integers(0, 99), nudge=st.sampled_from([0.9, 0.999, 1.001, 1.1]))
def test_l2_minimises_the_error(seed, nudge):
    x, x_hat = pair(seed)
    factor = gain_factor(x, x_hat, "l2")
    assert factor.shape == (1, 2, 12, 1)
    error = [(x - f * x_hat).square().sum(-1) for f in (factor, factor * nudge)]
    assert bool((error[0] < error[1]).all())


def test_norm_parallel_and_unit():
    x, x_hat = pair()
    scaled = {gain: gain_factor(x, x_hat, gain) * x_hat for gain in GAINS}
    torch.testing.assert_close(scaled["norm"].norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close((x * scaled["parallel"]).sum(-1), x.square().sum(-1))
    torch.testing.assert_close(scaled["unit"].norm(dim=-1), torch.ones(1, 2, 12, dtype=x.dtype))


@pytest.mark.parametrize("gain", GAINS)
def test_nothing_to_scale_is_left_alone(gain):
    zeros = torch.zeros(1, 1, 3, 4)
    assert gain_factor(zeros, zeros, gain).flatten().tolist() == [1, 1, 1]
    codec = build([("norm", TokenNorm())], gain)
    assert torch.equal(reconstructed(codec, zeros), zeros)


@pytest.mark.parametrize("gain", GAINS)
def test_the_gain_works_on_what_the_quantizer_sees(gain):
    """Without stages: decode is the plain reconstruction times the factor, in fp16."""
    x = block(2, 9, 16)
    plain = reconstructed(build([]), x)
    factor = gain_factor(x, plain, gain)
    torch.testing.assert_close(
        reconstructed(build([], gain), x), factor.half().double() * plain, rtol=1e-12, atol=1e-12
    )


NORM_FIRST = {
    "norm": [("norm", TokenNorm())],
    "norm, hadamard": [("norm", TokenNorm()), ("rotation", Hadamard())],
    "norm, rht": [("norm", TokenNorm()), ("rotation", RandomizedHadamard(1))],
    "norm, haar, hadamard": [("norm", TokenNorm(rms=True)), ("a", RandomRotation(1)), ("b", Hadamard())],
    "hadamard, norm": [("rotation", Hadamard()), ("norm", TokenNorm())],
}
NO_NORM = {
    "nothing": [],
    "hadamard": [("rotation", Hadamard())],
    "norm over all heads": [("norm", TokenNorm("token"))],
    "norm over all heads, hadamard": [("norm", TokenNorm("token")), ("rotation", Hadamard())],
    "head norm behind a token norm": [("own", TokenNorm()), ("joint", TokenNorm("token"))],
}


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("stages", NORM_FIRST.values(), ids=NORM_FIRST)
def test_a_head_norm_takes_the_gain_for_nothing(gain, stages):
    """No bits more, and the same reconstruction as keeping the factor apart, but for the rounding of the norm."""
    x = block(2, 9, 16)
    plain, folded = build(stages).encode(x), build(stages, gain).encode(x)
    assert folded.nbytes == plain.nbytes
    assert set(folded.parts) == set(plain.parts)
    seen = x
    for _, stage in stages:
        seen = stage.forward(seen)[0]
    parts = quantizer().encode(seen, x.dtype)
    factor = gain_factor(seen, quantizer().decode(parts, seen.shape, seen.dtype), gain)
    expected = build(stages).decode(plain) * factor
    torch.testing.assert_close(build(stages).decode(folded), expected, rtol=3 * FP16, atol=3 * FP16)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("stages", NO_NORM.values(), ids=NO_NORM)
def test_a_gain_that_nothing_takes_is_stored_and_counted(gain, stages):
    x = block(4, 9, 16)
    plain, kept = build(stages).encode(x), build(stages, gain).encode(x)
    assert kept.nbytes == plain.nbytes + 2 * 4 * 9  # 16 bits per head and token
    assert kept.parts["gain"].dtype is torch.float16
    assert kept.parts["gain"].shape == (1, 4, 9, 1)


def test_the_nearest_norm_takes_the_gain():
    stages = [("far", TokenNorm()), ("rotation", Hadamard()), ("near", TokenNorm())]
    x = block(1, 6, 16)
    plain, folded = build(stages).encode(x), build(stages, "norm").encode(x)
    assert torch.equal(plain.parts["far.scale"], folded.parts["far.scale"])
    assert not torch.equal(plain.parts["near.scale"], folded.parts["near.scale"])
