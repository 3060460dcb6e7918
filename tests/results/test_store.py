"""Records are whole or absent, found by their key; what cannot be used is named in one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from kvq.errors import RecordError
from kvq.results import Store, run_key
from kvq.results.files import PACK, loose_samples, record_path_of, safe_name
from kvq.results.record import dump_record
from tests.results import made

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def full(*_: object) -> None:
    """Stands for `os.fsync` on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def temporaries(store: Store) -> list[Path]:
    return list(store.runs.rglob(".*.tmp"))


def test_put_get_and_replace(store: Store) -> None:
    record = made.record("kivi", "2", metrics={"nll": 1.25})
    assert store.get(record.key) is None
    assert store.scan() == ([], [])
    rows = made.samples([1.0, 2.0])
    stored = store.put(record, iter(rows))
    assert store.get(record.key) == stored
    assert stored.model_copy(update={"samples_sha256": None}) == record
    assert store.samples(record.key) == rows
    assert store.scan() == ([stored], [])
    assert [len(line.split()) > 1 for line in store.samples_path(record.key).read_text().splitlines()] == [True, True]
    assert temporaries(store) == []
    replaced = store.put(record.model_copy(update={"metrics": {"nll": 2.5}}))
    assert store.get(record.key) == replaced != stored
    assert store.samples(record.key) == []
    assert not store.samples_path(record.key).exists()


def test_samples_that_are_not_the_records_are_refused(store: Store) -> None:
    record = made.record("kivi", "2")
    store.put(record, made.samples([1.0, 2.0]))
    path = store.samples_path(record.key)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordError, match=f"{record.key[:8]}.samples.jsonl are not .*force=true"):
        store.samples(record.key)
    path.unlink()
    with pytest.raises(RecordError, match=r"no such file, and none in samples\.zip"):
        store.samples(record.key)
    with pytest.raises(RecordError, match="no record"):
        store.samples("0" * 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named_and_nothing_is_written(store: Store, value: float) -> None:
    with pytest.raises(RecordError, match="metric 'nll' is"):
        store.put(made.record("kivi", "2", metrics={"nll": value}))
    with pytest.raises(RecordError, match="sample 1: 'nll' is"):
        store.put(made.record("kivi", "2"), made.samples([1.0, value]))
    with pytest.raises(RecordError, match="sample 0 cannot be written"):
        store.put(made.record("kivi", "2"), [{"x": [value]}])
    assert not store.runs.exists()


def test_broken_files_are_named_and_skipped(store: Store) -> None:
    good = store.put(made.record("kivi", "2"))
    other = made.record("kivi", "3")
    store.record_path(other.key).write_bytes(store.record_path(good.key).read_bytes())  # a copy under a wrong name
    contents = {"1": b'{"schema_version": 1, "key"', "2": b'{"schema_version": 99}', "3": b"", "4": b"\x00\x01"}
    for digit, content in contents.items():
        store.record_path(digit * 64).write_bytes(content)
    (store.runs / "notes.json").write_text("{}")
    records, broken = store.scan()
    assert records == [good]
    reasons = {entry.path.stem: entry.reason for entry in broken}
    assert reasons.keys() == {*(digit * 8 for digit in "1234"), "notes", other.key[:8]}
    assert f"its file name does not end in {good.key[:8]}" in reasons[other.key[:8]]
    assert "not valid JSON" in reasons["1" * 8]
    assert "schema_version is 99" in reasons["2" * 8]
    assert not any("\n" in reason for reason in reasons.values())


@pytest.mark.parametrize("key", ["", "abc", "../" * 20 + "a" * 4, "A" * 64, "0" * 64 + "\n"])
def test_keys_are_checked_before_they_become_paths(store: Store, key: str) -> None:
    with pytest.raises(RecordError, match="not a run's key"):
        store.get(key)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "results")
    for action in (store.check_writable, lambda: store.put(made.record("kivi", "2"))):
        with pytest.raises(RecordError, match=r"^results_dir: cannot write under '.*': Not a directory$"):
            action()
    with pytest.raises(RecordError, match="cannot write under"), store.lock("0" * 64):
        pass


