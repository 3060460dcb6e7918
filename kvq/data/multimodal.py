"""Items of multi-modal benchmarks and their official scores: OCRBench (images) and MMAU-Pro (audio).

Rows come from the hub, or from a local jsonl, json or parquet file whose media are bytes or paths relative to it.
"""

from __future__ import annotations

import io
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.data import hub
from kvq.data.rows import json_records
from kvq.errors import DataError, one_line

if TYPE_CHECKING:
    from kvq.config import DatasetConfig

Row = Mapping[str, Any]
_SPACES = "HME100k"
"""The source of formulae, which OCRBench compares without spaces."""


@dataclass(frozen=True)
class MediaItem:
    """A question about one image or recording.

    Attributes:
        kind: the category by which scores are split.
        media: bytes of the image or recording.
        choices: the allowed answers; empty where the answer is free text.
    """

    name: str
    kind: str
    source: str
    question: str
    answers: tuple[str, ...]
    media: bytes
    choices: tuple[str, ...] = ()


def ocrbench_score(source: str, answers: Sequence[str], text: str) -> float:
    """1 if any answer is contained in the text, else 0.

    Source: OCRBench (arXiv 2305.07895), released `example.py`: both in lower case, stripped, newlines as spaces;
    HME100k in its own case and without spaces.
    """

    def plain(given: str) -> str:
        if source == _SPACES:
            return given.strip().replace("\n", " ").replace(" ", "")
        return given.lower().strip().replace("\n", " ")

    return float(any(plain(answer) in plain(text) for answer in answers))


def choice_score(answer: str, choices: Sequence[str], text: str) -> float:
    """1 if the text is exactly the right choice: its words, its letter, or both ("B", "(b)", "B. rain"), else 0.

    Case, surrounding space and a last full stop do not count. MMAU-Pro's open-ended questions, whose answers a model
    judges, are skipped.
    """

    def plain(given: str) -> str:
        return " ".join(given.lower().split()).rstrip(".")

    if answer not in choices:
        return 0.0
    letter = string.ascii_lowercase[list(choices).index(answer)]
    given = plain(text)
    marked = re.fullmatch(rf"\(?{letter}[).:]?(?:\s+(?P<words>.+))?", given)
    return float(given == plain(answer) or (marked is not None and marked["words"] in (None, plain(answer))))


def read_items(dataset: DatasetConfig, benchmark: str) -> tuple[list[MediaItem], dict[str, str]]:
    """The items of a benchmark, and the skipped ones: name -> reason."""
    items: list[MediaItem] = []
    skipped: dict[str, str] = {}
    read = {"ocrbench": _ocrbench, "mmau_pro": _mmau_pro}[benchmark]
    for index, (row, folder) in enumerate(_rows(dataset)):
        name = f"{index}" if row.get("id") is None else f"{index}/{row['id']}"  # ids may repeat
        try:
            items.append(read(name, row, folder))
        except DataError as error:
            skipped[name] = str(error)
    return items, skipped


def _ocrbench(name: str, row: Row, folder: Path | None) -> MediaItem:
    answers = row.get("answer", row.get("answers"))
    answers = [answers] if isinstance(answers, str) else list(answers or [])
    kind, source = (str(row.get(field) or "") for field in ("question_type", "dataset"))
    return _item(name, kind or str(row.get("type") or ""), source, row, answers, _media(row.get("image"), folder))


def _mmau_pro(name: str, row: Row, folder: Path | None) -> MediaItem:
    choices = tuple(str(choice) for choice in _list(row.get("choices")))
    answer = str(row.get("answer") or "")
    if not choices:
        raise DataError("no choices: open-ended answers are judged by a model, which is outside of kvq")
    if answer not in choices:
        raise DataError("its answer is none of its choices")
    recordings = _list(row.get("audio", row.get("audio_path")))
    if len(recordings) != 1:
        raise DataError(f"{len(recordings)} recordings, where one is read")
    kind = str(row.get("category") or "")
    return _item(name, kind, "", row, [answer], _media(recordings[0], folder), choices)


def _list(given: Any) -> list[Any]:
    if given is None:
        return []
    return [given] if isinstance(given, str | bytes | Mapping) or hasattr(given, "save") else list(given)


def _item(
    name: str, kind: str, source: str, row: Row, answers: Sequence[Any], media: bytes, choices: tuple[str, ...] = ()
) -> MediaItem:
    question = str(row.get("question") or "")
    if not question.strip():
        raise DataError("empty question")
    kept = tuple(str(answer) for answer in answers if str(answer).strip())
    if not kept:
        raise DataError("no answer")  # an empty one would be found in every text
    return MediaItem(name, kind, source, question, kept, media, choices)


def _media(given: Any, folder: Path | None) -> bytes:
    """Bytes of an image or recording, given as bytes, path, hub row or decoded picture (as PNG)."""
    if isinstance(given, Mapping):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes):
        return given
    if isinstance(given, str) and given:
        file = (folder or Path()) / given
        if not file.is_file():
            raise DataError(f"{given}: no such file")
        return file.read_bytes()
    if hasattr(given, "save"):
        stream = io.BytesIO()
        given.save(stream, format="PNG")
        return stream.getvalue()
    raise DataError("no image or recording")


def _rows(dataset: DatasetConfig) -> list[tuple[Row, Path | None]]:
    if dataset.path is None:
        local, split = "a local copy (jsonl, json or parquet)", dataset.split or "test"
        found = hub.load_rows(f"dataset={dataset.name}", local, dataset.hub_id, dataset.hub_config, split=split)
        return [(row, None) for row in found]
    path = Path(dataset.path).expanduser()
    readers = {".jsonl": json_records, ".json": json_records, ".parquet": _parquet}
    if not path.is_file():
        raise DataError(f"dataset.path={dataset.path}: no such file; {', '.join(readers)} are read")
    if path.suffix not in readers:
        raise DataError(
            f"dataset.path={dataset.path}: cannot read {path.suffix or 'it'}; {', '.join(readers)} are read"
        )
    try:
        rows = readers[path.suffix](path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"dataset.path={path}: cannot be read: {one_line(error)}") from error
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"dataset.path={path}: one or more objects with a question, an answer and an image")
    return [(row, path.parent) for row in rows]


def _parquet(path: Path) -> list[Any]:
    import pyarrow.parquet

    return list(pyarrow.parquet.read_table(path).to_pylist())
