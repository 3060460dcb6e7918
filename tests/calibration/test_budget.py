"""One budget over layers and sides, the transform that its components come from, and moments summed up on the way."""

from __future__ import annotations

import dataclasses
import itertools
import math

import hypothesis
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import strategies as st

import kvq
from kvq.calibration.budget import Demand, demand_of, joint_parts, predicted, shared_out
from kvq.calibration.collect import collect
from kvq.calibration.moments import collect_joint
from kvq.codecs import Codec, FisherTransform, JointMoments, ScalarQuantizer, Stage, TokenNorm, bind_codec
from kvq.codecs.components import scalar_errors
from kvq.codecs.second_moments import metric_basis
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models import LoadedModel
from tests.calibrated import build, joint_moments, random_states
from tests.properties import examples
from tests.random_models import llama, token_ids


def spectra(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).exp()


def loss(widths: list[torch.Tensor], lambdas: list[torch.Tensor]) -> float:
    errors = torch.tensor(scalar_errors(), dtype=torch.float64)
    return sum(float((own * errors[bits.long()]).sum() / 2) for own, bits in zip(lambdas, widths, strict=True))


def test_no_other_widths_of_the_same_sum_lose_less() -> None:
    """Against all widths of five components in two places with 7 bits in all."""
    lambdas = [spectra(2, 1), spectra(3, 2)]
    quantizers = [ScalarQuantizer(1.4, widths="pooled")] * 2
    found = shared_out([demand_of(q, own) for q, own in zip(quantizers, lambdas, strict=True)])
    assert sum(int(own.sum()) for own in found) == 7
    every = [torch.tensor(w) for w in itertools.product(range(8), repeat=5) if sum(w) == 7]
    assert loss(found, lambdas) == pytest.approx(min(loss([w[:2], w[2:]], lambdas) for w in every), rel=1e-12)
    assert loss(found, lambdas) == pytest.approx(
        sum(predicted(q, own, bits) for q, own, bits in zip(quantizers, lambdas, found, strict=True))
    )


def test_one_water_level() -> None:
    """What any component would save by one bit more is at most what any saved by its last."""
    demands = [
        demand_of(ScalarQuantizer(bits, widths="pooled"), spectra(200, seed)) for seed, bits in enumerate((1, 3.5))
    ]
    widths = [own.long() for own in shared_out(demands)]
    assert sum(int(own.sum()) for own in widths) == 200 + 700
    last, following = [], []
    for demand, own in zip(demands, widths, strict=True):
        padded = torch.nn.functional.pad(demand.gains, (1, 1), value=0.0)
        last.append(padded.gather(1, own[:, None])[own > 0])
        following.append(padded.gather(1, own[:, None] + 1))
    assert torch.cat(following).max() <= torch.cat(last).min()


def test_a_bit_never_skips_the_one_before() -> None:
    gains = torch.tensor([[1.0, 5.0, 0.5], [2.0, 2.0, 2.0]])
    (found,) = shared_out([Demand(gains, 4)])
    assert found.tolist() == [1, 3]
    (all_of_them,) = shared_out([Demand(gains, 99)])
    assert all_of_them.tolist() == [3, 3]


@pytest.mark.parametrize("together", [None, 1, 2])
@pytest.mark.parametrize("metric", ["full", "diagonal", "none"])
def test_components_are_uncorrelated_and_their_noise_adds_up(metric: str, together: int | None) -> None:
    """Deviations of 1; noise d in a component costs λ d / 2, which is (1/2) tr(F E[e eᵀ]) of the noise e of states."""
    x = torch.randn(4, 3000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x @ torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1] += x[0]
    stage = FisherTransform(metric, together, left_out=0)
    codec = Codec({"transform": stage}, ["transform"], ScalarQuantizer(2, widths="own"))
    moments = joint_moments(codec, x.float())
    tables = stage.fit_joint(moments)
    spectrum = tables["spectrum"][0].double()
    assert bool((spectrum.diff() <= 0).all())
    bound = stage.bound(tables, 4, 8)
    assert isinstance(bound, Stage)
    y, side = bound.forward(x)
    torch.testing.assert_close(bound.inverse(y, side), x, atol=1e-4, rtol=0)
    rows = y.transpose(0, 1).flatten(1)
    size = 8 * (together or 4)
    of_group = tables["order"][0] // size
    inside = of_group[:, None] == of_group
    covariance = rows.mT @ rows / len(rows)
    torch.testing.assert_close(covariance * inside, torch.eye(32, dtype=torch.float64), atol=1e-3, rtol=0)
    if metric == "full" and together is None:
        basis = bound.inverse(torch.eye(32, dtype=torch.float64).unflatten(1, (4, 8)).transpose(0, 1), side)
        back = basis.transpose(0, 1).flatten(1) - tables["mean"].double()
        ridge = 0.01 * moments.fisher.diagonal().mean() * torch.eye(32, dtype=torch.float64)
        torch.testing.assert_close(((back @ (moments.fisher + ridge)) * back).sum(1), spectrum, rtol=1e-3, atol=1e-5)


