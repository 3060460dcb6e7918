"""Rows of text from the hub or local files, and a data set's text as one string; torch is not imported."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, get_session

from kvq.data.embedded import load_corpus
from kvq.errors import DataError, did_you_mean, one_line

if TYPE_CHECKING:
    from kvq.config import DatasetConfig

_SUFFIXES = (".jsonl", ".json", ".json.gz", ".jsonl.gz", ".parquet", ".txt", ".md")


@cache
def go_offline_if_silent(patience: float = 3.0) -> None:
    """Switch the hub's libraries to offline mode, for their cache, where it does not answer in so many seconds."""
    try:
        constants.is_offline_mode() or get_session().head(constants.ENDPOINT, timeout=patience)
    except Exception:  # of whatever library transports it; all mean that the hub does not answer
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
        if "datasets" in sys.modules:  # it keeps a copy of its own
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def load_rows(setting: str, local: str, hub_id: str | None, *args: Any, first: int | None = None, **named: Any) -> Any:
    """A split of a data set of the hub as `datasets.Dataset`; from the hub's cache where the hub does not answer.

    `setting` begins an error's line, such as `dataset=c4`; `local` describes what `dataset.path=` takes in place of the
    hub; `first`: stream only so many rows (None: download all and cache them); others as of `datasets.load_dataset`.
    """
    if hub_id is None:
        raise DataError(f"{setting}: set dataset.path= (a local copy) or dataset.hub_id=")
    go_offline_if_silent()
    from datasets import Dataset, load_dataset

    try:
        if first is None:
            return load_dataset(hub_id, *args, **named)
        return Dataset.from_list(list(load_dataset(hub_id, *args, **named, streaming=True).take(first)))
    except Exception as error:  # of several libraries; all mean that the rows cannot be downloaded
        said = f"cannot load {hub_id} from the hub ({one_line(error, 200)}); dataset.path= takes {local}"
        raise DataError(f"{setting}: {said}") from error


def read_rows(config: DatasetConfig) -> tuple[str, ...]:
    """The texts of `dataset.path`, else of `dataset.hub_id`; the first `dataset.rows` of them (None: all).

    Of a record, the text is the field `dataset.text_field`; a text file is one row. A `path` is a file, or a folder of
    files of one kind, read in the order of their names.
    """
    if config.path is None:
        local = "a local copy (jsonl, parquet or text)"
        choices = {"data_files": config.data_files, "split": config.split or "test", "first": config.rows}
        rows = load_rows(f"dataset={config.name}", local, config.hub_id, config.hub_config, **choices)
        return _extract_texts(rows, config.text_field, str(config.hub_id))
    path = Path(config.path).expanduser()
    field = config.text_field
    read = (row for file in _list_files(path) for row in _extract_texts(_read_file(file, field), field, str(file)))
    return tuple(read)[: config.rows]


def describe_source(config: DatasetConfig) -> str | None:
    """Describe `dataset.path` for the record ("12 .txt files"); None: it cannot be read."""
    if config.path is None:
        return None
    path = Path(config.path).expanduser()
    try:
        files = _list_files(path)
    except DataError:
        return None
    kind = _file_suffix(files[0]).removesuffix(".gz")
    return f"{kind} file" if path.is_file() else f"{len(files)} {kind} files"


def _file_suffix(path: Path) -> str:
    """The longest of `_SUFFIXES` that a file's name ends with; empty: none, so the file cannot be read."""
    return max((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), key=len, default="")


def _list_files(path: Path) -> list[Path]:
    """The file, or the readable files of a folder by name, all of one kind, without hidden ones."""
    where, kinds = f"dataset.path={path}", ", ".join(_SUFFIXES)
    if not path.exists():
        raise DataError(f"{where}: no such file or folder")
    if path.is_file():
        if not _file_suffix(path):
            raise DataError(f"{where}: cannot read {path.suffix or 'a file without a suffix'}; it reads {kinds}")
        return [path]
    inside = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
    files = sorted(file for file in inside if _file_suffix(file) and file.is_file())
    if not files:
        raise DataError(f"{where}: the folder holds no {kinds} files")
    if len(suffixes := sorted(set(map(_file_suffix, files)))) > 1:
        raise DataError(f"{where}: the folder holds files of several kinds ({', '.join(suffixes)}); give one file")
    return files


def _read_file(path: Path, field: str | None = None) -> Any:
    """A list of a file's JSON values or of its one text, or a `pyarrow.Table` (of the column `field` if it has one)."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            known = pyarrow.parquet.read_schema(path).names
            return pyarrow.parquet.read_table(path, columns=[field] if field in known else None)
        return [read_text(path)] if path.suffix in (".txt", ".md") else read_json_records(path)
    except Exception as error:  # of several libraries, for files that are cut short, garbled or too large
        raise DataError(f"dataset.path={path}: cannot be read: {one_line(error, 200)}") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark, whose lines end in a newline."""
    return _decode_utf8(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def _decode_utf8(data: bytes) -> str:
    """Text of UTF-8 bytes without its byte order mark; ValueError: UTF-16 or binary data."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:4096]:
        raise ValueError("no UTF-8 text, but UTF-16 or binary; save it as UTF-8")
    return data.decode("utf-8-sig")


def read_json_records(path: Path) -> list[Any]:
    """The records of a file: an array, or one to a line; not by `datasets` (docs/architecture.md, Libraries)."""
    text = _decode_utf8(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return records


def read_objects(path: Path, holds: str) -> list[dict[str, Any]]:
    """The JSON objects or rows of a json, jsonl or parquet file; `holds` names their fields in the error."""
    if not path.is_file():
        raise DataError(f"dataset.path={path}: no such file; .jsonl, .json and .parquet are read")
    read = _read_file(path)
    rows: list[Any] = read if isinstance(read, list) else read.to_pylist()
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"dataset.path={path}: one or more objects with {holds}")
    return rows


def _extract_texts(rows: Any, field: str, where: str) -> tuple[str, ...]:
    """The texts of a list of JSON values, or of a field of a `datasets.Dataset` or a `pyarrow.Table`."""
    if not isinstance(rows, list):
        _check_field(rows.column_names, field, where)
        rows = rows[field].to_pylist() if hasattr(rows[field], "to_pylist") else list(rows[field])
    texts = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            _check_field(list(row), field, f"row {number} of {where}")
            row = row[field]
        if not isinstance(row, str):
            raise DataError(f"dataset.text_field={field}: row {number} of {where} is {type(row).__name__}, not text")
        texts.append(row)
    return tuple(texts)


def _check_field(names: list[str], field: str, where: str) -> None:
    """Raise DataError if `dataset.text_field` is not among the fields of `where`."""
    if field not in names:
        hint = did_you_mean(field, names)
        raise DataError(f"dataset.text_field={field} is not in {where}; its fields are: {', '.join(names)}.{hint}")


def read_joined_text(config: DatasetConfig) -> str:
    """Documents of an embedded corpus in the order of their hashes, or all rows, joined by `separator`."""
    if str(config.loader) == "embedded":
        documents = load_corpus(config.name, config.split or "test").documents
        # An order that mixes their packages, so that a stream cut short is a sample of them all.
        mixed = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
        return config.separator.join(mixed)
    return config.separator.join(read_rows(config))
