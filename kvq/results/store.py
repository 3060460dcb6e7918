"""A folder of records that are written atomically: a killed process leaves no half record."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from kvq.errors import RecordError
from kvq.results.files import (
    RECORD,
    SAMPLES,
    TEMPORARY,
    cause,
    make_folders,
    names,
    place,
    places_of,
    sync_folder,
    write_temporary,
)
from kvq.results.record import KEY_PATTERN, Record, dump_record, parse_record
from kvq.results.versions import is_stale

# A record is some kilobytes; anything this large was not written by `Store.put`.
MAX_RECORD_BYTES = 16 * 2**20
_KEY = re.compile(rb'^  "key": "([0-9a-f]{64})"', re.MULTILINE)
# A temporary file this old belongs to a writer that was killed: writing one takes well under a second.
_ABANDONED_SECONDS = 3600.0


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

    A record lies in `<task>/<model>/<data set>/<method>-<bits>-<8 digits of the key>.json`, its per-item samples in a
    file of the same name that ends in `.samples.jsonl`. A record under any other folder, or in `<key>.json` as stores
    of versions before 0.3 have them, is read as well.

    Every file is written to a temporary file in the same folder, synced and renamed, the record last: a readable record
    is complete, and so are its samples. Constructing a Store neither reads nor writes.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.runs = self.root / "runs"
        self._places = places_of(self.runs, Path.cwd())
        self._scanned: dict[str, Path] = {}

    def record_path(self, key: str) -> Path:
        """Path of the record of `key`; `runs/<key>.json` when there is none."""
        paths = self._paths(key)
        return paths[0] if paths else self.runs / f"{key}{RECORD}"

    def samples_path(self, key: str) -> Path:
        """Path of the samples of `key`: in the folder of its record."""
        return _samples_of(self.record_path(key))

    def get(self, key: str) -> Record | None:
        """Return the record of `key`, or None when there is none.

        Raises:
            RecordError: the file is there but cannot be used; the message names it and the reason. `put` with the same
                key replaces it.
        """
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
        """Files that may hold the record of `key`, those that another run's record fills left out."""
        _checked(key)
        try:
            found = self._places.find(key)
        except OSError as error:
            raise self._cannot_read(error) from error
        return [path for path in found if _key_in(path) in (None, key)]

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
        return self.root / "partial" / f"{_checked(key)}.jsonl"

    def scan(self) -> tuple[list[Record], list[Broken]]:
        """Return every record, sorted by key, and every `.json` file that is not one, with its reason.

        Raises:
            RecordError: the folder is there but cannot be listed.
        """
        try:
            paths = self._places.files()
        except OSError as error:
            raise self._cannot_read(error) from error
        records: dict[str, Record] = {}
        broken: list[Broken] = []
        for path in paths:
            try:
                record = _read(path)
            except FileNotFoundError:
                continue  # replaced by another process between the listing and the read
            except RecordError as error:
                broken.append(Broken(path, str(error)))
                continue
            if record.key in records:
                broken.append(Broken(path, f"another file holds the run {record.key[:12]}"))
            else:
                records[record.key] = record
                self._scanned[record.key] = path
        return [records[key] for key in sorted(records)], broken

    def samples(self, key: str) -> list[dict[str, Any]]:
        """Return the samples stored with the record of `key`; an empty list when it was stored without.

        Raises:
            RecordError: no usable record of `key`, or samples that are missing, torn or not those of the record.
        """
        record = self.get(key)
        if record is None:
            raise RecordError(f"no record '{key}' under {self.runs}")
        return self.samples_of(record)

    def samples_of(self, record: Record) -> list[dict[str, Any]]:
        """Return the samples of a record that is read already; an empty list when it was stored without.

        Raises:
            RecordError: samples that are missing, torn or not those of the record.
        """
        if record.samples_sha256 is None:
            return []
        found = self._scanned.get(record.key)  # unless another process has replaced it since
        path = _samples_of(found) if found and _samples_of(found).is_file() else self.samples_path(record.key)
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != record.samples_sha256:
                raise RecordError(f"samples {path} are not those of their record: run it again with force=true")
            rows: list[dict[str, Any]] = json.loads(b"[" + b",".join(content.splitlines()) + b"]")
            _check_samples(rows)
            return rows
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"cannot read samples {path}: {cause(error)}") from error

    def put(self, record: Record, samples: Iterable[Mapping[str, Any]] = ()) -> Record:
        """Store a record and its samples, replacing what was there under its key, and return it as stored.

        Hold `lock(record.key)` when another process may write the same key. When the disk is full, the old record
        stays; a kill during the replacement leaves the old record, the new one, or none.

        Raises:
            RecordError: a metric or sample that is not finite, or a folder that cannot be written.
        """
        lines = _dump_samples(record.key, samples)
        digest = hashlib.sha256(lines).hexdigest() if lines else None
        stored = record.model_copy(update={"samples_sha256": digest})
        path = self.runs / place(record)
        if _key_in(path) not in (None, record.key):  # another run has the readable name
            path = path.with_name(f"{record.key}{RECORD}")
        content = dump_record(stored)
        pending: list[Path] = []
        try:
            make_folders(path.parent)
            pending.append(write_temporary(self.runs, record.key, content))
            if lines:
                pending.append(write_temporary(self.runs, record.key, lines))
            # Without this a kill between the two renames would leave the old record beside the new samples.
            for old in {path, *self._paths(record.key)}:
                old.unlink(missing_ok=True)
                _samples_of(old).unlink(missing_ok=True)
            if lines:
                pending[1].replace(_samples_of(path))
            sync_folder(path.parent)
            pending[0].replace(path)
            sync_folder(path.parent)
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            for leftover in pending:
                with contextlib.suppress(OSError):
                    leftover.unlink(missing_ok=True)
        return stored

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float | int | None = None) -> Iterator[None]:
        """Hold the lock of `key`: one process at a time runs it. The system frees it when its holder dies.

        Clears temporary files that a killed writer of this key left behind. Not re-entrant.

        Args:
            key: name of the run.
            timeout: seconds to wait for another holder; None waits until it is free.

        Raises:
            RecordError: the folder cannot be written, or the lock was not free in time.
        """
        folder = self.runs / ".locks"
        lock = FileLock(folder / f"{_checked(key)}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=-1 if timeout is None else timeout)
        except Timeout:
            raise RecordError(f"run {key[:12]} is held by another process (waited {timeout:g} s)") from None
        except (OSError, NotImplementedError) as error:
            raise self._cannot_write(error) from error
        try:
            self._clear_temporaries(key, older_than=0.0)
            yield
        finally:
            lock.release()

    def check_writable(self) -> None:
        """Write a file under runs/ that vanishes when closed, and clear temporary files that killed writers left.

        Raises:
            RecordError: one line naming the folder and the system's reason.
        """
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            # Without a name, so that nothing stays behind when this process is killed here.
            with tempfile.TemporaryFile(dir=self.runs) as file:
                file.write(b"kvq\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error
        self._clear_temporaries("", older_than=_ABANDONED_SECONDS)

    def _cannot_read(self, error: OSError) -> RecordError:
        return RecordError(f"results_dir: cannot read '{self.runs}': {cause(error)}")

    def _cannot_write(self, error: Exception) -> RecordError:
        return RecordError(f"results_dir: cannot write under '{self.runs}': {cause(error)}")

    def _clear_temporaries(self, key: str, older_than: float) -> None:
        now = time.time()
        for path in self.runs.glob(f".{key}*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                if abs(now - path.stat().st_mtime) >= older_than:  # also of a clock that was ahead
                    path.unlink()


def _checked(key: str) -> str:
    if not KEY_PATTERN.match(key):
        raise RecordError(f"key {key!r:.80} is not a run's key (64 lower-case hex digits)")
    return key


def _read(path: Path) -> Record:
    """Parse one file; FileNotFoundError when absent, RecordError with the bare reason when it is no record."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RecordError("not a regular file")
        if status.st_size > MAX_RECORD_BYTES:
            raise RecordError(f"{status.st_size / 2**20:.0f} MiB, over the limit of {MAX_RECORD_BYTES // 2**20} MiB")
        content = path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise RecordError("a link to nothing") from None
        raise
    except OSError as error:
        raise RecordError(f"cannot be read: {cause(error)}") from error
    record = parse_record(content)
    if not names(path, record.key):
        raise RecordError(f"its key is {record.key[:12]}..., which is not its file name")
    return record


def _key_in(path: Path) -> str | None:
    """Key that a file written by `Store.put` holds; None where none can be read."""
    try:
        match = _KEY.search(path.read_bytes()) if path.is_file() else None
    except OSError:
        return None
    return match[1].decode() if match else None


def _samples_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(RECORD) + SAMPLES)


def _check_samples(rows: list[Any]) -> None:
    """Raise `ValueError` for rows that nobody can compute with.

    A loss has its number of tokens, in all rows or in none; losses, their tokens and scores are finite numbers.
    """
    loss = {"nll", "tokens"} if any("nll" in row for row in rows if isinstance(row, dict)) else set()
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"sample {index} is {type(row).__name__}, not an object")
        for name in sorted((loss | {"score"}) & row.keys()):
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"sample {index}: '{name}' is {value!r:.40}, not a finite number")
        if lacking := sorted(loss - row.keys()):
            raise ValueError(f"sample {index}: '{lacking[0]}' is missing")


def _dump_samples(key: str, samples: Iterable[Mapping[str, Any]]) -> bytes:
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
