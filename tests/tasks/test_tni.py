from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.models import state_statistics
from kvq import build_method
from kvq.config import compose, resolve
from kvq.config.diagnostics import DistributionConfig, TniConfig
from kvq.config.identity import canonical
from kvq.diagnostics import AttentionRule
from kvq.errors import ConfigError, Unsupported
from kvq.models.load import LoadedModel
from kvq.tasks import distribution, tni
from kvq.tasks.distribution import channel_kl, hadamard, nsn
from kvq.tasks.measurement import LayerStates, Measurement, capture
from kvq.tasks.tni import positions_of
from tests.random_models import llama
from tests.tasks.diagnosed import DiagnosedInputs, journal


class SinkInputs(DiagnosedInputs):
    """Every window begins with token 0, whose keys are tiny."""

    @property
    def ids(self) -> torch.Tensor:
        ids = super().ids.clamp_min(1)
        ids[::128] = 0
        return ids


def with_sink() -> LoadedModel:
    """Keys of layer 0 are the token's embedding; that of token 0 points away from what the keys read."""
    model = llama(layers=1, head_dim=32)
    read = model.model.layers[0].self_attn.k_proj.weight
    read[:, 24:] = 0
    model.model.embed_tokens.weight[0, :24] *= 0.01
    return LoadedModel(model, torch.device("cpu"))


def measured(folder: Path, name: str, inputs: DiagnosedInputs, **overrides: Any) -> Measurement:
    method = build_method(name, 2, 32, **overrides)
    tni.TASK.check(inputs, method)
    return tni.measure(inputs, method, None, journal(folder))


def test_an_implanted_sink_is_found(tmp_path: Path) -> None:
    found = measured(tmp_path, "oscar", SinkInputs(TniConfig(context=128, windows=3), with_sink()))
    (sink,) = [row for row in found.samples if row["kind"] == "sink" and row["side"] == "key"]
    assert (sink["position"], sink["stability"]) == (0, 1.0)
    assert sink["relative_norm"] < 0.1
    assert found.metrics["key_sinks"] == 1
    assert found.metrics["key_layers_with_low_first_token"] == 1
    assert found.metrics["key_median_over_min"] > 10
    (without,) = [row for row in found.samples if row["kind"] == "without" and row["side"] == "key"]
    assert without["positions"] == (0,)


def test_a_sink_is_told_by_head(tmp_path: Path) -> None:
    """Norms of position 0, the attention it receives and the low positions, per head, against the definitions."""
    inputs = SinkInputs(TniConfig(context=128, windows=3), with_sink())
    rows = [row for row in measured(tmp_path, "fp16", inputs).samples if row["kind"] == "layer"]
    keys, queries = ([row for row in rows if row["side"] == side] for side in ("key", "query"))
    assert [row["head"] for row in keys] == [0, 1]
    assert all(row["low"] == [0] and row["first_over_median"] < 0.1 for row in keys)
    assert all(row["first"] == pytest.approx(row["first_over_median"] * row["median"], rel=0.2) for row in keys)
    assert len(queries) == 4
    seen: list[torch.Tensor] = []
    for window in inputs.ids[:384].view(3, 128):
        model = inputs.model.model
        model.set_attn_implementation("eager")
        (weights,) = model(input_ids=window[None], output_attentions=True).attentions
        seen.append(weights[0, :, 1:, 0].mean(-1))
    expected = torch.stack(seen).mean(0)
    assert [row["first_attention"] for row in queries] == pytest.approx(expected.tolist(), rel=1e-4)
    assert [row["first_attention"] for row in keys] == pytest.approx(expected.view(2, 2).mean(1).tolist(), rel=1e-4)


