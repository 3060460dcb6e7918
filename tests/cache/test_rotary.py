"""Rotary embeddings undone and redone: in every style, with scaling, across forks, crops and resets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, Glm4Config, GptOssConfig, LlamaConfig, PretrainedConfig

import kvq
from kvq.cache import KVCache
from kvq.cache.rotary import STYLES, RopeTable, Style, styles_of
from kvq.codecs.stages import Rope
from kvq.errors import Unsupported
from tests.random_models import llama, token_ids

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
SIZES |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **THETA}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, **THETA}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 4.0}
LONG |= {"original_max_position_embeddings": 128, **THETA}
HALF, EVEN, GLM, PLAIN = STYLES[:4]
KINDS: dict[str, tuple[Any, dict[str, Any], Style]] = {
    "llama": (LlamaConfig, {}, HALF),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}, HALF),
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3}, HALF),
    "longrope": (LlamaConfig, {"rope_parameters": LONG}, HALF),
    "linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **THETA}}, HALF),
    "dynamic": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}}, HALF),
    "cohere": (CohereConfig, {}, EVEN),
    "glm4": (Glm4Config, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}}, GLM),
    "gpt_oss": (
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", **THETA}},
        PLAIN,
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    kind, more, _ = KINDS[name]
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or name != "cohere"}
    config: PretrainedConfig = kind(**{**sizes, **more, **({"hidden_size": 128} if name == "cohere" else {})})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)


def method(name: str = "nsnquant", size: int = 8, *overrides: str, dim: int = 32) -> kvq.methods.method.Method:
    return kvq.build_method(name, bits=2, head_dim=dim, overrides=[f"residual.size={size}", *overrides])


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_turned_back_keys_are_those_of_the_projection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-6 of the largest, at positions the probe has not seen; a factor on attention stays in the keys."""
    model = built(name)
    assert styles_of(model) == [(KINDS[name][2], 0)] * 2
    cache = KVCache(model, method())
    attention = model.model.layers[0].self_attn
    projected, cached = [], []
    attention.k_proj.register_forward_hook(lambda _m, _i, out: projected.append(out))
    append = cache.layers[0].key.append
    monkeypatch.setattr(cache.layers[0].key, "append", lambda x, *more: cached.append(x) or append(x, *more))
    for start, end in ((0, 40), (40, 41), (41, 97)):
        model(token_ids(97)[:, start:end], past_key_values=cache)
    keys, before = torch.cat(cached, 2), torch.cat(projected, 1).unflatten(-1, (-1, 32)).transpose(1, 2)
    rope = cache.layers[0].key.rope.rope
    one = Rope(rope.cos[:, None], rope.sin[:, None], rope.interleaved)
    factor = getattr(model.model.rotary_emb, "attention_scaling", 1.0)
    assert (factor != 1) == (name in ("yarn", "longrope"))
    back = one.rotate(keys, back=True)
    turned = 2 * rope.cos.shape[-1]
    before = torch.cat([before[..., :turned] * factor, before[..., turned:]], -1)
    scale = float(keys.abs().max())
    assert float((back - before).abs().max()) < 1e-6 * scale
    assert float((one.rotate(back) - keys).abs().max()) < 1e-6 * scale
    assert float((keys - before).abs().max()) > 0.1 * scale


def test_keys_turned_in_an_unknown_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as far as the tables say; and by something that hands over no tables."""
    model = llama(head_dim=32)
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.apply_rotary_pos_emb

    def twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return plain(*plain(q, k, cos, sin, **more), cos, sin, **more)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", twice)
    with pytest.raises(Unsupported, match="LlamaAttention turns its keys in a way that kvq does not know") as caught:
        KVCache(model, method())
    assert "\n" not in str(caught.value)
    KVCache(model, method("kivi"))  # undoes nothing
    assert method("waterfill").key.uses_rope  # which is what refuses it, once it is calibrated


def test_sequences_at_different_positions_are_refused() -> None:
    model = llama(head_dim=32)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    with pytest.raises(Unsupported, match="position_ids: a method that undoes RoPE needs the same"):
        model(token_ids(4, batch=2), position_ids=positions, past_key_values=KVCache(model, method()))
    same = positions[:1].expand(2, -1)
    model(token_ids(4, batch=2), position_ids=same, past_key_values=KVCache(model, method()))


def feed(model: Any, cache: KVCache, tokens: Tensor, bounds: list[int]) -> Tensor:
    return [model(tokens[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(bounds)][-1]


@pytest.mark.parametrize("policy", ["block", "sliding"])
def test_a_decoded_copy_forks_crops_and_resets(policy: str) -> None:
    """Every way to hold the same tokens reads the same."""
    model, tokens = llama(head_dim=32), token_ids(60, batch=2)
    chosen = method("nsnquant", 8, f"residual.policy={policy}")
    expected = feed(model, KVCache(model, chosen), tokens, [0, 30, 37, 38, 50, 60])
    kept = KVCache(model, chosen, keep_decoded=True)
    assert torch.equal(feed(model, kept, tokens, [0, 30, 37, 38, 50, 60]), expected)
    base = KVCache(model, chosen)
    feed(model, base, tokens, [0, 30, 37])
    fork = base.fork()
    feed(model, base, token_ids(20, batch=2, seed=5), [0, 3, 20])
    assert torch.equal(feed(model, fork, tokens, [37, 38, 50, 60]), expected)
    fork.reset()
    assert torch.equal(feed(model, fork, tokens, [0, 30, 37, 38, 50, 60]), expected)
    short = KVCache(model, chosen)
    feed(model, short, tokens, [0, 30, 37])
    feed(model, short, token_ids(40, batch=2, seed=6), [37, 39])
    short.crop(-2)
    torch.testing.assert_close(feed(model, short, tokens, [37, 38, 50, 60]), expected, atol=2e-3, rtol=0)
    order = torch.tensor([1, 0])
    swapped = KVCache(model, chosen)
    feed(model, swapped, tokens, [0, 30, 37])
    swapped.reorder_cache(order)
    torch.testing.assert_close(
        feed(model, swapped, tokens[order], [37, 38, 50, 60]), expected[order], atol=1e-4, rtol=0
    )


def test_rotations_of_a_forward_that_broke_off_are_forgotten() -> None:
    table = RopeTable(None)
    for tokens in (40, 9):
        table.extend(0, tokens, None, torch.zeros(1))
    assert table.tokens == 9
