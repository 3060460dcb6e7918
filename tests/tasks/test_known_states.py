"""Errors on drawn states and on a model's: the figures of kvquant-plus-plus through the tasks, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvq import build_method
from kvq.config.diagnostics import Drawn, ModelStatesConfig, RandomStatesConfig
from kvq.diagnostics import relative_mse, weighted_mse
from kvq.errors import ConfigError, Unsupported
from kvq.tasks.known_states import TASKS, draw_states, draw_walk, generator_of, mean_attention
from kvq.tasks.measurement import LayerStates, Measurement, capture
from tests.tasks.diagnosed import DiagnosedInputs, journal

PLUS = "kvquant_plus_plus"


def inputs_of(task: Any, bits: int = 2) -> DiagnosedInputs:
    inputs = DiagnosedInputs(task)
    inputs.config.bits = bits
    return inputs


def on_drawn(folder: Path, name: str, bits: int = 2, **settings: Any) -> Measurement:
    task = RandomStatesConfig(**settings)
    inputs, method = inputs_of(task, bits), build_method(name, bits, task.head_dim)
    TASKS["random_states"].check(inputs, method)
    found = TASKS["random_states"].measure(inputs, method, None, journal(folder))
    assert found.units.keys() == found.metrics.keys()
    assert len(found.samples) == found.metrics["places"]
    return found


def test_the_noise_floor_of_a_low_rank(tmp_path: Path) -> None:
    for name, share in (("low_rank", 0.16), ("low_rank_8", 0.30)):
        found = on_drawn(tmp_path, f"{PLUS}/{name}", 2, tokens=128, draws=4, against="turboquant/hadamard").metrics
        reductions = [found[f"key_mse_reduction{kind}"] for kind in ("_least", "", "_most")]
        print(f"{name} at T=128: {reductions[1]:.1%} less ({reductions[0]:.1%} to {reductions[2]:.1%})")
        assert reductions[1] == pytest.approx(share, abs=0.02)
        assert reductions == sorted(reductions)
        rank = 8 if name.endswith("8") else 4
        assert found["correction_share"] == rank * (128 + 64) / (128 * 64)


def test_product_quantization_held_out(tmp_path: Path) -> None:
    """Codebooks are of tokens drawn apart; their bytes count over all tokens of the sequence."""
    codes = on_drawn(tmp_path, f"{PLUS}/product", tokens=256, draws=1).metrics
    scalar = on_drawn(tmp_path, "turboquant/hadamard", tokens=256, draws=1).metrics
    print(f"product {codes['key_rel_mse']:.4f}, scalar {scalar['key_rel_mse']:.4f}")
    assert 0.100 < codes["key_rel_mse"] < 0.124
    assert scalar["key_rel_mse"] == pytest.approx(0.1145, abs=0.003)
    assert codes["bits_per_element"] == pytest.approx(2 + 16 * 256 * 64 / (2 * (2048 + 256) * 64))


def test_ranking_and_held_out_queries(tmp_path: Path) -> None:
    found = on_drawn(
        tmp_path, f"{PLUS}/attention_mse", 3, head_dim=128, tokens=1024, draws=4, against="turboquant"
    ).metrics
    ranking, other = (found[f"key_{name}_error_reduction"] for name in ("ranking", "held_out"))
    print(f"ranking query {ranking:.0%} less, held-out query {-other:.0%} more")
    assert 0.5 < ranking < 0.75
    assert other < -0.5


def test_anchors_at_a_jump(tmp_path: Path) -> None:
    sets: dict[str, Any] = {"states": "drifting", "tokens": 30, "jumps": [15], "drift": 0.03, "draws": 3}
    sets |= {"against": f"{PLUS}/delta", "against_bits": 3}
    sets["states"] = Drawn(sets["states"])
    regular = on_drawn(tmp_path, f"{PLUS}/delta_every", 3, **sets).metrics
    adaptive = on_drawn(tmp_path, f"{PLUS}/delta_threshold_low", 3, **sets).metrics
    print(f"anchors by a threshold: {adaptive['key_mse_reduction']:.1%} less")
    assert regular["key_mse_reduction"] == 0
    assert 0.97 < adaptive["key_mse_reduction"] < 0.995


def test_calibrated_channels_are_fitted_to_tokens_drawn_apart(tmp_path: Path) -> None:
    sets: dict[str, Any] = {"states": Drawn.drifting, "tokens": 50, "draws": 2, "fit_tokens": 200}
    found = on_drawn(tmp_path, f"{PLUS}/delta_outliers", 3, **sets, against=f"{PLUS}/delta_prod").metrics
    print(f"2.5 bits with outlier channels: MSE of values {found['value_mse']:.6f}, keys {found['key_mse']:.6f}")
    assert found["value_mse_reduction"] > 0.3
    assert found["key_mse_reduction"] < 0
    outliers = on_drawn(tmp_path, f"{PLUS}/outliers", 2, draws=1, tokens=128, fit_tokens=200).metrics
    assert outliers["key_bits"] == 1.5 + 2 * 16 / 64


def test_errors_by_hand_and_draws_of_their_own(tmp_path: Path) -> None:
    """Each number of a draw from the draw itself; nothing shares a generator."""
    task = RandomStatesConfig(tokens=64, draws=2, queries=3)
    found = on_drawn(tmp_path, "rtn", 2, tokens=64, draws=2, queries=3)
    codec = build_method("rtn", 2, 64).key
    assert codec is not None
    for draw, row in enumerate(found.samples):
        known = draw_states(task, draw)
        rest = codec.decode(codec.encode(known.key)) - known.key
        assert row["key_mse"] == pytest.approx(float(rest.square().mean()))
        assert row["key_rel_mse"] == pytest.approx(float(relative_mse(known.key, known.key + rest).mean()))
        products = [(rest[0, head] @ q).square() for head in range(2) for q in known.queries[0, head]]
        assert row["key_ip_error"] == pytest.approx(float(torch.stack(products).mean()), rel=1e-5)
        for name in ("ranking", "held_out"):
            error = weighted_mse(known.key, known.key + rest, getattr(known, name)).mean()
            assert row[f"key_{name}_error"] == pytest.approx(float(error))
            assert float(getattr(known, name).sum()) == pytest.approx(2)
    first = torch.randn(64, generator=torch.Generator().manual_seed(0))
    drawn_ones = [part for draw in range(2) for part in (draw_states(task, draw).key, draw_states(task, draw).value)]
    firsts = [part[0, 0, 0] for part in drawn_ones] + [first]
    assert len({tuple(row.tolist()) for row in firsts}) == 5
    again = draw_states(RandomStatesConfig(tokens=64, seed=1), 0)
    assert not torch.equal(again.key, draw_states(RandomStatesConfig(tokens=64), 0).key)


def test_drawn_states() -> None:
    shape = (2, 40, 64)
    sphere = draw_walk(Drawn.sphere, shape, generator_of(0, 0))
    torch.testing.assert_close(sphere.norm(dim=-1), torch.ones(1, 2, 40))
    steps = draw_walk(Drawn.gaussian, shape, generator_of(0, 0))
    found = draw_walk(Drawn.drifting, shape, generator_of(0, 0), 0.15, [20])
    torch.testing.assert_close(found[:, :, [0, 20]], steps[:, :, [0, 20]])
    for token in (*range(1, 20), *range(21, 40)):
        torch.testing.assert_close(found[:, :, token] - found[:, :, token - 1], 0.15 * steps[:, :, token])
    share = (found[:, :, 1] - found[:, :, 0]).norm() / found[:, :, 0].norm()
    assert float(share) == pytest.approx(0.15, rel=0.25)


def test_a_block_of_a_models_states(tmp_path: Path) -> None:
    """Layer by layer from captured states, with the weights of the block's last query and of those behind it."""
    task = ModelStatesConfig(context=96, windows=1, held_out=16, against="turboquant/prod_keys", bos=False)
    inputs = inputs_of(task, 3)
    method = build_method(f"{PLUS}/attention", 3, 32)
    TASKS["model_states"].check(inputs, method)
    found = TASKS["model_states"].measure(inputs, method, None, journal(tmp_path))
    layers: list[LayerStates] = []
    capture(inputs.model, inputs.ids[:96], layers.append)
    assert [row["place"] for row in found.samples] == [0, 1]
    plain = build_method("turboquant/prod_keys", 3, 32).key
    assert method.key is not None
    assert plain is not None
    for layer, row in zip(layers, found.samples, strict=True):
        key, query = layer.key[:, :, :80], layer.query.unflatten(1, (2, -1))
        ranking = mean_attention(query[:, :, :, 79], key)
        later = mean_attention(query[:, :, :, 80:].flatten(2, 3), key)
        with method.key.planned(method.key.quantizer.salient(ranking)):  # type: ignore[attr-defined]
            ours = method.key.decode(method.key.encode(key))
        theirs = plain.decode(plain.encode(key))
        for name, weights in (("ranking", ranking), ("held_out", later)):
            own, beside = (float(weighted_mse(key, x, weights).mean()) for x in (ours, theirs))
            assert row[f"key_{name}_error"] == pytest.approx(own, rel=1e-4)
            assert row[f"key_{name}_error_reduction"] == pytest.approx(1 - own / beside, rel=1e-3, abs=1e-4)
    alone = ModelStatesConfig(context=96, windows=1, held_out=16, layers=[1], bos=False)
    part = TASKS["model_states"].measure(inputs_of(alone), method, None, journal(tmp_path))
    assert [row["key_mse"] for row in part.samples] == pytest.approx([found.samples[1]["key_mse"]])
    missing = ModelStatesConfig(context=96, windows=1, held_out=16, layers=[1, 5], bos=False)
    with pytest.raises(ConfigError, match=r"task.layers=\[1, 5\]: model=random has no layer 5; 0 to 1$"):
        TASKS["model_states"].measure(inputs_of(missing), method, None, journal(tmp_path))
    full = TASKS["model_states"].measure(inputs_of(task), build_method("fp16"), None, journal(tmp_path))
    assert full.metrics == {"places": 0.0}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("h2o/kivi", {}, "task=random_states: eviction of h2o/kivi evicts tokens; needs codecs"),
        ("kvquant", {}, "a codec of kvquant undoes rotary embeddings; needs states that do not depend"),
        ("spinquant", {}, "value of spinquant: 'rotation' needs a model's loss"),
        ("oscar_covariance", {}, "key of oscar_covariance: 'rotation' needs a model's queries"),
        ("rtn", {"against": f"{PLUS}/outliers"}, f"task.against={PLUS}/outliers: .* not calibrated"),
        (f"{PLUS}/product", {"head_dim": 30}, "head_dim=30"),
    ],
)
def test_what_random_states_refuses(name: str, settings: dict[str, Any], said: str) -> None:
    task = RandomStatesConfig(**settings)
    with pytest.raises(Unsupported, match=said):
        TASKS["random_states"].check(inputs_of(task), build_method(name, 2, 128))


