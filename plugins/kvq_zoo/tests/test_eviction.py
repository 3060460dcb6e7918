"""Eviction: what is kept, what attention sees, equal memory, and the families on which it works."""

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.errors import ConfigError, Unsupported
from kvq_zoo.eviction import HeavyHitters, SnapKV, StreamingLLM
from tests.families import family
from tests.random_models import llama, token_ids

ALONE = ["streamingllm", "h2o", "snapkv"]
SETTINGS = ["eviction.budget=24", "eviction.least=9"]
SNAP = ["eviction.window=8"]


def method(name, *overrides, head_dim=32):
    given = [*SETTINGS, *(SNAP if name.startswith("snapkv") else []), *overrides]
    return kvq.build_method(name, bits=4, head_dim=head_dim, overrides=given)


@pytest.fixture(scope="module")
def model():
    return llama(head_dim=32)


def attention_by_hand(model, tokens):
    """Attention weights of every layer `[batch, heads, queries, tokens]`."""
    model.set_attn_implementation("eager")
    out = model(tokens, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return out


def states(model, tokens, name="fp16"):
    cache = KVCache(model, kvq.build_method(name, head_dim=32))
    model(tokens, past_key_values=cache)
    return [(layer.key._full.view, layer.value._full.view) for layer in cache.layers]


def held(cache):
    return [(layer.key._full.view, layer.value._full.view) for layer in cache.layers]


def rows(states, kept):
    return states.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))


def test_a_budget_that_holds_everything_changes_nothing(model):
    tokens = token_ids(40)
    for name in ALONE:
        cache = KVCache(model, method(name, "eviction.budget=64"))
        plain = KVCache(model, kvq.build_method("fp16", head_dim=32))
        for piece in (tokens[:, :30], tokens[:, 30:31], tokens[:, 31:32]):
            torch.testing.assert_close(
                model(piece, past_key_values=cache).logits, model(piece, past_key_values=plain).logits
            )
        assert cache.nbytes == plain.nbytes


def test_h2o_keeps_heavy_hitters_and_the_newest(model):
    tokens = token_ids(50)
    cache = KVCache(model, method("h2o"))
    model(tokens, past_key_values=cache)
    for weights, (key, value), found in zip(
        attention_by_hand(model, tokens), states(model, tokens), held(cache), strict=True
    ):
        score = weights.sum(2).unflatten(1, (2, 2)).mean(2)
        heavy = score[..., :38].topk(12).indices.sort(-1).values
        kept = torch.cat([heavy, torch.arange(38, 50).expand(1, 2, -1)], -1)
        assert torch.equal(found[0], rows(key, kept))
        assert torch.equal(found[1], rows(value, kept))


def test_h2o_adds_up_the_weights_of_later_queries(model):
    """Token by token the scores are those of a prefill, until the first token leaves."""
    tokens = token_ids(24)
    prefill, stepwise = KVCache(model, method("h2o")), KVCache(model, method("h2o"))
    model(tokens, past_key_values=prefill)
    for token in tokens.split(1, 1):
        model(token, past_key_values=stepwise)
    for one, other in zip(prefill.layers, stepwise.layers, strict=True):
        torch.testing.assert_close(one._received, other._received, rtol=1e-4, atol=1e-5)
    for token in token_ids(6, seed=5).split(1, 1):
        model(token, past_key_values=stepwise)
    assert stepwise.layers[0].key.tokens == stepwise.layers[0]._received.shape[-1] == 24
    assert stepwise.get_seq_length() == 30


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_snapkv_keeps_what_the_window_attends_to(model, pool):
    tokens = token_ids(50)
    cache = KVCache(model, method("snapkv", f"eviction.pool={pool}"))
    model(tokens, past_key_values=cache)
    for weights, (key, value), found in zip(
        attention_by_hand(model, tokens), states(model, tokens), held(cache), strict=True
    ):
        score = weights[:, :, -8:, :42].sum(2).unflatten(1, (2, 2)).mean(2)
        windows = torch.nn.functional.pad(score, (2, 2), value=0.0 if pool == "avg" else -1.0).unfold(-1, 5, 1)
        smooth = windows.mean(-1) if pool == "avg" else windows.max(-1).values
        kept = torch.cat([smooth.topk(16).indices.sort(-1).values, torch.arange(42, 50).expand(1, 2, -1)], -1)
        assert torch.equal(found[0], rows(key, kept))
        assert torch.equal(found[1], rows(value, kept))
    model(tokens[:, :1], past_key_values=cache)
    assert cache.layers[0].key.tokens == 25


