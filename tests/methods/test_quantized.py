"""`kvq.quantize`, `kvq.method_for` and `kvq.calibrate` on small random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvq
from kvq import methods as calls
from kvq.config import MethodConfig, compose, resolve
from kvq.config.identity import canonical_method
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods import presets
from kvq.methods.presets import Preset
from tests.data.byte_tokenizer import byte_tokenizer
from tests.random_models import llama, token_ids


@pytest.fixture
def model() -> PreTrainedModel:
    return llama(head_dim=64, vocabulary=300)


def written(model: PreTrainedModel, prompt: torch.Tensor, **given: object) -> list[int]:
    words = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    out = model.generate(**words, max_new_tokens=12, do_sample=False, pad_token_id=0, **given)
    return out[0].tolist()


@pytest.mark.parametrize("name", ["kivi", "nsnquant", "kivi/nsnquant_setting", "oscar_covariance"])
def test_generates_as_with_its_cache_and_undoes_itself(model: PreTrainedModel, name: str) -> None:
    prompt = token_ids(150)
    full = written(model, prompt)
    method = kvq.method_for(model, name, bits=2)
    if method.is_calibrated:
        text = "".join(chr(97 + number % 26) for number in range(600))
        method = kvq.calibrate(model, method, text, byte_tokenizer(), samples=2, length=128)
    own = written(model, prompt, past_key_values=kvq.KVCache(model, method))
    with kvq.quantize(model, method) as used:
        assert used is method
        assert written(model, prompt) == own
        assert type(model(input_ids=prompt).past_key_values) is kvq.KVCache
        assert model(input_ids=prompt, use_cache=False).past_key_values is None
        filled = DynamicCache()
        model(input_ids=prompt, past_key_values=filled)
        assert filled.get_seq_length() == prompt.shape[1]
    assert written(model, prompt) == full
    assert type(model(input_ids=prompt).past_key_values) is DynamicCache


def test_by_name_with_overrides_and_in_turn(model: PreTrainedModel) -> None:
    prompt = token_ids(150)
    with kvq.quantize(model, "kivi", bits=2, overrides=["residual.size=32"], dtype=torch.float16) as method:
        cache = model(input_ids=prompt).past_key_values
        assert method.residual.key.size == 32
        assert cache.dtype is torch.float16
        assert cache.bits_per_element < 4
    with pytest.raises(ZeroDivisionError), kvq.quantize(model, "nsn", bits=3):
        raise ZeroDivisionError
    assert type(model(input_ids=prompt).past_key_values) is DynamicCache


def test_what_cannot_be_is_one_line(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="method=kiwi"), kvq.quantize(model, "kiwi"):
        pass
    with pytest.raises(Unsupported, match="bits"), kvq.quantize(model, "kivi", bits=11):
        pass
    with (
        pytest.raises(ConfigError, match="overrides"),
        kvq.quantize(model, kvq.build_method("kivi"), overrides=["x=1"]),
    ):
        pass
    with pytest.raises(Unsupported, match="calibrates nothing"):
        kvq.calibrate(model, kvq.method_for(model, "kivi", 2), "text", byte_tokenizer())
    with pytest.raises(DataError, match="fewer than one window"):
        kvq.calibrate(model, kvq.method_for(model, "cq/4c9b"), "text", byte_tokenizer())


def test_each_method_is_a_call(model: PreTrainedModel) -> None:
    """`kvq.calls.KIVI(...)` is the method by name with overrides; its signature is in the stub."""
    preset = calls.KIVI(2, group_size=64, value={"clip": 0.9}, residual_size=64)
    own = [f"{side}.quantizer.group_size=64" for side in ("key", "value")]
    own += ["residual.size=64", "value.quantizer.clip=0.9"]
    assert preset == Preset("kivi", 2, tuple(own))
    assert preset.build(64).settings == kvq.build_method("kivi", 2, 64, own).settings
    assert calls.TurboQuant(4, rotation=None).overrides == ("key.stages.rotation=null", "value.stages.rotation=null")
    with kvq.quantize(model, preset) as used:
        assert used.settings == preset.build(64).settings
    with pytest.raises(ConfigError, match=r"KIVI\(groupsize\): its settings are .* Did you mean 'group_size'"):
        calls.KIVI(groupsize=3)
    with pytest.raises(ConfigError, match=r"NSNQuant\(value=undo_rope\)"):
        calls.NSNQuant(value={"undo_rope": None})
    with pytest.raises(AttributeError, match="no attribute 'KIVY'"):
        calls.KIVY()
    with pytest.raises(ConfigError, match="overrides belong to a method by name"):
        kvq.quantize(model, preset, overrides=["a=1"]).__enter__()


def of_conf(name: str, overrides: list[str]) -> MethodConfig:
    return resolve(compose([f"method={name}", *overrides])).method


def test_calls_are_the_files_of_conf() -> None:
    """The stub is what conf/ says today; every setting of a call is one that an override can name."""
    assert Path(presets.__file__).with_name("__init__.pyi").read_text(encoding="utf-8") == presets.stub()
    assert len(set(presets.names().values())) == len(presets.names())
    for name, called in presets.names().items():
        given = {one: default for one, _, default in presets.maker(called).keywords() if default not in (..., None, {})}
        overrides = [f"method.{word}" for word in presets.maker(called)(**given).overrides]
        assert canonical_method(of_conf(name, overrides)) == canonical_method(of_conf(name, [])), name
