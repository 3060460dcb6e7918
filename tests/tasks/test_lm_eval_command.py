"""lm-eval's own command line with the model `kvq` says what `task=lm_eval` records."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvq.config import compose, resolve
from kvq.errors import ConfigError, Unsupported
from kvq.runs import run
from kvq.tasks.decoding import FOLLOWED, SAMPLING, SCORES, Decoder
from kvq.tasks.lm_eval_model import MethodLM, config_of, main
from tests.tasks.test_lm_eval import write_tasks

ARGUMENTS = "pretrained=tiny,method=kivi,bits=2,residual.size=16"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_tasks(tmp_path)
    return tmp_path


@pytest.mark.long
def test_it_equals_the_task(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tasks / "out"
    words = ["--model", "kvq", "--model_args", ARGUMENTS, "--tasks", "letters,say,colours", "--batch_size", "2"]
    words += ["--include_path", str(tasks), "--output_path", str(out), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["kvq"])
    assert main(words) == 0
    (file,) = out.rglob("results*.json")
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    given = f"task=lm_eval task.tasks=[letters,say,colours] task.include_path={tasks} model=tiny method=kivi bits=2"
    record = run(resolve(compose([*given.split(), "residual.size=16", f"results_dir={tasks / 'results'}"])))
    assert found["colours"]["acc,none"] == record.metrics["acc[colours]"]
    assert found["letters"]["acc,none"] == record.metrics["acc[letters]"]
    assert found["say"]["exact_match,none"] == record.metrics["exact_match[say]"]


def test_what_the_model_takes(tmp_path: Path) -> None:
    config = config_of("tiny", "kivi", 2, **{"residual.size": 16, "device": "cpu"})
    assert (config.model.name, config.method.name, config.residual.size) == ("tiny", "kivi", 16)
    assert config_of(str(tmp_path)).model.path == str(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'kivi'"):
        config_of("tiny", "kiv")
    with pytest.raises(ConfigError, match="prefill=half: whole or chunked"):
        MethodLM("tiny", prefill="half")
    with pytest.raises(Unsupported, match="bits=11"):
        MethodLM("tiny", "kivi", 11)


def test_settings_that_it_cannot_take_are_one_line(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvq"])
    # Without the library's thousands of own tasks, which take ten seconds to list.
    own = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)
    words = ["--model", "kvq", "--model_args", "pretrained=tiny,method=kiv", "--tasks", "say"]
    assert main([*words, "--include_path", str(tasks)]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: method=kiv: unknown method")


ACTING: dict[str, Any] = {
    "sequence_bias": [[[5], 3.0]],
    "repetition_penalty": 3,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[11], [7, 8]],
    "min_length": 45,
    "min_new_tokens": 5,
    "exponential_decay_length_penalty": [2, 1.5],
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [9],
    "temperature": 0.5,
    "top_h": 0.5,
    "top_k": 3,
    "top_p": 0.6,
    "min_p": 0.2,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02,
}


@pytest.fixture(scope="module")
def model() -> MethodLM:
    return MethodLM("tiny", "fp16")


def answers(model: MethodLM, count: int = 1, **given: Any) -> list[str]:
    text = "The colour of the sky is blue. The colour of the sun is"
    given = {"max_gen_toks": 8, "until": [], "do_sample": False, **given}
    return model.generate_until([Instance("generate_until", {}, (text, given), 0, ("t", 0, 1)) for _ in range(count)])


@pytest.mark.parametrize("name", [*SCORES, *SAMPLING])
def test_scores_are_those_of_transformers(model: MethodLM, name: str) -> None:
    """Of each setting that is followed, step by step on what transformers' own generation writes."""
    ends, prompt = model._until_end, torch.arange(40)[None]
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0} if name in SAMPLING else {"do_sample": False}
    settings = {**sampled, name: float(ACTING[name]) if name == "repetition_penalty" else ACTING[name]}
    theirs = model.model.generate(
        prompt,
        generation_config=GenerationConfig(max_new_tokens=6, eos_token_id=ends, pad_token_id=0, **settings),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    decoder, changed = Decoder({**settings, name: ACTING[name]}, prompt[0].tolist(), ends), False
    for logits, scores, token in zip(theirs.logits, theirs.scores, theirs.sequences[0, 40:].tolist(), strict=True):
        torch.testing.assert_close(decoder.scores(logits).float(), scores.float(), rtol=1e-4, atol=1e-4)
        changed |= not torch.equal(logits, scores)
        decoder._tokens.append(token)
    assert changed
    assert ACTING.keys() == {*SCORES, *SAMPLING} < {*FOLLOWED}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({key: value}, rf"{key}=.*: cannot be followed; what can is do_sample, until") for key, value in {
            "num_beams": 4, "num_return_sequences": 2, "use_cache": False, "guidance_scale": 2.0, "max_length": 9,
            "stop_strings": ["a"], "penalty_alpha": 0.5, "forced_eos_token_id": 3, "return_dict_in_generate": True,
        }.items()),
        ({"temprature": 2.0}, r"temprature=2.0: unknown setting. Did you mean 'temperature'\?"),
        ({"max_new_tokens": 3}, "max_gen_toks=8 and max_new_tokens=3: give one of them"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: at least 1"),
        ({"do_sample": True}, "do_sample=true: needs a temperature above 0"),
        ({"do_sample": "yes"}, "do_sample=yes: true or false"),
        ({"do_sample": True, "temperature": -1}, "temperature=-1: .* strictly positive"),
        ({"do_sample": True, "temperature": 1, "top_p": float("nan")}, "top_p=nan: a finite number"),
        ({"do_sample": True, "temperature": "hot"}, "generation_kwargs: could not convert string to float"),
        ({"bad_words_ids": [[10**6]]}, "generation_kwargs: .*vocabulary size"),
    ],
)  # fmt: skip
def test_what_generation_cannot_follow_is_refused(model: MethodLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answers(model, **given)


def test_what_asks_for_nothing_else_is_taken(model: MethodLM) -> None:
    plain = answers(model)
    same = {"num_beams": 1, "use_cache": True, "top_p": None, "repetition_penalty": 1, "early_stopping": False}
    assert answers(model, **same) == plain
    with pytest.warns(UserWarning, match=r"\{'top_p': 0.9\}: without effect, as the answers are greedy"):
        assert answers(model, top_p=0.9) == plain


def test_repeats_are_as_many_draws(model: MethodLM) -> None:
    sampled = {"do_sample": True, "temperature": 1.0}
    drawn = answers(model, 6, **sampled)
    assert len(set(drawn)) > 3
    assert drawn == answers(model, 6, **sampled)
    assert drawn[:2] == answers(MethodLM("tiny", "fp16"), 2, **sampled)
    assert len(set(answers(model, 3))) == 1
