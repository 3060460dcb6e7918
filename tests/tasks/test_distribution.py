from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvq import build_method
from kvq.config import compose, resolve
from kvq.config.diagnostics import DistributionConfig
from kvq.config.identity import canonical
from kvq.errors import ConfigError, Unsupported
from kvq.tasks import distribution
from kvq.tasks.capture import LayerStates, capture
from kvq.tasks.distribution import channel_kl, hadamard, nsn
from tests.tasks.diagnosed import DiagnosedInputs, journal


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
