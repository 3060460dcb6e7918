"""`kvq choose`: the rule of its race against the definition and in simulation, and whole runs on a random model."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import Unsupported
from kvq.results import Store
from kvq_lab import choose, choosing, memory, needles
from kvq_lab.racing import find_positive, round_level, round_sizes, run_race
from tests.random_models import save_random_model

ROOT = Path(__file__).parents[3]
LEVELS = runpy.run_path(str(ROOT / "experiments" / "bench" / "race_levels.py"))
TABLE = ROOT / "results" / "bench" / "race_levels.md"


def closed_test(differences: np.ndarray, level: float) -> list[bool]:
    """A difference stands out where each set of tests that holds it is rejected by its largest, over all flips."""
    tests, windows = differences.shape
    units = differences / np.sqrt((differences**2).sum(axis=1, keepdims=True))
    flips = np.array(list(itertools.product((1, -1), repeat=windows))) @ units.T
    found = [True] * tests
    for size in range(1, tests + 1):
        for group in itertools.combinations(range(tests), size):
            largest = flips[:, group].max(axis=1)
            if np.mean(largest >= largest[0] - 1e-9) > level:
                found = [kept and test not in group for test, kept in enumerate(found)]
    return found


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(4, 8))
@settings(max_examples=25, deadline=None)
def test_step_down_is_the_closed_test(seed: int, tests: int, windows: int) -> None:
    differences = np.random.default_rng(seed).normal(0.7, 1, (tests, windows))
    assert find_positive(differences, 0.05).tolist() == closed_test(differences, 0.05)
    assert find_positive(differences * np.arange(1, tests + 1)[:, None], 0.05).tolist() == closed_test(
        differences, 0.05
    )


def test_rounds_double_and_spend_no_more_than_alpha() -> None:
    assert list(round_sizes(70)) == [8, 8, 16, 32, 6]
    assert list(round_sizes(66)) == [8, 8, 16, 32]  # two windows are no round
    assert list(round_sizes(7)) == []
    assert sum(round_level(number, 0.05) for number in range(1, 10**4)) <= 0.05


def test_a_format_is_dropped_only_for_one_of_at_most_its_bytes() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, (3, 32))
    losses = noise + np.array([[0.1], [0.5], [0.0]])
    rounds = np.split(losses, (8, 16), axis=1)
    race = run_race(rounds, [4, 5, 8])
    assert race.dropped == {1: (0, 1)}
    assert race.left == [0, 2]
    assert race.worth == {(2, 0)}
    assert race.undecided == []
    assert race.rounds == 1  # nothing was left to decide
    assert race.ladder() == [0, 2]


def test_a_race_that_one_wins_at_once_and_a_race_of_none() -> None:
    losses = np.random.default_rng(0).normal(0, 0.01, (3, 8)) + np.array([[0.0], [1.0], [2.0]])
    race = run_race([losses, losses], [4, 5, 6])
    assert (race.left, race.rounds, race.ladder()) == ([0], 1, [0])
    alone = run_race([losses[:1], losses[:1]], [4])
    assert (alone.left, alone.undecided, alone.dropped) == ([0], [], {})


def test_equal_formats_stay_and_what_is_not_measured_is_not_tested() -> None:
    equal = run_race([np.ones((3, 8)), np.ones((3, 8))], [4, 4, 8])
    assert (equal.dropped, equal.ladder(), len(equal.undecided)) == ({}, [0], 3)
    missing = np.random.default_rng(0).normal(0, 0.01, (3, 8)) + np.array([[0.0], [1.0], [np.nan]])
    assert run_race([missing], [4, 5, 6]).dropped == {1: (0, 1)}
    smallest = run_race([missing[::-1]], [4, 5, 6])
    assert smallest.left[0] == 0
    assert smallest.ladder() == [1, 2]


def test_few_races_have_a_false_drop() -> None:
    found = [case for case in LEVELS["levels"](12) if case[1] == "normal"]
    assert sum(12 * false for _, _, false, _, _ in found) <= 8  # of 60 races; 3 are expected at most, at 5%
    assert {name: right for name, _, _, right, _ in found}["a ladder, half of it worse"] > 0.9


def test_the_committed_table_keeps_the_level() -> None:
    rows = [re.split(r" *\| *", line.strip("| ")) for line in TABLE.read_text(encoding="utf-8").splitlines()[4:]]
    assert {(row[0], row[1]) for row in rows} == set(itertools.product(LEVELS["LOSSES"], LEVELS["NOISES"]))
    # What the rule is exact for, and windows on record; a standard error of 250 races is 1.4.
    level = {"normal": 5.0, "heavy-tailed": 5.0, "errors like losses": 5.0, "measured": 7.0}
    assert [row for row in rows if float(row[2]) > level.get(row[1], 100.0)] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), positions=256)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    letters = np.random.default_rng(0).integers(97, 123, 2400).astype(np.uint8)
    path.write_bytes(letters.tobytes())
    return path


def test_a_whole_run_and_its_repeat(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = "engine/llamacpp_q8_0,engine/llamacpp_q4_0,kivi bits=2"
    words = [f"model={model}", f"method={methods}", f"text={text}", "window=64", "minutes=5", f"results={tmp_path}"]
    words += ["model.dtype=float32", "context=256"]
    assert choose.main(words) == 0
    first = capsys.readouterr()
    assert "formats of several engines in rounds of 8, 8, 14 windows" in first.out
    assert "at most 5%" in first.out
    assert "a window takes about" in first.err
    keys = {record.key for record in Store(tmp_path).scan()[0]}
    # Full precision of 4 rounds (with the canaries' two windows), 2 canaries, at least one round of 3 formats.
    assert len(keys) >= 2 + 2 + 3
    assert choose.main(words) == 0
    assert capsys.readouterr().out == first.out
    assert {record.key for record in Store(tmp_path).scan()[0]} == keys
    (card,) = (tmp_path / "choose").glob("*.html")
    page = card.read_text(encoding="utf-8")
    assert "<svg" in page
    assert not re.search(r"https?://|<script|<link|src=", page)


def test_no_time_is_no_verdict(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model={model}", "engine=lmdeploy", f"text={text}", "window=64", "minutes=0.0001", f"results={tmp_path}"]
    assert choose.main(words) == 0
    assert "no verdict: 0 of " in capsys.readouterr().out
    assert not list((tmp_path / "choose").glob("*.html"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("engine=vllm", "choose: needs model=PATH"),
        ("model=nothing", "model=nothing: no such folder or GGUF file"),
        ("model=MODEL engine=fast", "engine=fast: one of llamacpp"),
        ("model=MODEL minutes=0", "minutes=0: a number above 0"),
        ("model=MODEL memory=much", "memory=much: a size such as"),
        ("model=MODEL context=512", "context=512: model="),
        ("model=MODEL memory=1KiB engine=llamacpp", "memory=1.0 KiB: the smallest, "),
        ("model=MODEL text=missing.txt window=64", "dataset.path=missing.txt: no such file"),
        ("model=MODEL text=TEXT window=256", "passages of 256 tokens, 8 are needed; give a longer text or window="),
        (
            "model=MODEL engine=tensorrt",
            "is fitted to a text first, which choose does not do); these work: engine=llamacpp, ",
        ),
        ("model=MODEL method=engine/vllm_fp8_ds_mla", "a format of the latent"),
        ("model=MODEL method=nothing", "choose: none of method=nothing can be measured"),
    ],
)
def test_bad_input_is_one_line(
    words: str, said: str, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = words.replace("MODEL", str(model)).replace("TEXT", str(text))
    assert choose.main([*filled.split(), f"results={tmp_path}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_model_larger_than_memory_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_free_memory", lambda: 1000)
    assert choose.main([f"model={model}", "device=cpu"]) == 2
    assert re.search(
        r"its weights take .* as bfloat16, cpu has 1,000 bytes free; .* smaller model", capsys.readouterr().err
    )


def test_bytes_are_those_of_the_settings(model: Path, text: Path, tmp_path: Path) -> None:
    words = [f"model={model}", "method=kivi bits=4", f"text={text}", "window=64", f"results={tmp_path}"]
    race = choosing.Chooser(choose.parse_question(words))
    plain, kept = (race._build_format(("method=kivi", "bits=4", *more)) for more in ((), ("residual.size=0",)))
    assert kept.bytes < plain.bytes
    assert kept.name == f"{plain.name} residual.size=0"
    with pytest.raises(Unsupported, match="sink_tokens of kivi"):
        race._build_format(("method=kivi", "bits=4", "method.sink_tokens=4"))


def test_needles_are_shown_where_full_precision_finds_them(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"model={model}", "method=kivi bits=4", f"text={text}", "window=64", f"results={tmp_path}", "needles=192"]
    race = choosing.Chooser(choose.parse_question(words))
    assert race.needle_tokens == 192
    said: list[str] = []
    race.window_seconds = 60.0
    needles.find_full_needles(race, said.append)
    assert race.needles_found is None  # full precision's alone would take more than a quarter of the time
    race.window_seconds = 0.1
    needles.find_full_needles(race, said.append)
    assert race.needles_found is not None
    race.needle_seconds = None
    needles.find_needles(race, race.formats, said.append)
    assert race.formats[0].needles_found is None
    race.needle_seconds = 1.0
    needles.find_needles(race, race.formats, said.append)
    assert not said
    assert race.formats[0].needles_found is not None
    race.needles_found, race.formats[0].needles_found = 2, 2
    assert needles.needles_text(race, race.formats[0]) is None
    assert "full precision itself finds 2 of 5 in 192 tokens" in str(needles.needles_note(race))
    race.needles_found = 4
    assert needles.needles_text(race, race.formats[0]) == "2 of 5 needles in 192 tokens, full precision 4"
