"""What layers other than plain attention cache: states of fixed size, windows, latents, beside sink logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import kvq
from kvq.cache import KVCache
from kvq.cache.contents import reads_in_parts
from kvq.errors import Unsupported
from kvq.models.layers import KvLayer, head_dims_of, kv_layers_of, state_layers_of
from kvq.models.load import onednn_linear
from kvq.tasks.measurement import storage_metrics
from tests.families import LATENT, WINDOW, WINDOWED, family
from tests.random_models import in_double_precision, token_ids

SIDES = ("residual.key", "residual.value")


def kivi(*overrides: str, side: str = "residual"):
    policies = [f"{side}.policy=sliding"] if side == "residual" else ["residual.policy=block", f"{side}.policy=sliding"]
    given = ["residual.size=8", *policies, "key.quantizer.group_size=4", *overrides]
    return kvq.build_method("kivi", bits=2, head_dim=32, overrides=given)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_forks_go_their_own_ways(name: str) -> None:
    """Bit for bit as a cache of their own; also of states that models write into."""
    loaded, tokens = family(name), token_ids(40)
    one = kivi()

    def logits(cache: KVCache, start: int, end: int) -> torch.Tensor:
        return loaded.logits(loaded.hidden_states(tokens[:, start:end], cache))

    first, alone = KVCache(loaded.model, one), KVCache(loaded.model, one)
    for cache in (first, alone):
        logits(cache, 0, 30)
    fork = first.fork()
    for at in (36, 37, 38):  # the fork reads other tokens first
        logits(fork, at, at + 1)
    for at in (30, 31, 32):
        assert torch.equal(logits(first, at, at + 1), logits(alone, at, at + 1))
    assert first.nbytes == alone.nbytes


@torch.no_grad()
def test_states_are_counted_under_their_own_name() -> None:
    loaded = family("qwen3_next")
    cache = KVCache(loaded.model, kvq.build_method("fp16"))
    loaded.hidden_states(token_ids(40), cache)
    # One layer: 4 heads of 16x16, and a convolution over 4 tokens of 2 * 2 * 16 + 4 * 16 channels.
    state = 4 * (4 * 16 * 16 + 128 * 4)
    assert cache.state_bytes == state
    assert cache.nbytes == 4 * 2 * 40 * 2 * 32 + state
    stored = storage_metrics(cache, 1)
    assert stored["state_bytes"] == state
    assert stored["effective_bits"] == pytest.approx(32 + stored["state_bits"])
    assert "state_bytes" not in storage_metrics(KVCache(family("llama").model, kvq.build_method("fp16")), 1)


def test_states_take_no_token_back() -> None:
    loaded = family("qwen3_next")
    cache = KVCache(loaded.model, kivi())
    loaded.hidden_states(token_ids(10), cache)
    with pytest.raises(Unsupported, match="keeps a state of fixed size, from which tokens cannot be taken back"):
        cache.crop(-1)
    cache.crop(0)
    assert not cache.is_croppable
    with pytest.raises(Unsupported, match="keeps a state of fixed size"):
        cache.activate_past_recording()


@torch.no_grad()
def test_a_model_that_begins_anew_with_every_part_is_refused_in_parts() -> None:
    """transformers' Mamba 1 starts from nothing wherever it reads several tokens."""
    loaded, tokens = family("jamba"), token_ids(30)
    assert not reads_in_parts(loaded.model)
    assert reads_in_parts(family("bamba").model)
    cache = KVCache(loaded.model, kvq.build_method("fp16"))
    loaded.hidden_states(tokens[:, :29], cache)
    got = loaded.logits(loaded.hidden_states(tokens[:, 29:], cache))
    torch.testing.assert_close(got, loaded.model(tokens, use_cache=False).logits[:, -1:], atol=1e-3, rtol=0)
    with pytest.raises(Unsupported, match="JambaForCausalLM begins anew with every part of several tokens"):
        loaded.hidden_states(tokens[:, :2], cache)


