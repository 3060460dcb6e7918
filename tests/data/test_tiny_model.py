"""The embedded model does on the embedded corpora what its card says."""

from __future__ import annotations

import ast
import hashlib
import json
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.models.tiny_model.evaluation import bits_per_byte, needle_accuracy
from kvq.data import rows
from kvq.data.rows import contains_any, extract_docstrings, index_by_anchor, is_in_split, load_corpus, normalize
from kvq.errors import ConfigError

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


SOURCE = '''
"""A module's own words, of which there are enough to be worth keeping here at all."""

class Thing:
    """A class's words, indented,
    over two lines, and enough of them too: this makes well above twelve.
    """

    def short(self):
        """Too short."""

    async def method(self):
        if self:
            def inner():
                """An inner function's words, which count as well when there are twelve or more of them."""

def last(x="""A default value is no docstring however long it may be, and is not taken for one."""):
    return x
'''


def test_docstrings_in_order_without_short_ones():
    first_words = [text.split()[:2] for text in extract_docstrings(SOURCE)]
    assert first_words == [["A", "module's"], ["A", "class's"], ["An", "inner"]]
    assert "\nover two lines" in list(extract_docstrings(SOURCE))[1]


def test_modules_are_sorted_and_without_tests_or_generated_files():
    paths = list(rows.find_modules())
    assert paths == sorted(paths)
    assert len({path.split("/")[0] for path in paths}) == len(rows.PACKAGES)
    assert not [path for path in paths if "/tests/" in path or path.endswith(("/version.py", "__config__.py"))]


def test_held_out_by_the_sha256_of_the_path():
    shares = {path: int(hashlib.sha256(path.encode()).hexdigest()[:16], 16) / 16**16 for path in rows.find_modules()}
    assert all(is_in_split(path, "test") == (share < rows.TEST_FRACTION) for path, share in shares.items())


def test_test_split_is_read_quickly_and_the_same_each_time():
    load_corpus.cache_clear()
    began = time.process_time()
    first = {kind: load_corpus(kind, "test") for kind in ("pydocs", "pysource")}
    assert time.process_time() - began < 10  # about one second without the checking of types
    load_corpus.cache_clear()
    assert first == {kind: load_corpus(kind, "test") for kind in ("pydocs", "pysource")}
    digest = hashlib.sha256("".join(text + "\0" for text in first["pydocs"].documents).encode())
    assert first["pydocs"].fingerprint == digest.hexdigest()


def test_held_out_docstrings_are_those_of_held_out_sources():
    sources = load_corpus("pysource", "test").documents
    inside = {normalize(text) for source in sources for text in extract_docstrings(source)}
    assert {normalize(text) for text in load_corpus("pydocs", "test").documents} == inside


def test_no_document_is_there_twice():
    for kind in ("pydocs", "pysource"):
        texts = [normalize(text) for text in load_corpus(kind, "test").documents]
        assert len(set(texts)) == len(texts)


def test_contains_any_finds_whole_words_anywhere():
    held_out = "one two three four five six seven eight nine ten eleven twelve"
    index = index_by_anchor([held_out, held_out.replace("twelve", "dozen")])
    assert contains_any(f"before {held_out} after", index)
    assert contains_any(held_out, index)
    assert not contains_any(f"{held_out.removesuffix('twelve')} twenty", index)
    assert not contains_any(f"{held_out}s", index)
    assert not contains_any("short", index)


def test_normalize_sees_through_indentation_case_and_quotes():
    assert normalize('r"""The  First\n    line,\n') == normalize("r the first line")


def test_a_kind_misspelled():
    with pytest.raises(ConfigError, match=r"name=pydoc: one of pydocs, pysource\. Did you mean 'pydocs'"):
        load_corpus("pydoc", "test")


@pytest.mark.long
def test_no_held_out_docstring_is_in_training():
    """By plain substring search, which shares nothing with the index that does the dropping."""
    held_out = [normalize(text) for text in load_corpus("pydocs", "test").documents]
    assert len(held_out) > 500
    for kind in ("pydocs", "pysource"):
        documents = load_corpus(kind, "train").documents
        assert len(documents) > 2000
        training = " \n ".join(map(normalize, documents))
        assert not [text for text in held_out if f" {text} " in training]


@pytest.mark.long
def test_no_held_out_source_or_its_parsed_docstrings_are_in_training():
    training = load_corpus("pysource", "train").documents
    assert not {normalize(text) for text in load_corpus("pysource", "test").documents} & set(map(normalize, training))
    held_out = {normalize(text) for text in load_corpus("pydocs", "test").documents}
    for source in training:
        assert not held_out & {normalize(text) for text in extract_docstrings(source)}
        ast.parse(source)


@pytest.mark.slow
def test_each_test_split_has_enough_text():
    """200,000 tokens at four bytes a token, which the embedded tokenizer stays under."""
    for kind in ("pydocs", "pysource"):
        assert sum(len(text.encode()) for text in load_corpus(kind, "test").documents) > 800_000
