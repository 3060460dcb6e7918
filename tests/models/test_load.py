"""How checkpoints are asked for: dtype, placement, quantized weights, models of text and images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, Qwen3VLConfig

import kvq
from kvq.cache import KVCache
from kvq.config import DEVICE_MAPS, Dtype, ModelConfig, OutliersConfig, compose, resolve
from kvq.config.identity import canonical
from kvq.errors import ConfigError, Unsupported
from kvq.models import LoadedModel, load_model, placing
from kvq.tasks.scoring import scoring_bounds
from tests.families import family
from tests.models.test_families import method
from tests.random_models import llama, save_random_model, token_ids
from tests.tasks.test_scoring import chunked, token_by_token

ALWAYS = {"trust_remote_code": False, "output_loading_info": True, "ignore_mismatched_sizes": True}


class Untouchable(torch.nn.Module):
    """A model that must stay as it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.real = llama(layers=1, head_dim=32)
        self.config, self.base_model = self.real.config, self.real.model

    def forward(self, **kwargs: Any) -> Any:
        return self.real(**kwargs)

    def get_input_embeddings(self) -> Any:
        return self.real.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.real.get_output_embeddings()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("moved or cast")

    half = float = double = to


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `from_pretrained` is given; put a transformers configuration in under `config`."""
    seen: dict[str, Any] = {"config": LlamaConfig()}

    def load(path: str, **settings: Any) -> Any:
        seen.update(path=path, settings=settings)
        model = Untouchable() if "device_map" in settings else llama(layers=1, head_dim=32)
        return model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path, **settings: seen["config"])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    return seen


def test_one_device(asked: dict[str, Any]) -> None:
    loaded = load_model(ModelConfig("a", "some/model", revision="abc", dtype=Dtype.bfloat16), "cpu")
    assert asked["settings"] == {**ALWAYS, "revision": "abc", "dtype": torch.bfloat16}
    assert loaded.device == torch.device("cpu")
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_a_device_map_is_passed_on_and_nothing_is_moved(asked: dict[str, Any]) -> None:
    loaded = load_model(ModelConfig("a", "some/model", device_map="auto"), "cpu")
    assert asked["settings"] == {**ALWAYS, "revision": None, "dtype": torch.float32, "device_map": "auto"}
    assert loaded.device == torch.device("cpu")


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_quantized_weights_are_left_alone(asked: dict[str, Any], device_map: str | None) -> None:
    asked["config"] = LlamaConfig(quantization_config={"quant_method": "awq", "bits": 4})
    load_model(ModelConfig("a", "some/model", dtype=Dtype.float16, device_map=device_map), "cpu")
    place = device_map or {"": torch.device("cpu")}
    assert asked["settings"] == {**ALWAYS, "revision": None, "dtype": "auto", "device_map": place}
    with pytest.raises(Unsupported, match=r"model\.outliers: the weights of some/model are quantized"):
        load_model(ModelConfig("a", "some/model", outliers=OutliersConfig(key_pairs=1)), "cpu")


def test_device_maps_by_name() -> None:
    for name in (*DEVICE_MAPS, "null"):
        assert resolve(compose([f"model.device_map={name}"])).model.device_map == (None if name == "null" else name)
    with pytest.raises(ConfigError, match=r"model\.device_map=atuo: one of auto, .* Did you mean 'auto'"):
        ModelConfig("a", "b", device_map="atuo")


def test_a_real_device_map(tmp_path: Any) -> None:
    """On one device, through accelerate: the same logits."""
    pytest.importorskip("accelerate")
    llama(layers=1, head_dim=32).save_pretrained(tmp_path)
    plain, mapped = (
        load_model(ModelConfig("a", str(tmp_path), device_map=device_map), "cpu") for device_map in (None, "auto")
    )
    tokens, one = token_ids(30), method("kivi")
    bounds = scoring_bounds(one, 29)
    on = tokens.to(mapped.device)
    torch.testing.assert_close(chunked(mapped, one, on, bounds).cpu(), chunked(plain, one, tokens, bounds))


def test_a_layer_that_waits_on_disk(tmp_path: Any) -> None:
    """Weights are brought for a forward and taken away after it; what the layer caches stays where it computes."""
    pytest.importorskip("accelerate")
    llama(layers=2, head_dim=32).save_pretrained(tmp_path)
    plain = load_model(ModelConfig("a", str(tmp_path)), "cpu")
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "disk")
    waiting = LoadedModel(model.eval(), torch.device("cpu"))
    assert {str(weight.device) for weight in model.model.layers[1].parameters()} == {"meta"}
    tokens = token_ids(30)
    for name in ("kivi", "nsnquant"):
        one = method(name)
        bounds = scoring_bounds(one, 29)
        torch.testing.assert_close(chunked(waiting, one, tokens, bounds), chunked(plain, one, tokens, bounds))
        cache = KVCache(model, one)
        waiting.hidden_states(tokens, cache)
        cache.save(tmp_path / name)
        again = KVCache.load(tmp_path / name, plain.model, one)  # its weights have the same name
        assert torch.equal(waiting.hidden_states(tokens[:, :1], cache), plain.hidden_states(tokens[:, :1], again))


def qwen3_vl() -> Qwen3VLConfig:
    text = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    ids = {"image_token_id": 58, "video_token_id": 59, "vision_start_token_id": 57, "vision_end_token_id": 56}
    return Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}, **ids)


def test_a_model_of_text_and_images_reads_text(tmp_path: Any) -> None:
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(qwen3_vl()).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig("vl", str(tmp_path)), "cpu")
    tokens = token_ids(45) % 50
    plain = torch.log_softmax(loaded.model(input_ids=tokens, use_cache=False).logits, -1)[:, :-1]
    for name in ("identity", "fp16"):
        one = method(name)
        torch.testing.assert_close(chunked(loaded, one, tokens, scoring_bounds(one, 44)), plain, atol=1e-4, rtol=0)
    for name in ("kivi", "nsnquant"):
        one = method(name)
        got = chunked(loaded, one, tokens, scoring_bounds(one, 44))
        close = (got - token_by_token(loaded, one, tokens)).abs()
        assert float(close.mean()) < 1e-2
        assert float((got - plain).abs().max()) > 0.1


def test_capped_logits_are_followed() -> None:
    loaded = family("gemma2")
    tokens = token_ids(20)
    loaded.text_config.final_logit_softcapping = 2.0
    expected = loaded.model(tokens, use_cache=False).logits
    hidden = loaded.model.base_model(tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(loaded.logits(hidden), expected)
    assert float(expected.abs().max()) > 1.5


def test_memory_attention_and_form_are_passed_on(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "BitsAndBytesConfig", dict)
    limits = {0: "20GiB", "cpu": "60GiB"}
    given = ModelConfig("a", "m", device_map="auto", max_memory=limits, load_in="4bit", attn_implementation="eager")
    load_model(given, "cpu")
    found = asked["settings"]
    assert (found["max_memory"], found["device_map"], found["attn_implementation"]) == (limits, "auto", "eager")
    assert found["quantization_config"] == {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    load_model(ModelConfig("a", "m", load_in="8bit"), "cpu")
    assert asked["settings"]["device_map"] == {"": torch.device("cpu")}
    assert asked["settings"]["quantization_config"]["load_in_8bit"] is True


@pytest.mark.parametrize(
    ("load_in", "stored", "reason"),
    [
        ("4bit", "gptq", r"model\.load_in=4bit: the weights of m are quantized by gptq$"),
        ("gptq", None, r"model\.load_in=gptq: the weights of m are not quantized$"),
        ("awq", "gptq", r"model\.load_in=awq: the weights of m are quantized by gptq"),
    ],
)
def test_forms_that_a_checkpoint_has_not(asked: dict[str, Any], load_in: str, stored: str | None, reason: str) -> None:
    if stored is not None:
        asked["config"] = LlamaConfig(quantization_config={"quant_method": stored, "bits": 4})
    with pytest.raises(ConfigError, match=reason):
        load_model(ModelConfig("a", "m", load_in=load_in), "cpu")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.load_in=3bit", "model.load_in=3bit: one of 4bit, 8bit, gptq, awq"),
        ("model.max_memory={0: 20GiB}", "model.max_memory={0: '20GiB'}: sizes by device for model.device_map=auto"),
        ("model.attn_implementation=''", "model.attn_implementation="),
    ],
)
def test_settings_of_loading_are_checked(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        resolve(compose([override]))


def test_what_decides_numbers_is_in_the_key() -> None:
    """And by default nothing is, so that older keys stay valid."""

    def model(*overrides: str) -> dict[str, Any]:
        found: dict[str, Any] = canonical(resolve(compose(list(overrides))), "m", "d")["model"]
        return found

    plain = model()
    assert not plain.keys() & {"load_in", "attn_implementation", "max_memory"}
    assert model("model.device_map=auto", "model.max_memory={cpu: 1GiB}") == plain
    assert model("model.load_in=gptq") == plain
    assert model("model.load_in=8bit") == plain | {"load_in": "8bit"}
    assert model("model.attn_implementation=eager") == plain | {"attn_implementation": "eager"}


def test_window_layers_are_in_the_key_where_they_are_kept() -> None:
    plain, kept = (canonical(resolve(compose(given)), "m", "d") for given in ([], ["cache.window_layers=keep"]))
    assert "window_layers" not in plain
    assert kept == plain | {"window_layers": "keep"}
    whole = canonical(resolve(compose(["cache.window_layers=keep", "method=fp16"])), "m", "d")
    assert "window_layers" not in whole


def test_a_model_that_waits_on_disk_decodes_as_one_in_memory(tmp_path: Path) -> None:
    """accelerate brings each layer's weights where it computes; the cache's tensors lie there."""
    pytest.importorskip("accelerate")
    folder = save_random_model(tmp_path / "model")
    near = load_model(ModelConfig("a", str(folder)), "cpu")
    far = load_model(ModelConfig("a", str(folder), device_map="auto", max_memory={"cpu": "200KB"}), "cpu")
    assert any(weight.device.type == "meta" for weight in far.model.parameters())
    assert far.device == torch.device("cpu")
    one = kvq.build_method("kivi", bits=2, head_dim=128, overrides=["residual.size=8"])
    out = []
    for loaded in (near, far):
        cache = KVCache(loaded.model, one)
        tokens = torch.arange(40)[None] % 256
        out.append(loaded.model.generate(tokens, past_key_values=cache, max_new_tokens=5, do_sample=False))
        assert cache.kv_layers[0].device.type == "cpu"
    assert torch.equal(*out)
