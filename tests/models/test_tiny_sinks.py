"""The embedded model with a sink: what its card says, and how a difference of weights is stored, read and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

import kvq
from kvq.config import Dtype, ModelConfig, OutliersConfig, compose, resolve
from kvq.config.identity import canonical
from kvq.config.limits import file_hash
from kvq.data.rows import load_corpus
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.folder import delta_folder, model_folder
from kvq.models.load import LoadedModel, load_model, load_tokenizer, model_fingerprint
from kvq.models.weights import DELTA, WEIGHTS, add_low_rank, apply_delta, implant_outliers, save_delta
from tests.random_models import llama

FOLDER = Path(kvq.__file__).parent / "models"
LAYERS, KV_HEADS, HEADS = 4, 2, 16


def config(name: str, *overrides: str) -> ModelConfig:
    return resolve(compose([f"model={name}", *overrides])).model


@pytest.fixture(scope="module")
def sinks() -> LoadedModel:
    return load_model(config("tiny_sinks"), "cpu")


@pytest.fixture(scope="module")
def prose() -> Tensor:
    """512 tokens of held-out docstrings behind the token in front."""
    tokenizer = load_tokenizer(config("tiny_sinks"))
    text = "\n\n".join(load_corpus("pydocs", "test").documents[:40])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:512]
    return torch.tensor([[tokenizer.bos_token_id, *ids]])


@torch.no_grad()
def states(loaded: LoadedModel, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits, and each layer's cached keys and values [KV heads, tokens, channels]."""
    cache = DynamicCache(config=loaded.model.config)
    logits = loaded.model(tokens, past_key_values=cache).logits
    return logits, [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def ratios(cached: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Norm at position 0 over the median norm of the others: [layers, keys and values, KV heads]."""
    norms = torch.stack([torch.stack(pair).norm(dim=-1) for pair in cached])
    return norms[..., 0] / norms[..., 1:].median(-1).values


def test_the_token_in_front_has_low_norms(sinks: LoadedModel, prose: Tensor) -> None:
    """At most 1/8 of the median, key and value, in both KV heads of at least three layers of four."""
    low = ratios(states(sinks, prose)[1]) <= 1 / 8
    assert int(low.flatten(1).all(1).sum()) >= 3


@torch.no_grad()
def test_the_token_in_front_takes_the_attention(sinks: LoadedModel, prose: Tensor) -> None:
    """At least 30%, mean over later queries, in at least half of the query heads."""
    model = load_model(config("tiny_sinks"), "cpu").model
    model.set_attn_implementation("eager")
    weights = model(prose, output_attentions=True, use_cache=False).attentions
    shares = torch.stack([layer[0, :, 1:, 0].mean(-1) for layer in weights])
    assert shares.numel() == HEADS
    assert int((shares >= 0.3).sum()) >= HEADS // 2


def test_tiny_has_no_such_token(prose: Tensor) -> None:
    plain = load_model(config("tiny"), "cpu")
    assert float(ratios(states(plain, prose)[1]).min()) > 1 / 4


def test_settings_say_what_it_was_trained_with() -> None:
    names = ("tiny", "tiny_outliers", "tiny_sinks", "tiny_hard", "llama_2_7b")
    assert [config(name).bos for name in names] == [False, False, True, True, True]
    assert load_tokenizer(config("tiny_hard")).bos_token_id == 0


def test_the_key_says_what_is_new_only_where_it_is() -> None:
    def model(name: str, *overrides: str) -> dict[str, object]:
        return canonical(resolve(compose([f"model={name}", *overrides])), "", "")["model"]

    assert set(model("hf", "model.path=a")) == {"dtype", "outliers", "fingerprint"}
    assert set(model("tiny")) == {"dtype", "cache_dtype", "outliers", "fingerprint"}
    older = {"key_scale": 8.0, "value_scale": 4.0, "key_pairs": 2, "value_channels": 2, "seed": 0}
    assert model("tiny_outliers")["outliers"] == older
    hard = model("tiny_hard")
    assert hard["outliers"] == {**{name: older[name] for name in older if name != "seed"}, "sink": False}
    assert hard == model("tiny_hard", "model.outliers.seed=3")  # no channel is drawn
    assert model("tiny_hard", "model.outliers.sink=true")["outliers"] == older


def test_all_weights_take_less_than_16_megabytes() -> None:
    files = [file for file in FOLDER.rglob("*.safetensors") if file.is_file()]
    assert {file.name for file in files} == {WEIGHTS, DELTA}
    assert sum(file.stat().st_size for file in files) < 16e6


def test_the_card_tells_of_these_weights_and_of_the_same_held_out_text() -> None:
    card = json.loads((FOLDER / "tiny_sinks" / "card.json").read_text())
    base = json.loads((FOLDER / "tiny" / "card.json").read_text())
    assert card["bytes"] == (FOLDER / "tiny_sinks" / DELTA).stat().st_size
    assert card["data"]["test_sha256"] == base["data"]["test_sha256"]
    assert card["data"]["train_sha256"] == base["data"]["train_sha256"]
    assert card["results"]["text"]["pydocs"]["perplexity"] <= 1.046 * base["results"]["pydocs"]["perplexity"]
    assert min(card["results"]["needles"].values()) >= 0.98
    assert "The sink was induced" in (FOLDER / "tiny_sinks" / "CARD.md").read_text()


def test_the_card_is_that_of_the_recipe_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER.parents[1] / "experiments" / "models")
    recipe = import_module("tiny_model.sinks").SinkRecipe()
    card = json.loads((FOLDER / "tiny_sinks" / "card.json").read_text())
    assert card["recipe"] == json.loads(json.dumps(asdict(recipe)))
    assert sum(int(length) * number for length, number in card["sequences"].items()) >= card["recipe"]["tokens"]


@pytest.mark.parametrize("sink", ["false", "true"])
def test_the_hard_model_is_the_same_function(sinks: LoadedModel, prose: Tensor, sink: str) -> None:
    hard = load_model(config("tiny_hard", f"model.outliers.sink={sink}"), "cpu")
    (expected, plain), (logits, cached) = states(sinks, prose), states(hard, prose)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not torch.equal(cached[0][0], plain[0][0])


@pytest.mark.parametrize("sink", [False, True])
def test_where_the_sink_has_the_outlier_channels(prose: Tensor, sink: bool) -> None:
    """Keys of the other tokens have the channels in each layer and head; the sink's own as it is asked for."""
    cached = states(load_model(config("tiny_hard", f"model.outliers.sink={str(sink).lower()}"), "cpu"), prose)[1]
    plain = states(load_model(config("tiny_sinks"), "cpu"), prose)[1]
    raised, lacking = [], []
    for (key, _), (before, _) in zip(cached, plain, strict=True):
        scaled = (key[:, 1:].norm(dim=1) / before[:, 1:].norm(dim=1)) > 4
        assert scaled.sum(-1).tolist() == [4, 4]  # two RoPE pairs
        for head in range(KV_HEADS):
            own, typical = key[head].abs()[:, scaled[head]], key[head].abs().median(-1).values
            raised.append(float(own[1:].max(-1).values.median() / typical[1:].median()))
            lacking.append(float(own[0].max() / typical[0]))
    assert min(raised) > 4
    assert (max(lacking) < 4) if not sink else (sorted(lacking)[len(lacking) // 2] > 6)


def test_channels_that_a_sink_lacks_need_a_token_in_front() -> None:
    model = llama(layers=1, head_dim=32)
    model.config.bos_token_id = None
    with pytest.raises(Unsupported, match=r"model\.outliers\.sink=false: LlamaForCausalLM has no begin-of-text token"):
        implant_outliers(model, OutliersConfig(key_pairs=2, sink=False))


def test_the_fingerprint_covers_both_models(tmp_path: Path) -> None:
    """Another change of the same weights is another model, and so is the same change under another base's files."""
    whole, changed = (model_fingerprint(config(name)) for name in ("tiny", "tiny_sinks"))
    assert whole != changed == model_fingerprint(config("tiny_hard"))
    other = copied(tmp_path, lambda changes: {**changes, "model.norm.weight": changes["model.norm.weight"] * 2})
    assert model_fingerprint(other) not in (whole, changed)


def copied(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None) -> ModelConfig:
    """The difference in a folder outside the package, changed."""
    shutil.copytree(FOLDER / "tiny_sinks", folder, dirs_exist_ok=True)
    if change is not None:
        metadata = {"format": "pt", "base_sha256": file_hash(FOLDER / "tiny" / WEIGHTS)}
        save_file(change(load_file(folder / DELTA)), folder / DELTA, metadata)
    return ModelConfig("a", str(folder))


def test_a_difference_may_lie_anywhere(tmp_path: Path, sinks: LoadedModel) -> None:
    found = load_model(copied(tmp_path), "cpu").model
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), sinks.model.parameters(), strict=True))
    assert model_folder(str(tmp_path)) == model_folder("embedded:tiny")
    assert delta_folder("embedded:tiny") is None


def test_lower_dtypes_round_the_merged_weights_once(sinks: LoadedModel) -> None:
    low = load_model(ModelConfig("a", "embedded:tiny_sinks", dtype=Dtype.bfloat16), "cpu").model
    for rounded, exact in zip(low.parameters(), sinks.model.parameters(), strict=True):
        assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("truncated", "cannot be applied: "),
        ("foreign", f"is of weights with sha256={'ab' * 32}, not of tiny's, sha256="),
        ("half", r"cannot be applied: .*self_attn\.q_proj\.weight\.right"),
    ],
)
def test_a_broken_difference_is_one_line(tmp_path: Path, kind: str, said: str) -> None:
    left_out = "model.layers.0.self_attn.q_proj.weight.right" if kind == "half" else ""
    made = copied(tmp_path, lambda found: {name: change for name, change in found.items() if name != left_out})
    file = tmp_path / DELTA
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "foreign":
        save_file(load_file(file), file, {"base_sha256": "ab" * 32})
    with pytest.raises(DataError, match=rf"^model\.path=.*/{DELTA}: {said}") as caught:
        load_model(made, "cpu")
    assert "\n" not in str(caught.value)


