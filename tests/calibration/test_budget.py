"""One budget over layers and sides, the transform that its components come from, and moments summed up on the way."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import kvq
from kvq.calibration.budget import Demand, collect_joint, demand_of, fit_sharing, joint_parts, predicted, shared_out
from kvq.calibration.collect import collect_states
from kvq.calibration.files import bind_tables
from kvq.calibration.fit import calibrate
from kvq.codecs import Codec, FisherTransform, JointMoments, ScalarQuantizer, Stage, TokenNorm, bind_codec
from kvq.codecs.components import scalar_errors
from kvq.codecs.levels import pack_rows, unpack_rows
from kvq.codecs.second_moments import metric_basis
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.load import LoadedModel
from kvq.models.weights import weights_name
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
    bound = stage.bind(tables, 4, 8)
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
    for name in ("waterfill/scalar", "waterfill/heads_apart", "waterfill"):
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
    tables = stage.trim_tables(tables, used)
    bound = stage.bind(tables, heads, dim)
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


def bound_to(stage: FisherTransform, moments: JointMoments, bits: float) -> tuple[FisherTransform, torch.Tensor]:
    """The transform of a codec with this budget, and the widths of its components."""
    codec = Codec({"transform": stage}, ["transform"], ScalarQuantizer(bits, widths="pooled"))
    heads, dim = moments.heads, len(moments.mean) // moments.heads
    found = bind_codec(codec, fit_sharing({("key", 0): codec}, {("key", 0): moments})["key", 0], heads, dim)
    transform, quantizer = found.stages[0][1], found.quantizer
    assert isinstance(transform, FisherTransform)
    assert isinstance(quantizer, ScalarQuantizer)
    return transform, quantizer.tables["widths"]


@hypothesis.settings(max_examples=examples(20), deadline=None)
@hypothesis.given(rows=st.lists(st.integers(0, 12), min_size=1, max_size=6), columns=st.integers(1, 17))
def test_rows_of_integers_come_back(rows: list[int], columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    top = torch.tensor(rows)[:, None]
    codes = (torch.rand(len(rows), columns, generator=generator, dtype=torch.float64) * 2.0**top).floor()
    packed = pack_rows(codes, rows)
    assert len(packed) == -(-sum(rows) * columns // 8)
    assert torch.equal(unpack_rows(packed, rows, columns), codes * (top > 0))


@pytest.mark.parametrize(("heads", "together"), [(2, None), (3, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("tables", ["width+2", "int4"])
def test_the_encoder_is_the_best_for_rounded_rows(heads: int, together: int | None, tables: str) -> None:
    """No other encoder has less error in the metric; stored bytes are those of the rows' bits; groups stay apart."""
    moments = moments_of_heads(heads, 6, 3)
    stage = FisherTransform(heads_together=together, left_out=0, tables=tables)
    bound, widths = bound_to(stage, moments, 2)
    x = torch.randn(heads, 40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, side = bound.forward(x)
    found = (bound.inverse(y, side) - x).transpose(0, 1).flatten(1)
    metric = moments.fisher + 0.01 * moments.fisher.diagonal().mean() * torch.eye(6 * heads)
    for start, matrix in zip(
        range(0, 6 * heads, 6 * (together or heads)), bound._rows(bound.tables, "inverse"), strict=True
    ):
        own = slice(start, start + matrix.shape[1])
        rows = matrix[matrix.abs().sum(1) > 0].double()
        least = rows @ metric[own, own] @ found[:, own].mT  # the error is orthogonal to what the rows span
        size = (rows @ metric[own, own] * rows).sum(1).sqrt()[:, None] * found.std()
        assert float((least / size).abs().max()) < 1e-4
    stored = sum(table.nbytes for name, table in bound.tables.items() if name.endswith("codes"))
    bits = sum(int(t.long().sum()) * (6 * (together or heads) if not n.startswith("last") else 6)
               for n, t in bound.tables.items() if n.endswith("row_bits"))  # fmt: skip
    assert 0 <= 8 * stored - bits < 16
    assert int((widths > 0).sum()) == bound.tables["order"].shape[1]


def test_more_bits_of_rows_lose_less() -> None:
    """Predicted loss of the rounded forms falls to that of exact matrices."""
    moments = moments_of_heads(3, 8, 5)
    errors = ScalarQuantizer(2, widths="pooled").errors
    losses = []
    for tables in ("width+0", "width+2", "width+4", "width+8", "float32"):
        codec = Codec({"t": FisherTransform(tables=tables)}, ["t"], ScalarQuantizer(2, widths="pooled"))
        own = fit_sharing({("key", 0): codec}, {("key", 0): moments})["key", 0]
        weights, widths = own["quantizer.weights"].double(), own["quantizer.widths"].long()
        losses.append(float((weights * torch.tensor(errors)[widths] * (widths > 0)).sum() / 2))
    assert losses == sorted(losses, reverse=True)
    assert losses[-2] == pytest.approx(losses[-1], rel=0.02)
    assert losses[0] > 1.2 * losses[-1]


def test_groups_of_keys_with_their_values() -> None:
    """Heads 0 and 1 are keys, 2 and 3 their values: a change of head 0 moves head 2 as well, and no other."""
    moments = moments_of_heads(4, 6, 7)
    stage = FisherTransform(heads_together=1, left_out=0, with_values=True)
    bound, _ = bound_to(stage, moments, 0.5)
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[0] += 1
    moved = [bound.inverse(*bound.forward(own)) for own in (x, other)]
    changed = (moved[0] - moved[1]).abs().amax((1, 2)) > 1e-4
    assert changed.tolist() == [True, False, True, False]
    y, side = bound.forward(x)
    for heads in (slice(0, 2), slice(1, 3), slice(2, 4)):
        torch.testing.assert_close(bound.inverse(y, side, heads), bound.inverse(y, side)[heads])


def test_forward_matrices_are_folded_into_the_weights() -> None:
    """Components of hidden states by W_K A and W_V A are those of keys before RoPE and values by A; not counted."""
    loaded = LoadedModel(llama(head_dim=32).double(), torch.device("cpu"))
    overrides = ["key.stages.transform.folded=true", "key.stages.transform.with_values=true"]
    method = kvq.build_method("waterfill_kv", bits=2, head_dim=32, overrides=[f"+{one}" for one in overrides])
    windows = token_ids(160, batch=2)
    found = calibrate(loaded, method, windows, CalibrationConfig(samples=2, length=160))
    forward = {name: table for name, table in found.tensors.items() if name.endswith("forward")}
    assert set(forward) == {f"key.{layer}.transform.folded_forward" for layer in range(2)}
    counted = sum(table.nbytes for table in found.tensors.values()) - sum(table.nbytes for table in forward.values())
    assert found.nbytes == counted
    bound = bind_tables(method, found, weights_name(loaded.model), found.head_dims)
    kept = collect_states(loaded, windows[:1], None, False, 0)
    hidden: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(loaded.model.model.layers):  # type: ignore[union-attr, arg-type]
        block.input_layernorm.register_forward_hook(lambda _, __, out, at=layer: hidden.update({at: out[0]}))
    with torch.no_grad():
        loaded.model(windows[:1])
    for layer, states in kept.items():
        codec = bound.bound["key"][layer]
        assert codec is not None
        transform = codec.stages[-1][1]
        assert states.rope is not None
        x = torch.cat([states.rope.rotate(states.key, back=True), states.value])
        attention = loaded.model.model.layers[layer].self_attn  # type: ignore[union-attr, index]
        weights = torch.cat([attention.k_proj.weight, attention.v_proj.weight]).detach()  # type: ignore[union-attr]
        order = transform._channel_order(len(weights), x.shape[0])
        matrix = transform.tables["folded_forward"][0].double()[:, transform.tables["order"][0].long()]
        folded = weights.mT[:, order] @ matrix
        expected = transform.forward(x)[0].transpose(0, 1).flatten(1)[:, : matrix.shape[1]]
        shift = transform.tables["mean"][0].double()[order] @ matrix
        torch.testing.assert_close(hidden[layer] @ folded - shift, expected, atol=1e-6, rtol=1e-6)


def test_moments_are_those_of_kept_states() -> None:
    """Against states and gradients that were kept, keys turned back; the first tokens of a window do not count."""
    loaded = LoadedModel(llama().double(), torch.device("cpu"))
    windows = token_ids(24, batch=2)
    kept = collect_states(loaded, windows, None, True, 0)
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
    with pytest.raises(DataError, match="the first 24 of them left out"):
        collect_joint(loaded, windows, left_out=24)


def test_moments_of_keys_with_values() -> None:
    """Those of each side are blocks of them; the blocks between are those of states and gradients that were kept."""
    loaded = LoadedModel(llama().double(), torch.device("cpu"))
    windows = token_ids(24, batch=2)
    kept, apart = collect_states(loaded, windows, None, True, 0), collect_joint(loaded, windows, left_out=0)
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
        ({"tables": "int9"}, "tables=int9: float32, float16, int2 to int8"),
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
