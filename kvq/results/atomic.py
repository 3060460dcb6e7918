"""Atomic writes: a temporary file in the same folder is written, synced and renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

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
