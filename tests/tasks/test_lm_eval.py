"""lm-eval's tasks through the cache: against lm-eval's own HFLM, one at a time against batches, killed and repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from kvq.cli import main
from kvq.config import Config, compose, resolve
from kvq.errors import ConfigError, DataError
from kvq.methods.build import method_of
from kvq.results import Store
from kvq.tasks.lm_eval_files.ruler import found
from tests.random_models import save_random_model
from tests.sweeps import inputs_of, records

pytest.importorskip("lm_eval", reason="needs the extra 'eval'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

ROOT = Path(__file__).parents[2]
FACTS = [("sky", "blue"), ("grass", "green"), ("coal", "black"), ("snow", "white"), ("blood", "red"), ("sun", "gold")]
SHOTS = "".join(f"The colour of the {thing} is {colour}.\n" for thing, colour in FACTS) * 2


def write_tasks(folder: Path) -> list[str]:
    """A multiple-choice task with answers of several tokens, one with answers of one token, and a generation task."""
    docs = [
        {"question": f"{SHOTS}The colour of the {thing} is", "choices": [c for _, c in FACTS], "answer": index}
        for index, (thing, _) in enumerate(FACTS)
    ]
    rows = (json.dumps(doc | {"letters": list("abcdef"), "text": FACTS[doc["answer"]][1]}) + "\n" for doc in docs)
    (folder / "docs.jsonl").write_text("".join(rows), encoding="utf-8")
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    choice = {"output_type": "multiple_choice", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]}
    tasks = {
        "colours": common | choice | {"doc_to_choice": "choices"},
        "letters": common | choice | {"doc_to_choice": "letters", "target_delimiter": ""},
        "say": common
        | {
            "output_type": "generate_until",
            "doc_to_target": "text",
            "generation_kwargs": {"max_gen_toks": 9, "until": ["\n"], "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | task), encoding="utf-8")
    return list(tasks)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("lm_eval")
    names = write_tasks(folder)
    model = save_random_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "~"
    tokenizer.save_pretrained(model)
    return [
        "task=lm_eval",
        f"task.tasks=[{','.join(names)}]",
        f"task.include_path={folder}",
        "model=hf",
        f"model.path={model}",
        "model.dtype=float32",
        "residual.size=16",
    ]


def config_of(given: list[str], *changes: str) -> Config:
    return resolve(compose([*given, *changes]))


def answers(folder: Path, method: str) -> list[dict[str, Any]]:
    return Store(folder).samples(records(folder)[method].key)


@pytest.fixture(scope="module")
def canaries(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canaries")
    assert main([*given, "-m", "method=identity,zero,kivi", "bits=2", f"results_dir={folder}"]) == 0
    return folder


def test_identity_is_lm_evals_own_model_item_by_item_and_zero_is_not(given: list[str], canaries: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from kvq.models.inputs import Inputs
    from kvq.tasks.lm_eval import evaluate

    inputs = Inputs(config_of(given))
    theirs, figures, _ = evaluate(inputs, HFLM(inputs.model.model, tokenizer=inputs.tokenizer, device="cpu"))
    ours = {method: answers(canaries, method) for method in ("fp16", "identity", "zero", "kivi 2")}
    assert [row["item"] for row in theirs] == [row["item"] for row in ours["identity"]]
    assert len(theirs) == 18
    different: dict[str, set[str]] = {method: set() for method in ours}
    for method, rows in ours.items():
        for one, other in zip(theirs, rows, strict=True):
            same = one["responses"] == other["responses"]
            if one["task"] != "say":
                pairs = zip(one["responses"], other["responses"], strict=True)
                same = all(a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1] for a, b in pairs)
            if not same:
                different[method].add(one["task"])
    assert different["fp16"] == different["identity"] == set()
    assert different["zero"] == different["kivi 2"] == {"colours", "letters", "say"}
    for name, value in figures.items():
        assert records(canaries)["identity"].metrics[name] == pytest.approx(value)


def test_the_record_says_what_was_measured(canaries: Path) -> None:
    found = records(canaries)
    run, full = found["kivi 2"], found["fp16"]
    assert run.dataset == "lm_eval"
    assert run.metrics["items"] == 18
    assert run.metrics["score"] == pytest.approx(sum(row["score"] for row in answers(canaries, "kivi 2")) / 18)
    assert run.metrics["delta_score"] == pytest.approx(run.metrics["score"] - full.metrics["score"])
    assert run.metrics["lost"] - run.metrics["gained"] == pytest.approx(-18 * run.metrics["delta_score"])
    assert full.metrics["noise_flips"] == 0
    assert run.units["prefill_tokens_per_second"] == run.units["decode_tokens_per_second"] == "tokens/s"
    assert set(run.units) == set(run.metrics)
    # The examples in front of every question are read once, not 6 + 6 + 6 times.
    assert run.metrics["read_tokens"] < 0.1 * run.metrics["prompt_tokens"]
    assert found["identity"].metrics["flips"] == 0
    assert found["identity"].metrics["within_noise"] == 1
    assert 2 < run.metrics["bits_per_element"] < 8


def test_odd_items_are_named_and_counted(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    write_tasks(folder)
    docs = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()]
    docs[0]["question"] = ""
    docs[1]["letters"][1] = ""
    docs[2]["question"] *= 4
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    kept = [word for word in given if not word.startswith(("task.include_path", "task.tasks"))]
    local = [f"task.tasks=[{folder / 'letters.yaml'},{folder / 'say.yaml'}]", "task.noise_floor=false"]
    assert main([*kept, *local, "method=rtn", "bits=4", f"results_dir={tmp_path / 'r'}"]) == 0
    err = capsys.readouterr().err
    for item, why in (
        ("letters/0", "empty context"),
        ("letters/1", "empty continuation"),
        ("say/2", "cut on the left"),
    ):
        assert item in err
        assert why in next(row for row in answers(tmp_path / "r", "rtn 4") if row["item"] == item)["odd"]
    metrics = records(tmp_path / "r")["rtn 4"].metrics
    assert (metrics["items"], metrics["odd_items"]) == (12, 5)


def test_sampling_is_drawn_by_its_seed_and_averaged(given: list[str], tmp_path: Path) -> None:
    sampling = ["task.generation={do_sample: true, temperature: 0.8, top_p: 0.95}", "task.tasks=[say]"]
    for name, changes in (("a", []), ("b", ["task.batch_size=3"]), ("c", ["seed=1"])):
        folder = f"results_dir={tmp_path / name}"
        assert main([*given, *sampling, "task.repeats=3", "method=fp16", *changes, folder]) == 0
    first, batched, other = (answers(tmp_path / name, "fp16") for name in "abc")
    assert first == batched
    assert first != other
    for row in first:
        assert len(row["responses"]) == len(row["scores"]) == 3
        assert row["score"] == pytest.approx(sum(row["scores"]) / 3)
    assert any(len({json.dumps(said) for said in row["responses"]}) > 1 for row in first)
    assert "noise_flips" not in records(tmp_path / "a")["fp16"].metrics


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("task.tasks=[nothing_of_that_name.yaml]", "no such file"),
        ("task.include_path=nowhere", "no such folder"),
        ("task.metric=f1", "task.metric=f1: colours has acc"),
        ("task.tasks=[]", "a list of one or more"),
        ("task.tasks=???", "give task.tasks="),
        ("task.repeats=2", "set task.generation.do_sample=true"),
        ("task.generation={max_gen_toks: 600}", "leaves no room for a prompt"),
        ("task.generation={top_p: 0.6,do_smple: true}", "task.generation.do_smple=True: cannot be followed"),
        ("residual=none", "use task.prefill=whole"),
        ("dataset.path=here", "dataset.path=here"),
    ],
)
def test_bad_settings_are_one_line(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    kept = [word for word in given if not (change.startswith("residual") and word.startswith("residual"))]
    assert main([*kept, change, "method=rtn", "bits=4", f"results_dir={tmp_path}"]) != 0
    err = capsys.readouterr().err.strip().splitlines()
    assert says in err[-1], err


def logged(doc: int, filtered: str, **metrics: Any) -> dict[str, Any]:
    row = {"doc_id": doc, "filter": filtered, "metrics": list(metrics), "target": 7, "filtered_resps": [("7", True)]}
    return row | metrics


def test_the_metric_that_counts() -> None:
    from kvq.config.tasks import LmEvalConfig
    from kvq.tasks.lm_eval import item_samples

    task = LmEvalConfig(tasks=["any"])
    # RULER has a metric for each length, -1 where the item is of another.
    ruler = [logged(0, "none", **{"4096": -1.0, "8192": 0.5}), logged(1, "none", **{"4096": 1.0, "8192": -1.0})]
    assert [(row["item"], row["score"]) for row in item_samples("any", ruler, task)] == [("any/0", 0.5), ("any/1", 1.0)]
    filters = [logged(0, "strict", exact_match=0), logged(0, "flexible", exact_match=1)]
    (row,) = item_samples("any", filters, task)
    assert (row["score"], row["metric"], row["target"], row["responses"]) == (0.0, "exact_match", "7", [["7", True]])
    chosen = LmEvalConfig(tasks=["any"], metric="f1")
    assert [row["score"] for row in item_samples("any", [logged(0, "none", em=0, f1=0.25)], chosen)] == [0.25]
    with pytest.raises(ConfigError, match="any has no number per item"):
        list(item_samples("any", [logged(0, "none", word_perplexity=(-3.0, 4))], task))


def test_a_continuation_that_merges_into_its_context_is_one_line(given: list[str]) -> None:
    from lm_eval.api.instance import Instance

    from kvq.config.tasks import Prefill
    from kvq.tasks.lm_eval_model import CacheLM
    from kvq.tasks.reader import Reader

    inputs = inputs_of(given)
    model = CacheLM(Reader(inputs.model, method_of(inputs.config, 128), Prefill.chunked), inputs.tokenizer, 1, 512)
    request = Instance("loglikelihood", {}, ("a b", " c"), 0, metadata=("colours", 3, 1))
    model._asked[request.args] = "colours/3"
    with pytest.raises(DataError, match=r"^colours/3: its continuation ' c' merges into its context, as no token$"):
        model._loglikelihood_tokens([(request.args, [1, 2], [])])


FILES = {
    "beside.py": "SHARE = 1\n",
    "within.py": "def part():\n    return 1.0\n",
    "notes.txt": "why",
    "scoring.py": "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\nfrom beside import SHARE\n"
    "def score(doc, results):\n    from within import part\n    return {'exact_match': 1.0 * part() * SHARE}\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "noticed"),
    [
        ("scoring.py", "1.0 *", "0.5 *", True),
        ("beside.py", "1", "2", True),
        ("within.py", "1.0", "0.9", True),
        ("notes.txt", "why", "because", False),
        ("told.yaml", "colour of snow", "colour of coal", True),
    ],
)
@pytest.mark.long
def test_edited_metric_code_of_a_task_is_another_run(
    given: list[str], tmp_path: Path, file: str, old: str, new: str, noticed: bool
) -> None:
    """By all Python files of its folder: functions take others from files beside theirs in many ways."""
    write_tasks(tmp_path)
    task = yaml.safe_load((tmp_path / "say.yaml").read_text(encoding="utf-8")) | {"task": "told"}
    text = yaml.safe_dump(task) + "process_results: !function scoring.score\nnum_fewshot: 1\n"
    text += "fewshot_config: {sampler: first_n, samples: [{question: colour of snow, text: white}]}\n"
    for name, content in (FILES | {"told.yaml": text}).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    kept = [word for word in given if not word.startswith(("task.tasks", "task.include_path"))]
    words = [*kept, "task.tasks=[told]", f"task.include_path={tmp_path}"]

    def key() -> str:  # in a process of its own, as an edit is met
        code = (
            "import sys; from kvq.config import compose, resolve; from kvq.models.inputs import Inputs; "
            "from kvq.tasks.lm_eval import fingerprint; print(fingerprint(Inputs(resolve(compose(sys.argv[1:])))))"
        )
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    before = key()
    (tmp_path / file).write_text((tmp_path / file).read_text("utf-8").replace(old, new), encoding="utf-8")
    assert (key() != before) == noticed


def test_groups_and_tags_have_the_mean_of_their_leaves() -> None:
    """By items as lm-eval's groups do by default; of a group that weighs tasks alike, by tasks."""
    from kvq.tasks.lm_eval import Part, scores_of

    scores = {"algebra": [1.0, 0.0, 0.0, 0.0], "law": [1.0, 1.0]}
    samples = [{"task": task, "score": score} for task, own in scores.items() for score in own]
    parts = {"mmlu_tag": Part(["algebra", "law"], True), "alike": Part(["algebra", "law"], False)}
    assert scores_of(samples, parts) == {
        "score[task=algebra]": 0.25,
        "score[task=law]": 1.0,
        "score[task=mmlu_tag]": pytest.approx(0.5),
        "score[task=alike]": pytest.approx(0.625),
    }


