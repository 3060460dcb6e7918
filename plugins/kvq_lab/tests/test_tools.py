"""Tool calls: prompts, how answers are judged, BFCL's files, runs that are killed and repeated, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvq.config import compose, resolve
from kvq.errors import ConfigError, DataError
from kvq.results import Record, Store
from kvq.runs import run
from kvq_lab import tools
from kvq_lab.calls import Function, Request, read_bfcl
from kvq_lab.tools import CHECKS, check_answer, first_object, is_allowed, satisfies
from tests.sweeps import inputs_of

BFCL = Path(__file__).parent / "bfcl"
FILES = [f"task.path={BFCL / 'requests.json'}", f"task.answers={BFCL / 'answers.json'}"]
BARE = (
    "model=tiny task=tools task.items=3 task.shots=1 task.padding=32 task.max_new_tokens=12 "
    "task.resamples=50 residual.size=16 threads=1"
).split()
GIVEN = [*BARE, *FILES]
WEATHER = Function(
    "weather",
    "Weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            "hours": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city", "days"],
    },
)
CALL = Function("call", "Call somebody.", {"type": "object", "properties": {"name": {"type": "string"}}})


def allow_values(arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """The form of `Request.allowed` for one value of each argument."""
    return {name: [allow_values(value) if isinstance(value, dict) else value] for name, value in arguments.items()}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments})


ASKED = Request("weather 0", "Oslo?", (CALL, WEATHER), "weather", allow_values({"city": "Oslo", "days": 2}))


def judged(text: str, request: Request = ASKED) -> str:
    """The checks that an answer passes, by the letters J, S, F, A."""
    found = check_answer(text, request)
    assert tuple(found) == CHECKS
    return "".join(letter for letter, name in zip("JSFA", CHECKS, strict=True) if found[name])


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (' {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}', "JSFA"),
        ('Sure, {"name": "weather", "arguments": {"days": 2.0, "city": "Oslo"}} is it. {"name"', "JSFA"),
        ('```json\n{\n "name": "weather",\n "arguments": {"city": "Oslo", "days": 2}\n}\n```', "JSFA"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}', "JSF"),
        ('{"name": "weather", "arguments": {"city": "oslo", "days": 2}}', "JSF"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": "2"}}', "JF"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": true}}', "JF"),
        ('{"name": "weather", "arguments": {"city": "Oslo"}}', "JF"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 2, "unit": "C"}}', "JSF"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 2, "unit": "K"}}', "JF"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 2, "when": "now"}}', "JF"),
        ('{"name": "weather", "arguments": ["Oslo", 2]}', "JF"),
        ('{"name": "weather"}', "JF"),
        ('{"name": "call", "arguments": {"name": "Oslo"}}', "JS"),
        ('{"name": "call", "arguments": {"city": "Oslo", "days": 2}}', "JA"),
        ('{"name": "fly", "arguments": {"city": "Oslo", "days": 2}}', "JA"),
        ('{"name": ["weather"], "arguments": null}', "J"),
        ("{}", "J"),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 2}', ""),
        ("{name: weather}", ""),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": NaN}}', ""),
        ("weather(Oslo, 2)", ""),
        ("", ""),
        ("{" * 100_000, ""),
        ('{"a":' * 100_000, ""),
    ],
)
def test_an_answer_by_hand(text: str, passes: str) -> None:
    assert judged(text) == passes


def test_the_first_object_is_the_first_brace() -> None:
    assert first_object('say {"a": "}"} and {"b": 1}') == {"a": "}"}
    assert first_object('{no} {"b": 1}') is None


def test_values_are_equal_by_what_they_say() -> None:
    assert is_allowed(2, 2.0, False)
    assert not is_allowed(1, True, False)
    assert not is_allowed(True, 1, False)
    assert is_allowed(None, None, False)
    assert not is_allowed(0, None, False)
    assert is_allowed([1, 2], [1, 2], False)
    assert not is_allowed([2, 1], [1, 2], False)
    assert not is_allowed([1], [1, 2], False)
    assert is_allowed("New York, NY", "new york ny", True)
    assert not is_allowed("New York", "new york", False)
    assert is_allowed({"a": {"b": [1]}}, allow_values({"v": {"a": {"b": [1]}}})["v"][0], False)
    assert not is_allowed({"a": {"b": [2]}}, allow_values({"v": {"a": {"b": [1]}}})["v"][0], False)
    assert not is_allowed({"a": 1, "c": 1}, {"a": [1]}, False)
    assert is_allowed({"a": 1}, {"a": [2, 1], "b": ["", 3]}, True)


def test_a_schema_lists_all_fields() -> None:
    schema = WEATHER.parameters
    assert satisfies({"city": "a", "days": 1, "place": {"lat": 1.5}, "hours": [1, 2]}, schema)
    assert not satisfies({"city": "a", "days": 1, "place": {"lat": 1.5, "lon": 1}}, schema)
    assert not satisfies({"city": "a", "days": 1, "hours": [1.5]}, schema)
    assert satisfies({"anything": 1}, {"type": "object"})


def test_right_answers_pass_and_shots_are_other_requests() -> None:
    inputs = inputs_of(GIVEN)
    asked = tools.requests(inputs)
    assert [judged(one.answer, one) for one in asked] == ["JSFA"] * 4
    assert asked[1].answer == '{"name": "send_mail", "arguments": {"to": "Ada"}}'  # a subject may be left out
    for place, request in enumerate(asked):
        changed, shots = tools.add_shots(inputs_of(GIVEN, "task.shots=3").config.task, asked, place)
        assert sorted(one.name for one in [request, *shots]) == sorted(one.name for one in asked)
        assert len(changed.functions) == 3
        assert judged(request.answer, changed) == "JSFA"


def test_a_prompt_has_functions_padding_shots_and_the_request() -> None:
    inputs = inputs_of(GIVEN)
    items = tools.make_items(inputs)
    flat = [item for batch in items.batches for item in batch]
    assert len(flat) == 3
    assert not items.skipped
    bare = tools.make_items(inputs_of(GIVEN, "task.padding=0"))
    lengths = {item.request.name: len(item.prompt) for batch in bare.batches for item in batch}
    for item in flat:
        text = inputs.tokenizer.decode(list(item.prompt))
        assert text.endswith(f"Request: {item.request.text}\nAnswer:")
        assert all(text.index(function.text) < text.index("\nRequest: ") for function in item.request.functions)
        assert text.count("\nAnswer: {") == 1
        assert abs(len(item.prompt) - lengths[item.request.name] - 32) <= 2  # tokens of line ends
    assert tools.make_items(inputs).batches == items.batches
    other = tools.make_items(inputs_of(GIVEN, "task.seed=1"))
    assert other.batches[0][0].prompt not in [item.prompt for item in flat]


SIMPLE = {
    "id": "simple_0",
    "question": [[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Area of 3 by 4 cm?"}]],
    "function": [
        {
            "name": "shape.area",
            "description": "Area.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "sides": {"type": "tuple", "items": {"type": "float"}, "description": "both"},
                    "unit": {"type": "string", "enum": ["cm", "m"], "optional": True},
                    "more": {"type": "any"},
                    "box": {"type": "dict", "properties": {"low": {"type": "integer"}}},
                },
                "required": ["sides"],
            },
        }
    ],
}
TRUTH = {
    "id": "simple_0",
    "ground_truth": [
        {"shape.area": {"sides": [[3, 4], [4, 3]], "unit": ["cm"], "more": ["", 1], "box": ["", {"low": [1, 2]}]}}
    ],
}


def saved(folder: Path, rows: list[Any], truths: list[Any]) -> tuple[str, str]:
    for name, lines in (("requests.json", rows), ("answers.json", truths)):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return str(folder / "requests.json"), str(folder / "answers.json")


def test_a_file_of_the_leaderboard(tmp_path: Path) -> None:
    other = SIMPLE | {"id": "simple_1"}
    [request, second] = read_bfcl(*saved(tmp_path, [SIMPLE, "", other], [TRUTH | {"id": "simple_1"}, TRUTH]))
    assert (request.name, second.name) == ("simple_0", "simple_1")
    assert request.text == "Be short.\nArea of 3 by 4 cm?"
    assert request.functions[0].parameters == {
        "type": "object",
        "properties": {
            "sides": {"type": "array", "items": {"type": "number"}, "description": "both"},
            "unit": {"type": "string", "enum": ["cm", "m"]},
            "more": {},
            "box": {"type": "object", "properties": {"low": {"type": "integer"}}},
        },
        "required": ["sides"],
    }
    for arguments, passes in (
        ({"sides": [3, 4], "unit": "cm"}, "JSFA"),
        ({"sides": [4.0, 3.0], "unit": "cm", "more": 1, "box": {"low": 2}}, "JSFA"),
        ({"sides": [3, 4], "unit": "C.M."}, "JFA"),  # compared as the leaderboard does, but no value of the enum
        ({"sides": [3, 4]}, "JSF"),
        ({"sides": [3, 4], "unit": "cm", "more": 2}, "JSF"),
        ({"sides": [3, 4], "unit": "cm", "box": {"low": 3}}, "JSF"),
        ({"sides": "3, 4", "unit": "cm"}, "JF"),
    ):
        assert judged(call_text("shape.area", arguments), request) == passes, arguments


@pytest.mark.parametrize(
    ("row", "truth", "error"),
    [
        ("{", TRUTH, r"requests\.json: line 1: no JSON"),
        ("[]", TRUTH, r"line 1: an object with an id"),
        (SIMPLE, "nothing", r"answers\.json: line 1: no JSON"),
        (SIMPLE, TRUTH | {"id": "simple_9"}, r"line 1: task\.answers has no answer to simple_0"),
        (SIMPLE, TRUTH | {"ground_truth": TRUTH["ground_truth"] * 2}, r"2 calls; .*\(parallel\) are not supported"),
        (SIMPLE, TRUTH | {"ground_truth": "call"}, r"ground_truth is a list"),
        (SIMPLE, TRUTH | {"ground_truth": [{"other": {}}]}, r"calls other, which is not offered"),
        (SIMPLE, TRUTH | {"ground_truth": [{"shape.area": {"sides": 3}}]}, r"a list of allowed values"),
        (SIMPLE | {"question": SIMPLE["question"] * 2}, TRUTH, r"2 turns; .*\(multi_turn\) are not supported"),
        (SIMPLE | {"question": "Area?"}, TRUTH, r"question is a list of turns"),
        (SIMPLE | {"question": [[{"role": "user"}]]}, TRUTH, r"a text as its content"),
        ({name: SIMPLE[name] for name in ("id", "question")}, TRUTH, r"no list of functions"),
        (SIMPLE | {"function": [{"name": "f", "parameters": {"type": "HashMap"}}]}, TRUTH, r"'HashMap'"),
        (
            SIMPLE | {"function": [{"name": "f", "parameters": {"type": "dict", "required": 1}}]},
            TRUTH,
            r"no JSON schema",
        ),
        (SIMPLE | {"function": [{"name": "f"}]}, TRUTH, r"a schema is an object"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, row: Any, truth: Any, error: str) -> None:
    with pytest.raises(DataError, match=error) as caught:
        read_bfcl(*saved(tmp_path, [row], [truth]))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("task.path=", "task.answers="))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("tools")
    words = {"full": ["method=fp16"], "identity": ["method=identity"], "rtn": ["method=rtn", "bits=2"]}
    runs = {name: run(resolve(compose([*GIVEN, *more, f"results_dir={folder}"]))) for name, more in words.items()}
    return Store(folder), runs


def test_runs_on_the_embedded_model(made: tuple[Store, dict[str, Record]]) -> None:
    store, runs = made
    texts = {name: [row["text"] for row in store.samples(record.key)] for name, record in runs.items()}
    assert texts["identity"] == texts["full"] != texts["rtn"]
    assert runs["identity"].metrics["same_answers"] == 1
    found = [a == b for a, b in zip(texts["rtn"], texts["full"], strict=True)]
    assert runs["rtn"].metrics["same_answers"] == pytest.approx(sum(found) / 3)
    for name, record in runs.items():
        assert record.status == "done"
        assert record.metrics["items"] == 3
        assert set(record.units) == set(record.metrics)
        for check in CHECKS:
            assert record.metrics[check] == pytest.approx(sum(row[check] for row in store.samples(record.key)) / 3)
            assert (f"delta_{check}" in record.metrics) == (name != "full")
            assert (f"{check}_lost" in record.metrics) == (name != "full")
    assert runs["rtn"].baseline_key == runs["full"].key
    assert runs["rtn"].metrics["bits_per_element"] < 3


class Killed(Exception):
    """Stands for the end of the process."""


def test_a_killed_run_goes_on(
    made: tuple[Store, dict[str, Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*GIVEN, "method=fp16", "task.batch_size=1", "task.noise_floor=false", f"results_dir={tmp_path}"]
    asked: list[str] = []
    answer = tools.answer_batch

    def once(reader: Any, inputs: Any, batch: Any) -> Any:
        if len(asked) == 1:
            raise Killed
        asked.extend(item.request.name for item in batch)
        return answer(reader, inputs, batch)

    def counted(reader: Any, inputs: Any, batch: Any) -> Any:
        asked.extend(item.request.name for item in batch)
        return answer(reader, inputs, batch)

    monkeypatch.setattr(tools, "answer_batch", once)
    with pytest.raises(Killed):
        run(resolve(compose(given)))
    monkeypatch.setattr(tools, "answer_batch", counted)
    record = run(resolve(compose(given)))
    assert len(asked) == len(set(asked)) == 3
    store, runs = made
    texts = {row["item"]: row["text"] for row in store.samples(runs["full"].key)}
    assert {row["item"]: row["text"] for row in Store(tmp_path).samples(record.key)} == texts


def test_a_file_is_measured_and_names_the_run_by_what_it_holds(tmp_path: Path) -> None:
    keys = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        path, answers = saved(tmp_path / place, [SIMPLE], [TRUTH])
        words = [f"task.path={path}", f"task.answers={answers}", "task.noise_floor=false"]
        record = run(resolve(compose([*BARE, *words, "task.shots=0", "method=fp16", f"results_dir={tmp_path}"])))
        [sample] = Store(tmp_path).samples(record.key)
        assert (sample["item"], sample["function"]) == ("simple_0", "shape.area")
        keys.append(record.key)
    assert keys[0] == keys[1]


def test_refusals(tmp_path: Path) -> None:
    path, answers = saved(tmp_path, [SIMPLE], [TRUTH])
    for words, error, kind in (
        ([], r"needs task\.path and task\.answers", ConfigError),
        ([*FILES, "task.items=0"], r"task\.items=0", ConfigError),
        ([f"task.path={path}"], r"task\.path=.*needs task\.answers", ConfigError),
        ([f"task.answers={answers}"], r"task\.answers=.*needs task\.path", ConfigError),
        ([f"task.path={path}", f"task.answers={answers}"], r"task\.shots=1: task\.path has 1 requests", ConfigError),
        ([f"task.path={tmp_path}/no", f"task.answers={answers}"], r"task\.path=.*No such file", DataError),
        ([*FILES, "task.padding=100000000"], r"task\.padding=100000000", DataError),
        ([*FILES, "task.padding=4000"], r"prompt and answer take", DataError),
        ([*FILES, "task.chat_template=true"], r"chat template", ConfigError),
    ):
        with pytest.raises(kind, match=error) as caught:
            run(resolve(compose([*BARE, "method=fp16", *words, f"results_dir={tmp_path}"])))
        assert "\n" not in str(caught.value)
