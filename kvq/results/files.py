"""Files of a results folder: how they are written, where the records lie, and the journal of a run.

Writes are atomic: a temporary file in the same folder is written, synced and renamed. Records have readable paths and
are found again by the digits of the key that end each name. A journal has what a run has scored so far, so that a
killed run can resume.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvq.errors import RecordError
from kvq.results.record import KEY_PATTERN, Record

TEMPORARY = ".tmp"


def write_temporary(folder: Path, name: str, content: bytes, durable: bool = True) -> Path:
    """Write and sync `folder/.<name>.<random>.tmp`, which the caller renames; it is removed when writing fails.

    `durable=False`: not synced.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    handle, created = tempfile.mkstemp(prefix=f".{name}.", suffix=TEMPORARY, dir=folder)
    path = Path(created)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return path


def sync_folder(folder: Path) -> None:
    """Sync `folder`, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Make `folder` and those above it, and sync what names them, so that it survives a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write_file(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace the file at `path` by `content` atomically; creates its folder.

    `durable=False`, for files that can be made again: a power failure may leave the file empty, a kill does not.

    Raises:
        OSError: as in `write_temporary`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = write_temporary(path.parent, path.name, content, durable)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


RECORD, SAMPLES = ".json", ".samples.jsonl"
# Digits of a key in a file's name; with 10,000 records, two share them in one store out of a hundred, and `get` tells
# them apart by the whole key.
DIGITS = 8
_TAIL = re.compile(rf"(?:.*-)?([0-9a-f]{{{DIGITS}}})\Z", re.DOTALL)
_LONGEST = 80
# A folder changed this recently may change again without a new time stamp.
_COARSEST_CLOCK = 2.0


def place(record: Record) -> Path:
    """Path of a record in its store: `<task>/<model>/<data set>/<method>-<bits>-<8 digits of the key>.json`."""
    name = "-".join(filter(None, (safe(record.method), safe(record.bits) if record.bits else "", record.key[:DIGITS])))
    return Path(safe(record.task), safe(record.model), safe(record.dataset), name + RECORD)


def safe(text: str) -> str:
    """`text` as one part of a path on every file system: other than letters, digits and `+._-` become `_`."""
    return re.sub(r"[^A-Za-z0-9+._-]", "_", text).strip(".")[:_LONGEST] or "_"


def names(path: Path, key: str) -> bool:
    """Whether the file at `path` may hold the record of `key`."""
    stem = path.name.removesuffix(RECORD)
    return stem == key if KEY_PATTERN.match(stem) else digits_of(path.name) == key[:DIGITS]


def digits_of(name: str) -> str:
    """The digits of a key in a record's file name, also of one that is the whole key; "" in any other name."""
    stem = name.removesuffix(RECORD)
    if KEY_PATTERN.match(stem):
        return stem[:DIGITS]
    match = _TAIL.match(stem)
    return match[1] if match else ""


class _Folder(NamedTuple):
    changed: int
    read: float
    files: dict[str, list[Path]]
    folders: list[Path]


class Places:
    """The record files under a folder, listed anew where a folder has changed since."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[Path, _Folder] = {}

    def find(self, key: str) -> list[Path]:
        """Files whose names hold the first digits of `key`, sorted; their records may have another key.

        Raises:
            OSError: a folder cannot be listed.
        """
        return sorted(path for folder in self._folders() for path in folder.files.get(key[:DIGITS], ()))

    def files(self) -> list[Path]:
        """Every file named `*.json`, sorted; hidden ones and those in hidden folders are left out.

        Raises:
            OSError: a folder cannot be listed.
        """
        return sorted(path for folder in self._folders() for paths in folder.files.values() for path in paths)

    def _folders(self) -> Iterator[_Folder]:
        waiting = [self.root]
        while waiting:
            try:
                folder = self._folder(waiting.pop())
            except FileNotFoundError:
                continue  # there is no record yet
            waiting += folder.folders
            yield folder

    def _folder(self, path: Path) -> _Folder:
        changed = path.stat().st_mtime_ns
        known = self._known.get(path)
        if known is None or known.changed != changed or known.read - changed / 1e9 < _COARSEST_CLOCK:
            known = self._known[path] = _listed(path, changed)
        return known


@functools.lru_cache(maxsize=16)
def places_of(root: Path, here: Path) -> Places:
    """The record files under a folder, which all stores of a process share. `here`: where a relative path begins."""
    return Places(root)


def _listed(path: Path, changed: int) -> _Folder:
    listed = _Folder(changed, time.time(), {}, [])
    with os.scandir(path) as found:
        for entry in found:
            if entry.name.startswith("."):
                continue
            if entry.name.endswith(RECORD):
                listed.files.setdefault(digits_of(entry.name), []).append(path / entry.name)
            elif entry.is_dir(follow_symlinks=False):
                listed.folders.append(path / entry.name)
    return listed


def cause(error: Exception) -> str:
    """The system's reason in one line, without the path that the operating system's message includes."""
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


class Journal:
    """Rows by the name of their item, appended and synced per batch; deleted when the run is over.

    Rows are read only under the same `header` (versions, device), so a run never mixes measurements of two versions. An
    incomplete last line is dropped. A symbolic link at the path is replaced, never followed. One process at a time may
    write a journal: hold the run's lock.

    Args:
        path: the journal's file, created by the first `add`; None keeps rows in memory only.
        header: names the code and device that made the rows.
    """

    def __init__(self, path: Path | None = None, header: str = "") -> None:
        self.path, self.header = path, header
        self.rows: dict[str, dict[str, Any]] = {}
        self._whole = 0
        if path is not None and path.is_file() and not path.is_symlink():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            with _opened(path, os.O_RDONLY) as file:
                lines = file.read().splitlines(keepends=True)
        except OSError as error:
            raise RecordError(f"journal {path}: cannot be read: {cause(error)}") from error
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(row, dict):
                break
            rows.append(row)
            self._whole += len(line)
        if not rows or rows[0].get("header") != self.header:
            self._whole = 0
            return
        self.rows = {row["item"]: row for row in rows[1:] if isinstance(row.get("item"), str)}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store rows, each with its `item`; they survive a kill once this returns.

        Raises:
            RecordError: the folder cannot be written, or a row is no JSON.
        """
        new = {row["item"]: dict(row) for row in rows}
        if self.path is not None:
            try:
                self._append(self.path, new)
            except (OSError, TypeError, ValueError) as error:
                raise RecordError(f"journal {self.path}: cannot write: {cause(error)}") from error
        self.rows |= new

    def _append(self, path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
        lines = [json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows.values()]
        if not self._whole:
            lines.insert(0, json.dumps({"header": self.header}) + "\n")
        content = "".join(lines).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()
        with _opened(path, os.O_RDWR | os.O_CREAT) as file:
            file.truncate(self._whole)
            file.seek(self._whole)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(content)

    def discard(self) -> None:
        """Delete all rows, in memory and on disk."""
        self.rows, self._whole = {}, 0
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _opened(path: Path, flags: int) -> BinaryIO:
    """Open the file without following links. Raises: OSError: a link has been put in its place."""
    return os.fdopen(os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+b" if flags & os.O_RDWR else "rb")
