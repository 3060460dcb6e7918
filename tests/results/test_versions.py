"""A record is stale when a part that made it has another version: no more, no less."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

import kvq
from kvq.codecs.trellis import LongTrellis
from kvq.config import plugins
from kvq.errors import RecordError
from kvq.results import Store, is_stale, staleness, versions
from kvq.results.versions import code_behind, code_hash, declared_versions, versions_of
from tests.results import made

RESULTS = Path(__file__).resolve().parents[2] / "results"
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
    monkeypatch.setattr(versions, "declared_versions", lambda: {**declared_versions(), "KVCache": 99})
    assert not is_stale(record)
    monkeypatch.setattr(versions, "declared_versions", lambda: {**declared_versions(), "Codec": 99})
    assert is_stale(record)
    assert staleness()(record)
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
    monkeypatch.setattr(versions, "declared_versions", lambda: {"ppl": 1, "KVCache": 1})
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
