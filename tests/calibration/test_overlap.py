"""A calibration on the text under test is seen by content, refused, or marked where it is asked for."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.calibration.text import WORDS, shared_ngrams
from kvq.cli import main
from kvq.config.method import TEST_TEXT
from kvq.report.labels import ON_TEST_TEXT, is_variant, label
from tests.properties import examples
from tests.sweeps import inputs_of, records, small_run

_WORD = st.sampled_from(["a", "b", "The", "root", "9", "—", "日本"])
_TEXTS = st.lists(st.lists(_WORD, max_size=40).map(" ".join), max_size=4)


def naive(texts: list[str]) -> set[tuple[str, ...]]:
    found = set()
    for text in texts:
        words = [word for word in re.split(r"\W+", text.lower()) if word]
        found |= {tuple(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}
    return found


@settings(max_examples=examples(100), deadline=None)
@given(one=_TEXTS, other=_TEXTS, both=_TEXTS)
def test_the_share_is_that_of_sets_of_ngrams(one: list[str], other: list[str], both: list[str]) -> None:
    one, other = [*one, *both], [*both, *other]
    mine, theirs = naive(one), naive(other)
    fewer = min(len(mine), len(theirs))
    assert shared_ngrams(one, other) == (len(mine & theirs) / fewer if fewer else 0)


def rows(seed: int) -> list[str]:
    """Sentences that are nowhere alike."""
    numbers = random.Random(seed)
    return [" ".join(str(numbers.randrange(1000)) for _ in range(20)) + "." for _ in range(40)]


TESTED, OTHER = "\n".join(rows(1)), "\n".join(rows(2))
LIKE = {
    "copy": TESTED,
    "excerpt": TESTED[: len(TESTED) // 2],
    "superset": f"{OTHER[:2000]}\n{TESTED}\n{OTHER[-2000:]}",
    "rows in another order": "\n".join(random.Random(3).sample(rows(1), 40)),
    "other spaces": "  \n".join(re.sub(" ", "   ", row) for row in rows(1)),
}


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """A run on `TESTED` that calibrates on the file `calibration.txt`."""
    (tmp_path / "tested.txt").write_text(TESTED, encoding="utf-8")
    return [
        *small_run(tmp_path),
        *("method=kvquant", "bits=2", "task.context=256", "task.stride=256", f"dataset.path={tmp_path / 'tested.txt'}"),
        *("method.calibration.dataset=wikitext2", f"method.calibration.path={tmp_path / 'calibration.txt'}"),
        *("method.calibration.samples=12", "method.calibration.length=128", f"results_dir={tmp_path / 'results'}"),
    ]


@pytest.mark.parametrize("kind", LIKE)
def test_text_like_that_under_test_is_refused(
    kind: str, run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calibration.txt").write_text(LIKE[kind], encoding="utf-8")
    assert main(run) == 1
    said = capsys.readouterr().err
    assert re.search(r"method\.calibration\.path=\S+: shares \d+% of its sequences of 13 words with the text", said)
    assert not list((tmp_path / "results" / "runs").rglob("*.json"))


def test_another_text_passes_and_its_share_is_recorded(run: list[str], tmp_path: Path) -> None:
    (tmp_path / "calibration.txt").write_text(OTHER, encoding="utf-8")
    assert main(run) == 0
    found = records(tmp_path / "results")["kvquant 2"]
    assert (found.metrics["calibration_shared"], found.units["calibration_shared"]) == (0, "fraction")
    assert ON_TEST_TEXT not in label(found)


def test_what_is_asked_for_is_measured_and_marked(run: list[str], tmp_path: Path) -> None:
    (tmp_path / "calibration.txt").write_text(TESTED, encoding="utf-8")
    assert main([*run, "method.calibration.allow_test_text=true"]) == 0
    found = records(tmp_path / "results")["kvquant 2"]
    assert found.metrics["calibration_shared"] > 0.3
    assert label(found).endswith(ON_TEST_TEXT)
    assert is_variant(found)  # no part in the frontier


@pytest.mark.parametrize(
    ("calibration", "tested"),
    [
        pytest.param(one, other, marks=[pytest.mark.long] * ((one, other) != ("pydocs", "pydocs")))
        for one, other in itertools.product(("pydocs", "pysource"), repeat=2)
    ],
)
def test_the_embedded_corpora_are_apart(calibration: str, tested: str) -> None:
    from kvq.runs import Prepared

    words = ["model=tiny", f"dataset={tested}", "method=kvquant", f"method.calibration.dataset={calibration}"]
    share = Prepared(inputs_of(words).config).shared_text
    print(f"calibrated on {calibration}, tested on {tested}: {100 * share:.2f}% of 13-grams in common")
    assert share < TEST_TEXT / 4
