"""Multi-head latent attention cached in expanded form: keys and values of every head in the place of the latent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvq
from kvq.cache import KVCache
from kvq.config import compose, resolve
from kvq.config.diagnostics import MemoryConfig
from kvq.config.identity import canonical
from kvq.config.run import Mla
from kvq.config.tasks import Prefill
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.layers import kv_layers_of
from kvq.models.shapes import cache_shape
from kvq.results.presets import departures
from kvq.runs import Prepared
from kvq.tasks.measurement import storage_metrics
from kvq.tasks.memory import rows_of
from kvq.tasks.reader import Reader
from kvq.tasks.scoring import scoring_bounds
from tests.families import LATENT, family
from tests.random_models import in_double_precision, token_ids
from tests.tasks.diagnosed import DiagnosedInputs
from tests.tasks.test_scoring import chunked

EXPANDED = "cache.mla=expanded"


def expanded(name: str, *overrides: str) -> Method:
    return kvq.build_method(name, bits=2, head_dim=32, overrides=[EXPANDED, *overrides])


def kivi(policy: str = "sliding") -> Method:
    return expanded("kivi", "residual.size=8", f"residual.policy={policy}", "key.quantizer.group_size=4")


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", LATENT)
def test_expanded_keys_and_values_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full precision those of the plain forward; quantized, whole residuals and chunks of 7 as token by token."""
    loaded, tokens = in_double_precision(family(name, seed=3), monkeypatch), token_ids(43)
    with torch.no_grad():
        plain = torch.log_softmax(loaded.model(tokens, use_cache=False).logits, -1)[:, :-1]
    for chunk in (7, 42):
        got = chunked(loaded, expanded("fp16"), tokens, scoring_bounds(kivi(), 42, chunk))
        torch.testing.assert_close(got, plain, atol=1e-9, rtol=0)
    for policy in ("sliding", "block"):
        one = kivi(policy)
        single = chunked(loaded, one, tokens, scoring_bounds(one, 42, 1))
        for chunk in (None, 7):
            got = chunked(loaded, one, tokens, scoring_bounds(one, 42, chunk))
            assert (got - single).abs().max() < 1e-9, (policy, chunk)
        assert (single - plain).abs().max() > 0.1
    # A cache of the latent, and transformers' own, of the same model.
    latent = kvq.build_method("fp16")
    torch.testing.assert_close(chunked(loaded, latent, tokens, [(0, 42)]), plain, atol=1e-9, rtol=0)
    with torch.no_grad():
        own = loaded.model(tokens, past_key_values=DynamicCache(config=loaded.model.config)).logits
    torch.testing.assert_close(torch.log_softmax(own, -1)[:, :-1], plain, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", LATENT)
@torch.no_grad()
def test_bytes_count_against_what_is_held_and_against_the_latent(name: str, tmp_path: Path) -> None:
    """Of random models in 16 bits, and by `task=memory` from the configuration alone."""
    model, tokens = copy.deepcopy(family(name).model).bfloat16(), 40
    config = model.config.get_text_config()
    layers = kv_layers_of(config, Mla.expanded)
    model.config.save_pretrained(tmp_path)
    inputs = DiagnosedInputs(MemoryConfig(), path=str(tmp_path))
    shape = cache_shape(inputs.config.model, Mla.expanded)
    each = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    numbers = each / (config.kv_lora_rank + config.qk_rope_head_dim)
    for method in (expanded("fp16"), kivi("block")):
        cache = KVCache(model, method)
        model(input_ids=token_ids(tokens), past_key_values=cache)
        assert sum(row["total"] for row in rows_of(shape, method, tokens, measured=False)) == cache.nbytes
        stored = storage_metrics(cache, 1)
        assert stored["expanded_bits"] == pytest.approx(8 * cache.nbytes / (len(layers) * tokens * each))
        assert stored["effective_bits"] == pytest.approx(stored["expanded_bits"] * numbers)
        if method.key is None:
            assert cache.nbytes - cache.state_bytes == 2 * len(layers) * tokens * each
    plain = KVCache(model, kvq.build_method("fp16"))
    model(input_ids=token_ids(tokens), past_key_values=plain)
    assert "expanded_bits" not in storage_metrics(plain, 1)


def test_answers_together_and_forks_of_expanded_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, text = in_double_precision(family("deepseek_v3"), monkeypatch), token_ids(80)[0].tolist()
    reader = Reader(loaded, kivi(), Prefill.whole)
    prompts = [text[:30], text[20:57]]
    rows = reader.write(*reader.begin_together(prompts), 5, lambda row: False)
    for prompt, row in zip(prompts, rows, strict=True):
        cache, logits = reader.begin(reader.tensor([prompt]))
        fork = cache.fork()
        assert reader.write(cache, logits, 5, lambda row: False) == [row]
        assert reader.write(fork, logits, 5, lambda row: False) == [row]


def test_the_record_says_that_latents_were_expanded() -> None:
    def settings(*given: str) -> dict[str, Any]:
        return canonical(resolve(compose(["method=kivi", "bits=2", *given])), "m", "d")

    assert "latent" not in settings()
    assert settings(EXPANDED) == settings() | {"latent": "expanded"}
    assert settings(EXPANDED, "method=fp16")["latent"] == "expanded"
    assert departures(settings(EXPANDED), settings()) == ["expanded keys and values"]


@pytest.mark.parametrize(
    ("chosen", "why"),
    [("nsnquant", "undoes rotary embeddings"), ("h2o", "evicts tokens"), ("kvquant", "fits tables to states")],
)
def test_methods_that_go_by_what_is_not_there_are_refused(chosen: str, why: str) -> None:
    with pytest.raises(Unsupported, match=rf"^cache\.mla=expanded: .* of {chosen} {why}; .*; use cache\.mla=latent$"):
        expanded(chosen)


def test_models_and_uses_that_have_no_expanded_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"^cache\.mla=expanded: model: LlamaConfig caches no latent; use"):
        KVCache(family("llama").model, kivi())
    loaded = family("deepseek_v2")
    cache = KVCache(loaded.model, kivi())
    loaded.hidden_states(token_ids(20), cache)
    with pytest.raises(Unsupported, match="expanded from a latent; use"):
        cache.save(tmp_path / "cache")
    other = copy.deepcopy(loaded.model)
    attention = other.model.layers[0].self_attn
    attention.__dict__["expand_kv"] = None
    with pytest.raises(Unsupported, match=r"^cache\.mla=expanded: model: .*Attention has no step that expands the"):
        KVCache(other, kivi())


@pytest.mark.every_plugin
def test_formats_of_a_latent_are_refused_where_none_is_cached(tmp_path: Path) -> None:
    """vLLM's ds_mla formats: of no use to a plain llama, nor to keys and values that a latent expands to."""
    family("deepseek_v2").model.config.save_pretrained(tmp_path / "latent")
    family("llama").model.config.save_pretrained(tmp_path / "plain")

    def check(folder: str, *overrides: str) -> None:
        words = ["method=engine/vllm_fp8_ds_mla", "model=hf", f"model.path={tmp_path / folder}", *overrides]
        Prepared(resolve(compose(words))).check_latent()

    check("latent")
    check("plain", "task=memory")
    for folder, *overrides in (["plain"], ["latent", EXPANDED]):
        told = rf"^method=engine/vllm_fp8_ds_mla: a format of the latent .* model=.*{folder} "
        with pytest.raises(Unsupported, match=told):
            check(folder, *overrides)