def test_norms_are_those_of_captured_states(tmp_path: Path) -> None:
    inputs = DiagnosedInputs(TniConfig(context=128, windows=1))
    found = measured(tmp_path, "fp16", inputs)
    layer = inputs.model.model.model.layers[0]
    hidden = layer.input_layernorm(inputs.model.model.model.embed_tokens(inputs.ids[None, :128]))
    value = layer.self_attn.v_proj(hidden).unflatten(-1, (2, 32)).norm(dim=-1)[0]
    (row,) = [r for r in found.samples if (r["kind"], r["side"], r["layer"]) == ("positions", "value", 0)]
    assert torch.allclose(torch.tensor(row["norms"]), value[row["positions"]], rtol=1e-4)
    cv = value.std(0, correction=0) / value.mean(0)
    assert found.metrics["value_cv_layer0"] == pytest.approx(float(cv.mean()), rel=1e-4)
    assert not [r for r in found.samples if r["kind"] in ("range", "group", "without")]


def test_ranges_bounds_and_errors_of_a_method(tmp_path: Path) -> None:
    found = measured(tmp_path, "oscar", DiagnosedInputs(TniConfig(context=128, windows=2)))
    stages = {(r["side"], r["stage"]) for r in found.samples if r["kind"] == "range"}
    assert stages == {("key", "input"), ("key", "hadamard"), ("key", "norm"), ("value", "input"), ("value", "hadamard")}
    groups = [r for r in found.samples if r["kind"] == "group"]
    assert len(groups) == 2 * 2 * 4  # sides, layers, groups of 32 tokens
    assert all(r["error"] < r["bound"] for r in groups if r["side"] == "key")
    assert not [r for r in groups if r["side"] == "value" and "bound" in r]  # values share no scale between tokens
    assert {r["side"] for r in found.samples if r["kind"] == "without"} == {"key"}
    assert set(found.units) == set(found.metrics)


@pytest.mark.parametrize("method", ["nsn", "nsnquant", "turboquant", "fp8", "kivi_had"])
def test_every_kind_of_codec_is_followed(tmp_path: Path, method: str) -> None:
    found = measured(tmp_path, method, DiagnosedInputs(TniConfig(context=128, windows=1)))
    assert [row for row in found.samples if row["kind"] == "group"]


def test_positions_kept() -> None:
    kept = positions_of(2048, 64)
    assert kept[:16] == list(range(16))
    assert kept[-1] == 2047
    assert len(kept) < 80
    assert positions_of(4, 64) == [0, 1, 2, 3]


