"""NSNQuant against its definition in fp64, its printed bits, and the distribution it is meant to make."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm as normal

import kvq
from kvq.codecs import (
    ApplyRope,
    ChannelScale,
    ChannelShift,
    Codec,
    DoubleQuant,
    Hadamard,
    Passthrough,
    Rope,
    TokenNorm,
    UndoRope,
    rope_table,
)
from kvq.codecs.stages import geometric_median
from tests.codecs.oracles import block, hadamard, stored
from tests.codecs.test_codebooks import codewords
from tests.codecs.test_rope import turned

store = np.vectorize(stored)


def oracle(x, rope, bits, gain="parallel", rotate_first=False):
    """One chunk `[heads, tokens, dim]` by the formulas of the paper, token by token where it matters."""
    every = codewords("finetuned", bits).numpy()
    dim, out = x.shape[-1], np.zeros_like(x)
    matrix = hadamard(dim)
    if rope is not None:
        x = turned(torch.from_numpy(x)[None], rope, back=True)[0]
    if rotate_first:
        x = x @ matrix
    for head, v in enumerate(x):
        s1 = naive(np.linalg.norm(v, axis=1, keepdims=True) / dim**0.5, 4, "per_channel", None, False)
        normalized = v / s1
        o = naive(normalized.mean(0, keepdims=True), 4, "per_token", 32, True)
        s2 = np.linalg.norm(normalized - o, axis=1, keepdims=True) / dim**0.5
        nsn = (normalized - o) / s2
        seen = nsn if rope is None else turned(torch.from_numpy(nsn)[None, None], rope)[0, 0]
        seen = seen if rotate_first else seen @ matrix
        pieces = seen.reshape(-1, 8)
        coded = every[((pieces[:, None] - every[None]) ** 2).sum(-1).argmin(1)].reshape(seen.shape)
        if gain == "parallel":
            s2 = s2 * (seen**2).sum(1, keepdims=True) / (seen * coded).sum(1, keepdims=True)
        back = coded if rotate_first else coded @ matrix.T
        back = back if rope is None else turned(torch.from_numpy(back)[None, None], rope, back=True)[0, 0]
        out[head] = s1 * (store(s2) * back + o)
    if rotate_first:
        out = out @ matrix.T
    return out if rope is None else turned(torch.from_numpy(out)[None], rope)[0]


def test_chunks_have_their_own_means():
    """The residual's size is the chunk of the means and of the first norm's group."""
    x, rope = block(1, 20, 32), rope_table(20, 32)
    codec = kvq.build_method("nsnquant", bits=1, head_dim=32).key
    out = codec.decode(codec.encode(x, 8, rope), rope)[0].numpy()
    for start in (0, 8, 16):
        piece = x[0, :, start : start + 8].numpy()
        expected = oracle(piece, rope.narrow(start, piece.shape[1]), 1)
        np.testing.assert_allclose(out[:, start : start + 8], expected, rtol=1e-9, atol=1e-9)


def test_two_bits_find_the_nearest_signed_codeword():
    """The two-bit codebook has 65,536 codewords; the chain around it is that of one bit."""
    x = block(1, 4, 16)
    codec = kvq.build_method("nsnquant", bits=2, head_dim=16).value
    np.testing.assert_allclose(
        codec.decode(codec.encode(x))[0].numpy(), oracle(x[0].numpy(), None, 2, rotate_first=True), rtol=1e-9, atol=1e-9
    )


@given(
    seed=st.integers(0, 99),
    tokens=st.integers(1, 20),
    pairs=st.sampled_from([0, 2, 8]),
    interleaved=st.booleans(),
    quantized=st.booleans(),
    center=st.sampled_from(["mean", "median"]),
)
def test_nsn_is_undone_exactly(seed, tokens, pairs, interleaved, quantized, center):
    """v = s1 (s2 v_nsn + o), through RoPE and Hadamard, when nothing behind it quantizes; also with 4-bit s1, o."""
    x = block(2, tokens, 16, seed)[:, None]
    if seed % 2:
        x[..., 0, :] = 0
    angle = torch.rand(1, tokens, pairs, dtype=torch.float64) * 6
    rope = Rope(angle.cos(), angle.sin(), interleaved).blocks(tokens, 1)
    scale = DoubleQuant(4, "per_channel") if quantized else None
    offset = DoubleQuant(4, "per_token", 32, signed=True) if quantized else None
    stages = [
        UndoRope(),
        TokenNorm(rms=True, double_quant=scale),
        ChannelShift(center, offset),
        TokenNorm(rms=True),
        ApplyRope(),
        Hadamard(),
    ]
    y, sides = x, []
    for stage in stages:
        y, side = stage.forward(y, rope) if stage.uses_rope else stage.forward(y)
        sides.append(side)
    for stage, side in zip(reversed(stages), reversed(sides), strict=True):
        y = stage.inverse(y, side, rope) if stage.uses_rope else stage.inverse(y, side)
    torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)


def divergence(x):
    """Mean KL from N(0, 1) per channel of `[tokens, dim]`: 100 bins of width 0.1 on [-5, 5], against the CDF."""
    edges = np.linspace(-5, 5, 101)
    expected = np.diff(normal.cdf(edges))
    found = np.array([np.histogram(channel, edges)[0] for channel in x.T]) / len(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(found > 0, found * np.log(found / expected), 0)
    return terms.sum(1).mean()


def test_nsn_makes_gaussians_of_scaled_and_shifted_tokens():
    """4096 tokens with scales over a factor of 50 and channel offsets: as near to N(0, 1) as a sample of it (.0096)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 4096, 128, generator=generator) + torch.randn(1, 1, 1, 128, generator=generator)
    x = x * torch.exp(torch.randn(1, 1, 4096, 1, generator=generator))
    codec = Codec(
        {"norm1": TokenNorm(rms=True), "shift": ChannelShift(), "norm2": TokenNorm(rms=True), "hadamard": Hadamard()},
        ["norm1", "shift", "norm2", "hadamard"],
        Passthrough(),
    )
    after = divergence(codec.encode(x, 64).parts["values"][0, 0].numpy())
    plain = divergence(torch.randn(4096, 128, generator=generator).numpy())
    assert plain == pytest.approx(0.0096, abs=0.0005)
    assert after < 0.012
    assert divergence(x[0, 0].numpy()) > 0.1


