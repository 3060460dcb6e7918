from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvq import KVCache, build_method
from kvq.cache.side import CacheSide
from kvq.codecs.stages import Rope
from kvq.config.diagnostics import MemoryConfig
from kvq.errors import ConfigError, Unsupported
from kvq.models.inputs import LayerKind, cache_shape, load_shapes
from kvq.tasks import memory
from kvq.tasks.memory import rows_of, side_parts
from tests.families import family
from tests.properties import mostly_quick
from tests.random_models import random_llama, token_ids
from tests.tasks.diagnosed import DiagnosedInputs, journal

LLAMA = "meta-llama/Llama-3.1-8B"
METHODS = ("nsn", "kivi", "oscar", "oscar/token_scope", "nsnquant", "turboquant/outliers", "turboquant_plus", "rtn")
METHODS += ("fp8", "engine/llamacpp_q4_0", "engine/vllm_turboquant_3bit_nc", "engine/vllm_fp8_per_token_head")


class _Turns:
    """A table of rotations that turns nothing, as long as asked."""

    tokens = 10**9

    def __init__(self, tokens: int) -> None:
        none = torch.zeros(1, tokens, 0)
        self.rope = Rope(none, none)

    def after(self, tokens: int) -> Rope:
        assert not tokens
        return self.rope


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tokens", [100, 300, 517])
def test_bytes_are_those_of_the_cache(name: str, tokens: int) -> None:
    """To the byte, measured and from the layout alike, at three lengths."""
    method = build_method(name, 2, 64)
    for side in ("key", "value"):
        codec, residual = getattr(method, side), getattr(method.residual, side)
        cache = CacheSide(codec, residual, side)
        cache.rope = _Turns(tokens)  # type: ignore[assignment]
        cache.append(torch.randn(1, 2, tokens, 64, generator=torch.Generator().manual_seed(0)).half())
        for measured in (True, False):
            parts = side_parts(codec, residual, tokens, 2, 64, measured)
            assert parts.pop("residual", 0) == cache.residual_bytes
            assert sum(parts.values()) == cache.packed_bytes


def test_published_ratios(tmp_path: Path) -> None:
    """nsn: 5.09x at 2,048 tokens and 3 bits, 3.141 bits; OScaR at 2 bits and 4,096 tokens: 3.06 and 3.47 bits."""
    task = MemoryConfig(lengths=[2048, 4096], measured=0)
    inputs = DiagnosedInputs(task, path=LLAMA)
    nsn = memory.measure(inputs, build_method("nsn", 3, 128), None, journal(tmp_path)).metrics
    assert nsn["compression_2048"] == pytest.approx(5.09, abs=5e-3)
    assert nsn["bits_without_residual_2048"] == pytest.approx(3 + 16 / 128 + 32 / 2048)
    oscar = memory.measure(inputs, build_method("oscar", 2, 128), None, journal(tmp_path)).metrics
    assert oscar["bits_without_residual_4096"] == 3.0625
    plain = memory.measure(inputs, build_method("fp16"), None, journal(tmp_path)).metrics
    assert plain["compression_2048"] == 1
    assert plain["total_bytes_2048"] == 2 * 32 * 8 * 128 * 2048 * 2
    one_side = 8 * 128 * 2048 * 2
    assert plain["peak_bytes_2048"] - plain["total_bytes_2048"] == one_side
    assert nsn["peak_bytes_2048"] - nsn["total_bytes_2048"] == 3 * one_side


def test_shapes_of_models_without_weights(tmp_path: Path) -> None:
    inputs = DiagnosedInputs(MemoryConfig(lengths=[131072]), path=LLAMA)
    memory.check(inputs, build_method("nsn", 3, 128))
    assert memory.TASK.fingerprint(inputs) == "shape 32x8x128"
    with pytest.raises(ConfigError, match=r"task\.lengths=\[200000\]: model=random takes at most 131072 tokens"):
        memory.check(DiagnosedInputs(MemoryConfig(lengths=[200000]), path=LLAMA), build_method("nsn", 3, 128))
    random_llama().model.save_pretrained(tmp_path)
    shape = cache_shape(DiagnosedInputs(MemoryConfig(), path=str(tmp_path)).config.model)
    assert (shape.layers, shape.context, shape.head_dims) == ((LayerKind(2, 2, 32),), 512, [32])