REFUSED = {
    "recurrent_gemma": ("RecurrentGemmaConfig", {}, "keeps its recurrent states in its modules"),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 12}, "no keys and values, only states of fixed size"),
    "deepseek_v32": ("DeepseekV32Config", {}, "has layers of indexed_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_cache_of_keys_and_values_can_hold_is_refused(name: str) -> None:
    kind, sizes, reason = REFUSED[name]
    config = getattr(transformers, kind)(hidden_size=48, num_hidden_layers=4, **sizes)
    with pytest.raises(Unsupported, match=reason) as caught:
        head_dims_of(config)
    assert "\n" not in str(caught.value)


def test_a_family_with_a_cache_of_its_own_is_refused() -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 61}
    config = transformers.MiniMaxConfig(**sizes, num_hidden_layers=2, intermediate_size=32, num_local_experts=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(Unsupported, match="MiniMaxForCausalLM takes a cache of its own"):
        KVCache(model, kvq.build_method("fp16"))


@pytest.mark.parametrize("name", LATENT)
@torch.no_grad()
def test_the_latent_is_cached_and_bits_are_counted_against_it(name: str) -> None:
    """Key side: one head of the latent; value side: the rotated part of the keys."""
    loaded = family(name)
    layers = kv_layers_of(loaded.text_config)
    assert {(layer.head_dim, layer.value_dim) for layer in layers} == {(32, 16)}
    cache = KVCache(loaded.model, kvq.build_method("fp16"))
    loaded.hidden_states(token_ids(20), cache)
    assert cache.nbytes - cache.state_bytes == 4 * len(layers) * 20 * (32 + 16)
    assert cache.side_bits() == 32


@torch.no_grad()
def test_expanded_keys_are_not_taken_for_the_latent() -> None:
    """The configuration says what a layer caches; a family that caches something else is refused."""
    loaded = family("deepseek_v3")
    cache = KVCache(loaded.model, kvq.build_method("fp16"))
    wide = torch.zeros(1, 4, 3, 32 + 16)
    with pytest.raises(Unsupported, match="layer 0 caches keys of 48 channels per head; its configuration says 32"):
        cache._update(wide, wide, 0)


@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_a_window_layer_holds_no_more_than_its_window(name: str) -> None:
    """And part of a block; nothing but the window where nothing is encoded."""
    loaded, tokens = family(name), token_ids(58)
    windowed = [layer.window == WINDOW for layer in kv_layers_of(loaded.text_config)]
    assert any(windowed)
    block = kvq.build_method("kivi", bits=2, head_dim=32, overrides=["residual.size=8", "residual.policy=block"])
    for one, most in ((kvq.build_method("fp16"), WINDOW - 1), (block, WINDOW - 1 + 7)):
        cache = KVCache(loaded.model, one)
        loaded.hidden_states(tokens[:, :40], cache)
        for at in range(40, 58):
            loaded.hidden_states(tokens[:, at : at + 1], cache)
            held = [layer.key.tokens for layer in cache.kv_layers]
            assert all(count <= most if small else count == at + 1 for count, small in zip(held, windowed, strict=True))
        assert cache.get_seq_length() == 58


@pytest.mark.parametrize("policy", ["block", "sliding"])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma4"])
@torch.no_grad()
def test_what_a_window_drops_no_query_reads(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a cache that keeps the whole past behind the model's mask."""
    loaded, tokens = in_double_precision(family(name), monkeypatch), token_ids(70)
    one = kvq.build_method("kivi", bits=2, head_dim=32, overrides=["residual.size=8", f"residual.policy={policy}"])
    cache, whole = KVCache(loaded.model, one), KVCache(loaded.model, one)
    for layer in whole.kv_layers:
        layer.window = None
    whole._windows = [None] * len(whole._windows)
    for start, end in [(0, 45), *((at, at + 1) for at in range(45, 70))]:
        got, expected = (loaded.hidden_states(tokens[:, start:end], given) for given in (cache, whole))
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    assert cache.nbytes < whole.nbytes


@torch.no_grad()
def test_crops_of_a_window() -> None:
    """Tokens whose arrival pushed others out of the window stay, unless the update was recorded."""
    loaded, tokens = family("mistral"), token_ids(60)
    one = kvq.build_method("fp16")
    cache, short = KVCache(loaded.model, one), KVCache(loaded.model, one)
    loaded.hidden_states(tokens[:, :50], cache)
    with pytest.raises(Unsupported, match="cannot remove 2 tokens, others left the window of 24 then"):
        cache.crop(-2)
    loaded.hidden_states(tokens[:, :10], short)
    short.crop(-3)
    assert short.get_seq_length() == 7
    long = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = loaded.model.generate(tokens, **long)
    for given in (one, kvq.build_method("identity", bits=3, head_dim=32, overrides=["residual.size=8"])):
        held = KVCache(loaded.model, given)
        got = loaded.model.generate(tokens, past_key_values=held, prompt_lookup_num_tokens=3, **long)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "name",
    ["gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "kimi_linear", "lfm2", "falcon_h1", "zamba2", "nemotron_h"],
)
@torch.no_grad()
def test_caches_with_windows_latents_or_states_are_saved(name: str, tmp_path: Path) -> None:
    loaded, tokens = family(name), token_ids(60)
    one = kivi()
    cache = KVCache(loaded.model, one)
    loaded.hidden_states(tokens[:, :50], cache)
    cache.save(tmp_path / "cache")
    again = KVCache.load(tmp_path / "cache", loaded.model, one)
    for at in range(50, 60):
        got, expected = (loaded.hidden_states(tokens[:, at : at + 1], given) for given in (again, cache))
        assert torch.equal(got, expected)
    assert (again.nbytes, again.state_bytes) == (cache.nbytes, cache.state_bytes)
    KVCache(loaded.model, one).save(tmp_path / "empty")
    empty = KVCache.load(tmp_path / "empty", loaded.model, one)
    got, expected = (loaded.hidden_states(tokens, given) for given in (empty, KVCache(loaded.model, one)))
    assert torch.equal(got, expected)


def test_packed_attention_with_sink_logits_is_refused() -> None:
    loaded, tokens = family("gpt_oss", head_dim=128), token_ids(41)
    one = kvq.build_method("nsn", bits=2, head_dim=128, overrides=["residual.size=8"])
    cache = KVCache(loaded.model, one, attention="packed")
    loaded.hidden_states(tokens[:, :40], cache)
    with pytest.raises(Unsupported, match=r"GptOssAttention attends with s_aux.*cache\.attention=dense"):
        loaded.hidden_states(tokens[:, 40:], cache)


def test_layers_of_configurations() -> None:
    config = family("falcon_h1").text_config
    assert kv_layers_of(config) == [KvLayer(0, 32, 32, None), KvLayer(1, 32, 32, None)]
    assert state_layers_of(config) == [0, 1]
    assert [layer.window for layer in kv_layers_of(family("gpt_oss").text_config)] == [WINDOW, None]
    assert state_layers_of(family("llama").text_config) == []


def test_linear_layers_by_onednn_equal_torchs() -> None:
    """To the rounding of float32; a layer that is to have a gradient, or other numbers, is torch's own."""
    layer, states = torch.nn.Linear(96, 40), torch.randn(2, 7, 96)
    plain, torchs = torch.nn.Linear.forward, layer(states)
    with onednn_linear():
        with torch.no_grad():
            torch.testing.assert_close(layer(states), torchs)
            torch.testing.assert_close(layer(states[:, :1]), torchs[:, :1])
            doubled = layer.double()(states.double())
        layer.float()(states).sum().backward()
    assert doubled.dtype is torch.float64
    assert layer.weight.grad is not None
    assert torch.nn.Linear.forward is plain