def test_the_median_balances_directions():
    """Weiszfeld's point: unit vectors to the tokens sum to nothing; one token far away hardly moves it."""
    x = block(2, 63, 8)
    point = geometric_median(x, x.mean(-2, keepdim=True))
    directions = torch.nn.functional.normalize(x - point, dim=-1).sum(-2)
    assert float(directions.norm(dim=-1).max()) < 1e-3
    far = x.clone()
    far[..., 0, :] += 1e6
    moved = geometric_median(far, far.mean(-2, keepdim=True)) - point
    assert float(moved.norm(dim=-1).max()) < 1
    same = torch.ones(1, 1, 4, 8)
    assert torch.equal(geometric_median(same, same[..., :1, :]), same[..., :1, :])


def test_channel_scale_is_the_sample_deviation():
    x = block(2, 30, 16)
    y, side = ChannelScale().forward(x)
    torch.testing.assert_close(side["scale"], x.std(-2, keepdim=True))
    torch.testing.assert_close(ChannelScale().inverse(y, side), x)
    one, side = ChannelScale().forward(torch.zeros(1, 1, 1, 4))
    assert not bool(side["scale"].any())
    assert not bool(one.any())


@pytest.mark.parametrize(
    ("overrides", "low", "high"), [([], 10, 40), (["value.stages.norm1.double_quant=null"], 0.15, 0.35)]
)
def test_a_value_token_far_below_its_chunk_is_lost_to_the_4_bits_of_its_norm(overrides, low, high):
    """The figures of docs/methods.md and docs/pitfalls.md: relative errors of 17 and 0.22, of the others 0.23."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 64, 128, generator=generator) + torch.randn(1, 8, 1, 128, generator=generator)
    x[:, :, 20] *= 1e-3
    codec = kvq.build_method("nsnquant", bits=2, overrides=overrides).value
    error = (codec.decode(codec.encode(x, 64)) - x).norm(dim=-1) / x.norm(dim=-1)
    assert low < error[:, :, 20].mean() < high
    assert 0.15 < error[:, :, 21:].mean() < 0.35


def naive(x, bits, axis, size, signed):
    """Group by group, number by number."""
    out = np.zeros_like(x)
    top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    rows, columns = x.shape
    along = rows if axis == "per_channel" else columns
    size = size or along
    for line in range(columns if axis == "per_channel" else rows):
        for start in range(0, along, size):
            span = slice(start, min(start + size, along))
            where = (span, line) if axis == "per_channel" else (line, span)
            step = max(abs(v) for v in x[where]) / top
            codes = [round(v / step) if step else 0 for v in x[where]]
            if not signed:
                codes = [0 if v == 0 else max(code, 1) for v, code in zip(x[where], codes, strict=True)]
            out[where] = [code * stored(step) for code in codes]
    return out


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    bits=st.integers(2, 9),
    axis=st.sampled_from(["per_channel", "per_token"]),
    size=st.one_of(st.none(), st.integers(1, 9)),
    signed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_its_definition(rows, columns, bits, axis, size, signed, seed):
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x if signed else x.abs()
    x[..., ::3] = 0
    quant = DoubleQuant(bits, axis, size, signed)
    parts = quant.encode(x)
    out = quant.decode(parts, rows, columns, torch.float64)
    for got, given_ in zip(out, x, strict=True):
        np.testing.assert_allclose(got.numpy(), naive(given_.numpy(), bits, axis, size, signed), atol=1e-12)
    assert parts["step"].dtype is torch.float16


def test_a_small_scale_never_becomes_zero():
    x = torch.tensor([[100.0], [1e-3], [0.0]])
    quant = DoubleQuant(4, "per_channel")
    out = quant.decode(quant.encode(x), 3, 1, torch.float64).flatten()
    assert out[0] == pytest.approx(100, rel=1e-3)
    assert out[1] == pytest.approx(100 / 15, rel=1e-3)
    assert out[2] == 0
