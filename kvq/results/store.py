"""A folder of records that are written atomically: a killed process leaves no half record.

As a command, `kvq pack`: move the samples of a results folder's records into one `samples.zip` per folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from kvq.errors import KvqError, RecordError, reason_of
from kvq.results.files import (
    DIGITS,
    PACK,
    RECORD,
    TEMPORARY,
    list_records,
    loose_samples,
    pack_samples,
    read_samples,
    record_path_of,
    write_file,
)
from kvq.results.record import KEY_PATTERN, Record, dump_record, is_stale, parse_record

_KEY = re.compile(rb'^  "key": "([0-9a-f]{64})"', re.MULTILINE)
# Record files by the digits of the key, as last listed, for all stores of a process.
_listed: dict[Path, dict[str, list[str]]] = {}


class Broken(NamedTuple):
    """A file under runs/ that is not a usable record, and why, in one line."""

    path: Path
    reason: str


class State(NamedTuple):
    """What is on disk for a run: `done`, `stale`, `failed`, `unsupported` or `pending`, why, and its record."""

    name: str
    why: str = ""
    record: Record | None = None


class Store:
    """Records under `root/runs/`, in files that a person can find, and found by their key.

    A record lies in `<task>/<model>/<data set>/<method>-<bits>-<8 digits of the key>.json`; it is read under any other
    folder and name that ends in these digits. A run writes its per-item samples to a file of the same name that ends
    in `.samples.jsonl`; `pack` moves those of a folder into one `samples.zip`.

    Every file is written to a temporary file, synced and renamed, the record last: a readable record is complete, and
    so are its samples. Constructing a Store neither reads nor writes.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.runs = self.root / "runs"

    def record_path(self, key: str) -> Path:
        """Path of the record of `key`; `runs/<8 digits of the key>.json` when there is none."""
        return next(iter(self._paths(key)), self.runs / f"{key[:DIGITS]}{RECORD}")

    def samples_path(self, key: str) -> Path:
        """Path of the samples of `key`, in the folder of its record: a file of their own, or `samples.zip`."""
        loose = loose_samples(self.record_path(key))
        return next((path for path in (loose, loose.with_name(PACK)) if path.exists()), loose)

    def get(self, key: str) -> Record | None:
        """Return the record of `key`, or None when there is none."""
        corrupt = None
        for path in self._paths(key):
            try:
                record = _read(path)
            except FileNotFoundError:
                continue  # replaced by another process since it was listed
            except RecordError as error:
                corrupt = corrupt or RecordError(f"corrupt record {path}: {error}")
                continue
            if record.key == key:
                return record
        if corrupt is not None:
            raise corrupt
        return None

    def _paths(self, key: str) -> list[Path]:
        """Files that may hold the record of `key`: their names end in its digits, and no other key is in them."""
        digits, root = _check_key(key)[:DIGITS], self.runs.absolute()
        found = _listed.get(root, {}).get(digits, [])
        if not found or not all(map(os.path.exists, found)):
            by_digits: dict[str, list[str]] = {}
            for name in list_records(self.runs):
                by_digits.setdefault(name.removesuffix(RECORD)[-DIGITS:], []).append(name)
            _listed[root], found = by_digits, by_digits.get(digits, [])
        return [path for path in map(Path, found) if _key_in(path) in (None, key)]

    def state(self, key: str) -> State:
        """What is on disk under a key; a record that cannot be read is `pending`, and says why."""
        try:
            record = self.get(key)
        except RecordError as error:
            return State("pending", str(error))
        if record is None:
            return State("pending")
        if record.status == "done" and is_stale(record):
            return State("stale", "the version of a part has been raised since", record)
        return State(record.status, record.reason or "", record)

    def journal_path(self, key: str) -> Path:
        """Where a run keeps what it has scored so far."""
        return self.root / "partial" / f"{_check_key(key)}.jsonl"

    def scan(self, near: Collection[str] | None = None) -> tuple[list[Record], list[Broken]]:
        """Return every record, sorted by key, and every `.json` file that is not one, with its reason.

        `near`: keys, so that only records of the same models and data sets are read.
        """
        records: dict[str, Record] = {}
        broken: list[Broken] = []
        files = list(map(Path, list_records(self.runs)))
        if near is not None:
            folders = {path.parts[-3:-1] for key in near for path in self._paths(key)}
            files = [path for path in files if path.parts[-3:-1] in folders]
        for path in files:
            try:
                record = _read(path)
            except FileNotFoundError:
                continue  # replaced by another process between the listing and the read
            except RecordError as error:
                broken.append(Broken(path, str(error)))
                continue
            if record.key in records:
                broken.append(Broken(path, f"another file holds the run {record.key[:12]}"))
            records.setdefault(record.key, record)
        return [records[key] for key in sorted(records)], broken

    def samples(self, key: str) -> list[dict[str, Any]]:
        """Return the samples stored with the record of `key`; an empty list when it was stored without."""
        if (record := self.get(key)) is None:
            raise RecordError(f"no record '{key}' under {self.runs}")
        return self.samples_of(record)

    def samples_of(self, record: Record) -> list[dict[str, Any]]:
        """Return the samples of a record that is read already; an empty list when it was stored without."""
        if record.samples_sha256 is None:
            return []
        path = loose_samples(self.record_path(record.key))
        try:
            content = read_samples(path)
            if hashlib.sha256(content).hexdigest() != record.samples_sha256:
                raise RecordError(f"samples {path} are not those of their record: run it again with force=true")
            rows: list[dict[str, Any]] = json.loads(b"[" + b",".join(content.splitlines()) + b"]")
            return rows
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot read samples {path}: {reason_of(error)}") from error

    def put(self, record: Record, samples: Iterable[Mapping[str, Any]] = ()) -> Record:
        """Store a record and its samples, replacing what was there under its key, and return it as stored.

        Hold `lock(record.key)` when another process may write the same key. When the disk is full, the old record
        stays; a kill during the replacement leaves the old record, the new one, or none.
        """
        lines = _dump_samples(record.key, samples)
        digest = hashlib.sha256(lines).hexdigest() if lines else None
        stored = record.model_copy(update={"samples_sha256": digest})
        path, content = self.runs / record_path_of(record), dump_record(stored)
        room = path.with_name(f".{record.key}{TEMPORARY}")  # the room for the new one, before the old one goes
        try:
            with self._hold(PACK):  # packing a folder deletes what it takes for a temporary file of a kill
                write_file(room, lines + content)
                room.unlink()
                # First, or a kill between the two files would leave the old record beside the new samples.
                for old in {path, *self._paths(record.key)}:
                    old.unlink(missing_ok=True)
                    loose_samples(old).unlink(missing_ok=True)
                if lines:
                    write_file(loose_samples(path), lines)
                write_file(path, content)
        except OSError as error:
            raise self._cannot_write(error) from error
        return stored

    def pack(self) -> int:
        """Move the samples of each folder into its `samples.zip`; return how many files were moved.

        Safe beside running sweeps, which wait while a folder is packed; see `kvq.results.files.pack_samples`.
        """
        moved = 0
        for folder in sorted({Path(path).parent for path in list_records(self.runs)}):
            with self._hold(PACK):
                try:
                    moved += pack_samples(folder)
                except OSError as error:
                    raise RecordError(f"cannot pack {folder / PACK}: {reason_of(error)}") from error
        return moved

    def lock(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of `key`: one process at a time runs it, others wait. Freed if its holder dies."""
        return self._hold(_check_key(key))

    @contextlib.contextmanager
    def _hold(self, name: str) -> Iterator[None]:
        """Hold the file lock `name` within the context."""
        lock = FileLock(self.runs / ".locks" / f"{name}.lock")
        try:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise self._cannot_write(error) from error
        try:
            yield
        finally:
            lock.release()

    def check_writable(self) -> None:
        """Make a file under runs/ that vanishes when closed."""
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.runs).close()  # without a name: nothing stays behind
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: Exception) -> RecordError:
        """The error of a results folder that cannot be written, with the system's reason."""
        return RecordError(f"results_dir: cannot write under '{self.runs}': {reason_of(error)}")


def _check_key(key: str) -> str:
    """The key, if it is 64 lower-case hex digits; else raise `RecordError`."""
    if not KEY_PATTERN.match(key):
        raise RecordError(f"key {key!r:.80} is not a run's key (64 lower-case hex digits)")
    return key


def _read(path: Path) -> Record:
    """Parse one file; `RecordError` with the bare reason when it is no record."""
    state = path.stat()
    record = _parse_file(path, state.st_mtime_ns, state.st_size, state.st_ino)
    if not path.name.endswith(record.key[:DIGITS] + RECORD):
        raise RecordError(f"its key is {record.key[:12]}..., and its file name does not end in {record.key[:DIGITS]}")
    return record


@functools.lru_cache(maxsize=4096)
def _parse_file(path: Path, *state: int) -> Record:
    """The record in a file, parsed once as long as its time, size and inode stay."""
    return parse_record(path.read_bytes())


def _key_in(path: Path) -> str | None:
    """Key that a file written by `Store.put` holds; None where none can be read."""
    match = _KEY.search(path.read_bytes()) if path.is_file() else None
    return match[1].decode() if match else None


def _dump_samples(key: str, samples: Iterable[Mapping[str, Any]]) -> bytes:
    """Samples as JSON lines; `RecordError` for numbers that are not finite and rows that JSON cannot hold."""
    lines: list[str] = []
    for index, row in enumerate(samples):
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RecordError(f"record {key[:12]}: sample {index}: '{name}' is {value}; it must be finite")
        try:
            lines.append(json.dumps(dict(row), sort_keys=True, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise RecordError(f"record {key[:12]}: sample {index} cannot be written as JSON: {error}") from None
    return "".join(lines).encode("utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvq pack` and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvq pack", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder that holds runs/")
    try:
        print(f"{Store(parser.parse_args(arguments).results).pack()} files of samples packed")
    except KvqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
