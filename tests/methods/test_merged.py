"""A rotation of values in the weights equals the one in the codec, and leaves the weights as they were."""

from __future__ import annotations

import pytest
import torch

import kvq
from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.errors import ConfigError, Unsupported
from kvq.models import LoadedModel
from kvq.results import run_key
from tests.random_models import in_double_precision, llama, token_ids

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