def test_items_of_ruler_come_from_a_file(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same items under another name are the same run; a broken or missing file is one line."""
    model = [word for word in given if word.startswith(("model", "residual"))]
    items = [{"input": f"The number of {name} is", "outputs": [str(n)]} for n, name in enumerate(("ann", "bob"))]
    folder = f"results_dir={tmp_path / 'results'}"
    asked = [*model, "task=lm_eval/ruler_file", "task.generation={max_gen_toks: 4}", "method=rtn", "bits=4", folder]
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps(item) for item in items), encoding="utf-8")
        assert main([*asked, f"dataset.path={tmp_path / name}"]) == 0
    done = records(tmp_path / "results")
    assert set(done) == {"fp16", "rtn 4"}
    rows = Store(tmp_path / "results").samples(done["rtn 4"].key)
    assert [row["target"] for row in rows] == ["['0']", "['1']"]
    assert found({"outputs": ["a-b", "c"]}, ["It is A-B."]) == {"string_match_all": 0.5}
    (tmp_path / "odd.jsonl").write_text('{"input": "no answer"}\n', encoding="utf-8")
    for given_path, says in [
        (["dataset.path=nowhere.jsonl"], "No such file"),
        ([f"dataset.path={tmp_path / 'odd.jsonl'}"], "row 1 is no item of RULER"),
        ([], "give dataset.path="),
    ]:
        capsys.readouterr()
        assert main([*asked, *given_path]) != 0
        assert says in capsys.readouterr().err.strip().splitlines()[-1]