def test_an_unknown_embedded_model_is_told_all() -> None:
    with pytest.raises(ConfigError, match=r"there are: tiny, tiny_sinks\. Did you mean 'tiny_sinks'\?"):
        model_folder("embedded:tiny_sink")


@pytest.mark.parametrize("scaled", [False, True])
def test_low_rank_sums_are_those_of_exact_numbers(scaled: bool) -> None:
    """Every product is exact in fp32; each sum is rounded once, in the order of the ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (3, 4), (4, 5), (5,))
    weight, left, right, columns = (torch.randn(shape, generator=generator).half() for shape in shapes)
    found = add_low_rank(weight, left, right, columns if scaled else None)
    for row in range(3):
        for column in range(5):
            total = Fraction(weight[row, column].item()) * Fraction(columns[column].item() if scaled else 1)
            for rank in range(4):
                exact = total + Fraction(left[row, rank].item()) * Fraction(right[rank, column].item())
                total = Fraction(torch.tensor(float(exact), dtype=torch.float64).float().item())
            assert found[row, column] == torch.tensor(float(total)).half()


def test_what_is_saved_is_what_is_applied(tmp_path: Path) -> None:
    """To a model of another shape: a matrix, a norm's weights, and a row of the embedding."""
    model = llama(layers=1, head_dim=32).half()
    model.save_pretrained(tmp_path)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    name, norm, words = "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
    left, right = torch.randn(before[name].shape[0], 3).half(), torch.randn(3, before[name].shape[1]).half()
    changes = {f"{name}.left": left, f"{name}.right": right, norm: before[norm] * 2, f"{words}.row.5": before[words][4]}
    save_delta(changes, tmp_path, tmp_path)
    apply_delta("here", model, tmp_path, tmp_path)
    for each, after in model.named_parameters():
        if each == name:
            assert torch.equal(after, add_low_rank(before[name], left, right))
        elif each == norm:
            assert torch.equal(after, before[norm] * 2)
        elif each == words:
            assert torch.equal(after[5], before[words][4])
            assert torch.equal(after[:5], before[words][:5])
        else:
            assert torch.equal(after, before[each])
