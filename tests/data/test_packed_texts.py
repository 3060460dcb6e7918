"""Packed files are read as far as a text may shrink; beyond that they cost one line, not the memory they ask for."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from kvq.config import DatasetConfig
from kvq.data import rows
from kvq.data.rows import read_rows
from kvq.errors import DataError

TEXTS = [f"row {number} has words of its own" for number in range(3000)]


def _gz(path: Path, texts: list[str]) -> None:
    path.write_bytes(gzip.compress("\n".join(json.dumps({"text": text}) for text in texts).encode()))


def _parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts, "other": [1] * len(texts)}), path, compression="zstd")


def _arrow(path: Path, texts: list[str], compression: str | None = None) -> None:
    table, options = pa.table({"text": texts}), pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)


def _packed_arrow(path: Path, texts: list[str]) -> None:
    _arrow(path, texts, "zstd")


KINDS = [("a.jsonl.gz", _gz), ("a.parquet", _parquet), ("a.arrow", _arrow), ("b.arrow", _packed_arrow)]
Write = Callable[[Path, list[str]], None]


@pytest.mark.parametrize(("name", "write"), KINDS)
def test_texts_are_read_in_order(tmp_path: Path, name: str, write: Write) -> None:
    write(tmp_path / name, TEXTS)
    assert read_rows(DatasetConfig("a", path=str(tmp_path / name))) == tuple(TEXTS)
    with pytest.raises(DataError, match=r"text_field=txt is not in .*Did you mean 'text'"):
        read_rows(DatasetConfig("a", path=str(tmp_path / name), text_field="txt"))


@pytest.mark.parametrize(("name", "write"), [kind for kind in KINDS if kind[1] is not _arrow])
def test_a_bomb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Write) -> None:
    """A text that stands in the file once; without the limit it is read whole."""
    bomb = ["x" * 20_000] * 1000
    write(tmp_path / name, bomb)
    assert (tmp_path / name).stat().st_size < 20_000_000 / rows._RATIO
    assert len(read_rows(DatasetConfig("a", path=str(tmp_path / name)))) == 1000
    monkeypatch.setattr(rows, "_ALWAYS", 2**20)
    with pytest.raises(DataError, match=r"cannot be read: unpacks to more than \d+ MiB \(200 times its size") as caught:
        read_rows(DatasetConfig("a", path=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_what_no_reader_can_open_is_one_line_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"dataset\.path="):
        read_rows(DatasetConfig("a", path=str(tmp_path / "a.jsonl")))
    with pytest.raises(DataError, match=r"the folder holds no"):
        read_rows(DatasetConfig("a", path=str(tmp_path)))
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved/state.json").unlink()
    os.mkfifo(tmp_path / "saved/state.json")
    with pytest.raises(DataError, match=r"not a whole saved dataset: state\.json is no regular file"):
        read_rows(DatasetConfig("a", path=str(tmp_path / "saved")))
