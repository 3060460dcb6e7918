"""The settings of committed records, composed anew, give the keys that the records have: none is lost by a change."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import kvq
from kvq.codecs.trellis import LongTrellis
from kvq.config import compose, plugins, resolve
from kvq.config.identity import canonical
from kvq.errors import RecordError
from kvq.results import Record, Store, is_stale, run_key
from kvq.results.presets import flatten
from kvq.results.record import code_behind, code_hash, declared_versions, versions_of
from tests.results import made

RESULTS = Path(__file__).resolve().parents[2] / "results"


@functools.cache
def records() -> list[Record]:
    found = Store(RESULTS).scan()[0]
    assert len(found) >= 398
    return found


def one_per_protocol() -> list[Record]:
    """The first record of each task, model and text, and of each method."""
    protocols = {json.dumps([r.config["task"], r.config["model"], r.config["dataset"]]): r for r in records()}
    return [*protocols.values(), *{record.method: record for record in records()}.values()]


WORDS = ("~method.", "+method.policies.", "method.key.stages.transform.heads_together=")
"""How overrides begin that a command gives as they stand."""
SETTINGS = (
    "oscar/",
    *(f"nsnquant/{name}" for name in ("figure4", "figure8", "table15", "table20", "table21", "table3", "table7")),
    *(f"kvquant_plus_plus/{name}" for name in ("9_2", "9_5", "3_5_text")),
    *("embedded/round_weights", "task=ppl/nsnquant_table15"),
    *(f"real/{name}" for name in ("allocated", "eviction", "layers", "niah", "residual", "round_weights", "tails")),
    "method.calibration.path=",
    "method.calibration.samples=",
    "method.calibration.seed=",
    "method.bits_by_layer",
    "method.sink_tokens=",
    "residual.policy=",
    "stages.transform.tables=",
    *WORDS,
    "hydra/sweeper=kvq_search",
)
"""Experiments that give a method's residual, eviction, groups or clip themselves; all others have the preset's. Last:
a calibration, bits by layer, a dtype of tables or a search that the command names."""


def own_settings(record: Record) -> list[str]:
    """The settings of a method that its experiment gives, as overrides."""
    searched = "hydra/sweeper=kvq_search" in record.provenance.command
    if not searched and not any(f"+experiment={name}" in record.provenance.command for name in SETTINGS):
        return []
    residual = {side: held for side, held in record.config["residual"].items() if held is not None}
    given = record.config["method"]
    method = {
        "eviction": given.get("eviction") or {},
        "full_precision_layers": given.get("full_precision_layers") or {},
    }
    if "sink_tokens" in given:
        method["sink_tokens"] = given["sink_tokens"]
    for side in ("key", "value"):
        quantizer = (record.config["method"].get(side) or {}).get("quantizer", {})
        method[side] = {"quantizer": {name: quantizer[name] for name in ("group_size", "clip") if name in quantizer}}
    leaves = [*flatten(residual, "residual"), *flatten(method, "method")]
    return [*before_rope(record), *("=".join(leaf) for leaf in leaves if not leaf[0].endswith("._target_"))]


def own_calibration(record: Record) -> list[str]:
    """Overrides of a calibration on a text of one's own, whose fingerprint stands for its path, or on fewer windows."""
    own = record.config["method"].get("calibration") or {}
    if "text" not in str(own.get("dataset")).split("+"):
        named = ("dataset", "samples") if "method.calibration.samples=" in record.provenance.command else ()
        return [f"method.calibration.{name}={own[name]}" for name in named]
    words = [f"method.calibration.{name}={own[name]}" for name in ("dataset", "samples", "length")]
    return [*words, "method.calibration.path=text.txt"]


def own_tables(record: Record) -> list[str]:
    """Overrides of the dtype of a transform's tables, where the command names it."""
    sides = [one for one in ("key", "value") if f"method.{one}.stages.transform.tables=" in record.provenance.command]
    return [
        f"method.{side}.stages.transform.tables={record.config['method'][side]['stages']['transform']['tables']}"
        for side in sides
    ]


