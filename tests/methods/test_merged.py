"""A rotation of values in the weights equals the one in the codec, and leaves the weights as they were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kvq
from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.errors import ConfigError, Unsupported
from kvq.methods.policies import GqaCompensation
from kvq.models.load import LoadedModel
from kvq.results import run_key
from tests.calibrated import bound, build, random_states, sides
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


@pytest.mark.parametrize(("shared", "extra"), [(1, 0), (2, 1), (4, 1), (5, 2), (8, 2), (16, 2), (17, 3), (64, 3)])
def test_extra_bits(shared, extra):
    config = SimpleNamespace(num_attention_heads=3 * shared, num_key_value_heads=3)
    assert GqaCompensation().extra_bits(config) == extra
    assert GqaCompensation().extra_bits(SimpleNamespace(num_attention_heads=8)) == 0


UNCALIBRATED = [(name, bits) for name in ("kvquant_plus_plus/gqa", "kvquant_plus_plus", "rtn") for bits in (2, 7, 8)]


@pytest.mark.parametrize(("name", "bits"), [*UNCALIBRATED, ("kvquant_plus_plus/outliers", 2)])
def test_measured_bits_hold_them(name, bits):
    """One bit for 2 query heads of a KV head, at most 8; also in layers with tables of their own."""
    model = llama(layers=1, head_dim=64, kv_heads=2)
    assert model.config.num_attention_heads == 4
    methods = (kvq.build_method(name, bits, 64, ["residual.size=32", f"gqa_compensation={on}"]) for on in (True, False))
    on, off = (kvq.KVCache(model, bound(method, random_states(2, 64, 64), layers=1)) for method in methods)
    for cache in (on, off):
        with torch.no_grad():
            model(input_ids=token_ids(64), past_key_values=cache)
    assert on.bits_per_element - off.bits_per_element == min(bits + 1, 8) - bits
    assert on.bits_per_element > bits


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("kvquant_plus_plus/outliers", 2),
        *((f"kvquant_plus_plus/{name}", 2) for name in ("outliers_low_rank", "low_rank", "delta", "huffman")),
        ("kvquant_plus_plus/delta_outliers", 3),
        ("gear", 2),
        ("turboquant/outliers", 2),
    ],
)
def test_codecs_inside_of_codecs_get_them(name, bits):
    """A codec with a bit more is that which is built with it, to the stored byte."""
    x = random_states(2, 64, 32)
    for side, codec in sides(build(name, x, bits)).items():
        more, expected = codec.with_more_bits(1, 8), getattr(build(name, x, bits + 1), side)
        stored, wanted = more.encode(x, 32), expected.encode(x, 32)
        assert stored.parts.keys() == wanted.parts.keys()
        assert all(torch.equal(part, wanted.parts[key]) for key, part in stored.parts.items())
        assert torch.equal(more.decode(stored), expected.decode(wanted))
        assert getattr(more.quantizer, "bits", None) == getattr(expected.quantizer, "bits", None)


@pytest.mark.parametrize(("bits", "high", "low"), [(1, 3, 2), (2, 4, 2), (3, 5, 3)])
def test_outlier_channels_and_others_get_as_many(bits, high, low):
    """The text adds them to both widths, which are min(b + 1, 4) and max(b - 1, 1) without them."""
    quantizer = build("kvquant_plus_plus/outliers", random_states(2, 64, 32), bits).key.with_more_bits(1, 8).quantizer
    assert (quantizer.high.quantizer.bits, quantizer.low.quantizer.bits) == (high, low)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "kvquant_plus_plus/product",
            "method.gqa_compensation of kvquant_plus_plus/product: key: ProductQuantizer: has no",
        ),
        ("fp8", "Float8Quantizer: has no bits to add"),
    ],
)
def test_what_has_no_bits_to_add_is_refused(name, message):
    with pytest.raises(Unsupported, match=message):
        kvq.build_method(name, 2, 64, ["gqa_compensation=true"])


def test_it_needs_a_cache_of_a_model():
    with pytest.raises(ConfigError, match=r"method.gqa_compensation of fp16: needs codecs"):
        kvq.build_method("fp16", 2, 64, ["gqa_compensation=true"])