@pytest.mark.parametrize("name", ALONE)
def test_attention_reads_the_kept_tokens_at_their_positions(model, name):
    """One more token by the cache, and by a mask over everything."""
    tokens, more = token_ids(50), token_ids(1, seed=9)
    cache = KVCache(model, method(name))
    model(tokens, past_key_values=cache)
    kept = [key for key, _ in held(cache)]
    got = model(more, past_key_values=cache).logits
    full = KVCache(model, kvq.build_method("fp16", head_dim=32))
    model(tokens, past_key_values=full)
    for layer, keys in zip(full.layers, kept, strict=True):
        every = layer.key._full.view
        left = torch.cdist(keys, every).argmin(-1)
        bias = torch.full(every.shape[:3], -torch.inf).scatter(2, left, 0.0)
        bias = torch.cat([bias, torch.zeros(1, 2, 1)], -1).repeat_interleave(2, 1)[:, :, None]
        layer.bias = bias
    hooks = []
    for module, layer in zip((block.self_attn for block in model.model.layers), full.layers, strict=True):

        def hidden(_module, args, kwargs, bias=layer.bias):
            return args, {**kwargs, "attention_mask": bias}

        hooks.append(module.register_forward_pre_hook(hidden, with_kwargs=True))
    expected = model(more, past_key_values=full).logits
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", ["24", "0.5"])
def test_equal_budgets_are_equal_bytes(model, budget):
    tokens = token_ids(64)
    found = set()
    for name in ("streamingllm/prompt", "h2o/prompt", "snapkv"):
        cache = KVCache(model, method(name, f"eviction.budget={budget}"))
        model(tokens, past_key_values=cache)
        found.add((cache.nbytes, cache.effective_bits))
    kept = 24 if budget == "24" else 32
    assert found == {(2 * 2 * 2 * kept * 32 * 4, 32 * kept / 64)}


@pytest.mark.parametrize(("codec", "bits"), [("kivi", 5), ("oscar", 5.5)])
@pytest.mark.parametrize("policy", ["streamingllm", "h2o", "snapkv"])
def test_what_is_left_is_quantized(model, policy, codec, bits):
    name = f"{policy}/{codec}"
    tokens = token_ids(64)
    cache = KVCache(model, method(name, "eviction.budget=40", "residual.size=32"))
    model(tokens, past_key_values=cache)
    assert (cache.layers[0].key.packed_tokens, cache.layers[0].key.residual_tokens) == (32, 8)
    assert cache.side_bits("key") == bits
    assert cache.effective_bits == 8 * cache.nbytes / (2 * 2 * 2 * 64 * 32)
    alone = KVCache(model, method(policy if policy == "snapkv" else f"{policy}/prompt", "eviction.budget=40"))
    model(tokens, past_key_values=alone)
    for layer, plain in zip(cache.layers, alone.layers, strict=True):
        key = plain.key._full.view
        codec = cache.method.key
        assert torch.equal(layer.key._visible()[:, :, :32], codec.decode(codec.encode(key[:, :, :32], 32)))
        assert torch.equal(layer.key._visible()[:, :, 32:], key[:, :, 32:])
    more = token_ids(40, seed=4)
    for token in more.split(1, 1):
        assert bool(torch.isfinite(model(token, past_key_values=cache).logits).all())
    assert cache.layers[0].key.tokens == 80


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi3"]
)
@pytest.mark.parametrize("evicting", [*ALONE, "snapkv/kivi"])
def test_generate_on_every_family_that_can(name, evicting):
    loaded = family(name)
    given = ["eviction.budget=10", "eviction.least=9"] + (["eviction.window=4"] if "snapkv" in evicting else [])
    cache = KVCache(loaded.model, kvq.build_method(evicting, bits=4, head_dim=32, overrides=given))
    tokens = token_ids(16, batch=2)
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    out = loaded.model.generate(tokens, past_key_values=cache, **settings)
    assert out.shape == (2, 22)
    assert cache.get_seq_length() == 21
    kept, windows = (15 if "snapkv" in evicting else 10), [layer.window for layer in cache.layers]
    assert [layer.key.tokens for layer in cache.layers] == [21 if window else kept for window in windows]
    assert any(window is None for window in windows)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("evicting", ["streamingllm/prompt", "h2o/prompt", "snapkv/kivi", "triattention/prompt"])
