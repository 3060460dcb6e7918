"""TurboQuant's inner-product form over many sketches, its two instances over a split, and the bits of both."""

import math

import pytest
import torch

import kvq
from kvq.codecs import (
    ChannelSplit,
    Codec,
    InnerProductQuantizer,
    LloydMaxQuantizer,
    Passthrough,
    RandomRotation,
    TokenNorm,
)
from kvq.codecs.lloyd_max import optimal_levels, sketch_constant, sketch_matrix
from tests.codecs.oracles import block, level_error

MSE = {1: 0.3609, 2: 0.1160, 3: 0.03397}
CPU = torch.device("cpu")


def unit(count, dim=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=-1)


def estimates(bits, sketch, seeds, x, queries):
    """<q, x̂> for every sketch, token and query."""
    out = []
    for seed in range(seeds):
        quantizer = InnerProductQuantizer(bits, sketch, seed=1000 + seed)
        out.append(quantizer.decode(quantizer.encode(x[None], x.dtype), x[None].shape, x.dtype)[0] @ queries.T)
    return torch.stack(out)


@pytest.mark.parametrize("sketch", ["gaussian", "orthogonal"])
@pytest.mark.parametrize("bits", [2, 3])
def test_inner_products_are_unbiased_over_sketches(bits, sketch):
    """120 sketches: means over tokens and queries lie within 3 standard errors of the truth, and so do the pairs."""
    x, queries = unit(40), torch.cat([unit(30, seed=1), unit(40)])  # a token's own direction shows a lost length
    error = estimates(bits, sketch, 120, x, queries) - x @ queries.T
    mean, spread = error.mean(0), error.std(0) / 120**0.5
    assert float((mean.abs() > 3 * spread).double().mean()) < 0.01
    for part in (error[..., :30], torch.diagonal(error[..., 30:], dim1=1, dim2=2)):
        per_sketch = part.flatten(1).mean(1)
        assert abs(float(per_sketch.mean())) < 3 * float(per_sketch.std()) / 120**0.5


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, *(pytest.param(bits, marks=pytest.mark.long) for bits in (3, 4))])
def test_variance_of_the_estimate(bits):
    """D · variance = (π/2 - 1/D) · MSE(b-1): .564, .181 and .0531 at 128 channels."""
    x, queries = unit(200), unit(400, seed=1)
    variance = estimates(bits, "gaussian", 300, x, queries).var(0).mean()
    assert float(128 * variance) == pytest.approx((math.pi / 2 - 1 / 128) * MSE[bits - 1], rel=0.03)
    assert (math.pi / 2 - 1 / 128) * MSE[bits - 1] == pytest.approx({2: 0.564, 3: 0.181, 4: 0.0531}[bits], rel=0.003)


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_printed_bound_of_the_variance(bits):
    """Var <q, x̂> <= √3 π² |q|² 4^-b / D (KVQuant++, section 2.1): by the optimal levels' error at b - 1 bits."""
    for dim in (8, 64, 128):
        variance = (math.pi / 2 - 1 / dim) * level_error(optimal_levels(bits - 1, dim), dim) / dim
        assert variance <= math.sqrt(3) * math.pi**2 * 4.0**-bits / dim


def test_orthogonal_rows_err_less():
    x = unit(500)
    errors = {}
    for sketch in ("gaussian", "orthogonal"):
        quantizer = InnerProductQuantizer(2, sketch)
        out = quantizer.decode(quantizer.encode(x[None], x.dtype), x[None].shape, x.dtype)[0]
        errors[sketch] = float((out - x).square().sum(-1).mean())
    assert errors["gaussian"] / errors["orthogonal"] == pytest.approx(2.75, abs=0.1)


def test_a_sketch_by_its_definition():
    """Codes of the mse form, signs of S r, |r|; decoding by the formula, number by number."""
    x = unit(6, 16)
    quantizer = InnerProductQuantizer(3, "gaussian", seed=5)
    plain = LloydMaxQuantizer(2)
    coded = plain.decode(plain.encode(x[None], x.dtype), x[None].shape, x.dtype)[0]
    s = sketch_matrix("gaussian", 16, 5, torch.float64, CPU)
    rest = x - coded
    expected = coded.clone()
    for token in range(6):
        norm = float(rest[token].norm().half())
        for row in s:
            expected[token] += math.sqrt(math.pi / 2) / 16 * norm * row * (1 if row @ rest[token] >= 0 else -1)
    out = quantizer.decode(quantizer.encode(x[None], x.dtype), x[None].shape, x.dtype)[0]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_sketches():
    rows = sketch_matrix("orthogonal", 64, 3, torch.float64, CPU)
    torch.testing.assert_close(rows @ rows.T, 64 * torch.eye(64, dtype=torch.float64))
    assert not torch.equal(rows, sketch_matrix("orthogonal", 64, 4, torch.float64, CPU))
    assert sketch_constant("gaussian", 64) == math.sqrt(2 / math.pi)
    sphere = unit(200_000, 8, seed=9)[:, 0].abs().mean() * 8**0.5
    assert sketch_constant("orthogonal", 8) == pytest.approx(float(sphere), rel=0.01)


def instance(bits, seed):
    stages = {"norm": TokenNorm(), "rotation": RandomRotation(seed)}
    return Codec(stages, ["norm", "rotation"], LloydMaxQuantizer(bits))


def test_a_split_is_two_codecs_side_by_side():
    """The channels of most energy of each head and block, found by hand, through a codec of their own."""
    x = block(2, 40, 16, dtype=torch.float32)
    x[:, 0, :, [3, 9, 12]] *= 10
    x[:, 1, :, [0, 7, 15]] *= 10
    high, low = instance(4, 0), instance(1, 2)
    codec = Codec({}, [], ChannelSplit(3, high, low))
    out = codec.decode(codec.encode(x, 16))
    for head, channels in ((0, [3, 9, 12]), (1, [0, 7, 15])):
        others = [channel for channel in range(16) if channel not in channels]
        for part, picked in ((high, channels), (low, others)):
            piece = x[:, head : head + 1, :, picked].contiguous()
            expected = part.decode(part.encode(piece, 16))
            torch.testing.assert_close(out[:, head : head + 1][..., picked], expected, rtol=1e-5, atol=1e-6)


def test_each_block_chooses_its_own_channels():
    x = torch.zeros(1, 1, 8, 16)
    x[..., :4, 5], x[..., 4:, 11] = 1, 1
    codec = Codec({}, [], ChannelSplit(1, Codec({}, [], Passthrough()), Codec({}, [], Passthrough())))
    packed = codec.encode(x, 4)
    masks = packed.parts["mask"].flatten(0, 2)
    assert masks.tolist() == [[1 << 5, 0], [0, 1 << 3]]
    assert torch.equal(codec.decode(packed), x)
    assert codec.token_group is None


@pytest.mark.parametrize(("gain", "mse"), [("norm", 0.119), ("parallel", 0.131)])
def test_gains_cost_error_and_no_bits(gain, mse):
    codec = kvq.build_method(f"turboquant/{gain}", bits=2).key
    x = torch.randn(1, 4, 512, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = codec.decode(codec.encode(x))
    assert float((out - x).square().sum() / x.square().sum()) == pytest.approx(mse, abs=0.002)
    kept = {"norm": out.norm(dim=-1) / x.norm(dim=-1), "parallel": (out * x).sum(-1) / x.square().sum(-1)}[gain]
    torch.testing.assert_close(kept, torch.ones_like(kept), rtol=0, atol=1e-3)