def test_drawn_states_have_no_layers() -> None:
    method = build_method("rtn", 2, 128, overrides=["bits_by_layer.key=[2,3]"])
    with pytest.raises(Unsupported, match=r"^task=random_states: bits_by_layer of rtn gives layers"):
        TASKS["random_states"].check(inputs_of(RandomStatesConfig()), method)


def test_what_model_states_refuses() -> None:
    inputs = inputs_of(ModelStatesConfig(context=96, windows=1, held_out=16, bos=False))
    with pytest.raises(Unsupported, match="kvquant_plus_plus/product fits tables to the first tokens"):
        TASKS["model_states"].check(inputs, build_method(f"{PLUS}/product", head_dim=32))
    with pytest.raises(Unsupported, match="full_precision_layers of turboquant_plus keeps layers"):
        TASKS["model_states"].check(inputs, build_method("turboquant_plus", 3, 32))


def test_the_other_method_is_in_the_name_of_what_is_measured() -> None:
    """Its settings and versions are, so that a change of its preset or code makes another run."""
    names = {
        TASKS["random_states"].fingerprint(inputs_of(RandomStatesConfig(against=against, against_bits=bits)))
        for against, bits in ((None, None), ("rtn", None), ("rtn", 2), ("rtn", 3), ("kivi", 2))
    }
    assert len(names) == 4
    assert "drawn states" in names
