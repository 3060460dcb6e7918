"""QJL: unbiased inner products over sketches, outlier channels apart, early layers with a sketch of their own."""

import math
from typing import get_args

import pytest
import torch
from transformers import LlamaConfig

import kvq
from kvq.codecs import Codec, DeltaQuantizer, Sketch
from kvq.codecs.lloyd_max import sketch_constant
from kvq.errors import Unsupported
from kvq.models.layers import KvLayer
from kvq_zoo.qjl import SketchQuantizer, tall_sketch
from tests.codecs.test_delta import drifting, inner

DIM = 64


def states(tokens=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, tokens, DIM, generator=generator, dtype=torch.float64)
    x[..., 5] *= 12
    return x


@pytest.mark.parametrize("sketch", get_args(Sketch))
@pytest.mark.parametrize(("outliers", "shared"), [(0, True), (8, True), (8, False)])
def test_inner_products_are_unbiased_over_sketches(sketch, outliers, shared):
    key, query = states(), states(seed=1)[:, :, :1]
    wanted = (key * query).sum(-1)
    found = []
    for seed in range(200):
        quantizer = SketchQuantizer(2, outliers, shared_rows=shared, sketch=sketch, seed=seed)
        out = quantizer.decode(quantizer.encode(key, torch.float64), key.shape, torch.float64)
        found.append((out * query).sum(-1))
    estimates = torch.stack(found)
    # One number: tokens share the query and the sketch.
    off = (estimates - wanted).mean(-1)
    assert abs(float(off.mean())) < 3 * float(off.std()) / math.sqrt(len(found))


def test_it_is_the_estimator_of_the_paper():
    """sqrt(π/2)/m · |k| · <S q, sign(S k)> for Gaussian rows, with the norm as stored."""
    key, query = states(), states(seed=1)[:, :, :1]
    quantizer = SketchQuantizer(ratio=4, outliers=0, sketch="gaussian", seed=3)
    out = quantizer.decode(quantizer.encode(key, torch.float64), key.shape, torch.float64)
    sketch = tall_sketch("gaussian", 4, DIM, 6, torch.float64, torch.device("cpu"))
    norm = key.norm(dim=-1).half().double()
    wanted = math.sqrt(math.pi / 2) / (4 * DIM) * norm * (torch.sign(key @ sketch.mT) @ (query @ sketch.mT).mT)[..., 0]
    torch.testing.assert_close((out * query).sum(-1), wanted, rtol=1e-10, atol=1e-10)


def test_outlier_channels_are_those_of_most_energy_and_lower_the_error():
    key = states(64)
    parts = SketchQuantizer(outliers=1).encode(key, torch.float64)
    assert parts["channels"].flatten().tolist() == [5, 5]

    def error(outliers):
        quantizer = SketchQuantizer(outliers=outliers)
        out = quantizer.decode(quantizer.encode(key, torch.float64), key.shape, torch.float64)
        others = [c for c in range(DIM) if c != 5]
        return float((out - key)[..., others].norm())

    assert error(1) < error(0) / 1.3


def test_bits_and_early_layers():
    x = torch.randn(1, 2, 128, 128).half()
    for name, outlier_signs in (("qjl", 2), ("qjl/gaussian", 1)):
        method = kvq.build_method(name, head_dim=128)
        early, late = (method.codec("key", layer, 32).encode(x).bits_per_element for layer in (14, 15))
        assert late == 2 + outlier_signs + 2 * 16 / 128 + 8 * 8 / (32 * 128)
        assert early == 4 + 1 + 2 * 16 / 128 + 8 * 8 / (32 * 128)
        assert method.codec("value", 0, 32) is method.value
        assert method.value.encode(x).bits_per_element == 3
    assert kvq.build_method("qjl/one_sketch").policies == ()


def test_codecs_of_early_layers_are_checked_with_the_model():
    held = [KvLayer(place, 128, 128, None) for place in range(2)]
    method = kvq.build_method("qjl", head_dim=128, overrides=["policies.first_layers.key.quantizer.outliers=200"])
    with pytest.raises(Unsupported, match="outliers=200: head_dim=128 leaves no other"):
        method.layers(LlamaConfig(), held)


def test_the_released_run():
    """Of 128 channels: 256 and 512 coordinates, 256 and 128 for the outliers, which take rows of the common sketch."""
    method = kvq.build_method("qjl", head_dim=128)
    x = torch.randn(1, 1, 64, 128, dtype=torch.float64)
    sketches = []
    for layer, rows, outlier_rows in ((0, 512, 128), (15, 256, 256)):
        quantizer = method.codec("key", layer, 32).quantizer
        common, apart = (quantizer._matrix(128, x, x.dtype, outlier) for outlier in (False, True))
        assert common.shape == (rows, 128)
        assert torch.equal(apart, common[:outlier_rows])
        for block in common.split(128):
            torch.testing.assert_close(block @ block.mT, 128 * torch.eye(128, dtype=x.dtype))
        sketches.append(common)
    assert not torch.equal(sketches[0][:256], sketches[1])
    own = SketchQuantizer(2, 8, 2, shared_rows=False)
    assert not torch.equal(own._matrix(128, x, x.dtype, True), own._matrix(128, x, x.dtype, False))


def test_the_constant_of_orthogonal_rows_is_a_little_larger():
    """The released code has that of Gaussian rows for both, and so scores 0.2% more."""
    more = sketch_constant("orthogonal", 128) / sketch_constant("gaussian", 128) - 1
    assert round(more, 4) == 0.002


def test_a_part_above_the_whole_is_no_nan():
    """All energy is in the outliers, whose stored norm is that of the key."""
    key = torch.zeros(1, 1, 32, DIM)
    key[..., :8] = torch.rand(1, 1, 32, 8) + 1
    quantizer = SketchQuantizer()
    parts = quantizer.encode(key, key.dtype)
    parts["outlier_norm"] = torch.nextafter(parts["norm"], torch.full_like(parts["norm"], 100))
    out = quantizer.decode(parts, key.shape, key.dtype)
    assert torch.isfinite(out).all()
    assert not out[..., 8:].any()


def test_deltas_of_one_bit_diverge_and_are_refused():
    """One sign per coordinate of a Gaussian sketch and no codes: (π/2) · D(0) = π/2."""
    signs = SketchQuantizer(1, outliers=0, sketch="gaussian")
    quantizer = DeltaQuantizer(inner(signs))
    relative = quantizer.relative_error(DIM)
    print(f"relative error of one bit: {relative:.3f} (pi/2 - 1/D = {math.pi / 2 - 1 / DIM:.3f})")
    assert relative == pytest.approx(math.pi / 2, rel=0.05)
    with pytest.raises(Unsupported, match=r"deltas diverge: .* error is 1\.5\d at head_dim=64, .* below 1"):
        quantizer.check(DIM)
    x = drifting(60, drift=0.01)
    grown = (Codec({}, [], quantizer).decode(Codec({}, [], quantizer).encode(x)) - x).square().sum(-1).mean((0, 1))
    rate = float(grown[50] / grown[10]) ** (1 / 40)
    print(f"its error grows by {rate:.2f} per token")
    assert rate > 1.2
