"""Rows of text from the hub or from local files, and the text of a data set as one string; torch is not imported.

Files are jsonl, json, parquet, arrow, text, folders of them, and saved datasets.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.data import hub
from kvq.data.embedded import load_corpus
from kvq.errors import DataError, did_you_mean, first_line, one_line

if TYPE_CHECKING:
    from kvq.config import DatasetConfig


def read_rows(config: DatasetConfig) -> tuple[str, ...]:
    """Return the first `dataset.rows` rows of `dataset.path`, or else of `dataset.hub_id`; None: all.

    Of records, a row is the field `dataset.text_field`.

    A `path` is a file (.jsonl, .json, .parquet, .arrow, .txt, .md; the first two also with .gz), a folder of files of
    one of these kinds, read in the order of their names, or a folder that `datasets` wrote with `save_to_disk`. A plain
    text file is one row.
    """
    if config.path is not None:
        return _local_rows(config, config.path)[: config.rows]
    local = "a local copy (jsonl, parquet, text or a saved dataset)"
    given = {"data_files": config.data_files, "split": config.split or "test", "first": config.rows}
    rows = hub.load_rows(f"dataset={config.name}", local, config.hub_id, config.hub_config, **given)
    return _column(rows, config.text_field, str(config.hub_id))


def _local_rows(config: DatasetConfig, given: str) -> tuple[str, ...]:
    path = Path(given).expanduser()
    if not path.exists():
        raise DataError(f"dataset.path={given}: no such file or folder")
    if path.is_file():
        return _file_rows(path, config.text_field)
    if _is_saved(path):
        return _saved_rows(path, config)
    return tuple(row for file in _files(path) for row in _file_rows(file, config.text_field))


def source_of(config: DatasetConfig) -> str | None:
    """Describe `dataset.path` for the record ("saved dataset", "12 .txt files"); None: it cannot be read."""
    path = None if config.path is None else Path(config.path).expanduser()
    if path is None or not path.exists():
        return None
    if path.is_file():
        return f"{_kind(path)} file"
    if _is_saved(path):
        return "saved dataset"
    try:
        files = _files(path)
    except DataError:
        return None
    return f"{len(files)} {_kind(files[0])} files"


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def _files(folder: Path) -> list[Path]:
    """The files of a folder that can be read, in the order of their names, without hidden ones."""
    inside = (file for file in folder.rglob("*") if not any(p.startswith(".") for p in file.relative_to(folder).parts))
    files = sorted(file for file in inside if _kind(file) in _READERS and file.is_file())
    kinds = sorted({_kind(file) for file in files})
    if not kinds:
        raise DataError(f"dataset.path={folder}: the folder holds no {_kinds()} files and no saved dataset")
    if len(kinds) > 1:
        raise DataError(
            f"dataset.path={folder}: the folder holds files of several kinds ({', '.join(kinds)}); give one file, a "
            "folder of one kind, or a saved dataset"
        )
    return files


def _saved_rows(path: Path, config: DatasetConfig) -> tuple[str, ...]:
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(str(path))
    except Exception as error:  # of several libraries, for every file that is cut short or garbled
        raise DataError(f"dataset.path={path}: not a whole saved dataset: {first_line(error)}") from error
    if isinstance(rows, DatasetDict):
        split = config.split or "test"
        if split not in rows:
            hint = did_you_mean(split, rows)
            raise DataError(f"dataset.split={split} is not in {path}; there are: {', '.join(rows)}.{hint}")
        rows = rows[split]
    return _column(rows, config.text_field, str(path))


def _file_rows(path: Path, field: str) -> tuple[str, ...]:
    reader = _READERS.get(_kind(path))
    if reader is None:
        given = path.suffix or "a file without a suffix"
        raise DataError(f"dataset.path={path}: cannot read {given}; it reads {_kinds()}")
    try:
        return reader(path, field)
    except DataError:
        raise
    except Exception as error:  # of several libraries, for archives that are cut short, garbled or too large
        raise DataError(f"dataset.path={path}: cannot be read: {first_line(error)}") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark, whose lines end in a newline."""
    return _decoded(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:4096]:
        raise ValueError("no UTF-8 text, but UTF-16 or binary; save it as UTF-8")
    return data.decode("utf-8-sig")


def _json(path: Path, field: str) -> tuple[str, ...]:
    texts = []
    for row, record in enumerate(json_records(path), 1):
        where = f"row {row} of {path}"
        if isinstance(record, dict):
            _check_field(record, field, where)
            record = record[field]
        elif not isinstance(record, str):
            raise DataError(f"dataset.path: {where} is {type(record).__name__}, not an object with {field!r}")
        texts.append(_checked(record, field, where))
    return tuple(texts)


def json_records(path: Path) -> list[Any]:
    """The records of a file: an array of them, or one to a line.

    Not by `datasets.load_dataset`, which is slower, copies a file into a cache in the home folder, and turns text that
    reads like a date into a date (docs/architecture.md, Libraries).
    """
    text = _decoded(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
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


def objects(path: Path, holds: str) -> list[dict[str, Any]]:
    """The objects of a json, jsonl or parquet file; `holds`: what each of them has, for the error."""
    if not path.is_file():
        raise DataError(f"dataset.path={path}: no such file; .jsonl, .json and .parquet are read")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows = json_records(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"dataset.path={path}: cannot be read: {one_line(error)}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"dataset.path={path}: one or more objects with {holds}")
    return rows


def _parquet(path: Path, field: str) -> tuple[str, ...]:
    import pyarrow.parquet

    _check_field(pyarrow.parquet.read_schema(path).names, field, str(path))
    return _column(pyarrow.parquet.read_table(path, columns=[field]), field, str(path))


def _arrow(path: Path, field: str) -> tuple[str, ...]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        return _column(stream.read_all(), field, str(path))


_READERS: dict[str, Callable[[Path, str], tuple[str, ...]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": lambda path, _: (read_text(path),),
    ".md": lambda path, _: (read_text(path),),
}


def _kind(path: Path) -> str:
    """The suffix that chooses the reader; only json is read compressed."""
    inner = Path(path.stem).suffix
    return inner if path.suffix == ".gz" and inner in (".json", ".jsonl") else path.suffix


def _kinds() -> str:
    return ", ".join(_READERS)


def _column(table: Any, field: str, where: str) -> tuple[str, ...]:
    """The values of a field of a `datasets.Dataset` or a `pyarrow.Table`."""
    _check_field(table.column_names, field, where)
    values = table[field]
    texts = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
    return tuple(_checked(text, field, f"row {row} of {where}") for row, text in enumerate(texts, 1))


def _check_field(names: Iterable[str], field: str, where: str) -> None:
    names = list(names)
    if field not in names:
        hint = did_you_mean(field, names)
        raise DataError(f"dataset.text_field={field} is not in {where}; its fields are: {', '.join(names)}.{hint}")


def _checked(text: Any, field: str, where: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"dataset.text_field={field}: {where} holds {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair
        odd = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"dataset.text_field={field}: {where} holds {odd}, which no text is encoded with") from error
    return text


def joined_text(config: DatasetConfig) -> str:
    """Documents of an embedded corpus in the order of their hashes, or all rows, joined by `separator`."""
    if str(config.loader) == "embedded":
        documents = load_corpus(config.name, config.split or "test").documents
        # An order that mixes their packages, so that a stream cut short is a sample of them all.
        mixed = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
        return config.separator.join(mixed)
    return config.separator.join(read_rows(config))
