"""LongBench's prompts, metrics and truncation on items made here, and on the real file where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.items import code_completion
from kvq.cli import main
from kvq.config import compose, resolve
from tests.random_models import save_random_model
from tests.sweeps import inputs_of, records, refused, samples

pytest.importorskip("lm_eval", reason="needs the extra 'eval'")
pytest.importorskip("rouge", reason="needs the extra 'eval'")
longbench = pytest.importorskip("kvq.tasks.longbench")

EIGHT = ["qasper", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p"]
ANSWERS: dict[str, tuple[list[str], list[str] | None]] = {
    "qasper": (["a small model"], None),
    "qmsum": (["They agreed to wait."], None),
    "multi_news": (["Two cities were flooded."], None),
    "trec": (["Human"], ["Human", "Location", "Number"]),
    "triviaqa": (["Paris", "paris, france"], None),
    "samsum": (["Ann will call Bob."], None),
    "lcc": (["    return total"], None),
    "repobench-p": (["    return self.total"], None),
    "multifieldqa_en": (["green"], None),
    "hotpotqa": (["1912"], None),
    "2wikimqa": (["no"], None),
    "gov_report": (["The office spent less."], None),
    "passage_count": (["7"], None),
    "passage_retrieval_en": (["Paragraph 3"], None),
}


def item(base: str, number: int = 0) -> dict[str, Any]:
    answers, classes = ANSWERS[base]
    return {
        "_id": f"{base}-{number}",
        "input": "What is it?",
        "context": f"Passage {number}: the model is small and the city is green. " * 3,
        "answers": answers,
        "length": 1000 + 4500 * number,
        "all_classes": classes,
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longbench")
    for base in ANSWERS:
        rows = "".join(json.dumps(item(base, number)) + "\n" for number in range(2))
        for name in (base, f"{base}_e"):
            (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def given(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = save_random_model(tmp_path_factory.mktemp("model"), positions=4000)
    run = f"task=longbench dataset.path={data} model=hf model.path={model} model.dtype=float32 model.context=1500"
    return [*run.split(), "residual.size=16"]


def test_the_presets_name_the_papers_subsets() -> None:
    assert resolve(compose(["task=longbench"])).task.subsets == EIGHT
    extended = resolve(compose(["task=longbench_e"])).task
    assert extended.buckets
    assert len(extended.subsets) == 13
    assert {name.removesuffix("_e") for name in extended.subsets} == ANSWERS.keys() - {"qmsum"}
    for name in [*EIGHT, *extended.subsets]:
        assert longbench.load_subset(name).hub_config == name


@pytest.mark.parametrize("base", ANSWERS)
def test_the_right_answer_is_right_in_every_subset(base: str) -> None:
    for name in (base, f"{base}_e") if base != "qmsum" else (base,):
        subset, row = longbench.load_subset(name), item(base)
        right, wrong = (subset.score(row, text) for text in (row["answers"][0], "@@@"))
        assert right == pytest.approx(1, abs=1e-6)
        assert wrong < 0.35
        assert subset.max_new_tokens == {"passage_count": 32, "passage_retrieval_en": 32}.get(
            base, subset.max_new_tokens
        )
        assert (subset.answer("\nyes\nno") == "yes") == (base in ("trec", "triviaqa", "samsum"))


def test_the_middle_is_cut(given: list[str]) -> None:
    inputs = inputs_of(given, "task.subsets=[qasper]", "model.context=4000")
    document = longbench.documents(inputs)[0]
    whole, _ = longbench.prompt_tokens(inputs, document, 4000)
    for room in (100, 101):
        tokens, cut = longbench.prompt_tokens(inputs, document, room)
        assert len(tokens) == room
        assert cut == len(whole) - room
        assert tokens == [*whole[: room - room // 2], *whole[-(room // 2) :]]


def test_a_chat_template_goes_around_what_the_benchmark_allows(given: list[str]) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    for base, templated in (("qasper", True), ("trec", False), ("lcc", False), ("qmsum", True)):
        inputs = inputs_of(given, f"task.subsets=[{base}]", "task.chat_template=true")
        inputs.tokenizer.chat_template = template
        for room in (3000, 150):
            tokens, cut = longbench.prompt_tokens(inputs, longbench.documents(inputs)[0], room)
            text = inputs.tokenizer.decode(tokens)
            assert text.startswith("<user>") == text.endswith("<assistant>") == templated
            assert len(tokens) <= room
            assert (cut > 0) == (room == 150)


def test_a_run_scores_every_item_and_compares_it_with_full_precision(given: list[str], tmp_path: Path) -> None:
    chosen = ["task.subsets=[passage_retrieval_en,passage_count]", f"results_dir={tmp_path}", "task.buckets=true"]
    assert main([*given, *chosen, "-m", "method=identity,zero,kivi", "bits=2"]) == 0
    found = records(tmp_path)
    texts = {method: [row["text"] for row in samples(tmp_path, method)] for method in found}
    assert texts["identity"] == texts["fp16"]
    assert texts["zero"] != texts["fp16"]
    run, full = found["kivi 2"].metrics, found["fp16"].metrics
    assert set(found["kivi 2"].units) == set(run)
    assert run["items"] == 4
    parts = [run[f"score[subset={name}]"] for name in ("passage_retrieval_en", "passage_count")]
    assert run["subset_mean"] == pytest.approx(sum(parts) / 2)
    assert "rouge_l" not in full
    assert full["noise_flips"] == 0
    assert found["identity"].metrics["rouge_l"] == pytest.approx(1, abs=1e-6)
    assert found["zero"].metrics["rouge_l"] < 1
    assert {row["bucket"] for row in samples(tmp_path, "fp16")} == {"0-4k", "4-8k"}
    assert {"score[bucket=0-4k]", "score[bucket=4-8k]"} <= set(run)
    assert run["decode_tokens_per_second"] > 0


def test_bad_items_are_named_and_counted(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [item("trec", number) for number in range(4)]
    rows[1]["context"], rows[2]["answers"] = "  ", []
    file = tmp_path / "trec.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    only = ["task.subsets=[trec]", f"dataset.path={file}", f"results_dir={tmp_path / 'r'}", "task.noise_floor=false"]
    assert main([*given, *only, "method=fp16"]) == 0
    err = capsys.readouterr().err
    assert "2 skipped items: trec/trec-1: empty context; trec/trec-2: no answers" in err
    metrics = records(tmp_path / "r")["fp16"].metrics
    assert (metrics["items"], metrics["skipped_items"]) == (2, 2)
    skipped = [row["skipped"] for row in samples(tmp_path / "r", "fp16") if "skipped" in row]
    assert skipped == ["empty context", "no answers"]
    assert main([*given, *only, "method=fp16", "model.context=60"]) == 1
    assert "no item can be scored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("task.subsets=[trek]", "Did you mean 'trec'?"),
        ("task.subsets=[]", "a list of one or more"),
        ("dataset.path=nowhere", "no folder, and 8 subsets"),
        ("dataset=pydocs", "holds text"),
        ("task.prefill=chunked residual=none", "use task.prefill=whole"),
        ("dataset.path=FILE", "no folder, and 8 subsets; choose one by task.subsets="),
        ("dataset.path=BROKEN task.subsets=[trec]", "cannot be read"),
    ],
)
def test_bad_settings_are_one_line(
    given: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{", encoding="utf-8")
    change = change.replace("FILE", str(data / "trec.jsonl")).replace("BROKEN", str(broken))
    refused(capsys, [*given, "method=rtn", "bits=4", f"results_dir={tmp_path / 'r'}"], change, says)


def test_items_of_one_id_and_answers_that_are_no_list(given: list[str], tmp_path: Path) -> None:
    rows = [item("trec", 0) | {"_id": "x"} for _ in range(2)]
    (tmp_path / "trec.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = longbench.documents(inputs_of(given, "task.subsets=[trec]", f"dataset.path={tmp_path / 'trec.jsonl'}"))
    assert [one.name for one in found] == ["trec/x", "trec/x/1"]
    assert [longbench.load_subset("qasper").score({"answers": "Paris"}, text) for text in ("P", "Paris")] == [0, 1]


def test_rouge_l() -> None:
    assert longbench.rouge_l("the cat sat", "the cat sat") == pytest.approx(1, abs=1e-6)
    assert longbench.rouge_l("the cat sat", "the dog sat") == pytest.approx(2 / 3, abs=1e-6)
    assert longbench.rouge_l("", " ") == 1
    assert longbench.rouge_l("a", "") == longbench.rouge_l("...", "a") == 0


def test_items_of_code_ask_a_line_of_their_file(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text("def scale_all(values):\n    return values\n", encoding="utf-8")
    source = "from .tools import scale_all\n\n\ndef run(values):\n    scaled = scale_all(values)\n"
    crossed = code_completion.make_cross_file("package/run.py", source, {"package/tools.py": tools})
    assert crossed is not None
    context, before, line = crossed
    assert context == f"# Path: package/tools.py\n{tools.read_text(encoding='utf-8')}\n"
    assert f"{before}{line}\n" == f"# Path: package/run.py\n{source}"
    before, line = code_completion.make_completion("".join(f"value_{n} = {n}\n" for n in range(400))) or "??"
    assert len(before) >= code_completion.MIN_CONTEXT
    assert line == f"value_{before.count('=')} = {before.count('=')}"