def test_components_without_bits_are_not_kept() -> None:
    x = torch.randn(1, 2, 500, 16, generator=torch.Generator().manual_seed(0))
    for name in ("waterfill/scalar", "waterfill/heads_apart", "waterfill/two_stages", "waterfill"):
        codec = build(name, x, 0.5).value
        assert codec is not None
        own = codec.stages[-1][1].tables  # type: ignore[attr-defined]
        used = int((codec.quantizer.tables["widths"] > 0).sum())  # type: ignore[attr-defined]
        assert own["order"].shape == (1, used)
        assert used <= own["forward"].shape[0] * own["forward"].shape[2] < 32
        packed = codec.encode(x)
        assert packed.parts["string"].shape == (1, 1, 500, 2)
        assert packed.bits_per_element == 0.5


@hypothesis.settings(max_examples=examples(15))
@hypothesis.given(st.data())
def test_heads_that_are_left_over_are_a_smaller_group(data: st.DataObject) -> None:
    """Against each group's own basis, in fp64; a smaller group stores a row for each component it uses, and no more."""
    dim = 4
    heads, together = data.draw(st.sampled_from([(3, 2), (5, 2), (5, 3), (7, 4), (4, 3), (2, 3), (4, 2)]))
    x = random_states(heads, dim, 200, data.draw(st.integers(0, 9)))[0].double()
    stage = FisherTransform(heads_together=together, left_out=0)
    moments = joint_moments(Codec({}, [], ScalarQuantizer(2)), x.float())
    moments = dataclasses.replace(moments, covariance=moments.covariance + 1e-3 * torch.eye(heads * dim).double())
    groups = torch.arange(heads * dim).split(dim * min(together, heads))
    found = []
    metric = moments.fisher + 0.01 * moments.fisher.diagonal().mean() * torch.eye(heads * dim)
    for own in groups:
        spectrum, forward, inverse = metric_basis(moments.covariance[own][:, own], metric[own][:, own])
        found += [(spectrum[i], own, forward[:, i], inverse[i]) for i in range(len(own))]
    found.sort(key=lambda component: -float(component[0]))
    used = data.draw(st.integers(1, heads * dim))
    tables = stage.fit_joint(moments)
    ordered = torch.stack([own[0] for own in found])
    torch.testing.assert_close(tables["spectrum"][0].double(), ordered, rtol=1e-5, atol=0)
    tables = FisherTransform.trimmed(tables, used)
    bound = stage.bound(tables, heads, dim)
    assert isinstance(bound, FisherTransform)
    centred = x.transpose(0, 1).flatten(1) - tables["mean"].double()
    expected = torch.stack([centred[:, own] @ column for _, own, column, _ in found[:used]], 1)
    y, side = bound.forward(x)
    rows = y.transpose(0, 1).flatten(1)
    torch.testing.assert_close(rows[:, :used], expected, atol=1e-4, rtol=1e-4)
    assert not rows[:, used:].any()
    back = tables["mean"].double().expand(len(centred), -1).clone()
    for i, (_, own, _, row) in enumerate(found[:used]):
        back[:, own] += rows[:, i : i + 1] * row
    torch.testing.assert_close(bound.inverse(y, side).transpose(0, 1).flatten(1), back, atol=1e-4, rtol=1e-4)
    counts = [max(sum(own is group for _, own, *_ in found[:used]), 1) for group in groups]
    alike = [count for count, own in zip(counts, groups, strict=True) if len(own) == len(groups[0])]
    stored = len(groups[0]) * len(alike) * max(alike) + sum(len(groups[-1]) * count for count in counts[len(alike) :])
    for name in ("forward", "inverse"):
        assert sum(table.numel() for key, table in tables.items() if key.endswith(name)) == stored


