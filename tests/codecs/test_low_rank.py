"""A low-rank correction of a block's error: by its definition, its bytes, and what it finds where there is nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.codecs import (
    CalibratedChannelSplit,
    Codec,
    HuffmanCodec,
    LloydMaxQuantizer,
    LowRankCorrection,
    PackedStore,
    RandomizedHadamard,
    TokenNorm,
    UniformQuantizer,
    calibrated_parts,
)
from kvq.codecs.nested import exact_svd, randomized_svd
from kvq.errors import Unsupported
from tests.calibrated import fitted
from tests.properties import examples

NOISE = {128: (0.16, 0.30), 360: (0.11, 0.21), 2048: (0.08, 0.16)}
"""Share of the error that ranks 4 and 8 take away at 64 channels where errors are independent, by tokens."""


def states(*shape, seed=101):
    """Never the seed of a rotation (0) or of a start (3)."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def base(bits=2):
    return Codec(
        {"norm": TokenNorm(), "rotation": RandomizedHadamard(0)}, ["norm", "rotation"], LloydMaxQuantizer(bits)
    )


def corrected(inner, **settings):
    return Codec({}, [], LowRankCorrection(inner, **settings))


def squared(codec, x):
    return float((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(("bits", "corrects"), [(2, True), (3, True), (4, False), (5, False)])
def test_only_below_four_bits(bits, corrects):
    """From `below` bits on, parts and states are those of the base."""
    x, codec = states(1, 2, 70, 64), corrected(base(bits), below=4)
    same = corrected(base(bits)) if corrects else base(bits)
    found, expected = codec.encode(x), same.encode(x)
    assert ("right" in found.parts) == corrects
    assert found.nbytes == expected.nbytes
    assert torch.equal(codec.decode(found), same.decode(expected))


@pytest.mark.parametrize("tokens", NOISE)
def test_noise_has_a_low_rank_part_too(tokens):
    """A gain over these figures is structure; below them, there is none."""
    x = states(1, 6, tokens, 64)
    plain, found = squared(base(), x), {}
    for svd in ("exact", "randomized"):
        found[svd] = [1 - squared(corrected(base(), rank=rank, svd=svd), x) / plain for rank in (4, 8)]
        print(f"T={tokens} D=64 {svd}: rank 4 {found[svd][0]:.1%}, rank 8 {found[svd][1]:.1%} of the error")
    for shares in found.values():
        assert shares == pytest.approx(NOISE[tokens], abs=0.013)
    # A flat spectrum is the hardest for random directions.
    assert all(0.9 * best < near <= best for best, near in zip(*found.values(), strict=True))


def test_by_the_definition():
    """Head by head and block by block, with numpy's decomposition and factors in fp16."""
    x, inner, rank = states(2, 3, 40, 16), Codec({}, [], UniformQuantizer(2, "per_token")), 3
    found = corrected(inner, rank=rank, svd="exact").encode(x, 20)
    out = corrected(inner, rank=rank, svd="exact").decode(found)
    for sequence in range(2):
        for head in range(3):
            for start in (0, 20):
                part = (slice(sequence, sequence + 1), slice(head, head + 1), slice(start, start + 20))
                coded = inner.decode(inner.encode(x[part]))[0, 0].numpy()
                u, s, v = np.linalg.svd(x[part][0, 0].numpy() - coded)
                for column in range(rank):
                    left = [np.float64(np.float16(np.float32(value * s[column]))) for value in u[:, column]]
                    right = [np.float64(np.float16(np.float32(value))) for value in v[column]]
                    for token in range(20):
                        for channel in range(16):
                            coded[token, channel] += left[token] * right[channel]
                np.testing.assert_allclose(out[part][0, 0].numpy(), coded, rtol=0, atol=2e-3)


@settings(max_examples=examples(24), deadline=None)
@given(data=st.data())
def test_bytes_and_blocks(data):
    """Any shape: factors of 2 bytes a number; a block decodes alone as among others; ranks beyond the block's."""
    size = data.draw(st.sampled_from([1, 7, 70]))
    heads, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3 * size))
    dim = data.draw(st.sampled_from([8, 16]))
    rank, svd = data.draw(st.integers(1, 20)), data.draw(st.sampled_from(["exact", "randomized"]))
    inner = base(data.draw(st.integers(1, 4)))
    codec = corrected(inner, rank=rank, svd=svd)
    x = states(2, heads, tokens, dim, seed=data.draw(st.integers(200, 299))).float()
    x[:, :, ::4] = 0
    packed = codec.encode(x, size)
    whole = codec.decode(packed)
    lengths = [min(size, tokens - start) for start in range(0, tokens, size)]
    factors = sum(2 * min(rank, length, dim) * (length + dim) for length in lengths) * 2 * heads
    assert packed.nbytes == inner.encode(x, size).nbytes + factors
    assert bool(torch.isfinite(whole).all())
    store = None
    for start, length in zip(range(0, tokens, size), lengths, strict=True):
        alone = codec.encode(x[:, :, start : start + length])
        torch.testing.assert_close(codec.decode(alone), whole[:, :, start : start + length], rtol=1e-5, atol=1e-6)
        store = store or PackedStore(alone)
        if start:
            store.append(alone)
    for name, part in packed.parts.items():  # the same bits; products of factors round by their strides
        assert torch.equal(store.packed.parts[name], part), name
    torch.testing.assert_close(codec.decode(store.packed), whole, rtol=1e-5, atol=1e-6)
    if min(rank, *x.shape[-2:]) == dim:  # all of the error is corrected, up to the rounding of factors
        assert float((whole - x).norm()) < 5e-3 * float(x.norm()) + 1e-6


