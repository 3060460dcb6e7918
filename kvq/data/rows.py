"""Rows of text from the embedded corpora, the hub or local files, and a data set's text as one string, without torch.

The embedded corpora are English docstrings and Python sources of the pinned scientific packages: the text that these
packages carry, the same wherever the same versions are installed, with a fingerprint. Whole modules are held out by a
hash of their path, for both kinds at once; docstrings that modules copy from each other are dropped from the training
side. The calibration split is a small part of the training modules.
"""

from __future__ import annotations

import ast
import codecs
import gzip
import hashlib
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, get_session

from kvq.errors import DataError, check_choice, did_you_mean, one_line

if TYPE_CHECKING:
    from kvq.config import DatasetConfig

KINDS = ("pydocs", "pysource")
PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sklearn", "sympy")
TEST_FRACTION = 0.05
CALIBRATION_FRACTION = 0.05
# Shorter docstrings ("Return a copy.") recur everywhere and say nothing, so none could be held out.
MIN_WORDS = 12
# Tables of constants and glyphs are neither prose nor code.
MAX_DIGITS = 0.15
ANCHOR_WORDS = 8

_SKIPPED_FOLDERS = {
    *("tests", "testing", "benchmarks"),
    *("externals", "array_api_compat", "array_api_extra"),  # vendored: the same file in several packages
    "_antlr",  # generated
    "distutils",  # installed for some Python versions only
}
# Written at build time, so they differ between wheels of one version.
_SKIPPED_FILES = {
    *("__config__.py", "_version.py", "_version_meson.py", "version.py"),
    *("conftest.py", "_distributor_init.py"),
}
_WORD = re.compile(r"\w+")
_SUFFIXES = (".jsonl", ".json", ".json.gz", ".jsonl.gz", ".parquet", ".txt", ".md")


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind and split, by their modules' paths; `fingerprint` as of `text_fingerprint`."""

    documents: tuple[str, ...]
    fingerprint: str


@lru_cache(maxsize=4)
def load_corpus(kind: str, split: str) -> Corpus:
    """The corpus of a kind and split: held-out modules (test), as many others, or all others (tens of seconds)."""
    check_choice("dataset.name", kind, KINDS)
    check_choice("dataset.split", split, ("train", "test", "calibration"))
    texts = _drop_copies(_read_texts(kind, split), set()) if split == "test" else _train_documents(kind, split)
    documents = tuple(texts)
    return Corpus(documents, text_fingerprint(documents))


def text_fingerprint(texts: Iterable[str]) -> str:
    """The sha256 (hex) of texts, each followed by a NUL byte."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def is_in_split(path: str, split: str) -> bool:
    """Whether the module at package-relative posix `path` ("numpy/linalg/_linalg.py") is in a split."""
    share = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64
    if split == "calibration":
        return TEST_FRACTION <= share < TEST_FRACTION + CALIBRATION_FRACTION
    return (share < TEST_FRACTION) == (split == "test")


def find_modules() -> dict[str, Path]:
    """Return package-relative posix path -> file for all modules of the corpus, sorted."""
    modules = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise DataError(f"the embedded corpus needs the package {package}, which is not installed")
        root = Path(spec.origin).parent
        for file in root.rglob("*.py"):
            parts = file.relative_to(root).parts
            if file.name not in _SKIPPED_FILES and not _SKIPPED_FOLDERS.intersection(parts[:-1]):
                modules["/".join((package, *parts))] = file
    return dict(sorted(modules.items()))


def extract_docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of the module, classes and functions of `source`, in order, of at least MIN_WORDS words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    for node in _iter_definitions(tree):
        text = ast.get_docstring(node, clean=True)
        if text is not None and len(_WORD.findall(text)) >= MIN_WORDS:
            yield text.strip()


def normalize(text: str) -> str:
    """Return the lower-case words of `text` joined by spaces, by which copies of a docstring are recognized."""
    return " ".join(_WORD.findall(text.lower()))


def contains_any(text: str, held_out: dict[str, tuple[str, ...]]) -> bool:
    """Whether the normalized `text` contains a document of `held_out` (from `index_by_anchor`) as consecutive words."""
    words = text.split(" ")
    padded = f" {text} "
    for start in range(len(words) - ANCHOR_WORDS + 1):
        anchored = held_out.get(" ".join(words[start : start + ANCHOR_WORDS]))
        if anchored and any(f" {document} " in padded for document in anchored):
            return True
    return False


def index_by_anchor(documents: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Index normalized `documents` by their first ANCHOR_WORDS words, for `contains_any`."""
    index: dict[str, tuple[str, ...]] = {}
    for document in documents:
        anchor = " ".join(document.split(" ")[:ANCHOR_WORDS])
        index[anchor] = (*index.get(anchor, ()), document)
    return index


def _iter_definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the module and the classes and functions in it, in order; expressions, which hold none, are not entered."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        stack.extend(child for child in reversed(list(ast.iter_child_nodes(node))) if not isinstance(child, ast.expr))


def _read_texts(kind: str, split: str) -> Iterator[str]:
    """Yield the sources of `split`, or the docstrings in them, without empty files and tables of numbers."""
    for path, file in find_modules().items():
        if is_in_split(path, split):
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n").strip()
            if text and sum(map(str.isdigit, text)) <= MAX_DIGITS * len(text):
                yield from extract_docstrings(text) if kind == "pydocs" else (text,)


def _train_documents(kind: str, split: str) -> Iterator[str]:
    """Yield the texts of a training split that copy no text and contain no docstring of the test split."""
    held_out = {normalize(text) for text in load_corpus("pydocs", "test").documents}
    index = index_by_anchor(held_out)
    sources = {normalize(text) for text in load_corpus("pysource", "test").documents}
    for text in _drop_copies(_read_texts(kind, split), held_out | sources):
        if not contains_any(normalize(text), index):
            yield text


def _drop_copies(texts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yield the texts whose normalized form is neither in `seen` nor that of an earlier text."""
    hashes = {hashlib.sha256(text.encode()).digest() for text in seen}
    for text in texts:
        digest = hashlib.sha256(normalize(text).encode()).digest()
        if digest not in hashes:
            hashes.add(digest)
            yield text


@cache
def go_offline_if_silent() -> None:
    """Switch the hub's libraries to offline mode, for their cache, where it does not answer in 3 seconds."""
    try:
        constants.is_offline_mode() or get_session().head(constants.ENDPOINT, timeout=3.0)
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
        if not row.isascii() and row.encode(errors="ignore").decode() != row:
            raise DataError(f"dataset.text_field={field}: row {number} of {where} has half of a surrogate pair")
        texts.append(row)
    return tuple(texts)


def _check_field(names: list[str], field: str, where: str) -> None:
    """Raise DataError if `dataset.text_field` is not among the fields of `where`."""
    if field not in names:
        hint = did_you_mean(field, names)
        raise DataError(f"dataset.text_field={field} is not in {where}; its fields are: {', '.join(names)}.{hint}")


def read_joined_text(config: DatasetConfig) -> str:
    """Documents of an embedded corpus in the order of their hashes, or all rows, joined by empty lines."""
    if str(config.loader) == "embedded":
        documents = load_corpus(config.name, config.split or "test").documents
        # An order that mixes their packages, so that a stream cut short is a sample of them all.
        return "\n\n".join(sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest()))
    return "\n\n".join(read_rows(config))