def test_shipped_shapes_are_those_of_configured_models() -> None:
    from kvq.config import conf_dir
    from kvq.config.choices import choices_in

    files = [choice.read() for choice in choices_in(conf_dir()) if choice.group == "model"]
    contexts = {file["path"]: file["context"] for file in files if "path" in file}
    assert set(load_shapes()) <= set(contexts)
    assert {path: shape["context"] for path, shape in load_shapes().items()} == {p: contexts[p] for p in load_shapes()}


WINDOWS = ["mistral", "gemma2", "gemma4", "gpt_oss"]
LATENTS = ["deepseek_v2", "deepseek_v3", "minicpm3"]
STATES = ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2", "falcon_h1", "bamba", "granitemoehybrid"]
STATES += ["zamba2", "nemotron_h", "jamba"]


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [*WINDOWS, *LATENTS, *mostly_quick(STATES, "kimi_linear")])  # ten times as slow
@torch.no_grad()
def test_bytes_of_windows_latents_and_states_are_those_of_the_cache(name: str, tmp_path: Path) -> None:
    """Of random models in 16 bits, to the byte, from their configuration alone; windows of 24 tokens behind 75."""
    model, tokens = copy.deepcopy(family(name).model).bfloat16(), 75
    model.config.save_pretrained(tmp_path)
    shape = cache_shape(DiagnosedInputs(MemoryConfig(), path=str(tmp_path)).config.model)
    assert bool(shape.state_bytes) == (name in STATES)
    size, sliding = "residual.size=8", "residual.policy=sliding"
    methods = {("fp16", ()), ("nsn", (size,)), ("kivi", (size,)), ("turboquant", ())}
    for chosen, overrides in methods | {("turboquant", (size, sliding))}:
        method = build_method(chosen, bits=2, head_dim=32, overrides=list(overrides))
        cache = KVCache(model, method)
        model(input_ids=token_ids(tokens), past_key_values=cache)
        for measured in (True, False):
            rows = rows_of(shape, method, tokens, measured)
            assert sum(row["total"] for row in rows) == cache.nbytes, (chosen, overrides)
            assert sum(row["total"] for row in rows if row["side"] == "state") == cache.state_bytes
        if chosen == "fp16":
            assert sum(row["fp16"] for row in rows) == cache.nbytes


SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
WINDOWED = ["full_attention", "sliding_attention"] * 2
UNUSUAL: dict[str, dict[str, Any]] = {
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "falcon/grouped": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon/plain": {"multi_query": False, "new_decoder_architecture": False},
    "gpt_bigcode": {"multi_query": True},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "swa_num_key_value_heads": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": WINDOWED,
        "sliding_window": 64,
    },
}


@pytest.mark.parametrize("name", UNUSUAL)
@torch.no_grad()
def test_bytes_follow_what_the_models_class_caches(name: str, tmp_path: Path) -> None:
    """Of configurations whose KV heads and channels have names of their own, to the byte."""
    config = AutoConfig.for_model(name.partition("/")[0], **SMALL, **UNUSUAL[name])
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    config.save_pretrained(tmp_path)
    plain = DynamicCache(config=config)
    model(input_ids=token_ids(50), past_key_values=plain)
    held = sum(part.nbytes for layer in plain.layers for part in (layer.keys, layer.values))
    shape = cache_shape(DiagnosedInputs(MemoryConfig(), path=str(tmp_path)).config.model)
    assert sum(row["total"] for row in rows_of(shape, build_method("fp16"), 50, False)) == held


def test_a_hybrid_has_its_states_in_the_record_and_unknown_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family("qwen3_next").model.config.save_pretrained(tmp_path)
    inputs = DiagnosedInputs(MemoryConfig(lengths=[64]), path=str(tmp_path))
    method = build_method("fp16")
    memory.check(inputs, method)
    found = memory.measure(inputs, method, None, journal(tmp_path)).metrics
    assert memory.TASK.fingerprint(inputs) == "shape 1x2x32, 5120 bytes of states"
    assert (found["state_bytes_64"], found["compression_64"]) == (5120, 1)
    assert found["total_bytes_64"] == 5120 + 2 * 2 * 64 * 32 * 2
    monkeypatch.setattr("kvq.models.inputs.held_layers", lambda text: None)
    with pytest.raises(Unsupported, match="does not run without weights, so that its states have no size"):
        cache_shape(inputs.config.model)
