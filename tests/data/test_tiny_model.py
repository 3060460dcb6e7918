"""The embedded model does on the embedded corpora what its card says."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.models.tiny_model.evaluation import bits_per_byte, needle_accuracy
from kvq.data.embedded import load_corpus

FOLDER = Path(__file__).parents[2] / "kvq" / "models" / "tiny"
CARD = json.loads((FOLDER / "card.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture
def _same_text():
    packages = ("matplotlib", "networkx", "numpy", "pandas", "scikit-learn", "scipy", "sympy")
    if other := [name for name in packages if version(name) != CARD["versions"][name]]:
        pytest.skip(f"the corpus is that of other versions than the card's: {', '.join(other)}")


@pytest.mark.usefixtures("_same_text")
@pytest.mark.parametrize("kind", ["pydocs", "pysource"])
def test_held_out_text_is_the_cards(kind):
    assert load_corpus(kind, "test").fingerprint == CARD["data"]["test_sha256"][kind]


@pytest.mark.parametrize("kind", ["pydocs", "pysource"])
def test_held_out_text_has_200_000_tokens(kind, tokenizer):
    text = "\n\n".join(load_corpus(kind, "test").documents)
    assert len(tokenizer(text, verbose=False)["input_ids"]) >= 200_000


def test_digits_are_tokens_of_their_own_and_nothing_is_added(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("is 4829.")["input_ids"])[-6:] == ["Ġ", "4", "8", "2", "9", "."]
    text = "Any\n\ttext — Ω, naïve  spaces: 🙂 12"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_card_meets_the_bars():
    assert CARD["results"]["pydocs"]["bits_per_byte"] <= 1.12
    assert all(CARD["results"]["needles"][length] >= 0.95 for length in ("512", "1024", "2048"))
    assert CARD["minutes"] <= 120
    assert CARD["bytes"] == (FOLDER / "model.safetensors").stat().st_size <= 15.5e6


def test_card_is_that_of_the_recipe_in_the_repository(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parents[2] / "experiments" / "models")
    from tiny_model.recipe import Recipe

    assert CARD["recipe"] == json.loads(json.dumps(asdict(Recipe())))
    assert CARD["curve"][-1]["text"] < CARD["curve"][0]["text"] / 2
    assert sum(int(length) * number for length, number in CARD["sequences"].items()) >= CARD["recipe"]["tokens"]


@pytest.mark.parametrize(("length", "count"), [(512, 30), (2048, 12)])
@pytest.mark.long
def test_fresh_needles_are_found(model, tokenizer, length, count):
    assert needle_accuracy(model, tokenizer, length=length, count=count, seed=20) >= 0.9


@pytest.mark.long
@pytest.mark.usefixtures("_same_text")
def test_bits_per_byte_are_the_cards(model, tokenizer):
    measured = bits_per_byte(model, tokenizer, "pydocs")
    assert measured["bits_per_byte"] == pytest.approx(CARD["results"]["pydocs"]["bits_per_byte"], abs=2e-4)