def test_randomized_is_near_exact_and_leaves_the_generator_alone():
    x = states(3, 90, 32) * torch.linspace(3, 0.1, 32, dtype=torch.float64)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    near = randomized_svd(x, 4, 10, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    full = exact_svd(x, 4)
    errors = [(x - torch.bmm(*factors)).square().sum((1, 2)) for factors in (near, full)]
    assert bool((errors[0] < 1.01 * errors[1]).all())
    assert bool((errors[0] >= errors[1] * (1 - 1e-12)).all())


def test_bits():
    """Rank 4 at 128 tokens of 128 channels costs 1.0 bit; indices can be coded too."""
    x = states(1, 4, 256, 128).float()
    for name, bits in (("low_rank", 1.0), ("low_rank_exact", 1.0), ("low_rank_8", 2.0)):
        method = kvq.build_method(f"kvquant_plus_plus/{name}", 2)
        assert [codec.encode(x, 128).bits_per_element for codec in (method.key, method.value)] == [2.125 + bits] * 2
    codec = corrected(base(4))
    coded = HuffmanCodec({}, [], codec.quantizer)
    assert torch.equal(coded.decode(coded.encode(x, 128)), codec.decode(codec.encode(x, 128)))
    assert coded.encode(x, 128).nbytes < 0.97 * codec.encode(x, 128).nbytes


def outlier_channels(x, bits=2, rank=None):
    """Calibrated outlier channels fitted to `x`, with a correction of this rank around them."""

    def group(seed, extra, **bounds):
        stages = {"norm": TokenNorm(), "rotation": RandomizedHadamard(seed)}
        return Codec(stages, list(stages), LloydMaxQuantizer(bits, extra, **bounds))

    split = Codec({}, [], CalibratedChannelSplit(group(0, 1, most=4), group(2, -1, least=1)))
    return fitted(split if rank is None else corrected(split, rank=rank), x)


def test_a_calibrated_codec_is_corrected():
    """The base has the tables of the calibration: base and factors are those of the parts one after the other."""
    x, later = (states(1, 2, 128, 32, seed=seed).float() for seed in (301, 302))
    x[..., ::4] *= 5
    later[..., ::4] *= 5
    plain, codec = outlier_channels(x), outlier_channels(x, rank=4)
    assert set(calibrated_parts(codec)) == {"quantizer"}
    assert torch.equal(codec.quantizer.base.quantizer.tables["mask"], plain.quantizer.tables["mask"])
    rest = later - plain.decode(plain.encode(later))
    left, right = randomized_svd(rest[0], 4, 10, 2, 3)
    expected = plain.decode(plain.encode(later)) + torch.bmm(left.half().float(), right.half().float())[None]
    packed = codec.encode(later)
    torch.testing.assert_close(codec.decode(packed), expected, rtol=0, atol=2e-3)
    assert packed.nbytes == plain.encode(later).nbytes + 2 * 2 * 4 * (128 + 32)
    assert squared(codec, later) < squared(plain, later)
    assert calibrated_parts(corrected(base())) == {}
    with pytest.raises(Unsupported, match="CalibratedChannelSplit has no tables: calibrate first"):
        kvq.build_method("kvquant_plus_plus/outliers_low_rank", 2).key.encode(later)
