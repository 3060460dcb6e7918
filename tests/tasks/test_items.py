"""What every task of items shares: each item once, comparisons with full precision, the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvq.config.tasks import NiahConfig
from kvq.errors import DataError
from kvq.results.files import Journal
from kvq.tasks.items import Items, Scored, by_part, compare, measure_items, score_items
from kvq.tasks.measurement import Baseline

TASK = NiahConfig(margin=0.1, resamples=200)


def rows(scores: Sequence[float]) -> list[dict[str, Any]]:
    return [{"item": f"item {index}", "score": float(score)} for index, score in enumerate(scores)]


def baseline(scores: Sequence[float], **metrics: float) -> Baseline:
    return Baseline("0" * 64, metrics, rows(scores))


def batches(count: int, size: int) -> Items[int]:
    numbers = list(range(count))
    return Items([numbers[start : start + size] for start in range(0, count, size)], lambda n: f"item {n}")


def scored(batch: Sequence[int], wrong: int = -1) -> list[Scored]:
    cost = {
        "prompt_tokens": 10.0,
        "read_tokens": 5.0,
        "new_tokens": 2.0,
        "prefill": 0.5,
        "decode": 0.1,
        "key_bits": 3.0,
    }
    return [Scored({"item": f"item {n}", "score": float(n != wrong)}, cost) for n in batch]


def test_an_interrupted_run_scores_the_rest_and_nothing_twice(tmp_path: Path) -> None:
    asked: list[int] = []

    def score(batch: Sequence[int]) -> list[Scored]:
        if len(asked) == 6 and 6 in batch:
            raise KeyboardInterrupt
        asked.extend(batch)
        return scored(batch)

    path = tmp_path / "partial.jsonl"
    with pytest.raises(KeyboardInterrupt):
        score_items(batches(10, 2), score, Journal(path, "code"), "label")
    assert asked == [0, 1, 2, 3, 4, 5]
    asked.append(-1)
    found = score_items(batches(10, 2), score, Journal(path, "code"), "label")
    assert asked == [0, 1, 2, 3, 4, 5, -1, 6, 7, 8, 9]
    assert found == scored(range(10))


def test_metrics_of_a_run_and_the_noise_floor_in_another_batch_order() -> None:
    sizes: list[int] = []

    def score(batch: Sequence[int]) -> list[Scored]:
        sizes.append(len(batch))
        return scored(batch, wrong=3 if len(batch) < 4 else -1)

    found = measure_items(batches(9, 4), score, TASK, Journal(), None, "label")
    # 4, 4 and 1 items, then halves from the end, the single one beside itself.
    assert sizes == [4, 4, 1, 2, 2, 2, 2, 2]
    assert found.metrics == {
        "accuracy": 1.0,
        "items": 9.0,
        "skipped_items": 0.0,
        "prompt_tokens": 90.0,
        "read_tokens": 45.0,
        "new_tokens": 18.0,
        "prefill_tokens_per_second": pytest.approx(10.0),
        "decode_tokens_per_second": pytest.approx(20.0),
        "key_bits": 3.0,
        "noise_flips": pytest.approx(1 / 9),
    }
    assert set(found.units) == set(found.metrics)
    assert [row["score"] for row in found.samples] == [1.0] * 9


def test_skipped_items_are_in_the_samples_and_nothing_left_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    items = Items([[0, 1]], lambda n: f"item {n}", {"item 7": "too long"})
    found = measure_items(items, scored, TASK, Journal(), baseline([1, 1]), "label")
    assert found.samples[-1] == {"item": "item 7", "skipped": "too long"}
    assert found.metrics["skipped_items"] == 1
    assert "1 skipped items: item 7: too long" in capsys.readouterr().err
    with pytest.raises(DataError, match="no item can be scored; the first: item 7: too long"):
        measure_items(Items([], str, {"item 7": "too long"}), scored, TASK, Journal(), None, "label")


def test_right_and_wrong_answers_are_compared_by_mcnemar() -> None:
    found = compare(rows([0] * 9 + [1] * 91), baseline([1] * 8 + [0] + [1] * 91), TASK, "accuracy")
    assert (found["lost"], found["gained"], found["flips"]) == (8, 0, 0.08)
    assert found["delta_accuracy"] == pytest.approx(-0.08)
    assert found["p_value"] == pytest.approx(2 / 2**8)
    assert found["within_noise"] == 0
    assert found["not_worse"] == 0
    same = compare(rows([1] * 100), baseline([1] * 100), TASK, "accuracy")
    assert (same["flips"], same["p_value"], same["within_noise"], same["not_worse"]) == (0, 1, 1, 1)
    few = compare(rows([1] * 10), baseline([1] * 10), TASK, "accuracy")
    assert few["not_worse"] == 0  # ten items show nothing


def test_flips_of_the_batch_order_are_noise() -> None:
    scores = [0] * 8 + [1] * 92
    assert compare(rows(scores), baseline([1] * 100, noise_flips=0.1), TASK, "accuracy")["within_noise"] == 1
    assert compare(rows(scores), baseline([1] * 100, noise_flips=0.05), TASK, "accuracy")["within_noise"] == 0


def test_graded_scores_are_compared_by_their_bootstrap() -> None:
    ours, theirs = [0.3 + 0.01 * (i % 7) for i in range(60)], [0.5 + 0.01 * (i % 5) for i in range(60)]
    found = compare(rows(ours), baseline(theirs), TASK, "score")
    assert found["delta_score"] == pytest.approx(-0.19, abs=0.01)
    assert found["p_value"] < 1e-6
    assert found["not_worse_p"] > 0.99
    assert "lost" not in found
    same = compare(rows(ours), baseline(ours), TASK, "score")
    assert (same["flips"], same["p_value"], same["within_noise"]) == (0, 1, 1)
    back = compare(rows(theirs), baseline(ours), TASK, "score")
    assert back["not_worse"] == 1


def test_only_the_same_items_are_paired() -> None:
    with pytest.raises(DataError, match=r"scored other items \(item 2\)"):
        compare(rows([1, 1]), baseline([1, 1, 1]), TASK, "accuracy")


def test_parts() -> None:
    samples = [{"length": 10, "score": 1.0}, {"length": 10, "score": 0.0}, {"length": 20, "score": 1.0}]
    assert by_part(samples, "length", "accuracy") == {"accuracy[length=10]": 0.5, "accuracy[length=20]": 1.0}