def own_words(record: Record) -> list[str]:
    """Overrides of the method as the command gives them, and the first tokens kept, of which it may list several."""
    command = shlex.split(record.provenance.command)
    kept = any(word.startswith("method.sink_tokens=") for word in command)
    own = [f"method.sink_tokens={record.config['method'].get('sink_tokens') or 0}"] if kept else []
    return own + [word for word in command if word.startswith(WORDS)]


def before_rope(record: Record) -> list[str]:
    """Overrides of `oscar/rope`, which puts a stage in front of those of the preset."""
    key = record.config["method"].get("key") or {}
    if "+experiment=oscar/rope" not in record.provenance.command or "undo_rope" not in key.get("stages", {}):
        return []
    order = ",".join(key["order"])
    return ["+method.key.stages.undo_rope={_target_:kvq.codecs.UndoRope}", f"method.key.order=[{order}]"]


def quoted(value: str) -> str:
    """A value as an override: a template in quotes, because braces are Hydra's; a text with line breaks as it is."""
    text = json.loads(value) if value.startswith('"') else value
    return f"'{text}'" if "{" in text else value


APART = ("task.name", "task.engine.file")
"""What no override of a task says: its name, and the hash of a file that an engine read."""


def key_of(record: Record) -> str:
    """The key of a run with the record's names, task settings and fingerprints; residuals are the presets'."""
    names = {group: getattr(record, group) for group in ("model", "task", "dataset", "method")}
    names["task"] = "engine" if "engine" in record.config["task"] else record.task  # a variant of task=ppl
    given = list(map("=".join, names.items()))
    asked = record.config["method"]
    by_layer = asked.get("bits_by_layer", {})
    given += [f"method.bits_by_layer.{side}={own}" for side, own in by_layer.items()]
    given += ["bits=2"] if by_layer else [f"bits={record.bits}"] if record.bits else []
    task = [leaf for leaf in flatten(record.config["task"], "task") if leaf[0] not in APART and leaf[1] != "null"]
    given += [f"{name}={quoted(value)}" for name, value in task] + own_settings(record)
    given += [f"cache.attention={record.config['attention']}"] if "attention" in record.config else []
    given += own_calibration(record) + own_tables(record)
    given += own_words(record)
    given += [f"method.{name}=true" for name in ("merge_rotation", "gqa_compensation") if asked.get(name)]
    if rounded := record.config["model"].get("round_weights"):
        given.append(f"model.round_weights={rounded}")
    config = resolve(compose(given))
    calibration = asked.get("calibration") or {}
    fingerprints = [record.config[group]["fingerprint"] for group in ("model", "dataset")]
    settings = canonical(config, *fingerprints, calibration.get("fingerprint"))
    if file := record.config["task"].get("engine", {}).get("file"):
        settings["task"]["engine"]["file"] = file  # whose weights are as they are
        del settings["task"]["engine"]["weights"]
    return run_key(settings)


def check(some: list[Record]) -> None:
    lost = [f"{r.task} {r.model} {r.method} {r.bits}: {r.key[:12]}" for r in some if key_of(r) != r.key]
    assert not lost, f"{len(lost)} of {len(some)}: {lost[:9]}"


@pytest.mark.long
def test_one_record_of_each_protocol_and_method_is_found_by_its_key() -> None:
    check(one_per_protocol())


@pytest.mark.long
def test_every_committed_record_is_found_by_its_key() -> None:
    check(records())


def test_no_committed_record_names_a_folder_of_the_machine() -> None:
    folders = re.compile(r"=(/|~)\S+")
    assert [record.key for record in records() if folders.search(record.provenance.command)] == []


PART = '''"""A stage of somebody's own."""

from kvq.codecs import Hadamard


class Turn(Hadamard):
    """Turns."""

    angle = 1
'''


def settings(**method: Any) -> dict[str, Any]:
    return {"task": {"name": "ppl"}, "model": {"outliers": None}, "method": {"key": None, "value": None} | method}


