"""Every method in conf/method says what it is, builds, and is the recipe its paper gives."""

import functools

import pytest
import torch

from kvq.codecs import Passthrough, StoredWithKeys, rope_table
from kvq.config import compose, resolve
from kvq.config.bits import Bits
from kvq.config.choices import find
from kvq.config.identity import canonical
from kvq.config.method import BITS
from kvq.config.plugins import conf_dirs
from kvq.methods.build import build_method
from kvq.methods.transformers_caches import installed
from tests.cache.states import nearest_bits
from tests.calibrated import build
from tests.presets import ABOUT, NAMES, one_of_each

EXPECTED = {"fp16", "identity", "zero", "rtn", "kivi", "kivi/nsnquant_setting", "kivi_had", "nsn", "quarot", "oscar"}
EXPECTED |= {f"oscar/{name}" for name in ("token_scope", "released", "cr_only", "ots_only", "swapped_order")}
EXPECTED |= {"q8_0", "q4_0", "fp8"}
EXPECTED |= {"nsnquant", "turboquant", "turboquant_plus", "quanto", "hqq"}
EXPECTED |= {"oscar/values_without_hadamard", *(f"nsn/arm_{arm}" for arm in "abcd")}
EXPECTED |= {"polarquant", "qjl", "gear", "ott", "zipcache", "kvquant", "cq", "spinquant", "rotatekv"}
EXPECTED |= {"oscar_covariance", "oscar_covariance/served", "kivi/kvsink", "rtn/kvsink", "rtn/intactkv"}
EXPECTED |= {"kivi/kvtuner", "rtn/kvtuner"}
EXPECTED |= {f"{name}{preset}" for name in ("streamingllm", "h2o", "snapkv") for preset in ("", "/kivi")}
FIXED = {"fp16", "identity", "zero", "q8_0", "q4_0", "fp8"}
FIXED |= {"polarquant", "polarquant/hadamard", "qjl", "qjl/one_sketch", "qjl/gaussian"}
FIXED |= {"streamingllm", "streamingllm/prompt", "h2o", "h2o/prompt", "snapkv", "zipcache", "zipcache/released"}
FIXED |= {name for name in NAMES if name.partition("/")[0] in ("cq", "engine", "kitty", "kvarn")} - {"kvarn/paper"}
FIXED |= {"kvquant_plus_plus/product", "kvquant_plus_plus/tiers", "kvtc/8x", "kvtc/16x", "kvtc/32x", "nova_kv"}
FIXED -= {"engine/mlx", "engine/mlx_g32", "engine/mlx_g128"}
NSN = {
    f"nsn/{norm}_{axis}_{grid}": (norm == "norm", axis, grid == "sym")
    for norm in ("norm", "nonorm")
    for axis in ("per_channel", "per_token")
    for grid in ("asym", "sym")
}


@functools.cache
def config(name, *overrides):
    return resolve(compose([f"method={name}", *overrides]))


def key(name, *overrides):
    return canonical(config(name, *overrides), "model", "data")


def test_all_methods_are_there():
    assert set(NAMES) >= EXPECTED | set(NSN)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_by_its_path_and_described(name):
    found = find("method", name, *conf_dirs())
    first, given = f"# {ABOUT[name]}", found.read()
    assert given["name"] == name
    assert given["label"]
    assert given["note"]
    assert first.startswith("# ")
    assert len(first) <= 140
    assert set(given) <= {
        "defaults",
        "name",
        "label",
        "arxiv",
        "note",
        "serve",
        "bits_range",
        "real_bits",
        "latent_only",
        "bits_by_layer",
        "key",
        "value",
        "residual",
        "full_precision_layers",
        "backend",
        "first_layers",
        "eviction",
        "token_policy",
        "calibration",
        "sink_tokens",
        "kept_keys",
        "policies",
        "gqa_compensation",
        "merge_rotation",
        "merge_key_rotation",
    }


@pytest.mark.parametrize("name", one_of_each(NAMES))  # every one of them has a golden
def test_it_builds_and_decodes(name):
    if name in BITS and not installed(name):
        pytest.skip(f"needs the extra [{name}]")
    bits = nearest_bits(name)
    x, rope = torch.randn(1, 2, 64, 128, generator=torch.Generator().manual_seed(0)), rope_table(64, 128)
    if "/delta" in name:  # differences of independent tokens are longer than the tokens
        x = x[:, :, :1] + 0.15 * x.cumsum(2)
    method = build(name, x, bits)
    assert method.name == name
    assert method.is_full_precision == (name == "fp16")
    assert method.bits == (None if name in FIXED else Bits(bits, bits))
    for codec in (method.key, method.value):
        if codec is not None and not isinstance(codec, StoredWithKeys):
            error = (codec.decode(codec.encode(x, rope=rope), rope) - x).square().mean()
            signs = name.startswith("qjl")  # an estimate for inner products
            if type(codec.quantizer) is Passthrough:  # identity, and the part with RoPE of vLLM's fp8_ds_mla
                assert error == 0
            else:
                assert error > 0.9 if name == "zero" else 0 < error < (0.7 if signs else 0.5)


