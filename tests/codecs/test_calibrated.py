"""Calibrated quantizers and rotations: their bits, what they keep exactly, what they are fitted to, their refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvq.codecs import (
    ChannelOrder,
    Codec,
    CoupledQuantizer,
    GroupedHadamard,
    Hadamard,
    LearnedRotation,
    NonUniformQuantizer,
    TokenNorm,
    cayley_step,
    fit_codec,
    rope_table,
)
from kvq.codecs.kmeans import codebooks, levels_1d, nearest
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from tests.calibrated import build, random_states


def bits_of(name: str, heads: int, bits: int = 2, overrides: tuple[str, ...] = ()) -> tuple[float, ...]:
    x, rope = random_states(heads, 128), rope_table(256, 128)
    method = build(name, x, bits, overrides)
    return tuple(codec.encode(x, 32, rope).bits_per_element for codec in (method.key, method.value) if codec)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bits_of_kvquant(bits: int) -> None:
    """Nominal b + 0.32; 5 + 5 of 1024 channels, 1 + 1 of 256, each in 32 bits; values add 32 bits per token."""
    assert bits_of("kvquant", 8, bits) == (bits + 0.3125, bits + 0.3125 + 32 / 1024)
    assert bits_of("kvquant", 2, bits) == (bits + 0.25, bits + 0.25 + 32 / 256)
    assert bits_of("kvquant/dense", 8, bits) == (bits, bits + 32 / 1024)


def test_bits_of_the_others() -> None:
    assert bits_of("cq/4c9b", 2) == bits_of("cq", 2) == (2.25, 2.25)
    assert bits_of("cq/8c10b", 2) == (1.25, 1.25)
    assert bits_of("spinquant", 2) == (2.25, 2.25)
    assert bits_of("rotatekv", 4, 3) == (3.25, 3.25)


def test_codebooks_of_cq_amortise_as_the_papers_say() -> None:
    """Per layer and head 128/c groups of 2^b centroids: over 819,200 tokens 0.01 and 0.02 bits, over 4,096 2 and 4."""
    for channels, bits, tokens, extra in (
        (4, 9, 819200, 0.01),
        (8, 10, 819200, 0.02),
        (4, 9, 4096, 2.0),
        (8, 10, 4096, 4.0),
    ):
        x = torch.randn(1, 8, 128)
        tables = CoupledQuantizer(channels, bits, iterations=1).fit(x, None, 0)
        stored = 8 * sum(table.numel() * table.element_size() for table in tables.values())
        assert stored / (tokens * 128) == pytest.approx(extra, abs=1e-9)


def test_outliers_are_kept_exactly_and_are_the_most_extreme() -> None:
    x = random_states(2, 128).half().float()
    method = build("kvquant", x, 1)
    for codec, per_token in ((method.key, False), (method.value, True)):
        assert codec is not None
        bare = Codec({}, [], codec.quantizer)
        packed = bare.encode(x)
        out = bare.decode(packed)
        flat, found = (part.transpose(1, 2).flatten(2) for part in (x, out))
        index = packed.parts["outlier.index"][0, 0].long() + 2**15
        assert torch.equal(found[0].gather(-1, index), flat[0].gather(-1, index))
        if per_token:  # the largest and the smallest of each token
            wanted = torch.stack([flat[0].argmax(-1), flat[0].argmin(-1)], -1).sort(-1).values
            assert torch.equal(index, wanted)


def test_qnorm_gives_decoded_values_the_spread_of_the_originals() -> None:
    x = torch.randn(1, 2, 2000, 64, generator=torch.Generator().manual_seed(0))

    def spread(name: str) -> float:
        codec = build(name, x, 1, ("key.quantizer.outliers=0.0", "value.quantizer.outliers=0.0")).value
        assert codec is not None
        return float(codec.decode(codec.encode(x)).std() / x.std())

    assert abs(spread("kvquant/qnorm") - 1) < 0.03
    assert spread("kvquant") < 0.95


def test_levels_follow_the_weights() -> None:
    values = torch.cat([torch.zeros(500), torch.ones(500) * 3, torch.linspace(-1, 1, 200)]).double()
    weights = torch.cat([torch.ones(1000), torch.full((200,), 1e-9)])
    assert torch.allclose(levels_1d(values, weights, 2, 0), torch.tensor([0.0, 3.0]).double(), atol=1e-3)
    assert levels_1d(torch.tensor([1.0, 2.0]), torch.ones(2), 4, 0).tolist() == [1, 2, 2, 2]
    assert levels_1d(torch.tensor([1.0, 2.0]), torch.zeros(2), 2, 0).tolist() == [1, 2]


def test_codebooks_beat_where_they_begin_and_tiles_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    points, weights = torch.randn(3, 3000, 4, generator=generator), torch.rand(3, 3000, generator=generator)

    def error(centroids: torch.Tensor) -> float:
        found = centroids.gather(1, nearest(points, centroids).long()[..., None].expand(-1, -1, 4))
        return float(((points - found).square().sum(-1) * weights).sum())

    before, after = (codebooks(points, weights, 64, count, 0) for count in (1, 20))
    assert error(after) < 0.95 * error(before)
    assert torch.equal(after, codebooks(points, weights, 64, 20, 0))
    distance = torch.cdist(points, after)
    chosen = nearest(points, after).long()
    assert torch.allclose(distance.gather(-1, chosen[..., None])[..., 0], distance.amin(-1), atol=1e-5)
    few = codebooks(points[:, :5], weights[:, :5], 16, 3, 0)
    assert few.shape == (3, 16, 4)
    assert float(torch.cdist(points[:, :5], few).amin(-1).max()) < 1e-5


def test_a_learned_rotation_stays_orthogonal_and_descends() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0]
    if torch.linalg.det(target) < 0:
        target[:, 0] *= -1
    rotation = torch.eye(16, dtype=torch.float64)
    losses = []
    for _ in range(60):
        losses.append(float((rotation - target).square().sum()))
        rotation = cayley_step(rotation, 2 * (rotation - target), 1.5)
        assert torch.allclose(rotation @ rotation.T, torch.eye(16, dtype=torch.float64), atol=1e-12)
    assert losses[-1] < 0.5 * losses[0]
    stage = LearnedRotation(steps=100, rate=1.5)
    assert (stage.rate_at(0), round(stage.rate_at(50), 12)) == (1.5, 0.75)
    assert 0 < stage.rate_at(99) < 0.001


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_where_learning_begins(dim: int) -> None:
    """As released: every row of a Hadamard matrix has a sign of its own; or the matrix alone."""
    plain = LearnedRotation(start="hadamard").begin(dim)
    begun = LearnedRotation().begin(dim)
    assert begun.dtype == plain.dtype == torch.float64
    assert torch.allclose(begun @ begun.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    signs = (begun / plain).mean(1)
    assert torch.allclose(begun, signs[:, None] * plain, atol=1e-12)
    assert {round(float(sign), 9) for sign in signs} == {-1.0, 1.0}
    assert torch.equal(begun, LearnedRotation().begin(dim))
    assert not torch.equal(begun, LearnedRotation(seed=1).begin(dim))
    with pytest.raises(ConfigError, match="start=identity: one of random_hadamard, hadamard"):
        LearnedRotation(start="identity")


@pytest.mark.parametrize(("heads", "joined"), [(8, 4), (4, 4), (2, 2), (6, 3), (1, 1), (5, 1)])
def test_grouped_rotations_join_as_many_heads_as_they_can(heads: int, joined: int) -> None:
    x, stage = torch.randn(2, heads, 5, 12 if joined == 3 else 16), GroupedHadamard(4)
    if joined == 3:
        with pytest.raises(Unsupported, match="order 36"):
            stage.forward(x)
        return
    y, _ = stage.forward(x)
    assert torch.allclose(stage.inverse(y, {}), x, atol=1e-5)
    spike = torch.zeros(1, heads, 1, 16)
    spike[0, 0, 0, 3] = 1
    assert int((stage.forward(spike)[0].abs() > 1e-6).sum()) == joined * 16


def test_channels_are_put_in_the_order_of_their_sums() -> None:
    x = torch.randn(3, 50, 8)
    stage = ChannelOrder()
    stage = stage.bound(stage.fit(x, None, 0), 3, 8)  # type: ignore[assignment]
    y = stage.forward(x)[0]
    sums = y.sum(-2).flatten()
    assert all(a <= b + 1e-4 for a, b in itertools.pairwise(sums.tolist()))
    assert torch.equal(stage.inverse(y, {}), x)


def test_refusals_are_one_line() -> None:
    x = torch.randn(1, 2, 16, 64)
    unbound = build_method("kvquant", bits=2, head_dim=64)
    assert unbound.value is not None
    with pytest.raises(Unsupported, match=r"has no tables: calibrate first .*run.py.*bind_calibration"):
        unbound.value.encode(x)
    with pytest.raises(Unsupported, match=r"method=kvquant: not calibrated; `python run.py method=kvquant .*"):
        unbound.codec("key", 0, 2)
    codec = build("kvquant", x).value
    assert codec is not None
    with pytest.raises(Unsupported, match="fitted to 2 KV heads of 64 channels, given 3 KV heads of 64"):
        codec.encode(torch.randn(1, 3, 16, 64))
    with pytest.raises(Unsupported, match="head_dim=32: the calibration is of a model with head_dim=64"):
        codec.check(32)
    with pytest.raises(Unsupported, match="head_dim=6: 4 channels are coupled at a time"):
        CoupledQuantizer(4, 9).check(6)
    chain = Codec({"norm": TokenNorm()}, ["norm"], NonUniformQuantizer(2, "per_token"))
    with pytest.raises(ConfigError, match="stage 'norm': only rotations may stand in front"):
        fit_codec(chain, x[0], None, None, 0)
    for make, says in (
        (lambda: NonUniformQuantizer(9, "per_token"), "bits=9: a lookup table has 1 to 8"),
        (lambda: NonUniformQuantizer(2, "per_token", outliers=0.7), "outliers=0.7"),
        (lambda: CoupledQuantizer(0, 9), "channels=0: at least 1"),
        (lambda: CoupledQuantizer(8, 17), "code_bits=17"),
        (lambda: LearnedRotation(steps=0), "steps=0"),
        (lambda: LearnedRotation(rate=0.0), "rate=0.0"),
        (lambda: GroupedHadamard(0), "heads=0"),
        (lambda: NonUniformQuantizer(2, "per_token").kept(2**16 + 1), "index of an outlier has 16 bits"),
    ):
        with pytest.raises((ConfigError, Unsupported), match=says):
            make()


def test_gradients_turn_with_their_states() -> None:
    """Weights of a quantizer behind a rotation are those of rotated gradients."""
    x, gradients = torch.randn(2, 400, 16), torch.randn(2, 400, 16)
    chain = Codec({"hadamard": Hadamard()}, ["hadamard"], CoupledQuantizer(4, 3, iterations=4))
    found = fit_codec(chain, x, gradients, None, 0)
    turned = (Hadamard().forward(part)[0] for part in (x, gradients))
    expected = CoupledQuantizer(4, 3, iterations=4).fit(*turned, 0)
    assert torch.equal(found["quantizer.centroids"], expected["centroids"])