def test_what_is_read_is_what_classes_say() -> None:
    found: dict[str, list[int]] = {}
    roots = {"kvq": list(kvq.__path__)} | {name: [str(one.folder)] for name, one in plugins.installed().items()}
    names = [one.name for root, path in roots.items() for one in pkgutil.walk_packages(path, f"{root}.")]
    for module in names:
        if (
            module.endswith("__main__") or ".tests" in module or module.startswith("kvq_kernels.")
        ):  # some need a compiler for a GPU
            continue
        for name, kind in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            if "version" in vars(kind) and kind.__module__ == module:
                found.setdefault(name, []).append(kind.version)
    assert {name: [version] for name, version in declared_versions().items() if name[0].isupper()} == found


def test_a_run_keeps_the_versions_of_its_parts() -> None:
    key = {"_target_": "kvq.codecs.Codec", "stages": {"turn": {"_target_": "kvq.codecs.RandomizedHadamard"}}}
    found = versions_of(settings(key=key, sink_tokens=4))
    assert set(found) == {"ppl", "KVCache", "SinkSide", "Codec", "Hadamard", "RandomizedHadamard"}


def test_long_trellises_have_a_version_of_their_own() -> None:
    """They were trained anew, and shorter ones were not."""
    for memory, version in ((8, None), (9, LongTrellis.version)):
        quantizer = {"_target_": "kvq.codecs.TrellisQuantizer", "memory": memory}
        method = {"value": {"_target_": "kvq.codecs.Codec", "stages": {}, "quantizer": quantizer}}
        assert versions_of(settings(**method)).get("LongTrellis") == version


def test_a_raised_version_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    record = made.record(
        "kivi", "2", versions={"ppl": declared_versions()["ppl"], "Codec": declared_versions()["Codec"]}
    )
    assert not is_stale(record)
    monkeypatch.setattr("kvq.results.record.declared_versions", lambda: {**declared_versions(), "KVCache": 99})
    assert not is_stale(record)
    monkeypatch.setattr("kvq.results.record.declared_versions", lambda: {**declared_versions(), "Codec": 99})
    assert is_stale(record)
    assert is_stale(made.record("kivi", "2", versions={"ThatIsGone": 1}))


def test_a_part_outside_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "kvq_turns.py"
    file.write_text(PART)
    found = versions_of(settings(key={"_target_": "kvq_turns.Turn"}))
    assert set(found) == {"ppl", "KVCache", "Hadamard", "kvq_turns.Turn"}
    record = made.record("kivi", "2", versions=found)
    del sys.modules["kvq_turns"]
    for text, stale in [
        (PART, False),
        (PART.replace("angle = 1", "angle = 2"), True),
        ("raise AssertionError('read, not imported')", True),
    ]:
        file.write_text(text)
        assert is_stale(record) is stale
    file.unlink()
    assert is_stale(record)
    assert "kvq_turns" not in sys.modules


def test_a_hash_is_of_files_and_not_of_their_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.so"
    one.write_text("def score():\n    return 1\n")
    two.write_bytes(b"\x00")
    assert code_hash(one, two) == code_hash(two, one)
    assert len({code_hash(one), code_hash(two), code_hash(one, two), code_hash()}) == 4
    names: dict[str, Any] = {}
    exec(compile(one.read_text(), str(one), "exec"), names)
    before = code_hash(one)
    assert code_behind(names["score"]) == code_behind(functools.partial(names["score"])) == before
    assert code_behind(Path()) == code_hash(Path(inspect.getfile(type(Path()))))  # an object's class
    one.write_text(one.read_text() + "# more\n")
    assert code_behind(names["score"]) == code_hash(one) != before


def test_a_part_of_the_package_without_a_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.results.record.declared_versions", lambda: {"ppl": 1, "KVCache": 1})
    with pytest.raises(RecordError, match=r"kvq\.codecs.*Zero: no version"):
        versions_of(settings(key={"_target_": "kvq.codecs.Zero"}))


@pytest.mark.every_plugin
def test_committed_records_say_what_made_them() -> None:
    """Versions of a committed record are those of its settings today, and none has been raised."""
    records, broken = Store(RESULTS).scan()
    assert not broken
    for record in records:
        variant = plugins.settings_of_task("engine") if "engine" in record.config["task"] else None
        assert record.versions == versions_of(record.config, variant), record.key
        assert not is_stale(record)
