"""A rotation of values or keys in the weights equals the one in the codec, and leaves the weights as they were."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

import kvq
from kvq.cache.rotary import styles_of
from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.errors import ConfigError, Unsupported
from kvq.models import LoadedModel
from kvq.results import run_key
from kvq.sweep import SweepPlan
from tests.families import family
from tests.random_models import VOCABULARY, in_double_precision, llama, token_ids

FIRST = "model.layers.0.self_attn.v_proj.weight"


def both(name):
    """The method with its rotation in the codec, and in the weights."""
    return [kvq.build_method(name, 2, 64, ["residual.size=32", f"merge_rotation={on}"]) for on in ("false", "true")]


def decoded(model, method):
    """Logits of 40 tokens behind 96 that are quantized, and the cache."""
    cache = kvq.KVCache(model, method, dtype=torch.float64)
    with torch.no_grad():
        model(input_ids=token_ids(96), past_key_values=cache)
        return model(input_ids=token_ids(40), past_key_values=cache).logits, cache


@pytest.mark.parametrize("name", ["oscar", "nsnquant", "quarot"])
def test_in_the_weights_as_in_the_codec(name, monkeypatch):
    """To 1e-9 in fp64, with two query heads of a KV head and a bias of values."""
    model = llama(head_dim=64)
    v = model.model.layers[0].self_attn.v_proj
    v.bias = torch.nn.Parameter(torch.randn(v.out_features), requires_grad=False)
    model = in_double_precision(LoadedModel(model, torch.device("cpu")), monkeypatch).model
    weights = {name: part.clone() for name, part in model.state_dict().items()}
    online, merged = both(name)
    expected, own = decoded(model, online)
    with merged.merged.in_weights(model):
        assert not torch.equal(model.state_dict()[FIRST], weights[FIRST])
        found, cache = decoded(model, merged)
    assert (found - expected).abs().max() < 1e-9
    assert (expected - decoded(model, kvq.build_method("fp16", 2, 64))[0]).abs().max() > 1e-2
    assert cache.nbytes == own.nbytes
    assert all(torch.equal(part, weights[name]) for name, part in model.state_dict().items())


def random_model(name):
    if name != "opt":
        return family(name, 64)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "ffn_dim": 96, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "word_embed_proj_dim": 256, "max_position_embeddings": 512, "init_std": 0.2}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(OPTConfig(**sizes, **more, **none))
    return LoadedModel(model.eval().requires_grad_(False), torch.device("cpu"))


NO_ROPE = ["gpt2", "opt", "bloom", "mpt"]


@pytest.mark.parametrize("merged", [["merge_key_rotation"], ["merge_key_rotation", "merge_rotation"]])
@pytest.mark.parametrize("name", NO_ROPE)
def test_queries_and_keys_of_models_without_rotary_embeddings(name, merged, monkeypatch):
    """To 1e-9 in fp64: learned positions and ALiBi, projections apart and in one matrix, with biases."""
    model = in_double_precision(random_model(name), monkeypatch).model
    for part, bias in model.named_parameters():
        if part.endswith("bias"):
            torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    weights = {name: part.clone() for name, part in model.state_dict().items()}
    plain = kvq.build_method("oscar", 2, 64, ["residual.size=32"])
    rotated = kvq.build_method("oscar", 2, 64, ["residual.size=32", *(f"{setting}=true" for setting in merged)])
    assert [stage for stage, _ in rotated.key.stages] == ["norm"]
    expected, own = decoded(model, plain)
    with rotated.merged.in_weights(model):
        found, cache = decoded(model, rotated)
    assert (found - expected).abs().max() < 1e-9
    assert (expected - decoded(model, kvq.build_method("fp16", 2, 64))[0]).abs().max() > 1e-2
    assert cache.nbytes == own.nbytes
    assert all(torch.equal(part, weights[name]) for name, part in model.state_dict().items())


def test_values_of_a_matrix_that_rotary_keys_share(monkeypatch):
    """GPT-NeoX has RoPE on keys, whose matrix holds the values too."""
    model = in_double_precision(family("gpt_neox", 64), monkeypatch).model
    online, merged = both("oscar")
    expected, _ = decoded(model, online)
    with merged.merged.in_weights(model):
        found, _ = decoded(model, merged)
    assert (found - expected).abs().max() < 1e-9


def test_keys_with_rotary_embeddings_are_refused():
    model, method = llama(head_dim=64), kvq.build_method("oscar", 2, 64, ["merge_key_rotation=true"])
    weights = {name: part.clone() for name, part in model.state_dict().items()}
    with pytest.raises(Unsupported, match="LlamaForCausalLM turns keys by RoPE between k_proj and the cache"):
        method.merged.in_weights(model).__enter__()
    assert all(torch.equal(part, weights[name]) for name, part in model.state_dict().items())
    with pytest.raises(Unsupported, match=r"method\.merge_key_rotation: the weights do not rotate keys"):
        kvq.KVCache(model, method)


@pytest.mark.parametrize("name", [*NO_ROPE, "llama", "gpt_neox", "gptj", "falcon"])
def test_a_configuration_says_what_the_weights_show(name):
    """So a plan refuses what a run would: `check_model` by settings alone, and `in_weights` by a probe of the model."""
    model = (llama(head_dim=64) if name == "llama" else random_model(name).model).eval()
    method = kvq.build_method("oscar", 2, 64, ["merge_key_rotation=true"])
    has_rope = any(style is not None for style, _ in styles_of(model))
    assert has_rope == (name not in NO_ROPE)
    expected = pytest.raises(Unsupported, match="turns keys by RoPE") if has_rope else nullcontext()
    with expected:
        method.merged.check_model(model.config)
    kvq.build_method("oscar", 2, 64, ["merge_rotation=true"]).merged.check_model(model.config)


def test_a_plan_refuses_keys_with_rotary_embeddings(capsys, tmp_path):
    """One line, and no model is loaded."""
    words = ["method=oscar", "bits=2", "method.merge_key_rotation=true", f"results_dir={tmp_path}"]
    plan = SweepPlan()
    plan.add(resolve(compose(words)))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("unsupported  oscar bits=2  tiny")
    assert "method.merge_key_rotation: LlamaForCausalLM turns keys by RoPE" in line


def test_a_cache_of_weights_that_do_not_rotate_is_refused():
    model, method = llama(layers=1, head_dim=64), both("oscar")[1]
    with pytest.raises(Unsupported, match="the weights do not rotate values"):
        kvq.KVCache(model, method)
    with method.merged.in_weights(model):
        kvq.KVCache(model, method)
    with pytest.raises(Unsupported, match="the weights do not rotate values"):
        kvq.KVCache(model, method)


@pytest.mark.parametrize("name", ["kivi", "fp16", "turboquant/hadamard"])
def test_values_without_a_rotation_are_refused(name):
    with pytest.raises(ConfigError, match=rf"method.merge_rotation of {name}: values whose first stage"):
        kvq.build_method(name, 2, 64, ["merge_rotation=true"])


def test_keys_without_a_rotation_are_refused():
    with pytest.raises(ConfigError, match=r"method\.merge_key_rotation of kivi: keys whose first stage"):
        kvq.build_method("kivi", 2, 64, ["merge_key_rotation=true"])


def test_a_model_without_such_projections_is_refused():
    model = llama(head_dim=64)
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    with pytest.raises(Unsupported, match="has v_proj and o_proj in 1 of 2 layers"):
        both("oscar")[1].merged.in_weights(model).__enter__()


def test_what_is_more_than_a_sum_of_values_is_refused():
    """Weights come back although the rotation is refused."""
    model = llama(head_dim=64)
    attention, weight = model.model.layers[0].self_attn, model.state_dict()[FIRST].clone()
    attention.v_proj.register_forward_hook(lambda module, given, values: values.abs())
    with pytest.raises(Unsupported, match="does more with values than sum them"):
        both("oscar")[1].merged.in_weights(model).__enter__()
    assert torch.equal(model.state_dict()[FIRST], weight)


def test_it_is_a_run_of_its_own():
    def key(*words):
        return run_key(by_names(resolve(compose(["method=oscar", "bits=2", *words]))))

    assert key() == key("method.merge_rotation=false") != key("method.merge_rotation=true")
    assert key() == key("method.merge_key_rotation=false") != key("method.merge_key_rotation=true")
    assert key("method.merge_key_rotation=true") != key("method.merge_rotation=true")
