"""Scoring a continuation: what is quantized, what is not, and the canaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.cli import main
from kvq.config import PplConfig, Scoring, Windows
from kvq.config.method import Policy
from kvq.config.tasks import Prefill
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.results import Store
from kvq.tasks.ppl import ppl_windows, run_ppl
from kvq.tasks.reader import Reader, check_prefill
from kvq.tasks.scoring import ReferenceLogProbs, holding_method, parallel_method, score_continuation, scoring_bounds
from tests.random_models import in_double_precision, random_llama, save_random_model, token_ids
from tests.tasks.test_scoring import token_by_token

TASK = PplConfig(windows=Windows.disjoint, scoring=Scoring.continuation, prompt=40, context=64, batch_size=2)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    return in_double_precision(random_llama(), monkeypatch)


def scored(loaded: LoadedModel, method: Method, tokens: Tensor) -> tuple[Tensor, KVCache]:
    method = parallel_method(method)
    cache = KVCache(loaded.model, holding_method(method))
    chunks = list(score_continuation(loaded, cache, method.residual, tokens, 40))
    assert torch.equal(torch.cat([chunk.targets for chunk in chunks], 1), tokens[:, 40:])
    return torch.log_softmax(torch.cat([chunk.logits for chunk in chunks], 1), -1), cache


@torch.no_grad()
@pytest.mark.parametrize("name", ["kivi", "nsn", "rtn"])
def test_it_is_the_protocol_step_by_step(loaded: LoadedModel, name: str) -> None:
    method = build_method(name, bits=2, head_dim=32, overrides=["residual.size=16"])
    tokens = token_ids(64, batch=2)
    found, cache = scored(loaded, method, tokens)
    # By transformers alone: a full-precision prefill of all but the last prompt token, its states through the codecs...
    from transformers import DynamicCache

    plain = DynamicCache()
    loaded.model(input_ids=tokens[:, :39], past_key_values=plain)
    at_once = parallel_method(method)
    for layer in plain.layers:
        for kind in ("key", "value"):
            codec, side = getattr(at_once, kind), getattr(at_once.residual, kind)
            block = None if side.prefill_block == "whole" else side.size
            states = getattr(layer, f"{kind}s")
            setattr(layer, f"{kind}s", codec.decode(codec.encode(states, block)))
    # ...then one token at a time, in full precision.
    rows = [loaded.model(input_ids=tokens[:, at : at + 1], past_key_values=plain).logits for at in range(39, 63)]
    expected = torch.log_softmax(torch.cat(rows, 1), -1)
    assert (found - expected).abs().max() < 1e-6
    for layer in cache.layers:
        for side in (layer.key, layer.value):
            assert (side.packed_tokens, side.residual_tokens) == (39, 24)


def test_identity_is_full_precision_and_zero_is_not(loaded: LoadedModel) -> None:
    tokens = token_ids(64)
    full, _ = scored(loaded, build_method("fp16", head_dim=32), tokens)
    identity, _ = scored(loaded, build_method("identity", head_dim=32), tokens)
    zero, _ = scored(loaded, build_method("zero", head_dim=32), tokens)
    assert torch.equal(full, identity)
    # The first scored token already reads the quantized cache.
    assert (full[:, 0] - zero[:, 0]).abs().max() > 0.1
    assert (full - zero).abs().amax(-1).min() > 1e-3
    with torch.no_grad():
        plain = torch.log_softmax(loaded.model(input_ids=tokens).logits, -1)[:, 39:-1]
    assert (full - plain).abs().max() < 1e-6


def test_perplexity_counts_the_continuation_alone(loaded: LoadedModel) -> None:
    windows = ppl_windows([token_ids(64 * 3 + 10)[0]], TASK)
    assert [(len(window.tokens), window.targets) for window in windows] == [(64, 24)] * 3
    reference = ReferenceLogProbs(windows, 61, torch.float64)
    run_ppl(loaded, build_method("fp16", head_dim=32), windows, TASK, reference, fill=True)
    method = build_method("kivi", bits=2, head_dim=32, overrides=["residual.size=16"])
    result = run_ppl(loaded, method, windows, TASK, reference)
    assert result.metrics()["scored_tokens"] == 72
    assert result.metrics()["kl_mean"] > 1e-3
    none = ReferenceLogProbs(windows, 61, torch.float64, budget=0)
    assert run_ppl(loaded, method, windows, TASK, none).metrics()["kl_mean"] == pytest.approx(
        result.metrics()["kl_mean"], rel=1e-6
    )
    assert all(side.policy is Policy.block for side in vars(holding_method(method).residual).values())


def test_the_preset_and_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{number} and {number * number}." for number in range(300)), encoding="utf-8")
    model = save_random_model(tmp_path / "model")
    given = ["model=hf", f"model.path={model}", "model.dtype=float32", "dataset=text", f"dataset.path={text}"]
    given += [f"results_dir={tmp_path / 'r'}", "method=kivi", "bits=2", "task=ppl/kvquant_plus_plus"]
    assert main([*given, "task.max_windows=4"]) == 0
    (run,) = [record for record in Store(tmp_path / "r").scan()[0] if record.method == "kivi"]
    assert run.metrics["scored_tokens"] == 4 * 64
    assert run.metrics["delta_nll"] != 0
    assert run.config["residual"]["key"]["policy"] == "none"
    for change, says in (
        ("task.prompt=null", "task.prompt=null: 2 to task.context - 1 (191)"),
        ("task.prompt=192", "task.prompt=192"),
        ("task.windows=sliding", "cuts disjoint windows"),
        ("task.scoring=parallel", "belongs to task.scoring=continuation"),
    ):
        capsys.readouterr()
        assert main([*given, change]) != 0
        assert says in capsys.readouterr().err


def method(name, *overrides):
    window = ["eviction.window=4"] if name.startswith("snapkv") else []
    given = ["eviction.budget=12", "eviction.least=9", *window, *overrides]
    return build_method(name, bits=4, head_dim=32, overrides=given)


def ppl(context, **settings):
    return PplConfig(windows=Windows.disjoint, context=context, batch_size=1, **settings)


@pytest.mark.parametrize("name", ["h2o", "streamingllm"])
def test_generation_is_token_by_token(name, monkeypatch):
    loaded = in_double_precision(random_llama(), monkeypatch)
    tokens, task = token_ids(40), ppl(40)
    assert scoring_bounds(method(name), 3) == [(0, 1), (1, 2), (2, 3)]
    logs = token_by_token(loaded, method(name), tokens)
    expected = -logs[0].gather(-1, tokens[0, 1:, None]).sum()
    result = run_ppl(loaded, method(name), ppl_windows([tokens[0]], task), task)
    assert result.scores[0].nll == pytest.approx(float(expected), abs=1e-9)
    assert result.storage["effective_bits"] == 64 * 12 / 39
    full = run_ppl(loaded, method(name, "eviction.budget=64"), ppl_windows([tokens[0]], task), task)
    assert abs(full.nll - result.nll) > 1e-4


@pytest.mark.parametrize("name", ["snapkv", "h2o/prompt", "streamingllm/kivi"])
def test_behind_a_prompt(name):
    with pytest.raises(Unsupported, match="evicts tokens; needs tokens one by one"):
        scoring_bounds(method(name), 30)
    with pytest.raises(Unsupported, match=r"task\.prefill=chunked"):
        check_prefill(method(name), Prefill.chunked)
    loaded, tokens = random_llama(), token_ids(60)
    task = ppl(60, scoring=Scoring.continuation, prompt=41)
    result = run_ppl(loaded, method(name), ppl_windows([tokens[0]], task), task)
    assert result.scores[0].tokens == 19
    kept = 12 + 19 if "/kivi" not in name else None
    assert kept is None or result.storage["effective_bits"] == pytest.approx(32 * kept / 59)


@pytest.mark.every_plugin
def test_a_prompt_is_read_at_once_and_its_last_token_behind_it():
    reader = Reader(random_llama(), method("snapkv"), Prefill.whole)
    cache, logits = reader.begin(token_ids(40))
    assert (cache.get_seq_length(), cache.layers[0].key.tokens) == (40, 13)
    rows = reader.write(cache, logits, 5, lambda row: False)
    assert (len(rows[0]), cache.get_seq_length()) == (5, 44)


@pytest.mark.every_plugin
def test_chunked_reading_under_h2o_is_token_by_token():
    loaded, tokens = random_llama(), token_ids(30)
    cache, logits = Reader(loaded, method("h2o"), Prefill.chunked).begin(tokens)
    expected = token_by_token(loaded, method("h2o"), torch.cat([tokens, tokens[:, :1]], 1))[:, -1]
    torch.testing.assert_close(torch.log_softmax(logits, -1), expected)
    assert cache.layers[0].key.tokens == 12