def moments_of_heads(heads: int, dim: int, seed: int) -> JointMoments:
    """With channels of heads that have much in common, in the states and in what noise in them costs."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        own = torch.randn(heads, dim, 3 * heads * dim, generator=generator, dtype=torch.float64)
        rows = own + torch.randn(dim, 3 * heads * dim, generator=generator, dtype=torch.float64)
        rows = rows * torch.rand(heads, dim, 1, generator=generator, dtype=torch.float64).add(0.1)
        return rows.flatten(0, 1) @ rows.flatten(0, 1).mT / rows.shape[-1]

    mean = torch.randn(heads * dim, generator=generator).double()
    return JointMoments(mean, drawn(), drawn(), heads, 1000)


def in_double_precision(stage: FisherTransform, moments: JointMoments, used: int) -> FisherTransform:
    stage.dtype = torch.float64
    tables = FisherTransform.trimmed(stage.fit_joint(moments), used)
    bound = stage.bound(tables, moments.heads, len(moments.mean) // moments.heads)
    assert isinstance(bound, FisherTransform)
    return bound


def composed(moments: JointMoments, together: int, joined: int, ridge: float) -> tuple[torch.Tensor, ...]:
    """The two stages as one dense matrix, by other means (an eigenproblem of S F): T, T^-1, and what noise costs."""
    n = len(moments.mean)
    dim = n // moments.heads
    fisher = moments.fisher + ridge * moments.fisher.diagonal().mean() * torch.eye(n)

    def turned(covariance: np.ndarray, metric: np.ndarray) -> np.ndarray:
        """Columns v of S v = λ M^-1 v, by λ descending, of variance 1."""
        vectors = scipy.linalg.eigh(covariance, np.linalg.inv(metric))[1][:, ::-1]
        return vectors / np.sqrt(np.sum(vectors * (covariance @ vectors), 0))

    covariance, metric = moments.covariance.numpy(), fisher.numpy()
    groups = np.split(np.arange(n), range(dim * together, n, dim * together))
    first = scipy.linalg.block_diag(*(turned(covariance[np.ix_(g, g)], metric[np.ix_(g, g)]) for g in groups))
    chosen = np.concatenate([g[: joined * len(g) // dim] for g in groups])
    back = np.linalg.inv(first)
    carried = np.ix_(chosen, chosen)
    second = np.eye(n)
    second[carried] = turned((first.T @ covariance @ first)[carried], (back @ metric @ back.T)[carried])
    whole = first @ second
    back = np.linalg.inv(whole)
    return tuple(map(torch.from_numpy, (whole, back, np.sum((back @ metric) * back, 1))))


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(st.data())
def test_two_stages_are_one_dense_matrix(data: st.DataObject) -> None:
    """In fp64: components and states are those of the composed matrix, whatever is trimmed; signs are free.

    Two ways to eigenvectors differ by rounding over the gap between eigenvalues.
    """
    heads, dim = data.draw(st.sampled_from([(3, 4), (4, 6), (5, 4), (2, 8)]))
    together = data.draw(st.sampled_from([1, 2, 3]))
    joined = data.draw(st.integers(1, dim))
    moments = moments_of_heads(heads, dim, data.draw(st.integers(0, 9)))
    n = heads * dim
    used = data.draw(st.integers(1, n))
    stage = FisherTransform(heads_together=together, left_out=0, across=joined / dim)
    forward, back, costs = composed(moments, min(together, heads), joined, 0.01)
    order = costs.argsort(descending=True)[:used]
    spectrum = stage.fit_joint(moments)["spectrum"][0].double()
    torch.testing.assert_close(spectrum[:used], costs[order], rtol=1e-6, atol=0)
    bound = in_double_precision(stage, moments, used)
    x = torch.randn(2, 40, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, side = bound.forward(x.unflatten(-1, (heads, dim)).transpose(1, 2))
    rows = y.transpose(1, 2).flatten(2)
    expected = (x - moments.mean) @ forward[:, order]
    signs = (rows[..., :used] * expected).sum((0, 1)).sign()
    torch.testing.assert_close(rows[..., :used], expected * signs, rtol=1e-6, atol=1e-6)
    assert not rows[..., used:].any()
    found = bound.inverse(y, side).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, expected @ back[order] + moments.mean, rtol=1e-6, atol=1e-6)
    if used == n:
        torch.testing.assert_close(found, x, rtol=1e-8, atol=1e-8)
    matrices = [table.shape for name, table in bound.tables.items() if name.endswith("inverse")]
    assert bound.multiplications == sum(math.prod(shape) for shape in matrices)
    if used == n and heads % together == 0:
        assert bound.multiplications == dim * dim * heads * together + (heads * joined) ** 2


@pytest.mark.parametrize("heads", [2, 3])
def test_all_components_across_are_the_full_transform(heads: int) -> None:
    """The second stage then undoes what the first took apart; fewer lie between that and heads apart."""
    moments = moments_of_heads(heads, 6, 4)
    spectra = {
        across: FisherTransform(across=across, left_out=0).fit_joint(moments)["spectrum"][0].double()
        for across in (1 / 6, 0.5, 1.0)
    }
    whole, apart = (FisherTransform(heads_together=t, left_out=0).fit_joint(moments)["spectrum"][0] for t in (None, 1))
    torch.testing.assert_close(spectra[1.0], whole.double(), rtol=1e-5, atol=0)
    logs = [float(own.log().sum()) for own in (apart.double(), *spectra.values())]
    assert all(more > less for more, less in itertools.pairwise(logs))  # of log λ, which bits go by


def test_noise_in_components_of_two_stages_costs_what_they_weigh() -> None:
    """(1/2) tr(F E[e eᵀ]) of noise that is drawn for each component alone: half of Σ λ d."""
    moments = moments_of_heads(3, 4, 2)
    stage = FisherTransform(ridge=1e-9, left_out=0, across=0.5)
    bound = in_double_precision(stage, moments, 12)
    sizes = torch.linspace(0.1, 2, 12, dtype=torch.float64)
    noise = torch.randn(400_000, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * sizes.sqrt()
    moved = bound.inverse(noise.unflatten(1, (3, 4)).transpose(0, 1), {}).transpose(0, 1).flatten(1) - moments.mean
    cost = float(((moved @ moments.fisher) * moved).sum(1).mean() / 2)
    spectrum = stage.fit_joint(moments)["spectrum"][0].double()
    assert cost == pytest.approx(float((spectrum * sizes).sum() / 2), rel=0.01)


def test_moments_are_those_of_kept_states() -> None:
    """Against states and gradients that were kept, keys turned back; the first tokens of a window do not count."""
    loaded = LoadedModel(llama().double(), torch.device("cpu"))
    windows = token_ids(24, batch=2)
    kept = collect(loaded, windows, None, True, 0)
    found = collect_joint(loaded, windows, left_out=3)
    chosen = torch.arange(48).view(2, 24)[:, 3:].flatten()
    for (side, layer), moments in found.items():
        states = kept[layer]
        x, gradient = getattr(states, side).double(), states.gradients[side].double()
        if side == "key":
            assert states.rope is not None
            x, gradient = states.rope.rotate(x, back=True), states.rope.rotate(gradient, back=True)
        rows, slopes = (part[:, chosen].transpose(0, 1).flatten(1) for part in (x, gradient))
        assert (moments.heads, moments.tokens) == (len(x), 42)
        torch.testing.assert_close(moments.mean, rows.mean(0))
        torch.testing.assert_close(moments.covariance, rows.T.cov(correction=0))
        torch.testing.assert_close(moments.fisher, slopes.T @ slopes / 42)
    assert len(found) == 2 * len(kept)
    with pytest.raises(DataError, match="of which the first 24 are left out"):
        collect_joint(loaded, windows, left_out=24)


def test_moments_of_keys_with_values() -> None:
    """Those of each side are blocks of them; the blocks between are those of states and gradients that were kept."""
    loaded = LoadedModel(llama().double(), torch.device("cpu"))
    windows = token_ids(24, batch=2)
    kept, apart = collect(loaded, windows, None, True, 0), collect_joint(loaded, windows, left_out=0)
    found = collect_joint(loaded, windows, left_out=0, both=True)
    assert set(found) == {("both", layer) for layer in kept}
    for layer, states in kept.items():
        both, key, value = found["both", layer], apart["key", layer], apart["value", layer]
        n = len(key.mean)
        torch.testing.assert_close(both.mean, torch.cat([key.mean, value.mean]))
        torch.testing.assert_close(both.covariance[:n, :n], key.covariance)
        torch.testing.assert_close(both.covariance[n:, n:], value.covariance)
        torch.testing.assert_close(both.fisher[:n, :n], key.fisher)
        torch.testing.assert_close(both.fisher[n:, n:], value.fisher)
        assert states.rope is not None
        slopes = [states.rope.rotate(states.gradients["key"].double(), back=True), states.gradients["value"].double()]
        rows = [part.transpose(0, 1).flatten(1) for part in slopes]
        torch.testing.assert_close(both.fisher[:n, n:], rows[0].T @ rows[1] / 48)


def test_latents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(llama(), torch.device("cpu"))
    monkeypatch.setattr(loaded.text_config, "kv_lora_rank", 16, raising=False)
    with pytest.raises(Unsupported, match="model: caches latents"):
        collect_joint(loaded, token_ids(8))


def test_chains_that_share_no_bits_are_refused() -> None:
    transform, scalar = FisherTransform(), ScalarQuantizer(2, widths="pooled")
    assert joint_parts(Codec({}, [], ScalarQuantizer(2))) is None
    for codec in (
        Codec({"norm": TokenNorm(), "transform": transform}, ["norm", "transform"], scalar),
        Codec({"norm": TokenNorm(), "transform": transform}, ["transform", "norm"], scalar),
        Codec({"transform": transform}, ["transform"], ScalarQuantizer(2)),
        Codec({}, [], scalar),
    ):
        with pytest.raises(ConfigError, match="a FisherTransform stands last of its stages"):
            joint_parts(codec)
    for given, told in (
        ({"ridge": 0}, "ridge=0: above 0"),
        ({"mixing": 2}, "mixing=2"),
        ({"across": 1.5}, "across=1.5: a share, 0 to 1"),
        ({"tables": "int8"}, "tables=int8"),
    ):
        with pytest.raises(ConfigError, match=told):
            FisherTransform(**given)  # type: ignore[arg-type]


def test_any_number_of_bits() -> None:
    for bits, label in ((0.75, "0.75"), ("2.25", "2.25"), (3.0, "3"), ("k2.5v1", "k2.5v1")):
        method = kvq.build_method("waterfill", bits=bits, head_dim=64)
        assert method.bits is not None
        assert method.bits.label == label
    for bits in (0.4, 8.5):
        with pytest.raises((ConfigError, Unsupported), match=f"bits={bits}"):
            kvq.build_method("waterfill", bits=bits)
    with pytest.raises(ConfigError, match=r"bits=2\.25: whole numbers"):
        kvq.build_method("kivi", bits=2.25)  # type: ignore[arg-type]


def test_a_token_is_decoded_alone_as_among_others() -> None:
    """Bit for bit, whatever the lengths of blocks."""
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(4))
    for name in ("waterfill", "waterfill/scalar"):
        codec = build(name, x, 2.25).value
        assert codec is not None
        bound = bind_codec(codec, None, 2, 32)
        with pytest.raises(Unsupported, match="calibrate first"):
            bound.encode(x)
        whole = codec.decode(codec.encode(x, 32))
        for length in (1, 5, 16):
            assert torch.equal(codec.decode(codec.encode(x[:, :, :length])), whole[:, :, :length])
