"""Calibrated quantizers and rotations: their bits, what they keep exactly, what they are fitted to, their refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from kvq.codecs import (
    ChannelOrder,
    Codec,
    CoupledQuantizer,
    GroupedHadamard,
    Hadamard,
    LearnedRotation,
    NonUniformQuantizer,
    SparseCodec,
    TokenNorm,
    cayley_step,
    fit_codec,
    rope_table,
)
from kvq.codecs.levels import codebooks, levels_1d, nearest
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from tests.calibrated import build, random_states


def bits_of(name: str, heads: int, bits: int = 2, overrides: tuple[str, ...] = ()) -> tuple[float, ...]:
    x, rope = random_states(heads, 128), rope_table(256, 128)
    method = build(name, x, bits, overrides)
    return tuple(codec.encode(x, 32, rope).bits_per_element for codec in (method.key, method.value) if codec)


@pytest.mark.parametrize("bits", [2, *(pytest.param(bits, marks=pytest.mark.long) for bits in (1, 3, 4))])
def test_bits_of_kvquant_without_outliers(bits: int) -> None:
    """Values add 32 bits per token."""
    assert bits_of("kvquant/dense", 8, bits) == (bits, bits + 32 / 1024)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_bits_of_kvquant_follow_the_outliers(heads: int) -> None:
    """32 bits of every entry kept apart and 16 of each token for their number."""
    x, rope = random_states(heads, 128), rope_table(256, 128)
    method = build("kvquant", x, 2)
    for codec, more in ((method.key, 16), (method.value, 16 + 32)):
        assert codec is not None
        packed = codec.encode(x, 32, rope)
        kept = int(packed.parts["outlier.count"].sum())
        assert packed.parts["outlier.value"].shape == (1, 1, kept, 1)
        assert packed.bits_per_element == 2 + 32 * kept / x.numel() + more / (heads * 128)
        assert 0.008 < kept / x.numel() < 0.02
    # Of a token of values: those at or beyond the quantiles of so many channels.
    counts = packed.parts["outlier.count"].unique().tolist()
    assert counts == [2 * (int(0.005 * (heads * 128 - 1)) + 1)]


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


def test_levels_follow_the_weights() -> None:
    values = torch.cat([torch.zeros(500), torch.ones(500) * 3, torch.linspace(-1, 1, 200)]).double()
    weights = torch.cat([torch.ones(1000), torch.full((200,), 1e-9)])
    assert torch.allclose(levels_1d(values, weights, 2, 0), torch.tensor([0.0, 3.0]).double(), atol=1e-3)
    assert levels_1d(torch.tensor([1.0, 2.0]), torch.ones(2), 4, 0).tolist() == [1, 2, 2, 2]
    assert levels_1d(torch.tensor([1.0, 2.0]), torch.zeros(2), 2, 0).tolist() == [1, 2]


def _error(points: torch.Tensor, weights: torch.Tensor, centroids: torch.Tensor) -> float:
    found = centroids.gather(1, nearest(points, centroids).long()[..., None].expand(-1, -1, points.shape[-1]))
    return float(((points - found).square().sum(-1) * weights).sum())


def test_codebooks_beat_where_they_begin_and_tiles_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    points, weights = torch.randn(3, 3000, 4, generator=generator), torch.rand(3, 3000, generator=generator)
    before, after = (codebooks(points, weights, 64, count, 0) for count in (1, 20))
    assert _error(points, weights, after) < 0.97 * _error(points, weights, before)
    assert torch.equal(after, codebooks(points, weights, 64, 20, 0))
    distance = torch.cdist(points, after)
    chosen = nearest(points, after).long()
    assert torch.allclose(distance.gather(-1, chosen[..., None])[..., 0], distance.amin(-1), atol=1e-5)
    few = codebooks(points[:, :5], weights[:, :5], 16, 3, 0)
    assert few.shape == (3, 16, 4)
    assert float(torch.cdist(points[:, :5], few).amin(-1).max()) < 1e-5
    assert torch.isfinite(codebooks(points, torch.zeros_like(weights), 8, 3, 0)).all()


@pytest.mark.parametrize(("channels", "count"), [(4, 128), (8, 256)])
def test_codebooks_are_as_good_as_scikit_learns(channels: int, count: int) -> None:
    """Weights as heavy-tailed as squared gradients; the mean over sets, since each single start is by chance."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(4, channels, channels, generator=generator)
    points = torch.bmm(torch.randn(4, 6000, channels, generator=generator), mixed)
    weights = torch.randn(4, 6000, generator=generator).mul(2).exp()
    theirs = [
        KMeans(count, n_init=1, random_state=0).fit(p.numpy(), sample_weight=w.numpy()).cluster_centers_
        for p, w in zip(points, weights, strict=True)
    ]
    ours = codebooks(points, weights, count, 25, 0)
    ratio = _error(points, weights, ours) / _error(points, weights, torch.from_numpy(np.stack(theirs)).float())
    assert ratio < 1.02


