"""MLX-LM on models in memory: its logits in full precision, and its cache against the presets'."""

import pytest
import torch
from transformers import DynamicCache

from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.build import build_method
from kvq_engines import mlx
from kvq_engines.agreement import engine_attention
from kvq_engines.mlx import Mlx
from kvq_engines.tests import installed
from kvq_engines.tests.test_llamacpp import TOKENS, in_torch, kl, log_probs, model_of

pytestmark = installed.mlx


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(120, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("phi", {"partial_rotary_factor": 0.25}),
        ("glm4", {"pad_token_id": 0}),
        ("gemma2", {"tie_word_embeddings": True}),
    ],
)
def test_full_precision_is_pytorchs(family, given, tokens):
    model = model_of(family, **given)
    with Mlx(model, TOKENS) as engine:
        assert kl(in_torch(model, tokens), log_probs(engine, tokens)) < 1e-8
        assert engine.side_bits("key") == 32
        assert engine.state_bytes == 2 * 2 * model.config.num_key_value_heads * 64 * 4 * TOKENS
        assert "mlx 0." in engine.build


def test_layers_with_windows_are_read_and_not_quantized(tokens):
    kinds = ["sliding_attention", "full_attention"]
    model = model_of("gemma3_text", layer_types=kinds, sliding_window=TOKENS // 3, query_pre_attn_scalar=64)
    with Mlx(model, TOKENS) as engine:
        assert kl(in_torch(model, tokens), log_probs(engine, tokens)) < 1e-8
    with Mlx(model, TOKENS, 8) as engine, pytest.raises(Unsupported, match="layer with a window"):
        log_probs(engine, tokens)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 64), (4, 32), (2, 64), (3, 32)])
def test_a_preset_loses_what_the_engine_loses(bits, group, tokens):
    """Scale and offset have the dtype of the states in MLX, here fp32; that of the presets is fp16."""
    model = model_of()
    name = "engine/mlx" if group == 64 else f"engine/mlx_g{group}"
    method = build_method(name, bits, head_dim=64)
    with Mlx(model, TOKENS, bits, group) as engine:
        found = log_probs(engine, tokens)
        assert engine.side_bits("value") == bits + 64 / group
        held = engine.cached(2, 2, 64)
    own = kl(in_torch(model, tokens), found)
    assert kl(found, in_torch(model, tokens, method)) < max(own / 10, 1e-6)
    with engine_attention(model, None, held):
        assert kl(found, in_torch(model, tokens)) < 1e-8


@pytest.mark.parametrize("bits", [None, 4])
def test_a_cache_that_is_filled_goes_on_as_one_that_has_read(bits, tokens):
    model, half = model_of(), TOKENS // 2
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[None, :half], past_key_values=past)
    with Mlx(model, TOKENS, bits, 64) as engine:
        read = list(engine.logits(tokens[:half]))
        first, whole = engine.cached(2, 2, 64)[0], torch.cat([*read, *engine.read(tokens[half:])])
        size = engine.state_bytes
        engine.fill([(layer.keys, layer.values) for layer in past.layers])
        # The first layer's; of the second, a prompt that is read has gone through the quantized cache of the first.
        for found, expected in zip(engine.cached(2, 2, 64)[0], first, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        again = torch.cat(list(engine.read(tokens[half:])))
        assert engine.state_bytes == size
        if bits is None:
            torch.testing.assert_close(again, whole[half:], atol=1e-3, rtol=0)


def test_a_cache_that_it_cannot_hold(tokens):
    with (
        pytest.raises(Unsupported, match=r"6 bits in groups of 64: .*broadcast") as raised,
        Mlx(model_of(head_dim=128), TOKENS, 6, 64) as engine,
    ):
        log_probs(engine, tokens)
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match=r"task.context=4096: the model takes 512 tokens"):
        Mlx(model_of(), 4096)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setitem(mlx.PACKAGES, "mlx", "0.1")
    with pytest.raises(ConfigError, match=r"mlx==\S+ is installed; the cache is known of 0.1"):
        Mlx(model_of(), TOKENS)
    monkeypatch.setattr(mlx, "PACKAGES", {"mlx-nothing": "1"})
    with pytest.raises(ConfigError, match=r"needs mlx-nothing==1; pip install -e '.\[mlx\]'"):
        Mlx(model_of(), TOKENS)
