"""How checkpoints are asked for: dtype, placement, quantized weights, models of text and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from kvq.cache import KVCache
from kvq.config import Dtype, ModelConfig, OutliersConfig, compose, resolve
from kvq.config.identity import canonical
from kvq.config.run import DEVICE_MAPS
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel, load_model
from kvq.models.weights import round_to_nearest, rounded_weights
from kvq.runs import Prepared, run
from kvq.tasks.scoring import scoring_bounds
from tests.families import family
from tests.models.test_families import method
from tests.properties import examples
from tests.random_models import llama, token_ids
from tests.tasks.test_scoring import chunked

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


def test_capped_logits_are_followed() -> None:
    loaded = family("gemma2")
    tokens = token_ids(20)
    loaded.text_config.final_logit_softcapping = 2.0
    expected = loaded.model(tokens, use_cache=False).logits
    hidden = loaded.model.base_model(tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(loaded.logits(hidden), expected)
    assert float(expected.abs().max()) > 1.5


def test_memory_and_attention_are_passed_on(asked: dict[str, Any]) -> None:
    limits = {0: "20GiB", "cpu": "60GiB"}
    given = ModelConfig("a", "m", device_map="auto", max_memory=limits, attn_implementation="eager")
    load_model(given, "cpu")
    found = asked["settings"]
    assert (found["max_memory"], found["device_map"], found["attn_implementation"]) == (limits, "auto", "eager")


def test_what_decides_numbers_is_in_the_key() -> None:
    """And by default nothing is, so that older keys stay valid."""

    def model(*overrides: str) -> dict[str, Any]:
        found: dict[str, Any] = canonical(resolve(compose(list(overrides))), "m", "d")["model"]
        return found

    plain = model()
    assert not plain.keys() & {"attn_implementation", "max_memory"}
    assert model("model.device_map=auto", "model.max_memory={cpu: 1GiB}") == plain
    assert model("model.attn_implementation=eager") == plain | {"attn_implementation": "eager"}


TEXT = "task=ppl task.context=256 task.max_windows=1 task.scoring=parallel task.windows=disjoint".split()


@settings(max_examples=examples(8))
@given(rows=st.integers(1, 5), columns=st.integers(1, 300), bits=st.integers(2, 8), seed=st.integers(0, 99))
def test_a_weight_is_rounded_to_even_steps_of_its_group(rows: int, columns: int, bits: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
    found = round_to_nearest(weight, bits)
    for row in range(rows):
        for start in range(0, columns, 128):
            own = weight[row, start : start + 128].double()
            step = (own.max() - own.min()) / (2**bits - 1)
            left = (found[row, start : start + 128] - own).abs().max()
            assert left <= step * 0.5001 + 1e-6
            assert len(found[row, start : start + 128].unique()) <= 2**bits


def test_the_weights_come_back_and_the_output_embedding_stays() -> None:
    model = llama(head_dim=32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with rounded_weights(model, 3):
        changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".layers." in name and before[name].ndim == 2}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_weights_that_are_no_linear_layers_cannot_be_rounded() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=70))
    with pytest.raises(Unsupported, match=r"c_attn\.weight would stay as it is"), rounded_weights(model, 2):
        pass


def test_a_rotation_is_merged_before_the_weights_are_rounded() -> None:
    model = llama(head_dim=32)
    merged = build_method("oscar", 2, head_dim=32, overrides=["merge_rotation=true"]).merged
    assert merged is not None
    matrix = model.model.layers[0].self_attn.v_proj.weight
    with merged.in_weights(model):
        turned = matrix.detach().clone()
        with rounded_weights(model, 4):
            assert torch.equal(matrix, round_to_nearest(turned, 4))
        assert torch.equal(matrix, turned)


@pytest.mark.long
def test_a_run_names_its_rounded_weights_and_has_a_baseline_under_them(tmp_path: Path) -> None:
    given = ["model=tiny", "method=kivi", "bits=2", f"results_dir={tmp_path}", *TEXT]
    plain, fewer = (run(resolve(compose([*given, *more]))) for more in ([], ["model.round_weights=3"]))
    assert fewer.config["model"].pop("round_weights") == 3
    assert fewer.config == plain.config
    assert fewer.baseline_key != plain.baseline_key
    assert fewer.metrics["perplexity"] > plain.metrics["perplexity"]


@pytest.mark.parametrize("more", [["method=cq"], ["task=latency"]])
def test_tables_fitted_to_other_weights_and_times_are_refused(more: list[str]) -> None:
    prepared = Prepared(resolve(compose(["model=tiny", "model.round_weights=4", *more])))
    with pytest.raises(Unsupported, match=r"^model\.round_weights=4: not with "):
        _ = prepared.method
