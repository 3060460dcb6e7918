"""The journal of a run: what it has scored so far, so that a killed run can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kvq.errors import RecordError
from kvq.results.store import cause


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
