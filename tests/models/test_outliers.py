"""Outliers are implanted without changing what the model computes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvq.cache import KVCache
from kvq.config import OutliersConfig, compose, resolve
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel, load_model
from kvq.models.weights import implant_outliers

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 32, 3
TOKENS = torch.randint(0, 41, (2, 19), generator=torch.Generator().manual_seed(0))


def small(kv_heads=KV_HEADS):
    return {
        "vocab_size": 41,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": DIM,
        "initializer_range": 0.15,
    }


def llama(kv_heads=KV_HEADS, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**small(kv_heads), attention_bias=bias)).eval().to(dtype)
    if bias:
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                torch.nn.init.normal_(getattr(layer.self_attn, name).bias)
    return model


@torch.no_grad()
def run(model):
    """Logits, and the cached keys and values of each layer."""
    cache = DynamicCache(config=model.config)
    return model(TOKENS, past_key_values=cache).logits, [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_logits_stay(kv_heads, bias):
    model = llama(kv_heads, bias)
    before, _ = run(model)
    implant_outliers(model, OutliersConfig(key_scale=8.0, value_scale=4.0, key_pairs=3, value_channels=3))
    after, _ = run(model)
    assert float((after - before).abs().max()) <= 1e-4 * float(before.abs().max())


@pytest.mark.parametrize("scale", [0.25, 2.0, 64.0])
def test_logits_stay_exactly_in_double_precision(scale):
    """Powers of two: no weight is rounded, sums are of the same numbers."""
    model = llama(dtype=torch.float64)
    before, _ = run(model)
    implant_outliers(model, OutliersConfig(scale, scale, key_pairs=2, value_channels=2))
    torch.testing.assert_close(run(model)[0], before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_cached_keys_and_values_have_the_outliers(bias):
    """In every layer and KV head: two RoPE pairs of keys by 8 and two channels of values by 4, all others as before."""
    model = llama(bias=bias, dtype=torch.float64)
    _, before = run(model)
    implant_outliers(model, OutliersConfig(key_pairs=2, value_channels=2))
    _, after = run(model)
    chosen = set()
    for (k0, v0), (k1, v1) in zip(before, after, strict=True):
        for head in range(KV_HEADS):
            for old, new, scale, count in ((k0, k1, 8, 4), (v0, v1, 4, 2)):
                ratio = (new[:, head] / old[:, head]).flatten(0, 1)
                scaled = (ratio - scale).abs().max(0).values < 1e-6
                plain = (ratio - 1).abs().max(0).values < 1e-6
                assert int(scaled.sum()) == count
                assert bool((scaled | plain).all())
                channels = scaled.nonzero().flatten().tolist()
                if scale == 8:
                    assert {(channel + DIM // 2) % DIM for channel in channels} == set(channels)
                chosen.add(tuple(channels))
    assert len(chosen) > LAYERS  # not the same channels everywhere


def test_seeds_choose_channels_and_leave_the_global_state_alone():
    def weights(seed):
        model = llama()
        before = torch.random.get_rng_state()
        implant_outliers(model, OutliersConfig(key_pairs=2, value_channels=2, seed=seed))
        assert torch.equal(before, torch.random.get_rng_state())
        return model.model.layers[0].self_attn.k_proj.weight.detach()

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_models_that_it_would_change_are_refused_untouched():
    """A norm behind the projection undoes the scaling of keys, not of queries; fused projections are not understood."""
    others = [
        Qwen3ForCausalLM(Qwen3Config(**small())),
        GPT2LMHeadModel(GPT2Config(vocab_size=41, n_embd=48, n_layer=1, n_head=2)),
    ]
    for model in others:
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(Unsupported, match=r"model\.outliers: ") as caught:
            implant_outliers(model, OutliersConfig(key_pairs=2, value_channels=2))
        assert "\n" not in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def loaded(name: str) -> LoadedModel:
    return load_model(resolve(compose([f"model={name}"])).model, "cpu")


@torch.no_grad()
def test_outliers_change_the_cache_and_not_the_logits() -> None:
    plain, outliers = loaded("tiny"), loaded("tiny_outliers")
    tokens = torch.randint(0, 4096, (1, 256), generator=torch.Generator().manual_seed(0))
    logits, spread = [], []
    for each in (plain, outliers):
        cache = KVCache(each.model, build_method("fp16"))
        logits.append(each.logits(each.hidden_states(tokens, cache)))
        keys, values = cache.layers[0].key, cache.layers[0].value
        spread.append([float(s.append(torch.zeros(1, 2, 0, 128)).abs().amax((0, 1, 2)).max()) for s in (keys, values)])
    relative = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert relative < 1e-4
    assert spread[1][0] > 2 * spread[0][0]
    assert spread[1][1] > 1.5 * spread[0][1]


def test_it_has_the_papers_head_dim() -> None:
    config = loaded("tiny").text_config
    assert config.head_dim == 128
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
