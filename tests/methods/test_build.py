"""`build_method`: overrides, and one clear line for what cannot be built."""

import pytest
import torch

import kvq
from kvq.config import compose, resolve
from kvq.config.bits import Bits
from kvq.errors import ConfigError, KvqError, Unsupported
from kvq.methods.build import build_method, instantiate_method, method_of


def test_overrides_of_the_method_the_residual_and_bits():
    method = build_method(
        "nsn", overrides=["key.quantizer.group_size=64", "residual=none", "residual.size=32", "bits=2"]
    )
    assert method.key.quantizer.group_size == 64
    assert method.value.quantizer.group_size is None
    assert (method.residual.key.policy, method.residual.key.size) == ("none", 32)
    assert method.bits == Bits(2, 2)


def test_a_null_stage_drops_out_of_the_order():
    method = build_method("oscar", overrides=["key.stages.norm=null"])
    assert [name for name, _ in method.key.stages] == ["hadamard"]
    assert build_method("nsn", overrides=["key.stages.norm=null"]).key.stages == []


def test_keys_or_values_alone():
    method = build_method("kivi", overrides=["value=null"])
    assert method.value is None
    assert not method.is_full_precision


@pytest.mark.parametrize("bits", ["k4v2", (4, 2), {"key": 4, "value": 2}, Bits(4, 2)], ids=str)
def test_bits_of_each_side(bits):
    method = kvq.build_method("kivi", bits=bits)
    assert (method.key.quantizer.bits, method.value.quantizer.bits) == (4, 2)
    assert method.bits.label == "k4v2"


def test_composing_is_cached_but_methods_are_not_shared():
    first, second = build_method("nsn", bits=2), build_method("nsn", bits=2)
    assert first.key is not second.key


def test_a_fixed_rate_ignores_bits():
    assert build_method("identity", bits=16).bits is None


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("nns",), ConfigError, "method=nns: unknown method.*Did you mean 'nsn'"),
        (("oscar/relesed",), ConfigError, "Did you mean 'oscar/released'"),
        (("nsn", 1), Unsupported, "bits=1: nsn does 2 to 8 bits$"),
        (("nsn", "k3v9"), Unsupported, "bits=k3v9: nsn does 2 to 8 bits for values"),
        (("nsn", 99), ConfigError, "bits=99: whole numbers 1-16"),
        (("quarot", 3, 72), Unsupported, "method.key of quarot: head_dim=72"),
        (("rtn", 1, 128, ["key.quantizer.symmetric=true"]), Unsupported, "symmetric.* 2 to 16"),
        (("nsn", 3, 128, ["key.quantizer.group_siz=3"]), ConfigError, "unknown setting.*Did you mean 'group_size'"),
        (("nsn", 3, 128, ["+key.quantizer.klip=1"]), ConfigError, "klip: not an argument of kvq.codecs.Uni.*'clip'"),
        (
            ("nsn", 3, 128, ["key.quantizer.axis=per_chanel"]),
            ConfigError,
            "axis=per_chanel.*Did you mean 'per_channel'",
        ),
        (("nsn", 3, 128, ["key.quantizer.clip=abc"]), ConfigError, "clip=abc: kvq.codecs.UniformQuantizer takes float"),
        (("nsn", 3, 128, ["key.quantizer.clip=null"]), ConfigError, "clip=null: .*takes float"),
        (("nsn", 3, 128, ["key.quantizer.clip=2.0"]), ConfigError, "method.key of nsn: clip=2.0"),
        (("nsn", 3, 128, ["key.quantizer.group_size=0"]), ConfigError, "group_size=0"),
        (("nsn", 3, 128, ["key.quantizer._target_=kvq.codecs.Uniform"]), ConfigError, "_target_=.*cannot be imported"),
        (("nsn", 3, 128, ["key.quantizer._target_=nowhere.Uniform"]), ConfigError, "_target_=.*cannot be imported"),
        (("nsn", 3, 128, ["key._target_=kvq.codecs.Zero"]), ConfigError, "stages: not an argument of kvq.codecs.Zero"),
        (("oscar", 3, 128, ["key.order=[norm]"]), ConfigError, "leaves out stage 'hadamard'"),
        (("oscar", 3, 128, ["key.order=[norm,hadamrd]"]), ConfigError, "unknown stage 'hadamrd'. Did you mean"),
        (
            ("nsn", 3, 128, ["residual=nune"]),
            ConfigError,
            "residual=nune: unknown residual; one of block, ",
        ),
        (("nsn", 3, 128, ["residual.policy=blok"]), ConfigError, "Did you mean 'block'"),
        (("nsn", 3, 128, ["residual.size=-1"]), ConfigError, r"residual.size=-1 \(keys\)"),
        (("nsn", 3, 128, ["key=3"]), ConfigError, "method.key=3: a codec"),
        (("nsn", 3, 128, ["key"]), ConfigError, "cannot be read as setting=value"),
        (("3",), ConfigError, "method=3: unknown method"),
    ],
    ids=str,
)
def test_one_line_for_what_cannot_be_built(arguments, error, says):
    with pytest.raises(KvqError, match=says) as caught:
        build_method(*arguments)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


OWN = """
name: mine
bits_range: [1, 8]
key:
  _target_: kvq.codecs.Codec
  stages: {flip: {_target_: kvq_test_methods.Flip}}
  order: [flip]
  quantizer: {_target_: kvq.codecs.UniformQuantizer, bits: "${kvbits:key}", axis: per_token}
value: null
residual: {policy: block, size: 16}
"""
FLIP = """
from kvq.codecs import Stage

class Flip(Stage):
    def forward(self, x):
        return x.flip(-1), {}

    def inverse(self, y, side):
        return y.flip(-1)
"""


def test_a_method_kept_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "my conf" / "method").mkdir(parents=True)
    (tmp_path / "my conf" / "method" / "mine.yaml").write_text(OWN)
    (tmp_path / "kvq_test_methods.py").write_text(FLIP)
    monkeypatch.syspath_prepend(tmp_path)
    method = build_method("mine", bits=8, config_dir=tmp_path / "my conf")
    x = torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method.key.decode(method.key.encode(x)), x, rtol=0, atol=0.02)
    assert method.residual.key.size == 16
    with pytest.raises(ConfigError, match=r"method=mime: unknown method.*Did you mean 'mine'"):
        build_method("mime", config_dir=tmp_path / "my conf")


def test_a_resolved_run_builds_the_same_method():
    config = resolve(compose(["method=oscar", "bits=2", "residual.key.size=64"]))
    method = method_of(config, 128)
    assert method.residual == config.effective_residual
    assert method.residual.key.size == 64
    assert method.residual.value.size == 128
    assert method.bits == instantiate_method(config.method, config.residual, "2", 128).bits == config.parsed_bits
