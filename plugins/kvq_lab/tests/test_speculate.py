"""Speculative decoding: its text is greedy's, its counts follow from single steps, either side may be quantized."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.config import compose, resolve
from kvq.errors import ConfigError, DataError
from kvq.results import Record, Store
from kvq.runs import Prepared, run
from kvq.tasks.reader import shared
from kvq_lab.speculate import Rounds, acceptance_metrics
from kvq_lab.trajectory import Draws, Writer, cut_passages

GIVEN = "model=tiny task=speculate task.prompts=2 task.context=96 task.new_tokens=24 residual.size=16 threads=1".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("speculate")
    words = {
        "full": ["method=fp16"],
        "identity": ["method=identity"],
        "drafts": ["method=rtn", "bits=2"],
        "target": ["method=rtn", "bits=2", "task.drafts=full"],
    }
    runs = {name: run(resolve(compose([*GIVEN, *more, f"results_dir={folder}"]))) for name, more in words.items()}
    return Store(folder), runs


def test_texts_are_the_targets_own(made: tuple[Store, dict[str, Record]]) -> None:
    store, runs = made
    assert all(record.metrics["equal_texts"] == 1 for record in runs.values())
    texts = {name: [row["tokens"] for row in store.samples(record.key)] for name, record in runs.items()}
    assert texts["drafts"] == texts["identity"] == texts["full"]
    assert texts["target"] != texts["full"]


def test_a_draft_that_equals_its_target_is_always_right(made: tuple[Store, dict[str, Record]]) -> None:
    for name in ("full", "identity"):
        metrics = made[1][name].metrics
        assert metrics["acceptance"] == 1
        assert metrics["tokens_per_forward"] > 4.5
    quantized = made[1]["drafts"].metrics
    assert 0 < quantized["acceptance"] < 1
    assert 1 < quantized["tokens_per_forward"] < 5


def test_counts_follow_from_single_steps(made: tuple[Store, dict[str, Record]]) -> None:
    """On the target's text, a draft is right up to the first step at which the quantized cache would write another."""
    store, runs = made
    given = ["task=trajectory" if word == "task=speculate" else word for word in GIVEN]
    prepared = Prepared(resolve(compose([*given, "method=rtn", "bits=2"])))
    writer = Writer(prepared.inputs, prepared.method)
    for index, prompt in enumerate(cut_passages(prepared.inputs)):
        row = store.samples(runs["drafts"].key)[index]
        same, _, _ = writer.read_forced(prompt, row["tokens"], Draws(prepared.inputs.config.task, index))
        at, expected = 1, []
        for count in row["drafted"]:
            right = next((step for step in range(count) if not same[at + step]), count)
            expected.append(right)
            at += right + 1
        assert row["accepted"] == expected


def test_numbers_by_hand() -> None:
    rounds = Rounds([1, 2, 3], [4, 4], [4, 1])
    assert rounds.per_forward == 3.5
    assert shared([1, 2, 3], [1, 2, 4, 5]) == 2
    rows = [
        {"drafted": [4, 4], "accepted": [4, 1], "per_forward": 3.5, "equal": True},
        {"drafted": [4], "accepted": [0], "per_forward": 1.0, "equal": False},
        {"drafted": [], "accepted": [], "per_forward": 1.0, "equal": True},
    ]
    found = acceptance_metrics(rows)
    assert found["acceptance"] == pytest.approx(5 / 12)
    assert found["tokens_per_forward"] == pytest.approx(1 + 5 / 3)
    assert found["equal_texts"] == pytest.approx(2 / 3)
    assert found["acceptance_se"] == pytest.approx(0.3125)


def test_refusals(tmp_path: Path) -> None:
    for words, error in (
        ("task.new_tokens=100000", r"task\.new_tokens=100000"),
        ("task.length=0", r"task\.length=0"),
    ):
        with pytest.raises(ConfigError, match=error):
            run(resolve(compose([*GIVEN, "method=fp16", words, f"results_dir={tmp_path}"])))
    with pytest.raises(DataError, match=r"task\.prompts=5000"):
        run(resolve(compose([*GIVEN, "method=fp16", "task.prompts=5000", f"results_dir={tmp_path}"])))
