"""Needles in a haystack: what is asked, the canaries, killed and repeated, on random models and the embedded one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvq.cli import main
from kvq.tasks.niah import extract, make_items
from tests.random_models import save_random_model
from tests.sweeps import inputs_of, records, refused, samples

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("niah")
    model = save_random_model(folder / "model")
    essays = folder / "essays"
    essays.mkdir()
    for number in range(4):
        lines = (f"On {number} and {line}: what is small and old is not always true. " for line in range(40))
        (essays / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    return [
        "task=niah",
        "task.lengths=[400,480]",
        "task.depths=[0,0.5,1]",
        "task.repeats=2",
        "task.batch_size=4",
        "model=hf",
        f"model.path={model}",
        "model.dtype=float32",
        "dataset=text",
        f"dataset.path={essays}",
        "residual.size=16",
    ]


def test_a_prompt_has_its_length_its_needles_at_their_depths_and_its_question_last(given: list[str]) -> None:
    inputs = inputs_of(given, "task.mode=distractors", "task.needles=3", "task.digits=5")
    items = make_items(inputs)
    assert Counter((item.length, item.depth) for item in items) == dict.fromkeys(
        [(length, depth) for length in (400, 480) for depth in (0.0, 0.5, 1.0)], 2
    )
    assert len({item.name for item in items}) == len({item.needles[0] for item in items}) == 12
    for item in items:
        assert len(item.prompt) == item.length
        text = inputs.tokenizer.decode(list(item.prompt))
        lead, *others = item.needles
        assert text.endswith(lead.question)
        assert all(text.count(needle.sentence) == 1 and len(needle.value) == 5 for needle in item.needles)
        assert len(others) == 2
        body = text.removesuffix(lead.question)
        assert body.startswith(lead.sentence) == (item.depth == 0)
        assert body.endswith(lead.sentence) == (item.depth == 1)
    assert [item.prompt for item in items] == [item.prompt for item in make_items(inputs)]
    other = make_items(inputs_of(given, "task.mode=distractors", "task.needles=3", "task.seed=1"))
    assert items[0].prompt != other[0].prompt


def test_templates_of_ones_own(given: list[str]) -> None:
    words = ["task.needle='The best thing to do is to eat a fig.'", "task.question='The best thing to do is to'"]
    fig = inputs_of(given, *words, "task.answer='eat a fig'")
    for item in make_items(fig):
        text = fig.tokenizer.decode(list(item.prompt))
        assert "The best thing to do is to eat a fig." in text
        assert text.endswith("The best thing to do is to")
        assert item.needles[0].value == "eat a fig"
    keyed = inputs_of(given, "task.needle='{key} = {value};'", "task.question='{key} ='", "task.mode=distractors")
    item = make_items(keyed)[0]
    assert item.needles[0].sentence == f"{item.needles[0].key} = {item.needles[0].value};"
    assert len(item.needles) == 5


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (" 482913.", "482913", "482913"),
        (" 4829131", "482913", "4829131"),
        (" the 12 of 482913", "482913", "12"),
        (" none", "482913", "none"),
        (" To Eat A Fig, of course", "eat a fig", "eat a fig"),
        (" to drink", "eat a fig", "to drink"),
    ],
)
def test_what_an_answer_says(text: str, value: str, expected: str) -> None:
    assert extract(text, value) == expected


def test_canaries_and_what_the_record_says(given: list[str], tmp_path: Path) -> None:
    settings = ["task.mode=distractors", f"results_dir={tmp_path}", "residual.size=8"]
    assert main([*given, *settings, "-m", "method=identity,zero,kivi", "bits=2"]) == 0
    found = records(tmp_path)
    texts = {method: [row["text"] for row in samples(tmp_path, method)] for method in found}
    assert texts["identity"] == texts["fp16"]
    assert sum(a != b for a, b in zip(texts["zero"], texts["fp16"], strict=True)) >= 6
    # The first token of an answer already reads the quantized cache.
    assert any(a[:1] != b[:1] for a, b in zip(texts["zero"], texts["fp16"], strict=True))
    run, full = found["kivi 2"], found["fp16"]
    assert run.baseline_key == full.key
    assert set(run.units) == set(run.metrics)
    assert run.metrics["items"] == 12
    assert run.metrics["skipped_items"] == 0
    shares = [run.metrics[name] for name in ("hit", "wrong_needle", "bit_mixing", "other")]
    assert sum(shares) == pytest.approx(1)
    assert run.metrics["hit"] == run.metrics["accuracy"]
    assert 0 <= run.metrics["bit_mixing_random"] < 0.2
    assert run.metrics["other[length=480]"] == pytest.approx(
        sum(row["outcome"] == "other" for row in samples(tmp_path, "kivi 2") if row["length"] == 480) / 6
    )
    assert full.metrics["noise_flips"] == 0
    assert found["identity"].metrics["flips"] == 0
    assert found["identity"].metrics["within_noise"] == 1
    assert run.metrics["bits_per_element"] < found["identity"].metrics["bits_per_element"] == 32
    assert not list((tmp_path / "partial").glob("*"))


def test_prompts_without_room_for_an_answer_are_named(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ["task.lengths=[400,508]", "task.noise_floor=false", f"results_dir={tmp_path}"]
    assert main([*given, *long, "method=fp16"]) == 0
    assert "6 skipped items: length=508 depth=0 repeat=0: prompt and answer take" in capsys.readouterr().err
    metrics = records(tmp_path)["fp16"].metrics
    assert (metrics["items"], metrics["skipped_items"]) == (6, 6)
    assert sum("skipped" in row for row in samples(tmp_path, "fp16")) == 6
    assert main([*given, *long, "method=rtn", "bits=4"]) == 0
    assert records(tmp_path)["rtn 4"].metrics["items"] == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("task.lengths=[600]", "takes at most 512 tokens"),
        ("task.lengths=[60]", "needles"),
        ("task.lengths=[400,400]", "each once"),
        ("task.depths=[1.5]", "each 0 (start of the haystack) to 1"),
        ("task.needles=3", "task.mode=single plants one"),
        ("task.mode=distractors task.needles=1", "at least 2"),
        ("task.needle=a", "give both templates"),
        ("task.needle={value} task.question={value}", "gives the value away"),
        ("task.needle=fig task.question=what", "task.answer"),
        ("task.needle={value} task.question={thing}", "filled in"),
        ("task.mode=distractors task.needle={value} task.question=what", "task.needle has {key}"),
        ("task.prefill=chunked residual=none", "use task.prefill=whole"),
        ("dataset=lm_eval", "holds items, not text"),
        ("dataset.path=SHORT", "the longest haystack in the dataset has"),
        ("task.name=ppl", "not by its name"),
    ],
)
def test_bad_settings_are_one_line(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    (tmp_path / "short.txt").write_text("too short a haystack", encoding="utf-8")
    run = [*given, "method=rtn", "bits=4", f"results_dir={tmp_path / 'r'}"]
    refused(capsys, run, change.replace("SHORT", str(tmp_path / "short.txt")), says)


@pytest.mark.long
def test_the_embedded_model_finds_its_needles_and_zero_finds_none(tmp_path: Path) -> None:
    settings = ["task=niah", "task.lengths=[256,512]", "task.repeats=4", f"results_dir={tmp_path}"]
    assert main([*settings, "-m", "method=identity,zero"]) == 0
    found = records(tmp_path)
    assert found["fp16"].metrics["accuracy"] >= 0.9
    assert [row["text"] for row in samples(tmp_path, "identity")] == [row["text"] for row in samples(tmp_path, "fp16")]
    assert found["zero"].metrics["accuracy"] == 0
    assert found["zero"].metrics["p_value"] < 1e-6
    assert found["zero"].metrics["not_worse"] == found["zero"].metrics["within_noise"] == 0


@pytest.mark.long
def test_the_residual_alone_finds_needles_among_its_tokens(tmp_path: Path) -> None:
    """Codes that hold nothing: a needle is found where the last 128 tokens are kept and it is one of them, else not."""
    task = ["task=niah", "task.lengths=[512]", "task.depths=[0.5,1]", "task.repeats=10", "model=tiny_hard"]
    for kept, last in (
        ("residual.policy=sliding residual.size=128", 0.5),
        ("residual.policy=block residual.size=0", 0),
    ):
        folder = tmp_path / f"{last}"
        assert main([*task, "method=zero", *kept.split(), f"results_dir={folder}"]) == 0
        found = records(folder)["zero"].metrics
        assert found["accuracy[depth=0.5]"] == 0
        assert found["accuracy[depth=1.0]"] >= last
        assert (found["accuracy[depth=1.0]"] > 0) == (last > 0)