def test_a_full_disk_is_named_and_keeps_what_was_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = made.record("kivi", "2", metrics={"nll": 1.25})
    stored = store.put(record, made.samples([1.0]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match="No space left on device"):
            store.put(record.model_copy(update={"metrics": {"nll": 2.0}}), made.samples([2.0]))
    assert store.get(record.key) == stored
    assert store.samples(record.key) == made.samples([1.0])
    assert temporaries(store) == []


def test_lock_excludes_and_frees(store: Store) -> None:
    key, other = run_key({"a": 1}), run_key({"a": 2})
    again = FileLock(store.runs / ".locks" / f"{key}.lock", timeout=0)
    with store.lock(key), store.lock(other), pytest.raises(Timeout):
        again.acquire()
    with pytest.raises(ValueError, match="inside"), store.lock(key):
        raise ValueError("inside")
    again.acquire()


WRITER = """
import sys
from kvq.results import Store
from tests.results import made
store, keys = Store(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
for turn in range(int(sys.argv[3])):
    record = made.record("kivi", "2", settings={"x": turn % keys}, metrics={"turn": float(turn)})
    with store.lock(record.key):
        store.put(record, [{"window": i, "turn": turn} for i in range(200)])
    if turn % 3 == 0:
        store.pack()
"""


def start_writer(store: Store, keys: int, turns: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(store.root), str(keys), str(turns)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def check_whole(store: Store) -> int:
    records, broken = store.scan()
    assert broken == []
    for record in records:
        rows = store.samples(record.key)
        assert [row["window"] for row in rows] == list(range(200))
        assert {row["turn"] for row in rows} == {record.metrics["turn"]}
    return len(records)


@pytest.mark.parametrize("kills", [7, pytest.param(20, marks=pytest.mark.long)])
def test_sigkill_never_leaves_a_torn_record(store: Store, kills: int) -> None:
    seen = 0
    for attempt in range(kills):
        with start_writer(store, keys=3, turns=10**6) as process:
            time.sleep(0.003 * (attempt % 7) * (1 if seen else 1 + attempt))  # a busy machine writes later
            process.send_signal(signal.SIGKILL)
        seen = max(seen, check_whole(store))
        for x in range(3):  # no lock survives its holder
            with store.lock(run_key({"x": x})):
                pass
    assert seen > 0


@pytest.mark.parametrize("keys", [1, pytest.param(7, marks=pytest.mark.long)])
def test_two_writers_at_once(store: Store, keys: int) -> None:
    with start_writer(store, keys, 60) as first, start_writer(store, keys, 60) as second:
        while first.poll() is None or second.poll() is None:
            for record in store.scan()[0]:
                assert record.metrics.keys() == {"turn"}
        assert (first.returncode, second.returncode) == (0, 0)
    assert check_whole(store) == keys
    assert temporaries(store) == []


def test_a_record_lies_under_its_task_model_and_data_set(store: Store) -> None:
    record = store.put(made.record("engine/mlx", "4"), made.samples([1.0]))
    path = store.runs / record.task / record.model / record.dataset / f"engine_mlx-4-{record.key[:8]}.json"
    assert store.record_path(record.key) == path
    assert path.is_file()
    assert store.samples_path(record.key) == path.with_name(f"engine_mlx-4-{record.key[:8]}.samples.jsonl")


def test_a_record_is_found_in_any_folder_and_put_moves_it(store: Store) -> None:
    record = made.record("kivi", "2")
    moved = store.runs / "mine" / "of today" / f"best-{record.key[:8]}.json"
    moved.parent.mkdir(parents=True)
    moved.write_bytes(dump_record(record))
    loose_samples(moved).write_text("{}\n")
    assert store.get(record.key) == record
    assert store.scan() == ([record], [])
    store.put(record)
    assert [path.name for path in store.runs.rglob("*.json*")] == [f"kivi-2-{record.key[:8]}.json"]
    assert store.get(record.key) == record


def test_two_files_of_one_run_are_one_record(store: Store) -> None:
    record = store.put(made.record("kivi", "2"))
    path = store.record_path(record.key)
    (store.runs / path.name).write_bytes(path.read_bytes())
    assert store.scan() == ([record], [(path, f"another file holds the run {record.key[:12]}")])


def test_what_another_process_writes_is_seen(store: Store) -> None:
    other = Store(store.root)
    for bits in "2345":
        record = made.record("kivi", bits)
        assert store.get(record.key) is None
        other.put(record)
        assert store.get(record.key) == record
        other.record_path(record.key).unlink()
        assert store.get(record.key) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [("a/b", "a_b"), ("..", "_"), ("", "_"), (".x", "x"), ("é\n*", "___"), ("m" * 300, "m" * 80), ("k3v2", "k3v2")],
)
def test_names_are_parts_of_paths(text: str, part: str) -> None:
    assert safe_name(text) == part


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
