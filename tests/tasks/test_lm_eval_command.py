"""lm-eval's own command line with the model `kvq` says what `task=lm_eval` records."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager

from kvq.config import compose, resolve
from kvq.errors import ConfigError, Unsupported
from kvq.runner import run
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
