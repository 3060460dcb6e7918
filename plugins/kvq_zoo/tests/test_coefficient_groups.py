"""KVTC's groups: their errors, the program that chooses them, and what is made of a model's states."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import kvq
from kvq.calibration import fit
from kvq.calibration.collect import collect_states
from kvq.codecs import (
    Codec,
    ScalarQuantizer,
    TokenNorm,
    bind_codec,
)
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.load import LoadedModel
from kvq_zoo.coefficient_groups import KINDS, GroupErrors, Groups, group_bits, measure_errors, plan_groups
from kvq_zoo.kvtc import CoefficientQuantizer, PrincipalComponents, fit_groups, grouped_parts
from kvq_zoo.tests import kvtc_oracle as oracle
from tests.calibrated import build
from tests.random_models import llama, token_ids

SIZES = (1, 2, 3)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(n: int, seed: int) -> GroupErrors:
    """Errors of no quantizer at all."""
    draw = np.random.default_rng(seed)
    of = {(size, kind): draw.exponential(size / kind, n - size + 1) for size in SIZES for kind in KINDS}
    return GroupErrors(draw.exponential(1, n), of)


def total(errors: GroupErrors, groups: list[tuple[int, int]]) -> float:
    found, start = 0.0, 0
    for size, kind in groups:
        rest = errors.energies[start : start + size].sum()
        found, start = found + (errors.by_option[size, kind][start] if kind else rest), start + size
    return float(found + errors.energies[start:].sum())


def chosen(groups: Groups) -> list[tuple[int, int]]:
    return list(zip(groups.sizes, groups.kinds, strict=True))


@pytest.mark.parametrize("bits", [0, 33, 34, 74, 101, 150, 400])
def test_no_other_groups_of_two_layers_lose_less(bits: int) -> None:
    """Against all groups of three and four coefficients with all kinds."""
    layers = [drawn(3, 1), drawn(4, 2)]
    found = plan_groups(layers, bits)
    assert sum(groups.bits_per_token for groups in found) <= bits
    ways = [
        [(sum(map(oracle.cost, way)), total(own, way)) for way in oracle.every(len(own.energies), SIZES)]
        for own in layers
    ]
    least = min(a[1] + b[1] for a, b in itertools.product(*ways) if a[0] + b[0] <= bits)
    assert sum(total(own, chosen(groups)) for own, groups in zip(layers, found, strict=True)) == pytest.approx(least)


def test_errors_of_groups_are_those_of_loops() -> None:
    z = normal(7, 9) * torch.logspace(1, -2, 9)
    found = measure_errors(z, (1, 4, 16))
    assert found.energies == pytest.approx((z.numpy() ** 2).sum(0))
    assert set(found.by_option) == {(1, 2), (4, 2), (4, 4), (4, 8)}
    for group, errors in found.by_option.items():
        expected = [oracle.error(z.numpy(), start, group) for start in range(10 - group[0])]
        assert errors == pytest.approx(expected, rel=1e-9, abs=1e-18)


def test_what_is_stored_is_what_groups_cost() -> None:
    x = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(1, -1, 64)
    for bits in (0.5, 1, 2.25, 4):
        codec = build("kvtc", x, bits).value
        assert codec is not None
        assert isinstance(codec.quantizer, CoefficientQuantizer)
        groups, packed = codec.quantizer.groups(x), codec.encode(x[:, :, :50])
        codes = sum(size * kind for size, kind in chosen(groups))
        assert 8 * packed.nbytes == 50 * (8 * -(-codes // 8) + 32 * groups.stored_groups)
        assert (
            groups.bits_per_token
            == sum(group_bits(*group) for group in chosen(groups))
            == codes + 32 * groups.stored_groups
        )
        assert 0.95 * 128 * bits < groups.bits_per_token <= 128 * bits
        stage = codec.stages[-1][1]
        assert stage.tables["basis"].shape == (128, groups.coefficients)  # type: ignore[attr-defined]


def test_bits_too_few_for_a_group_leave_the_mean() -> None:
    x = torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(0)) + 3
    codec = build("kvtc", x, 0.5).value
    assert codec is not None
    packed = codec.encode(x)
    assert packed.nbytes == 0
    torch.testing.assert_close(codec.decode(packed), x.mean(2, keepdim=True).expand_as(x))


def test_components_are_those_of_singular_vectors() -> None:
    rows = normal(200, 12) @ normal(12, 12, seed=1) + 5
    tables = PrincipalComponents.fit_rows(rows)
    mean, basis = oracle.components(rows.numpy())
    np.testing.assert_allclose(tables["mean"][0], mean, rtol=1e-6)
    np.testing.assert_allclose(tables["basis"], basis, atol=1e-6)


def test_few_tokens_have_the_components_of_singular_vectors() -> None:
    """Of 9 tokens with 12 channels: 9, the last without variance; moments summed in pieces are those of one."""
    few, many = normal(9, 12) + 5, normal(200, 12) @ normal(12, 12, seed=1) + 5
    tables = PrincipalComponents.fit_rows(few)
    mean, basis = oracle.components(few.numpy())
    np.testing.assert_allclose(tables["mean"][0], mean, rtol=1e-6)
    assert tables["basis"].shape == (12, 9)
    np.testing.assert_allclose(tables["basis"][:, :8], basis[:, :8], atol=1e-6)
    whole = PrincipalComponents.fit_rows(many)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvq_zoo.kvtc._TOGETHER", 12 * 7)
        for name, table in PrincipalComponents.fit_rows(many).items():
            torch.testing.assert_close(table, whole[name], atol=1e-6, rtol=0)


def test_layers_of_a_side_share_bits_and_sides_do_not() -> None:
    codec = kvq.build_method("kvtc", bits="k2v1", head_dim=8).value
    own = kvq.build_method("kvtc/own_budget", bits=2, head_dim=8).value
    assert codec is not None
    assert own is not None
    rows = {("key", 0): normal(300, 64), ("key", 1): 30 * normal(300, 64, seed=1), ("value", 0): normal(300, 64)}
    rows = {place: x.float() for place, x in rows.items()}

    def costs(codec: Codec) -> dict[tuple[str, int], int]:
        tables = fit_groups(dict.fromkeys(rows, codec), lambda place: rows[place])
        names = ("quantizer.sizes", "quantizer.kinds")
        return {
            place: Groups(*(tuple(found[name].tolist()) for name in names)).bits_per_token
            for place, found in tables.items()
        }

    found = costs(codec)
    assert found["key", 0] < 64 < found["key", 1] <= 128 - found["key", 0]
    assert 32 < found["value", 0] <= 64
    assert set(costs(own).values()) == {costs(own)["key", 0]}


def test_a_model_is_calibrated_without_its_first_tokens() -> None:
    """The mean and components are those of its states before RoPE."""
    loaded = LoadedModel(llama().double(), torch.device("cpu"))
    windows = token_ids(24, batch=2)
    head_dim = loaded.model.config.head_dim
    method = kvq.build_method("kvtc", bits=4, head_dim=head_dim)
    settings = CalibrationConfig(samples=2, length=24)
    tables = fit.calibrate(loaded, method, windows, settings).tensors
    states = collect_states(loaded, windows, None, False, 0)
    seen = torch.arange(48).view(2, 24)[:, 4:].flatten()
    for layer, own in states.items():
        assert own.rope is not None
        for side, x in (("key", own.rope.rotate(own.key, back=True)), ("value", own.value)):
            rows = x.transpose(0, 1).flatten(1)[seen].numpy()
            name = f"{side}.{layer}.components"
            mean, basis = oracle.components(rows)
            np.testing.assert_allclose(tables[f"{name}.mean"][0], mean, atol=1e-6)
            used = tables[f"{name}.basis"].shape[1]
            np.testing.assert_allclose(tables[f"{name}.basis"][:, :1], basis[:, :1], atol=1e-5)
            assert used == max(int(tables[f"{side}.{layer}.quantizer.sizes"].sum()), 1)
    short = CalibrationConfig(samples=2, length=4)
    with pytest.raises(DataError, match="all of 4 tokens of a window are left out"):
        fit.calibrate(loaded, method, windows[:, :4], short)


def test_latents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(llama(), torch.device("cpu"))
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        monkeypatch.setattr(loaded.text_config, name, 16, raising=False)
    method = kvq.build_method("kvtc", bits=2, head_dim=loaded.model.config.head_dim)
    with pytest.raises(Unsupported, match="model: caches latents; bits are shared"):
        fit.calibrate(loaded, method, token_ids(8, batch=2), CalibrationConfig(samples=2, length=8))


def test_chains_that_share_no_bits_are_refused() -> None:
    stage, quantizer = PrincipalComponents(), CoefficientQuantizer(2)
    assert grouped_parts(None) is None
    assert grouped_parts(Codec({}, [], ScalarQuantizer(2))) is None
    for codec in (
        Codec({"norm": TokenNorm(), "pca": stage}, ["norm", "pca"], quantizer),
        Codec({"norm": TokenNorm(), "pca": stage}, ["pca", "norm"], quantizer),
        Codec({"pca": stage}, ["pca"], ScalarQuantizer(2)),
        Codec({}, [], quantizer),
    ):
        with pytest.raises(ConfigError, match="PrincipalComponents stand last of their stages"):
            grouped_parts(codec)
    bound = bind_codec(Codec({"pca": stage}, ["pca"], quantizer), None, 2, 8)
    with pytest.raises(Unsupported, match="calibrate first"):
        bound.encode(torch.zeros(1, 2, 3, 8))


def test_settings_out_of_range() -> None:
    for made, error, told in (
        (lambda: CoefficientQuantizer(0.4), Unsupported, "bits=0.4: .* takes 0.5 to 8"),
        (lambda: CoefficientQuantizer(9), Unsupported, "bits=9"),
        (lambda: CoefficientQuantizer(2, "all"), ConfigError, "budget=all: one of side, own"),
        (lambda: CoefficientQuantizer(2, sizes=()), ConfigError, r"sizes=\[\]"),
        (lambda: CoefficientQuantizer(2, sizes=(0, 16)), ConfigError, r"sizes=\[0, 16\]"),
        (lambda: CoefficientQuantizer(2, tokens=0), ConfigError, "tokens=0: at least 1"),
        (lambda: PrincipalComponents(-1), ConfigError, "left_out=-1: at least 0"),
        (lambda: PrincipalComponents(layers="each"), ConfigError, "layers=each: one of own, all"),
    ):
        with pytest.raises(error, match=told):
            made()


def test_ratios_are_bits() -> None:
    for name, bits in (("kvtc/8x", 2), ("kvtc/16x", 1), ("kvtc/32x", 0.5)):
        method = kvq.build_method(name, head_dim=64)
        assert method.key is not None
        assert method.key.quantizer.bits == 16 / int(name[5:-1]) == bits  # type: ignore[attr-defined]
        assert method.sink_tokens == 4
