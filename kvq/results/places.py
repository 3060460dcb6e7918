"""Where the records of a store lie: readable paths, found again by the digits of the key that end each name."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvq.results.record import KEY_PATTERN, Record

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
    """Whether a record of `key` may lie at `path`."""
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
