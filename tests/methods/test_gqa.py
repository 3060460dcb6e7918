"""Bits that are added where query heads share KV heads, in the bytes of a cache."""

from types import SimpleNamespace

import pytest
import torch

import kvq
from kvq.errors import ConfigError, Unsupported
from kvq.methods.merged import GqaCompensation
from tests.random_models import llama, token_ids


@pytest.mark.parametrize(("shared", "extra"), [(1, 0), (2, 1), (4, 1), (5, 2), (8, 2), (16, 2), (17, 3), (64, 3)])
def test_extra_bits(shared, extra):
    config = SimpleNamespace(num_attention_heads=3 * shared, num_key_value_heads=3)
    assert GqaCompensation().extra(config) == extra
    assert GqaCompensation().extra(SimpleNamespace(num_attention_heads=8)) == 0


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
