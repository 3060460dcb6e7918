"""`task=generate`: greedy texts side by side, what they share, what they repeat, what their caches take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq import cli
from kvq.config import compose, resolve
from kvq.errors import ConfigError, DataError, KvqError
from kvq.report.html import render
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import MARK, csv
from kvq.results import Record, Store
from kvq.runs import run
from kvq.tasks.reader import PROMPT, repetition
from tests.random_models import save_random_model

TEXT = "keys and values of all the tokens that came before, " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("generate") / "model")


def settings(folder: Path, *overrides: str) -> list[str]:
    model = ["model=hf", f"model.path={folder}", "model.dtype=float32", "device=cpu"]
    own = ["task=generate", "task.max_new_tokens=24", f"results_dir={folder.parent / 'results'}"]
    return [*own, *model, *overrides]


def written(folder: Path, *overrides: str, prompt: str = TEXT) -> tuple[Record, dict[str, object]]:
    (folder.parent / "prompt.txt").write_text(prompt, encoding="utf-8")
    asked = settings(folder, f"task.prompt_file={folder.parent / 'prompt.txt'}", *overrides)
    record = run(resolve(compose(asked)))
    assert record.status == "done", record.reason
    (sample,) = Store(folder.parent / "results").samples(record.key)
    return record, sample


@pytest.mark.parametrize(
    ("tokens", "length", "expected"),
    [
        ([5, 5, 5, 5, 5], 4, 1 / 2),  # two 4-grams, one of them new
        (list(range(9)), 4, 0),
        ([1, 2, 1, 2, 1, 2], 2, 3 / 5),  # 12 21 12 21 12
        ([1, 2, 3], 4, 0),
    ],
)
def test_the_share_of_repeated_ngrams(tokens: list[int], length: int, expected: float) -> None:
    assert repetition(tokens, length) == pytest.approx(expected)


def test_full_precision_writes_what_transformers_writes(folder: Path) -> None:
    record, sample = written(folder, "method=fp16")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    expected = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
    assert sample["tokens"] == expected.tolist()
    assert sample["text"] == tokenizer.decode(expected)
    assert sample["prompt"] == TEXT
    assert record.metrics["prompt_tokens"] == ids.shape[1]
    assert record.metrics["new_tokens"] == 24
    # Prompt and new tokens but the last, keys and values, one KV head of 128 channels in two layers, fp32.
    assert record.metrics["total_bytes"] == (ids.shape[1] + 23) * 2 * 2 * 128 * 4


def test_a_method_is_compared_with_full_precision(folder: Path) -> None:
    _, full = written(folder, "method=fp16")
    same, _ = written(folder, "method=identity")
    assert same.metrics["same_tokens"] == same.metrics["new_tokens"] == 24
    record, sample = written(folder, "method=kivi", "bits=2")
    one, other = sample["tokens"], full["tokens"]
    assert isinstance(one, list)
    assert isinstance(other, list)
    shared = int(record.metrics["same_tokens"])
    assert one[:shared] == other[:shared]
    assert shared == 24 or one[shared] != other[shared]
    assert record.metrics["repetition"] == repetition(one, 4)
    assert record.metrics["effective_bits"] < 32
    assert record.config["dataset"]["loader"] == "items"


def test_the_text_of_the_prompt_names_the_run(folder: Path) -> None:
    one, _ = written(folder, "method=fp16")
    (folder.parent / "elsewhere.txt").write_text(TEXT, encoding="utf-8")
    elsewhere = f"task.prompt_file={folder.parent / 'elsewhere.txt'}"
    assert run(resolve(compose(settings(folder, elsewhere, "method=fp16")))).key == one.key
    other, _ = written(folder, "method=fp16", prompt=TEXT + "and")
    assert other.key != one.key


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (
            ["task.prompt_file=/nowhere/at/all"],
            DataError,
            r"task\.prompt_file=/nowhere/at/all: cannot be read \(No such",
        ),
        (["task.prompt=abc", "task.max_new_tokens=510"], ConfigError, r"after a prompt of 3 tokens; .* at most 512"),
    ],
)
def test_what_cannot_be_asked_is_one_line(overrides: list[str], kind: type[KvqError], said: str, folder: Path) -> None:
    with pytest.raises(kind, match=said) as raised:
        run(resolve(compose(settings(folder, "method=fp16", *overrides))))
    assert "\n" not in str(raised.value)


def test_texts_stand_below_the_table_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the documentation, on the embedded model with the task's own prompt."""
    monkeypatch.setenv("COLUMNS", "80")
    results = f"results_dir={tmp_path / 'results'}"
    assert cli.main(["-m", "task=generate", "method=nsn,identity", "bits=2", "task.max_new_tokens=16", results]) == 0
    printed = capsys.readouterr().out
    assert "generate: tiny on prompt" in printed
    for name in ("Eff.", "total_bytes", "Same", "Rep%"):
        assert name in printed
    store = Store(tmp_path / "results")
    (table,) = build_tables(store).tables
    assert table.texts is not None
    assert table.texts.prompt == PROMPT
    full, same, nsn = table.texts.continuations
    assert (same.shared, same.same) == ("the same text as full precision", full.same)
    samples = {record.method: store.samples(record.key)[0] for record in store.scan()[0]}
    assert full.same == samples["fp16"]["text"]
    assert nsn.same + nsn.differs + nsn.rest == samples["nsn"]["text"]
    assert full.same.startswith(nsn.same)
    assert f"Prompt: …{PROMPT[-160:][:40]}" in printed
    assert (MARK in printed) == bool(nsn.differs)
    page = render(build_tables(store))
    assert page.count("<figcaption>") == 3
    assert ("<mark>" in page) == bool(nsn.differs)
    assert 'href="#texts"' in page
    assert "same_tokens" in csv(table).splitlines()[0]