def bits_per_element(name, bits, tokens, heads=8, block=None, **more):
    method = build_method(name, bits=bits, head_dim=128, **more)
    x = torch.randn(1, heads, tokens, 128, generator=torch.Generator().manual_seed(1))
    rope = rope_table(tokens, 128)
    return [codec.encode(x, block, rope).bits_per_element for codec in (method.key, method.value)]


@pytest.mark.parametrize(
    ("name", "bits", "tokens", "closed_form"),
    [
        ("kivi", 2, 128, (2 + 32 / 32, 2 + 32 / 32)),
        ("kivi/nsnquant_setting", 2, 64, (2 + 32 / 64, 2 + 32 / 128)),
        ("quarot", 2, 128, (2 + 32 / 128, 2 + 32 / 128)),
        ("nsn", 3, 2048, (3 + 16 / 128 + 32 / 2048,) * 2),
        ("nsn/arm_a", 3, 2048, (3 + 16 / 128,) * 2),
        ("nsn/arm_b", 3, 2048, (3 + 32 / 2048,) * 2),
        ("nsn/arm_c", 3, 2048, (3 + 16 / 128 + 16 / 2048,) * 2),
        ("oscar", 2, 128, (2 + 32 / 32 + 16 / 128, 2 + 32 / 32)),
        ("oscar/token_scope", 2, 128, (2 + 32 / 32 + 16 / 128 / 8, 2 + 32 / 32)),
        ("oscar/released", 2, 128, (2 + 32 / 32 + 16 / 128 / 8, 2 + 32 / 32)),
        ("oscar/cr_only", 2, 128, (2 + 32 / 32, 2 + 32 / 32)),
        ("rtn", 4, 128, (4 + 32 / 128,) * 2),
        ("identity", 3, 64, (32, 32)),
        ("zero", 3, 64, (0, 0)),
    ],
)
def test_measured_bits_are_the_closed_form(name, bits, tokens, closed_form):
    assert bits_per_element(name, bits, tokens) == pytest.approx(closed_form, abs=1e-9)


def test_nsn_at_residual_64_pays_for_its_small_blocks():
    assert bits_per_element("nsn", 3, 256, block=64) == pytest.approx([3.625, 3.625], abs=1e-9)


@pytest.mark.parametrize(("name", "ingredients"), NSN.items())
def test_nsn_presets_hold_their_ingredients(name, ingredients):
    norm, axis, symmetric = ingredients
    for codec in (config(name).method.key, config(name).method.value):
        quantizer = codec["quantizer"]
        assert (codec["stages"]["norm"] is not None) == norm
        assert (quantizer["axis"], quantizer["symmetric"]) == (axis, symmetric)
        assert quantizer["gain"] == ("unit" if norm else "none")
        assert quantizer["group_size"] is None


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("nsn/arm_a", "nsn/nonorm_per_token_sym"),
        ("nsn/arm_b", "nsn/nonorm_per_channel_asym"),
        ("nsn/arm_c", "nsn/norm_per_channel_sym"),
        ("nsn/arm_d", "nsn"),
        ("nsn/norm_per_channel_asym", "nsn"),
    ],
)
def test_an_alias_is_the_same_run(alias, name):
    assert key(alias) == key(name)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("oscar/token_scope", ["method.key.stages.norm.scope=token"]),
        ("oscar/cr_only", ["method.key.stages.norm=null"]),
        ("oscar/ots_only", ["method.key.stages.hadamard=null", "method.value.stages.hadamard=null"]),
        ("oscar/swapped_order", ["method.key.order=[norm,hadamard]"]),
        ("oscar/values_without_hadamard", ["method.value.stages.hadamard=null"]),
    ],
)
def test_an_ablation_can_be_given_on_the_command_line(name, overrides):
    assert key("oscar", *overrides) == key(name)
    assert key("oscar") != key(name)


def test_kivi_with_its_rotation_dropped_is_kivi():
    assert key("kivi_had", "method.key.stages.hadamard=null", "method.value.stages.hadamard=null") == key("kivi")


def test_oscar_presets_keep_their_defining_settings():
    released = config("oscar/released").method
    assert released.key["stages"]["norm"]["scope"] == "token"
    assert {released.key["quantizer"]["zero_point"], released.value["quantizer"]["zero_point"]} == {"integer"}
    quarot = config("quarot").method
    for codec in (quarot.key, quarot.value):
        assert (codec["quantizer"]["clip"], codec["quantizer"]["zero_point"]) == (0.95, "integer")


def test_residual_defaults_of_the_papers():
    sizes = {name: config(name).effective_residual.key for name in ("nsn", "kivi", "kivi/nsnquant_setting", "oscar")}
    assert {name: side.size for name, side in sizes.items()} == {
        "nsn": 128,
        "kivi": 128,
        "kivi/nsnquant_setting": 64,
        "oscar": 128,
    }
    assert [name for name, side in sizes.items() if side.prefill_block == "whole"] == ["nsn"]
