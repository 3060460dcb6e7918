"""Attention on packed codes inside models: the same function as dense attention, up to rounding."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import kvq
from kvq.cache import KVCache
from kvq.config import ModelConfig
from kvq.errors import ConfigError, Unsupported
from kvq.kernels import attend
from kvq.models.load import LoadedModel, load_model
from tests import presets
from tests.cache.states import nearest_bits
from tests.calibrated import bound, random_states
from tests.kernels import oracle
from tests.presets import LIBRARIES, lacks_package
from tests.random_models import in_double_precision, llama, token_ids

BOTH_WAYS = ("kivi", "nsn", "nsnquant")
JOINT = ["kvtc", "waterfill", "waterfill_kv"]  # with tables of a calibration, and first tokens in full precision
METHODS = [name for name in presets.METHODS if name not in JOINT]
REFUSED = {name: f"eviction of {name}" for name in ("h2o", "snapkv", "streamingllm", "triattention")} | {
    "qjl": "first_layers of qjl"
}
REFUSED |= {name: f"token_policy of {name}" for name in ("ott", "zipcache")} | dict.fromkeys(LIBRARIES, "backend of")
REFUSED |= {"kitty": "method=kitty has sink_tokens"}
"""Methods that are more than codecs behind a residual; codes that it does not read are in tests/kernels/test_eager."""


def method(name, size=6, head_dim=128, bits=None):
    bits = bits or nearest_bits(name)
    return kvq.build_method(name, bits=bits, head_dim=head_dim, overrides=[f"residual.size={size}"])


def joined():
    """Keys and values in the same components, of a model of two layers with two KV heads of 32 channels."""
    return bound(method("waterfill_kv", head_dim=32, bits=3), random_states(2, 32, 256), 2)


def exact(model, monkeypatch):
    """In fp64 throughout: rounding would turn a code now and then."""
    return in_double_precision(LoadedModel(model, torch.device("cpu")), monkeypatch).model


def steps(model, chosen, tokens, prompt=20, **settings):
    """Logits of tokens decoded one by one after a prompt."""
    cache = KVCache(model, chosen, **settings)
    out = [model(tokens[:, :prompt], past_key_values=cache).logits[:, -1:]]
    out += [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(prompt, tokens.shape[1])]
    return torch.cat(out, 1), cache


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        # Attention of either kind hands the same states over.
        pytest.param(name, way, marks=[pytest.mark.long] * (way == "eager" and name not in BOTH_WAYS))
        for name in METHODS
        for way in ("sdpa", "eager")
    ],
)
def test_same_logits_as_dense(name, way, monkeypatch):
    if lacks_package(name):
        pytest.skip(f"needs the extra [{name}]")
    model = exact(llama(), monkeypatch)
    model.set_attn_implementation(way)
    tokens = token_ids(35, batch=2)
    if name in REFUSED:
        with pytest.raises(Unsupported, match=f"cache.attention=packed: {REFUSED[name]}"):
            KVCache(model, method(name), attention="packed")
        assert model.config._attn_implementation == way
        return
    try:
        KVCache(model, method(name), attention="packed")
    except Unsupported as refused:
        if not re.search(r"attention=packed: (codes of|stage|\w+ stores lists)", str(refused)):
            raise
        return
    dense, held = steps(model, method(name), tokens)
    packed, other = steps(model, method(name), tokens, attention="packed")
    assert model.config._attn_implementation == f"kvq_{way}"
    assert held.nbytes == other.nbytes
    torch.testing.assert_close(packed, dense, atol=1e-7, rtol=0)
    if name in BOTH_WAYS:
        again, _ = steps(model, method(name), tokens)
        assert torch.equal(again, dense)  # a dense cache on the switched model


@pytest.mark.parametrize("residual", ["none", "block", "sliding"])
@pytest.mark.parametrize("whole", ["size", "whole"])
def test_residuals(residual, whole, monkeypatch):
    model = exact(llama(), monkeypatch)
    chosen = kvq.build_method(
        "kivi",
        bits=2,
        overrides=[
            f"residual.policy={residual}",
            "residual.value.policy=null",
            "residual.size=5",
            f"residual.prefill_block={whole}",
        ],
    )
    tokens = token_ids(28)
    for prompt in (1, 7, 24):
        dense, _ = steps(model, chosen, tokens, prompt)
        packed, _ = steps(model, chosen, tokens, prompt, attention="packed")
        torch.testing.assert_close(packed, dense, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        pytest.param("waterfill", 20, marks=pytest.mark.long),
        *((name, 20) for name in ("kvtc", "waterfill/scalar", "waterfill/heads_apart", "kivi/sink", "rtn/intactkv")),
        pytest.param("waterfill/kv_small", 20, marks=pytest.mark.long),
        ("waterfill_kv", 20),
        ("waterfill/scalar", 1),
        ("waterfill_kv", 1),
        ("rtn/intactkv", 1),
    ],
)
def test_joint_transforms_and_first_tokens(name, prompt, monkeypatch):
    model = exact(llama(head_dim=32), monkeypatch)
    chosen = kvq.build_method(name, bits=3, head_dim=32, overrides=["residual.size=6", "residual.policy=block"])
    if chosen.needs_calibration:
        chosen = bound(chosen, random_states(2, 32, 256), 2)
    tokens = token_ids(35, batch=2)
    dense, held = steps(model, chosen, tokens, prompt)
    packed, other = steps(model, chosen, tokens, prompt, attention="packed")
    assert held.nbytes == other.nbytes
    assert other.packed_bytes
    torch.testing.assert_close(packed, dense, atol=1e-7, rtol=0)


def test_first_tokens_of_keys_and_values_out_of_step(monkeypatch):
    """Keys that leave full precision at other times than values are in another order behind the packed ones."""
    chosen = kvq.build_method("kivi/sink", bits=2, overrides=["residual.value.size=9"])
    with pytest.raises(Unsupported, match="method=kivi/sink has sink_tokens, and keys that are packed at other times"):
        KVCache(exact(llama(), monkeypatch), chosen, attention="packed")


def test_first_tokens_in_a_window(monkeypatch):
    """A window leaves the first tokens behind, one after the other."""
    model = exact(llama(), monkeypatch)
    chosen, tokens = kvq.build_method("rtn/intactkv", bits=4, overrides=["residual.size=6"]), token_ids(45)
    cache = KVCache(model, chosen, attention="packed")
    model(tokens[:, :40], past_key_values=cache)
    layer = cache.layers[0]
    keys, values = (side.append_packed(torch.randn(1, 2, 1, 128).double()) for side in (layer.key, layer.value))
    query = torch.randn(1, 4, 1, 128).double()
    dense = [
        torch.cat([s.full[:, :, : s.sinks], oracle.decoded(dataclasses.replace(s, full=s.full[:, :, s.sinks :]))], 2)
        for s in (keys, values)
    ]
    for first in (0, 1, keys.sinks, keys.sinks + 3):
        found = attend(query, keys, values, 0.1, first)
        whole = (kvq.kernels.PackedStates(None, (), states) for states in dense)
        torch.testing.assert_close(found, oracle.attend(query, *whole, 0.1, first))


@pytest.mark.parametrize(
    "name", [f"engine/{one}" for one in ("llamacpp_q4_1", "vllm_fp8", "sglang_fp4", "vllm_turboquant_3bit_nc")]
)
def test_engines_keep_nothing_in_full_precision(name, monkeypatch):
    model = exact(llama(), monkeypatch)
    chosen, tokens = kvq.build_method(name), token_ids(35)
    dense, held = steps(model, chosen, tokens)
    packed, other = steps(model, chosen, tokens, attention="packed")
    assert held.nbytes == other.nbytes == other.packed_bytes
    torch.testing.assert_close(packed, dense, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["oscar", "waterfill_kv"])
def test_sliding_window_and_softcap(name, monkeypatch):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=9,
        initializer_range=0.2,
        attn_logit_softcapping=2.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = exact(Gemma2ForCausalLM(config).eval().requires_grad_(False), monkeypatch)
    tokens, chosen = token_ids(40), joined() if name == "waterfill_kv" else method(name, head_dim=32, bits=2)
    dense, _ = steps(model, chosen, tokens)
    packed, _ = steps(model, chosen, tokens, attention="packed")
    torch.testing.assert_close(packed, dense, atol=1e-7, rtol=0)


def test_forks_and_beams(monkeypatch):
    model = exact(llama(), monkeypatch)
    tokens, settings = token_ids(12), {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    outs = [
        model.generate(tokens, past_key_values=KVCache(model, method("kivi"), attention=way), **settings)
        for way in ("dense", "packed")
    ]
    assert torch.equal(*outs)
    narrow = exact(llama(head_dim=32), monkeypatch)
    for own, chosen in ((model, method("oscar")), (narrow, joined())):
        base, _ = steps(own, chosen, token_ids(30), attention="packed")
        cache = KVCache(own, chosen, attention="packed")
        own(token_ids(30)[:, :20], past_key_values=cache)
        for branch in (cache.fork(), cache.fork()):
            out = [own(token_ids(30)[:, i : i + 1], past_key_values=branch).logits for i in range(20, 30)]
            torch.testing.assert_close(torch.cat(out, 1), base[:, 1:], atol=1e-9, rtol=0)


def test_refusals():
    model = llama()
    with pytest.raises(ConfigError, match="method=kivi: not a name"):
        KVCache(model, "kivi")
    with pytest.raises(ConfigError, match="attention=pakced: one of dense, packed"):
        KVCache(model, method("kivi"), attention="pakced")
    with pytest.raises(ConfigError, match="keep_decoded"):
        KVCache(model, method("kivi"), keep_decoded=True, attention="packed")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(Unsupported, match="attention flex_attention; load the model with sdpa or eager"):
        KVCache(model, method("kivi"), attention="packed")


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelConfig(name="tiny", path="embedded:tiny"), "cpu").model


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_tiny_writes_the_same_tokens(tiny, name):
    """Greedy, 256 after a prompt of 150."""
    count = 256
    chosen = kvq.build_method(name, bits=nearest_bits(name))
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(5, tiny.config.vocab_size, (1, 150), generator=generator)
    outs = []
    for way in ("dense", "packed"):
        model = copy.copy(tiny)
        cache = KVCache(model, chosen, keep_decoded=way == "dense", attention=way)
        outs.append(
            model.generate(prompt, past_key_values=cache, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        )
    assert torch.equal(*outs)