def test_levels_are_as_good_as_those_of_all_values() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(300_000, generator=generator).clamp(-3, 3).double() / 3
    weights = torch.randn(300_000, generator=generator).mul(2).exp().double()

    def error(levels: torch.Tensor) -> float:
        index = torch.searchsorted((levels[1:] + levels[:-1]) / 2, values)
        return float(((values - levels[index]).square() * weights).sum())

    for bits in (1, 2, 3, 4):
        theirs = KMeans(2**bits, n_init=1, random_state=0).fit(values[:, None].numpy(), sample_weight=weights.numpy())
        wanted = error(torch.from_numpy(np.sort(theirs.cluster_centers_[:, 0])))
        assert error(levels_1d(values, weights, 2**bits, 0)) < 1.02 * wanted


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
    plain = LearnedRotation(start="hadamard").initial_rotation(dim)
    begun = LearnedRotation().initial_rotation(dim)
    assert begun.dtype == plain.dtype == torch.float64
    assert torch.allclose(begun @ begun.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    signs = (begun / plain).mean(1)
    assert torch.allclose(begun, signs[:, None] * plain, atol=1e-12)
    assert {round(float(sign), 9) for sign in signs} == {-1.0, 1.0}
    assert torch.equal(begun, LearnedRotation().initial_rotation(dim))
    assert not torch.equal(begun, LearnedRotation(seed=1).initial_rotation(dim))


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
    stage = stage.bind(stage.fit(x, None, 0), 3, 8)  # type: ignore[assignment]
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
    chain = Codec({"norm": TokenNorm()}, ["norm"], NonUniformQuantizer(2, "per_token"))
    with pytest.raises(ConfigError, match="stage 'norm': only rotations may precede"):
        fit_codec(chain, x[0], None, None, 0)


def test_gradients_turn_with_their_states() -> None:
    """Weights of a quantizer behind a rotation are those of rotated gradients."""
    x, gradients = torch.randn(2, 400, 16), torch.randn(2, 400, 16)
    chain = Codec({"hadamard": Hadamard()}, ["hadamard"], CoupledQuantizer(4, 3, iterations=4))
    found = fit_codec(chain, x, gradients, None, 0)
    turned = (Hadamard().forward(part)[0] for part in (x, gradients))
    expected = CoupledQuantizer(4, 3, iterations=4).fit(*turned, 0)
    assert torch.equal(found["quantizer.centroids"], expected["centroids"])


def test_tokens_of_which_none_lies_between_the_quantiles_have_levels() -> None:
    quantizer = NonUniformQuantizer(2, "per_channel", outliers=0.01)
    tables = quantizer.fit(torch.stack([torch.zeros(1, 8), torch.arange(1.0, 9)[None]], 1), None, 0)
    assert len(tables["levels"]) == 4
    assert bool(torch.isfinite(tables["levels"]).all())


def test_outliers_of_long_inputs_and_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of an input and sequences of a batch have lists of other lengths, and decode as each alone."""
    quantizer, x = NonUniformQuantizer(2, "per_channel", outliers=0.01), torch.randn(2, 4, 300, 32)
    x[1] *= 1.5
    codec = SparseCodec({}, [], quantizer.bind(quantizer.fit(x[0], None, 0), 4, 32))
    alone = [codec.encode(row[None], 32) for row in x]
    monkeypatch.setattr("kvq.codecs.codec.ELEMENTS_AT_ONCE", 2 * 4 * 32 * 32)
    both = codec.encode(x, 32)
    assert torch.equal(codec.decode(both), torch.cat([codec.decode(one) for one in alone]))
    assert both.parts["outlier.count"].max() < 2 * max(one.parts["outlier.count"].max() for one in alone)
