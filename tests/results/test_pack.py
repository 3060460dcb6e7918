"""Samples that are packed into one file of a folder are those that a run wrote, and none is lost."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from kvq.errors import RecordError
from kvq.results import Store
from kvq.results.files import PACK, record_path_of
from tests.results import made

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def files_of(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.runs.rglob("*") if path.suffix in (".jsonl", ".zip")}


def test_packed_samples_are_read_as_loose_ones(store: Store) -> None:
    records = [store.put(made.record("kivi", bits), made.samples([float(bits)])) for bits in "324"]
    without = store.put(made.record("fp16"))
    assert store.pack() == 3
    first = files_of(store)
    assert list(first) == [PACK]
    assert [store.samples_of(one) for one in records] == [made.samples([float(bits)]) for bits in "324"]
    assert store.samples_of(without) == []
    assert store.samples_path(records[0].key).name == PACK
    assert store.pack() == 0
    assert files_of(store) == first
    again = store.put(records[0], made.samples([9.0]))  # measured again: the loose file counts, then replaces
    assert store.samples_of(again) == made.samples([9.0])
    assert store.pack() == 1
    assert store.samples_of(again) == made.samples([9.0])
    store.put(records[0], made.samples([3.0]))
    assert store.pack() == 1
    assert files_of(store) == first  # the same samples are the same bytes, whatever the order in which they came
    store.record_path(records[1].key).unlink()
    assert store.pack() == 0
    assert len(files_of(store)[PACK]) < len(first[PACK])  # those of a record that is gone are gone


def test_a_damaged_pack_is_named_and_nothing_is_lost(store: Store) -> None:
    record = store.put(made.record("kivi", "2"), made.samples([1.0]))
    store.pack()
    pack = store.samples_path(record.key)
    whole = pack.read_bytes()
    other = store.put(made.record("kivi", "3"), made.samples([2.0]))
    for damaged in (whole[:-30], whole[:40] + b"x" * 40 + whole[80:], b""):
        pack.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"cannot read samples .*samples\.zip is damaged"):
            store.samples_of(record)
        with pytest.raises(RecordError, match=r"cannot pack .*samples\.zip is damaged"):
            store.pack()
        assert store.samples_of(other) == made.samples([2.0])
    pack.write_bytes(whole)
    assert store.pack() == 1
    assert store.samples_of(record) == made.samples([1.0])


def test_a_full_disk_while_packing_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = store.put(made.record("kivi", "2"), made.samples([1.0]))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match=r"cannot pack .*: No space left on device"):
            store.pack()
    torn = store.record_path(record.key).with_name(f".{PACK}.x.tmp")
    torn.write_bytes(b"of a process that was killed")
    assert store.samples_of(record) == made.samples([1.0])
    assert store.pack() == 1
    assert not torn.exists()


def test_committed_records_lie_at_their_places_and_their_samples_are_packed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    listed = subprocess.run(["git", "ls-files", "results/runs"], cwd=ROOT, capture_output=True, text=True, check=True)
    store, files = Store(ROOT / "results"), {ROOT / name for name in listed.stdout.split()}
    records, broken = store.scan()
    assert not broken
    paths = {store.runs / record_path_of(record) for record in records}
    packs = {store.runs / record_path_of(record).with_name(PACK) for record in records if record.samples_sha256}
    assert {path for path in files if path.suffix == ".json"} <= paths
    assert {path for path in files if path.suffix != ".json"} <= packs
    for record in records:
        store.samples_of(record)
