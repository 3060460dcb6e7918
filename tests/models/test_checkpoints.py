"""What a folder's files hold is compared with its configuration before it is loaded, and named by all that is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from kvq.config import ModelConfig
from kvq.data.text import encode
from kvq.errors import ConfigError, DataError
from kvq.models.load import load_model, load_tokenizer, longest_context, model_fingerprint, text_config_of
from tests.random_models import save_random_model

Weights = dict[str, Tensor]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig("a", str(save_random_model(tmp_path / "model")))


def set_in(config: ModelConfig, file: str, **settings: Any) -> None:
    path = Path(config.path, file)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")


def sharded(config: ModelConfig, name: Callable[[int], str]) -> Weights:
    """Two shards and an index in the place of the one file; the weights."""
    folder = Path(config.path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {weight: name(number % 2) for number, weight in enumerate(sorted(weights))}
    for file in set(places.values()):
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        own = {weight: weights[weight] for weight in weights if places[weight] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return weights


def test_a_changed_shard_is_another_model(model: ModelConfig) -> None:
    place = "part-{}.safetensors"
    whole = load_model(model, "cpu").model.state_dict()
    sharded(model, place.format)
    assert all(torch.equal(whole[name], one) for name, one in load_model(model, "cpu").model.state_dict().items())
    before = model_fingerprint(model)
    assert before == model_fingerprint(model)
    for number in (0, 1):
        file = Path(model.path, place.format(number))
        weights = load_file(file)
        next(iter(weights.values())).view(-1)[0] += 1
        save_file(weights, file, metadata={"format": "pt"})
        assert model_fingerprint(model) != before
        before = model_fingerprint(model)


@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_chat_template_is_part_of_a_model(model: ModelConfig, file: str) -> None:
    before = model_fingerprint(model)
    Path(model.path, file).parent.mkdir(exist_ok=True)
    Path(model.path, file).write_text("{{ messages }}", encoding="utf-8")
    assert model_fingerprint(model) != before


def test_a_link_in_the_folder_may_lead_outside(model: ModelConfig, tmp_path: Path) -> None:
    """As all do in the cache of the hub's library; the fingerprint is of what is read."""
    file = Path(model.path, "model.safetensors")
    before = model_fingerprint(model)
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    assert model_fingerprint(model) == before
    load_model(model, "cpu")


def test_a_link_to_nothing_is_one_line(model: ModelConfig) -> None:
    file = Path(model.path, "model.safetensors")
    file.unlink()
    file.symlink_to("nowhere")
    with pytest.raises(DataError, match=r"^model\.path=\S+: model\.safetensors cannot be read: No such file"):
        model_fingerprint(model)
    with pytest.raises(DataError, match=r"^model\.path=\S+: cannot be loaded: [^\n]+$"):
        load_model(model, "cpu")


def test_an_adapter_is_refused(model: ModelConfig) -> None:
    Path(model.path, "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}', encoding="utf-8")
    with pytest.raises(DataError, match="holds an adapter; merge it"):
        model_fingerprint(model)


@pytest.mark.parametrize(
    "given", [{"quant_method": "foo"}, {"bits": 4}, {"quant_method": None}, {}, {"quant_method": 4}], ids=str
)
def test_a_method_of_quantized_weights_that_is_unknown_is_refused(model: ModelConfig, given: dict[str, Any]) -> None:
    """transformers would leave out the method, warn, and read the codes as weights."""
    set_in(model, "config.json", quantization_config=given)
    with pytest.raises(DataError, match=r"quantization_config\.quant_method=(foo|None|4): one of .*awq.*gptq"):
        load_model(model, "cpu")


def test_a_context_above_the_positions_is_refused(model: ModelConfig) -> None:
    def at(context: int, timed: bool = False) -> int | None:
        config = ModelConfig("a", model.path, context=context)
        return longest_context(config, text_config_of(config), timed)

    assert at(512) == 512
    with pytest.raises(ConfigError, match=r"^model\.context=513: \S+ has 512 positions$"):
        at(513)
    assert at(9999, timed=True) == 9999
    set_in(model, "config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    assert at(2048) == 2048
    with pytest.raises(ConfigError, match=r"^model\.context=2049: \S+ has 2048 positions$"):
        at(2049)


def changed_words(config: ModelConfig, change: Callable[[dict[str, Any]], None]) -> None:
    path = Path(config.path, "tokenizer.json")
    words = json.loads(path.read_text(encoding="utf-8"))
    change(words)
    path.write_text(json.dumps(words), encoding="utf-8")


def test_ids_beyond_the_embedding_are_named(model: ModelConfig) -> None:
    changed_words(model, lambda words: words["model"]["vocab"].update({"a": 5000}))
    with pytest.raises(DataError, match=r"its tokenizer has 5001 tokens, the model 256$"):
        load_tokenizer(model)


def test_an_added_token_beyond_the_embedding_is_refused_where_it_is_used(model: ModelConfig) -> None:
    """Tokenizers of some models have more than their embeddings, for other models of the family."""
    token = {"id": 5000, "content": "<far>", "special": True, "normalized": False}
    token |= dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
    changed_words(model, lambda words: words["added_tokens"].append(token))
    tokenizer = load_tokenizer(model)
    assert len(encode(tokenizer, "near")) == 4
    with pytest.raises(DataError, match=r"^tokenizer: '<far>' is token \d+, the model's embedding has 256 rows$"):
        encode(tokenizer, "a <far> b")


@pytest.mark.parametrize(
    "content", [None, b"", b'{"version": "1.0"', b"[]", b"{" * 10**5, b"\xff" * 99, b"null", b'{"model": 5}']
)
def test_a_tokenizer_that_is_missing_or_torn_is_one_line(model: ModelConfig, content: bytes | None) -> None:
    path = Path(model.path, "tokenizer.json")
    Tokenizer.from_file(str(path))
    set_in(model, "tokenizer_config.json", bos_token="a")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"^model\.path=\S+: [^\n]+$"):
        load_tokenizer(model)


@pytest.mark.parametrize("length", [2**62, 10**8, 10**6])
def test_a_header_of_an_absurd_length_is_one_line(model: ModelConfig, length: int) -> None:
    file = Path(model.path, "model.safetensors")
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(DataError, match=r"cannot be loaded: [^\n]+$"):
        load_model(model, "cpu")
