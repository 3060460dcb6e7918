"""Files of a results folder: atomic writes, the path of a record, the samples of a folder, and the journal of a run."""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvq.errors import RecordError, reason_of
from kvq.results.record import Record

TEMPORARY = ".tmp"
RECORD, SAMPLES, PACK = ".json", ".samples.jsonl", "samples.zip"
DIGITS = 8
"""Digits of a run's key that end the name of its record's file."""
_EMPTY = b"PK\x05\x06" + bytes(18)  # a zip file without members


def write_file(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace the file at `path` by `content` atomically; creates its folder.

    `durable=False`, for files that can be made again: a power failure may leave the file empty, a kill does not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, created = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(handle, 0o644)
            if durable:
                file.flush()
                os.fsync(handle)
        Path(created).replace(path)
    except BaseException:
        Path(created).unlink(missing_ok=True)
        raise
    if durable:  # so that the new name survives a power failure
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def record_path_of(record: Record) -> Path:
    """Path of a record in its store: `<task>/<model>/<data set>/<method>-<bits>-<8 digits of the key>.json`."""
    name = "-".join(
        filter(None, (safe_name(record.method), safe_name(record.bits) if record.bits else "", record.key[:DIGITS]))
    )
    return Path(safe_name(record.task), safe_name(record.model), safe_name(record.dataset), name + RECORD)


def safe_name(text: str) -> str:
    """`text` as one part of a path on every file system: other than letters, digits and `+._-` become `_`."""
    return re.sub(r"[^A-Za-z0-9+._-]", "_", text).strip(".")[:80] or "_"


def list_records(root: Path) -> list[str]:
    """Path of every file `*.json` under `root`, sorted; hidden ones and those in hidden folders are left out."""
    return sorted(f"{root}/{name}" for name in glob.iglob(f"**/*{RECORD}", root_dir=root, recursive=True))  # noqa: PTH207


def loose_samples(record_path: Path) -> Path:
    """File of the samples of the record at a path, as a run writes it."""
    return record_path.with_name(record_path.name.removesuffix(RECORD) + SAMPLES)


def read_samples(loose: Path) -> bytes:
    """The samples that a run wrote to `loose`, which may have been moved into the `samples.zip` of the folder."""
    with contextlib.suppress(FileNotFoundError):
        return loose.read_bytes()
    with _pack(loose.with_name(PACK)) as pack:
        if loose.name not in pack.NameToInfo:
            raise FileNotFoundError(f"no such file, and none in {PACK}")
        return pack.read(loose.name)


def pack_samples(folder: Path) -> int:
    """Move the samples of a folder's records into its `samples.zip`, and drop those of records that are gone.

    The same samples give the same bytes. The new file is in place before a loose one is removed, so a kill loses
    nothing; no other process may write records of this folder meanwhile. Returns the number of files moved.
    """
    loose = [path for path in sorted(folder.glob(f"*{SAMPLES}")) if _has_record(folder, path.name)]
    path = folder / PACK
    for left in folder.glob(f".*{TEMPORARY}"):  # by a kill
        left.unlink()
    with _pack(path) as pack:
        kept = {name: pack.read(name) for name in pack.namelist() if _has_record(folder, name)}
        if not loose and len(kept) == len(pack.namelist()):
            return 0
    kept |= {file.name: file.read_bytes() for file in loose}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as new:
        for name, samples in sorted(kept.items()):
            # Without a date. bzip2 has one implementation; what deflate writes differs between libraries.
            new.writestr(zipfile.ZipInfo(name), samples, zipfile.ZIP_BZIP2, 9)
    write_file(path, content.getvalue())
    for file in loose:
        file.unlink()
    return len(loose)


def _has_record(folder: Path, name: str) -> bool:
    """Whether the record of a file of samples is in the folder."""
    return (folder / f"{name.removesuffix(SAMPLES)}{RECORD}").exists()


@contextlib.contextmanager
def _pack(path: Path) -> Iterator[zipfile.ZipFile]:
    """The `samples.zip` at a path, an empty one where there is none; its failures are `OSError`."""
    try:
        state = path.stat() if path.exists() else None
        yield _read_pack(path, *((state.st_mtime_ns, state.st_size, state.st_ino) if state else ()))
    except (zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise OSError(f"{path.name} is damaged: {error}") from error


@functools.lru_cache(maxsize=64)
def _read_pack(path: Path, *state: int) -> zipfile.ZipFile:
    """A `samples.zip` in memory, read again where its `state` (time, size, inode) has changed; empty without one."""
    return zipfile.ZipFile(io.BytesIO(path.read_bytes() if state else _EMPTY))


class Journal:
    """Rows by the name of their item, appended and synced per batch; deleted when the run is over.

    Rows are read only under the same `header` (versions, device), so a run never mixes measurements of two versions. An
    incomplete last line is dropped. One process at a time may write a journal: hold the run's lock.

    Args:
        path: the journal's file, created by the first `add`; None keeps rows in memory only.
        header: names the code and device that made the rows.
    """

    def __init__(self, path: Path | None = None, header: str = "") -> None:
        self.path, self.header = path, header
        self.rows: dict[str, dict[str, Any]] = {}
        self._whole = 0
        if path is not None and path.is_file():
            self._load(path)

    def _load(self, path: Path) -> None:
        """Read the rows of a journal with the same header; lines after a torn one are ignored."""
        lines, rows = path.read_bytes().splitlines(keepends=True), list[dict[str, Any]]()
        with contextlib.suppress(ValueError):
            for line in lines:
                row = json.loads(line)
                if not line.endswith(b"\n") or not isinstance(row, dict):
                    break
                rows.append(row)
        if rows and rows[0].get("header") == self.header:
            self._whole = sum(map(len, lines[: len(rows)]))
            self.rows = {row["item"]: row for row in rows[1:] if isinstance(row.get("item"), str)}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store rows, each with its `item`; they survive a kill once this returns."""
        new = {row["item"]: dict(row) for row in rows}
        if self.path is not None:
            try:
                self._append(self.path, new)
            except (OSError, TypeError, ValueError) as error:
                raise RecordError(f"journal {self.path}: cannot write: {reason_of(error)}") from error
        self.rows |= new

    def _append(self, path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Append rows to the file, after the last whole line, and sync it."""
        lines = [json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows.values()]
        if not self._whole:
            lines.insert(0, json.dumps({"header": self.header}) + "\n")
        content = "".join(lines).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if self._whole else "wb") as file:
            file.seek(self._whole)
            file.truncate()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(content)

    def discard(self) -> None:
        """Delete all rows, in memory and on disk."""
        self.rows, self._whole = {}, 0
        if self.path is not None:
            self.path.unlink(missing_ok=True)
