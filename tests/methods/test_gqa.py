"""Bits that are added where query heads share KV heads, in the bytes of a cache."""

from types import SimpleNamespace

import pytest
import torch

import kvq
from kvq.errors import ConfigError, Unsupported
from kvq.methods.merged import GqaCompensation
from tests.calibrated import build, random_states, sides
from tests.random_models import llama, token_ids


@pytest.mark.parametrize(("shared", "extra"), [(1, 0), (2, 1), (4, 1), (5, 2), (8, 2), (16, 2), (17, 3), (64, 3)])
def test_extra_bits(shared, extra):
    config = SimpleNamespace(num_attention_heads=3 * shared, num_key_value_heads=3)
    assert GqaCompensation().extra_bits(config) == extra
    assert GqaCompensation().extra_bits(SimpleNamespace(num_attention_heads=8)) == 0


@pytest.mark.parametrize("name", ["kvquant_plus_plus/gqa", "kvquant_plus_plus", "rtn"])
@pytest.mark.parametrize("bits", [2, 7, 8])
def test_measured_bits_hold_them(name, bits):
    """One bit for 2 query heads of a KV head, at most 8."""
    model = llama(layers=1, head_dim=64, kv_heads=2)
    assert model.config.num_attention_heads == 4
    on, off = (
        kvq.KVCache(model, kvq.build_method(name, bits, 64, ["residual.size=32", f"gqa_compensation={flag}"]))
        for flag in ("true", "false")
    )
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
