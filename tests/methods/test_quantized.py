"""`kvq.quantize`, `kvq.method_for` and `kvq.calibrate` on small random models."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import kvq
from kvq.errors import ConfigError, DataError, Unsupported
from tests.data.byte_tokenizer import byte_tokenizer
from tests.random_models import llama, token_ids


@pytest.fixture
def model() -> PreTrainedModel:
    return llama(head_dim=64, vocabulary=300)


def written(model: PreTrainedModel, prompt: torch.Tensor, **given: object) -> list[int]:
    words = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    out = model.generate(**words, max_new_tokens=12, do_sample=False, pad_token_id=0, **given)
    return out[0].tolist()


@pytest.mark.filterwarnings("ignore:kvq.quantize")
@pytest.mark.parametrize("name", ["kivi", "nsnquant", "kivi/nsnquant_setting", "oscar_covariance"])
def test_generates_as_with_its_cache_and_undoes_itself(model: PreTrainedModel, name: str) -> None:
    prompt = token_ids(150)
    full = written(model, prompt)
    method = kvq.method_for(model, name, bits=2)
    if method.needs_calibration:
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


@pytest.mark.filterwarnings("ignore:kvq.quantize")
def test_by_name_with_overrides_and_in_turn(model: PreTrainedModel) -> None:
    prompt = token_ids(150)
    given = {"overrides": ["residual.size=32"], "dtype": torch.float16}
    with kvq.quantize(model, "kivi", bits=2, **given) as method:
        cache = model(input_ids=prompt).past_key_values
        assert method.residual.key.size == 32
        assert cache.dtype is torch.float16
        assert cache.bits_per_element < 4
    with pytest.raises(ZeroDivisionError), kvq.quantize(model, "nsn", bits=3):
        raise ZeroDivisionError
    assert type(model(input_ids=prompt).past_key_values) is DynamicCache


def test_one_forward_reads_quantized_tokens_or_says_that_it_does_not(model: PreTrainedModel) -> None:
    """The loss of `zero` is that of full precision, which is warned of; no warning where tokens are read."""
    prompt, zero = token_ids(150), {"overrides": ["residual.size=32"]}
    full = model(prompt, labels=prompt).loss
    with pytest.warns(UserWarning, match="attends before it stores"), kvq.quantize(model, "zero", **zero):
        assert model(prompt, labels=prompt).loss == full
    with kvq.quantize(model, "zero", **zero), torch.no_grad():
        first = model.model(prompt[:, :140], None, None, None)
        assert type(first.past_key_values) is kvq.KVCache
        model.model(prompt[:, 140:], past_key_values=first.past_key_values.fork())
    with kvq.quantize(model, "fp16"):
        model(prompt)


@pytest.mark.parametrize("where", ["call", "config", "of the model"])
def test_generate_without_a_cache_is_given_none(model: PreTrainedModel, where: str) -> None:
    prompt = token_ids(40)
    given: dict[str, object] = {"call": {"use_cache": False}, "of the model": {}}.get(where, {})
    if where == "config":
        given = {"generation_config": GenerationConfig(use_cache=False)}
    model.generation_config.use_cache = where != "of the model"
    full = written(model, prompt, **given)
    with pytest.warns(UserWarning, match="use_cache=False stores nothing"), kvq.quantize(model, "zero"):
        assert written(model, prompt, **given) == full


@pytest.mark.filterwarnings("ignore:kvq.quantize")
def test_the_inner_of_two_statements_holds(model: PreTrainedModel) -> None:
    prompt = token_ids(9)
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 2, "return_dict_in_generate": True}
    with kvq.quantize(model, "zero"):
        with kvq.quantize(model, "identity"):
            for made in (model(prompt), model.model(prompt), model.generate(prompt, pad_token_id=0, **given)):
                assert made.past_key_values.method.name == "identity"
        assert model(prompt).past_key_values.method.name == "zero"
    rotated = kvq.method_for(model, "quarot", 4, ["merge_rotation=true"])
    with kvq.quantize(model, rotated):
        model(prompt)
        with pytest.raises(Unsupported, match="an outer `with` rotates"), kvq.quantize(model, "identity"):
            pass


def test_what_cannot_be_is_one_line(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="method=3: a name, or a method"), kvq.quantize(model, 3):  # type: ignore[arg-type]
        pass
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
