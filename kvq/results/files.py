"""Files of a results folder: how they are written, and where the records lie.

Writes are atomic: a temporary file in the same folder is written, synced and renamed. Records have readable paths and
are found again by the digits of the key that end each name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