def test_layers_with_a_window_keep_it_where_others_have_none(name, evicting):
    model, tokens, token = family(name).model, token_ids(40), token_ids(1)
    cache, plain = (KVCache(model, method(evicting, f"eviction.budget={budget}")) for budget in (24, 64))
    out, expected = ([model(piece, past_key_values=one).logits for piece in (tokens, token)] for one in (cache, plain))
    assert torch.equal(out[0], expected[0])  # a prompt is read in full
    assert not torch.equal(out[1], expected[1])
    for layer, whole in zip(cache.layers, plain.layers, strict=True):
        assert (layer.evicted, layer.key.tokens) == ((0, whole.key.tokens) if layer.window else (16, 25))
    assert cache.nbytes < plain.nbytes


def test_a_window_of_all_layers_that_would_matter_is_refused():
    loaded = family("mistral")
    cache = KVCache(loaded.model, kvq.build_method("streamingllm", head_dim=32, overrides=["eviction.budget=10"]))
    loaded.model(token_ids(20), past_key_values=cache)
    with pytest.raises(Unsupported, match="sees 24 tokens back"):
        loaded.model(token_ids(6), past_key_values=cache)


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi", "gptj", "gemma3n"])
def test_other_attentions_are_refused_by_name(name):
    loaded = family(name)
    with pytest.raises(Unsupported, match=r"ALiBi|earlier ones|outside of transformers' attention interface"):
        loaded.model(token_ids(20), past_key_values=KVCache(loaded.model, method("h2o", head_dim=32)))


def test_forks_go_their_own_way(model):
    tokens = token_ids(40)
    cache = KVCache(model, method("h2o"))
    model(tokens, past_key_values=cache)
    fork = cache.fork()
    more = token_ids(3, seed=7)
    expected = [model(token, past_key_values=fork).logits for token in more.split(1, 1)]
    assert cache.get_seq_length() == 40
    for token, logits in zip(more.split(1, 1), expected, strict=True):
        assert torch.equal(model(token, past_key_values=cache).logits, logits)
    with pytest.raises(Unsupported, match="cannot come back"):
        cache.crop(-1)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)


def test_no_forward_leaves_the_models_functions_changed(model):
    from transformers.models.llama import modeling_llama

    before = modeling_llama.ALL_ATTENTION_FUNCTIONS
    model(token_ids(40), past_key_values=KVCache(model, method("h2o")))
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS is before
    with pytest.raises(Unsupported):
        KVCache(model, method("h2o", "eviction.when=prompt")).layers[0].update(*2 * (torch.zeros(1, 2, 1, 32),))
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS is before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StreamingLLM(budget=0), "budget=0"),
        (lambda: StreamingLLM(budget=1.5), "budget=1.5"),
        (lambda: StreamingLLM(budget=4), "budget=4: sinks alone are 4 tokens; at least 5"),
        (lambda: StreamingLLM(sinks=-1), "sinks=-1"),
        (lambda: StreamingLLM(when="never"), "when=never: one of prompt, always"),
        (lambda: HeavyHitters(recent=2), "recent=2"),
        (lambda: HeavyHitters(least=0), "least=0"),
        (lambda: SnapKV(budget=32), "budget=32: the window's alone are 32 tokens; at least 33"),
        (lambda: SnapKV(least=16), "least=16"),
        (lambda: SnapKV(kernel=4), "kernel=4: an odd"),
        (lambda: SnapKV(window=0), "window=0"),
    ],
)
def test_bad_settings_are_named(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_eviction_from_quantized_blocks_is_refused(model):
    with pytest.raises(ConfigError, match="when=always: tokens cannot leave quantized blocks"):
        KVCache(model, method("h2o/kivi", "eviction.when=always"))