def test_a_rotation_spreads_an_outlier_channel_over_all() -> None:
    """One channel of ±1, the others 0: a kurtosis of d, which the rotation makes 1, that of ±1/√d."""
    x = torch.zeros(1, 2, 64, 16)
    x[..., 3] = torch.randint(0, 2, (1, 2, 64), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    assert state_statistics.kurtosis(x) == pytest.approx(16)
    assert state_statistics.kurtosis(state_statistics.rotated(x)) == pytest.approx(1)
    assert state_statistics.outlier(state_statistics.rotated(x)) == pytest.approx(1)


def test_noise_of_logits_is_the_same_wherever_an_outlier_is_until_it_is_rotated() -> None:
    """A channel of keys times 16 that queries read a 16th of: the same logits, the same noise of the grid."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 64, 16, generator=generator), torch.randn(1, 2, 64, 16, generator=generator)
    scales = torch.ones(16)
    scales[3] = 16
    plain, outlier = (
        LayerStates(0, 1, query / by, key * by, key, AttentionRule(0.25), None) for by in (torch.ones(16), scales)
    )
    noise, _ = state_statistics.logit_noise(plain, rotate=False, norms=False)
    same, alignment = state_statistics.logit_noise(outlier, rotate=False, norms=False)
    more, rotated_alignment = state_statistics.logit_noise(outlier, rotate=True, norms=False)
    assert same == pytest.approx(noise, rel=1e-5)
    assert alignment < 0.2
    assert rotated_alignment == pytest.approx(1, abs=0.2)
    assert more > 5 * noise


class NamedInputs(SinkInputs):
    """Token 7 is a comma, the others are numbers."""

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids: " ," if ids == [7] else str(ids[0]))


def test_attention_by_what_tokens_are(tmp_path: Path) -> None:
    """Shares of what queries give to earlier tokens, by token, against transformers' own weights."""
    inputs = NamedInputs(TniConfig(context=128, windows=3, by_token=4), with_sink())
    found = measured(tmp_path, "nsnquant/channel_scale", inputs, overrides=["residual.size=64"])
    rows = [row for row in found.samples if row["kind"] == "token"]
    assert [row["head"] for row in rows] == [head for head in range(4) for _ in range(4)]
    total = torch.zeros(4, 1000, dtype=torch.float64)
    model = inputs.model.model
    model.set_attn_implementation("eager")
    for window in inputs.ids[:384].view(3, 128):
        (weights,) = model(input_ids=window[None], output_attentions=True).attentions
        given = weights[0].double().tril(-1).sum(1)
        names = torch.cat([torch.tensor([999]), window[1:]])
        total.index_add_(1, names, given)
    shares = total / total.sum(1, keepdim=True)
    for row in rows:
        assert row["share"] == pytest.approx(float(shares[row["head"], row["token"]]), rel=1e-4)
        assert row["text"] == ("first" if row["token"] < 0 else " ," if row["token"] == 7 else str(row["token"]))
    for head in range(4):
        best = [row["share"] for row in rows if row["head"] == head]
        assert best == pytest.approx(shares[head].topk(4).values.tolist(), rel=1e-4)
    others = [row["share"] for row in rows if row["token"] >= 0]
    assert found.metrics["largest_token_share"] == max(others)
    assert found.metrics["heads_of_one_token"] == sum(share > 0.9 for share in others)
    (coded,) = [row for row in found.samples if row["kind"] == "range" and row["side"] == "key"][-1:]
    assert found.metrics["key_coded_norm_layer0"] == coded["norm"]
    assert found.metrics["key_coded_first_norm_layer0"] == coded["first_norm"]
    plain = measured(tmp_path, "fp16", SinkInputs(TniConfig(context=128, windows=1), with_sink()))
    assert not any("token_share" in name for name in plain.metrics)


def config(**changes: object) -> DistributionConfig:
    known = {"context": 128, "windows": 1, "signs": 2, "codebooks": ["finetuned"], "vectors": 5}
    return DistributionConfig(**(known | changes))  # type: ignore[arg-type]


def test_table_one_of_captured_values(tmp_path: Path) -> None:
    inputs = DiagnosedInputs(config())
    found = distribution.measure(inputs, build_method("fp16"), None, journal(tmp_path))
    layers: list[LayerStates] = []
    capture(inputs.model, inputs.ids[:128], layers.append)
    kl = [channel_kl(hadamard(nsn(layer.value, "NSN"))[0, head]).mean() for layer in layers for head in range(2)]
    assert found.metrics["kl_value_NSN_hadamard"] == pytest.approx(float(torch.stack(kl).mean()))
    assert len([row for row in found.samples if row["kind"] == "kl"]) == 2 * 2 * 2 * 3 * 2
    lemma = [row for row in found.samples if row["kind"] == "lemma"]
    assert all(row["variance_min"] <= 1 <= row["variance_max"] for row in lemma)
    vectors = [row["values"] for row in found.samples if row["kind"] == "vector" and row["side"] == "value"]
    assert vectors[0] == pytest.approx(layers[0].value[0, 0, 0].tolist(), rel=1e-3)
    assert len(vectors) == 5
    assert set(found.units) == set(found.metrics)


def test_ranges_of_channels_are_kept_where_asked(tmp_path: Path) -> None:
    """Of the first layer; their ends are the range of the head. Nothing else changes, nor the key without them."""
    plain = distribution.measure(DiagnosedInputs(config()), build_method("fp16"), None, journal(tmp_path))
    asked = DiagnosedInputs(config(channel_ranges=True))
    found = distribution.measure(asked, build_method("fp16"), None, journal(tmp_path))
    ranges = [row for row in found.samples if row["kind"] == "ranges"]
    assert [(row["side"], row["layer"], row["head"]) for row in ranges] == [
        (side, 0, head) for side in ("key", "value") for head in range(2)
    ]
    heads = {(row["side"], row["layer"], row["head"]): row for row in found.samples if row["kind"] == "lemma"}
    for row in ranges:
        head = heads[row["side"], row["layer"], row["head"]]
        assert len(row["lowest"]) == len(row["highest"]) == 32
        assert min(row["lowest"]) == pytest.approx(head["covariance_min"], rel=1e-3)
        assert max(row["highest"]) == pytest.approx(head["covariance_max"], rel=1e-3)
    assert [row for row in found.samples if row["kind"] != "ranges"] == plain.samples
    assert found.metrics == plain.metrics
    settings = [["task=distribution"], ["task=distribution", "task.channel_ranges=true"]]
    tasks = [canonical(resolve(compose(words)), "", "")["task"] for words in settings]
    assert "channel_ranges" not in tasks[0]
    assert tasks[1]["channel_ranges"] is True


def test_keys_go_through_nsn_before_rope(tmp_path: Path) -> None:
    inputs = DiagnosedInputs(config())
    found = distribution.measure(inputs, build_method("fp16"), None, journal(tmp_path))
    layers: list[LayerStates] = []
    capture(inputs.model, inputs.ids[:128], layers.append)
    kl = []
    for layer in layers:
        assert layer.rope is not None
        turns = layer.rope.blocks(128, 1)
        bare = turns.rotate(layer.key[:, None], back=True)[:, 0]
        y = turns.rotate(nsn(bare, "NS")[:, None])[:, 0]
        kl += [channel_kl(y[0, head]).mean() for head in range(2)]
    assert found.metrics["kl_key_NS"] == pytest.approx(float(torch.stack(kl).mean()), rel=1e-3)


def test_what_it_cannot_look_at(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="before any method; method=fp16"):
        distribution.check(DiagnosedInputs(config()), build_method("nsn", 2, 32))
    with pytest.raises(ConfigError, match="Did you mean 'kmeans'"):
        distribution.check(DiagnosedInputs(config(codebooks=["kmean"])), build_method("fp16"))
    with pytest.raises(ConfigError, match=r"task\.vector_layer=7"):
        distribution.measure(DiagnosedInputs(config(vector_layer=7)), build_method("fp16"), None, journal(tmp_path))


def test_vectors_are_kept_of_the_windows_asked_for(tmp_path: Path) -> None:
    """Equally many of each, with the window beside the position; of one window as before, with the key as before."""
    inputs = DiagnosedInputs(config(windows=2, vector_windows=2))
    found = distribution.measure(inputs, build_method("fp16"), None, journal(tmp_path))
    kept = [row for row in found.samples if row["kind"] == "vector" and row["side"] == "key"]
    assert [(row["window"], row["position"]) for row in kept] == [(0, 0), (0, 127), (1, 0), (1, 63), (1, 127)]
    layers: list[LayerStates] = []
    capture(inputs.model, inputs.ids[128:256], layers.append)
    last = [row for row in found.samples if row["kind"] == "vector" and row["side"] == "value"][-1]
    assert last["values"] == pytest.approx(layers[0].value[0, 0, 127].tolist(), rel=1e-3)
    words = ["task=distribution", "task.windows=2"]
    tasks = [canonical(resolve(compose(each)), "", "")["task"] for each in (words, [*words, "task.vector_windows=2"])]
    assert "vector_windows" not in tasks[0]
    assert tasks[1]["vector_windows"] == 2
    with pytest.raises(ConfigError, match=r"task\.vector_windows=3"):
        config(windows=2, vector_windows=3)
