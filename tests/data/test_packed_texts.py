"""Compressed files of texts are read in order, by their field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvq.config import DatasetConfig
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
