"""Tasks and modules outside the repository: how they are found, and what is said where they cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from kvq import cli
from kvq.config import TaskConfig, compose, outside, resolve
from kvq.config.explain import COMPOSE_ERRORS, choices, composed, main
from kvq.config.explain import explain as reworded
from kvq.errors import ConfigError
from kvq.methods.build import build_method
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import csv, markdown
from kvq.results import Store, is_stale
from kvq.tasks.measurement import task_of
from tests.results import made

TASK = '''"""Counts."""

from dataclasses import dataclass
from typing import ClassVar

from kvq.config import TaskConfig
from kvq.tasks.measurement import Measurement, Task


@dataclass
class CountConfig(TaskConfig):
    name: str = "counting"
    version: ClassVar[int] = 3
    upto: int = 5


def measure(inputs, method, baseline, journal):
    return Measurement({"count": float(inputs.config.task.upto)}, {"count": "numbers"})


TASK = Task(lambda inputs, method: None, measure, lambda inputs: "numbers", settings=CountConfig)
'''
YAML = "# Counts.\ndefaults: [counting_schema, _self_]\nname: counting\nupto: 7\n"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Modules and schemas of one test are not those of the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(outside, "_failed", {})
    monkeypatch.setattr(outside, "_registered", {})
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("counting", None)
    tasks = ConfigStore.instance().repo["task"]
    for name in ("counting.yaml", "counting_schema.yaml"):
        tasks.pop(name, None)
    outside.installed.cache_clear()


def folder(path: Path, module: str | None = TASK, yaml: str = YAML) -> Path:
    own = path / "own"
    (own / "task").mkdir(parents=True)
    (own / "task" / "counting.yaml").write_text(yaml)
    if module is not None:
        (own / "counting.py").write_text(module)
    return own


def said(overrides: list[str], own: Path) -> str:
    with pytest.raises(COMPOSE_ERRORS) as error:
        resolve(compose(overrides, own))
    return reworded(error.value, overrides, own)


def test_settings_are_checked_as_those_of_kvqs_own_tasks(tmp_path: Path) -> None:
    own = folder(tmp_path)
    task = resolve(compose(["task=counting", "task.upto=9"], own)).task
    assert (type(task).__name__, task.upto, task.name) == ("CountConfig", 9, "counting")
    assert task_of(task).settings is type(task)
    assert said(["task=counting", "task.upto=many"], own) == (
        "task.upto=many: Value 'many' of type 'str' could not be converted to Integer"
    )
    assert said(["task=counting", "task.upo=3"], own) == (
        "task.upo: unknown setting; task has name, upto. Did you mean 'upto'?"
    )
    assert said(["task=counting", "+task.more=3"], own).startswith("task.more: unknown setting")
    assert said(["task=counting", "task.name=ppl"], own).startswith("task.name=ppl: choose another task")
    assert "Did you mean 'counting'" in said(["task=countin"], own)
    assert choices(own)["task"]["counting"] == "Counts."
    assert "counting" not in choices()["task"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("TASK = Task(", "OTHER = Task(", r"counting\.py has no TASK"),
        (", settings=CountConfig", "", "TASK has no settings="),
        (", settings=CountConfig)", ")\nvars(TASK)['settings'] = int", "TASK has no settings="),
        ("    version: ClassVar[int] = 3\n", "", r"CountConfig has no version; give version: ClassVar\[int\] = 1"),
        ('"counting"', '"counts"', "CountConfig.name is 'counts'; expected 'counting'"),
        ("from kvq.config import", "from kvq.konfig import", r"cannot be imported \(ModuleNotFoundError: .*konfig"),
        ("    upto: int", "    upto int", r"cannot be imported \(SyntaxError"),
    ],
)
def test_a_task_that_cannot_be_used_says_why(tmp_path: Path, old: str, new: str, says: str) -> None:
    own = folder(tmp_path, TASK.replace(old, new))
    line = said(["task=counting"], own)
    assert line.startswith(f"task=counting: {own / 'counting.py'}")
    assert "\n" not in line
    with pytest.raises(ConfigError, match=says):
        raise ConfigError(line)
    assert resolve(compose(["method=kivi"], own)).method.name == "kivi"  # other runs do not need it


@pytest.mark.parametrize(("name", "hint"), [("plan", "; its name is token_policy now"), ("plans", "")])
def test_a_setting_that_a_method_of_ones_own_misnames(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(f"name: mine\n{name}: {{pool: 3}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^method/mine.yaml: {name}: unknown setting{hint}$"):
        composed(["method=mine"], tmp_path)


def test_a_task_without_its_module(tmp_path: Path) -> None:
    own = folder(tmp_path, module=None)
    assert said(["task=counting"], own) == (
        f"task=counting: its settings (counting_schema) are not known: no counting.py in {own}, and no installed "
        "package has an entry point counting of the group kvq.tasks"
    )


def test_a_yaml_that_names_no_schema(tmp_path: Path) -> None:
    own = folder(tmp_path, yaml="name: counting\nupto: 7\n")
    assert said(["task=counting"], own).startswith(
        "task.name=counting: nothing checks its settings; its YAML must begin with defaults: [counting_schema, _self_]"
    )


def test_the_name_of_an_installed_module_is_taken(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "task").mkdir(parents=True)
    (own / "task" / "colorsys.yaml").write_text(YAML.replace("counting", "colorsys"))
    (own / "colorsys.py").write_text(TASK.replace("counting", "colorsys"))
    assert "the name is taken by" in said(["task=colorsys"], own)


def test_an_installed_package_brings_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    (site / "counts-1.2.dist-info").mkdir(parents=True)
    (site / "counts-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: counts\nVersion: 1.2\n")
    (site / "counts-1.2.dist-info" / "entry_points.txt").write_text("[kvq.tasks]\ncounting = counting\n")
    (site / "counting.py").write_text(TASK)
    sys.path.append(str(site))
    outside.installed.cache_clear()
    assert choices()["task"]["counting"] == "Task of counts 1.2."
    assert main(["tasks", "count"]) == 0
    assert "Task of counts 1.2." in capsys.readouterr().out
    task = resolve(compose(["task=counting", "task.upto=2"])).task
    assert isinstance(task, TaskConfig)
    assert (task.name, task.upto) == ("counting", 2)  # type: ignore[attr-defined]
    assert cli.main(["task=counting", "method=kivi", "plan=true"]) == 0
    assert "tiny pydocs counting" in capsys.readouterr().out


def test_a_stage_that_is_not_found_says_where_it_was_looked_for(tmp_path: Path) -> None:
    given = ["+key.stages.turn={_target_: kvq_missing_stage.Turn}"]
    with pytest.raises(ConfigError) as error:
        build_method("kivi", overrides=given)
    line = str(error.value)
    assert line.startswith("method.key.stages.turn._target_=kvq_missing_stage.Turn: cannot be imported (No module")
    assert f"looked in {Path(sys.path[0] or '.').resolve()}" in line
    assert "installed packages. Put kvq_missing_stage.py in the folder of --config-dir=..., or set PYTHONPATH" in line


def test_records_of_a_task_that_is_not_here_are_shown(tmp_path: Path) -> None:
    store = Store(tmp_path)
    versions: dict[str, int | str] = {"counting": 3, "counting.CountConfig": "0" * 64}
    record = made.record("kivi", "2", task="counting", versions=versions, metrics={"count": 7.0}, units={"count": "s"})
    store.put(record)
    (table,) = build_tables(store).tables
    assert "| count (s) |" in markdown(table)
    assert "| 7.0000 |" in markdown(table)
    assert "count" in csv(table).splitlines()[0].split(",")
    assert is_stale(record)
    assert "the version of a part that made this number has been raised since, or the part is gone" in markdown(table)
