"""What an offline run of Weights & Biases wrote, read back from its file: a log in LevelDB's format of protobufs."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32 * 1024, 7
_FULL, _LAST = 1, 4
_PATIENCE = 30.0
"""Seconds; on an idle machine nothing is left to wait for."""


def _messages(content: bytes) -> Iterator[bytes]:
    if len(content) < 7:  # nothing is written yet
        return
    assert content[:4] == b":W&B"
    place, parts = 7, b""
    while place + _HEADER <= len(content):
        if _BLOCK - place % _BLOCK < _HEADER:  # what is left of a block is too short for a header
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + _HEADER])
        if place + _HEADER + length > len(content):  # still being written
            return
        parts += content[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


class OfflineRun:
    """The one run in `folder`: its header, config, summary, what was logged and how it ended."""

    def __init__(self, folder: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        self.folder = folder
        (path,) = folder.glob("*.wandb")
        self.content = path.read_bytes()
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.exit_code: int | None = None
        for message in _messages(self.content):
            record = wandb_internal_pb2.Record.FromString(message)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config |= _items(record.run.config.update)
            elif kind == "config":
                self.config |= _items(record.config.update)
            elif kind == "summary":
                self.summary |= _items(record.summary.update)
            elif kind == "history":
                self.logged |= _items(record.history.item)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def media(self, name: str) -> Path:
        """The file that was logged under a name."""
        return self.folder / "files" / self.logged[f"{name}.path"]


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_runs(results: Path) -> dict[str, OfflineRun]:
    """Every offline run under a results folder, by its id, once W&B's own process has written all of their ends."""
    folders, deadline = sorted((results / "wandb").glob("offline-run-*")), time.monotonic() + _PATIENCE
    found = [OfflineRun(folder) for folder in folders]
    while any(run.exit_code is None for run in found) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [OfflineRun(folder) for folder in folders]
    return {run.run.run_id: run for run in found}
