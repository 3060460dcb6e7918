"""Records lie where a person looks for them, and are found by their key wherever they lie."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvq.results import Store
from kvq.results.files import digits_of, place, safe
from kvq.results.record import dump_record
from tests.results import made

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_a_record_lies_under_its_task_model_and_data_set(store: Store) -> None:
    record = store.put(made.record("engine/mlx", "4"), made.samples([1.0]))
    path = store.runs / record.task / record.model / record.dataset / f"engine_mlx-4-{record.key[:8]}.json"
    assert store.record_path(record.key) == path
    assert path.is_file()
    assert store.samples_path(record.key) == path.with_name(f"engine_mlx-4-{record.key[:8]}.samples.jsonl")


def test_a_record_is_found_in_any_folder_and_under_its_whole_key(store: Store) -> None:
    """Stores of earlier versions have `<key>.json`; people sort files into folders of their own."""
    old, moved = made.record("kivi", "2"), made.record("kivi", "3")
    store.runs.mkdir()
    (store.runs / f"{old.key}.json").write_bytes(dump_record(old))
    (store.runs / "mine" / "of today").mkdir(parents=True)
    (store.runs / "mine" / "of today" / f"best-{moved.key[:8]}.json").write_bytes(dump_record(moved))
    assert store.get(old.key) == old
    assert store.get(moved.key) == moved
    assert store.scan() == (sorted((old, moved), key=lambda record: record.key), [])


def test_put_moves_a_record_from_where_it_lay(store: Store) -> None:
    record = made.record("kivi", "2")
    flat = store.runs / f"{record.key}.json"
    flat.parent.mkdir()
    flat.write_bytes(dump_record(record))
    flat.with_name(f"{record.key}.samples.jsonl").write_text("{}\n")
    store.put(record)
    assert [path.name for path in store.runs.rglob("*.json*")] == [f"kivi-2-{record.key[:8]}.json"]
    assert store.get(record.key) == record


def test_two_files_of_one_run_are_one_record(store: Store) -> None:
    record = store.put(made.record("kivi", "2"))
    copy = store.runs / f"{record.key}.json"
    shutil.copy(store.record_path(record.key), copy)
    records, broken = store.scan()
    assert records == [record]
    assert [(entry.path.name, entry.reason) for entry in broken] == [
        (f"kivi-2-{record.key[:8]}.json", f"another file holds the run {record.key[:12]}")
    ]


def test_runs_whose_keys_begin_alike(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are kept, under one digit as under eight: the second by its whole key."""
    monkeypatch.setattr("kvq.results.files.DIGITS", 0)
    monkeypatch.setattr("kvq.results.files.digits_of", lambda name: "")
    records = [store.put(made.record("kivi", "2", settings={"seed": seed})) for seed in range(3)]
    assert len({place(record) for record in records}) == 1
    assert [store.get(record.key) for record in records] == records
    assert len(store.scan()[0]) == 3
    again = [store.put(record) for record in records]
    assert [store.get(record.key) for record in again] == records
    assert len(list(store.runs.rglob("*.json"))) == 3


def test_what_another_process_writes_is_seen(store: Store) -> None:
    other = Store(store.root)
    for bits in "2345":
        record = made.record("kivi", bits)
        assert store.get(record.key) is None
        other.put(record)
        assert store.get(record.key) == record
        other.record_path(record.key).unlink()
        assert store.get(record.key) is None


def test_a_folder_that_did_not_change_is_not_listed_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [store.put(made.record("kivi", bits)) for bits in "234"]
    for folder in (store.runs, *store.runs.rglob("*")):
        os.utime(folder, (1, 1))
    assert [store.get(record.key) for record in records] == records
    monkeypatch.setattr(os, "scandir", None)
    assert [store.get(record.key) for record in records] == records


@pytest.mark.parametrize(
    ("text", "part"),
    [("a/b", "a_b"), ("..", "_"), ("", "_"), (".x", "x"), ("é\n*", "___"), ("m" * 300, "m" * 80), ("k3v2", "k3v2")],
)
def test_names_are_parts_of_paths(text: str, part: str) -> None:
    assert safe(text) == part


def test_digits_in_names() -> None:
    assert digits_of("kivi-2-01234567.json") == digits_of(f"{'01234567' * 8}.json") == digits_of("01234567.json")
    assert not any(digits_of(name) for name in ("notes.json", "kivi-0123456.json", "kivi-01234567 (1).json"))


def test_committed_records_lie_at_their_places() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    listed = subprocess.run(["git", "ls-files", "results/runs"], cwd=ROOT, capture_output=True, text=True, check=True)
    store = Store(ROOT / "results")
    records, broken = store.scan()
    assert not broken
    committed = {ROOT / name for name in listed.stdout.split() if name.endswith(".json")}
    assert committed <= {store.runs / place(record) for record in records}
