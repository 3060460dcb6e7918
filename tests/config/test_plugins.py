"""Tasks and modules outside the repository: how they are found, and what is said where they cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from kvq import cli
from kvq.config import compose, composing, plugins, resolve
from kvq.config.explain import COMPOSE_ERRORS, choices, composed, main
from kvq.config.explain import explain as reworded
from kvq.errors import ConfigError
from kvq.methods.build import build_method
from kvq.results.record import declared_versions
from kvq.tasks.measurement import task_of

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
    monkeypatch.chdir(tmp_path)
    yield
    for module in [
        name for name in sys.modules if name.partition(".")[0] in ("counting", "counts", "torn", "one", "two")
    ]:
        del sys.modules[module]
    tasks = ConfigStore.instance().repo["task"]
    for name in ("counting.yaml", "counting_schema.yaml"):
        tasks.pop(name, None)
    for cached in (plugins.installed, plugins._shared_dirs, composing._register, declared_versions):
        cached.cache_clear()


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
        ("TASK = Task(", "OTHER = Task(", r"counting\.py: no TASK with settings="),
        (", settings=CountConfig)", ")\nvars(TASK)['settings'] = int", "no TASK with settings="),
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
        f"task=counting: its settings (counting_schema) are not known: no counting.py in {own}, and no plugin (entry "
        "point of the group kvq.plugins) registers task counting."
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


PLUGIN = """
from kvq.config.plugins import Plugin
PLUGIN = Plugin("{name}", tasks={{"counting": "{name}.counting"}}, commands={{"count": "{name}.counting"}})
"""


def install(site: Path, name: str, code: str = PLUGIN, method: str = "counted") -> None:
    """An installed package `name` with a task, a command and a method."""
    information = site / f"{name}-1.2.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(f"[kvq.plugins]\n{name} = {name}:PLUGIN\n")
    conf = site / name / "conf"
    for group, choice, text in (
        ("task", "counting", YAML),
        ("method", method, f"# Counts.\ndefaults: [kivi, _self_]\nname: {method}\nlabel: Counted\n"),
    ):
        (conf / group).mkdir(parents=True)
        (conf / group / f"{choice}.yaml").write_text(text)
    (site / name / "__init__.py").write_text(code.format(name=name))
    (site / name / "counting.py").write_text(TASK + "\n\ndef main():\n    print('counted')\n    return 0\n")
    if str(site) not in sys.path:
        sys.path.append(str(site))
    for cached in (plugins.installed, plugins._shared_dirs, composing._register, declared_versions):
        cached.cache_clear()


@pytest.mark.every_plugin
def test_an_installed_package_brings_a_task_a_method_and_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "counts")
    assert "counts.counting" not in sys.modules  # what a plugin names is imported when it is needed
    assert main(["tasks", "count"]) == 0
    assert "Counts." in capsys.readouterr().out
    task = resolve(compose(["task=counting", "task.upto=2", "method=counted"])).task
    assert (task.name, task.upto) == ("counting", 2)  # type: ignore[attr-defined]
    assert cli.main(["-m", "task=counting", "method=kivi,counted", "plan=true"]) == 0
    assert "tiny pydocs counting" in capsys.readouterr().out
    assert plugins.merge_tables("commands")["count"] == "counts.counting"
    monkeypatch.setenv(plugins.SELECT, "none")
    for cached in (plugins.installed, plugins._shared_dirs, composing._register):
        cached.cache_clear()
    assert "counted" not in choices()["method"]
    assert said(["method=counted"], tmp_path).startswith("method=counted: unknown method")


@pytest.mark.every_plugin
def test_a_plugin_that_cannot_be_imported_is_one_line_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site", "torn", "import nothing_like_it")
    assert resolve(compose(["method=kivi"])).method.name == "kivi"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plugin torn: cannot be imported (ModuleNotFoundError: No module named 'nothing_like_it')")
    assert "Plugin torn cannot be imported" in said(["method=counted"], tmp_path)
    assert "Plugin torn cannot be imported" in said(["task=counting"], tmp_path)
    plugins._failures.clear()


@pytest.mark.every_plugin
@pytest.mark.parametrize(("method", "what"), [("counted", "command count|task counting"), ("kivi", "method=kivi")])
def test_one_name_of_two_plugins_is_refused_with_both(tmp_path: Path, method: str, what: str) -> None:
    site = tmp_path / "site"
    install(site, "one", method=method)
    if method == "counted":
        install(site, "two")
    with pytest.raises(ConfigError, match=what) as error:
        compose(["method=nsn"])
    assert all(name in str(error.value) for name in (("one", "two") if method == "counted" else ("one", "conf")))


def test_a_stage_that_is_not_found_says_where_it_was_looked_for(tmp_path: Path) -> None:
    given = ["+key.stages.turn={_target_: kvq_missing_stage.Turn}"]
    with pytest.raises(ConfigError) as error:
        build_method("kivi", overrides=given)
    line = str(error.value)
    assert line.startswith("method.key.stages.turn._target_=kvq_missing_stage.Turn: cannot be imported (No module")
    assert "; put kvq_missing_stage.py in the folder of --config-dir=..., set PYTHONPATH or" in line
