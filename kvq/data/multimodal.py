"""Items of OCRBench, questions about images, and its official score.

Rows come from the hub, or from a local jsonl, json or parquet file whose media are bytes or paths relative to it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.data import hub
from kvq.data.rows import objects
from kvq.errors import DataError

if TYPE_CHECKING:
    from kvq.config import DatasetConfig

Row = Mapping[str, Any]
_SPACES = "HME100k"
"""The source of formulae, which OCRBench compares without spaces."""


@dataclass(frozen=True)
class MediaItem:
    """A question about one image, whose bytes are `media`; scores are split by `kind`."""

    name: str
    kind: str
    source: str
    question: str
    answers: tuple[str, ...]
    media: bytes


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


def read_items(dataset: DatasetConfig) -> tuple[list[MediaItem], dict[str, str]]:
    """The items, and the skipped ones: name -> reason."""
    items: list[MediaItem] = []
    skipped: dict[str, str] = {}
    for index, (row, folder) in enumerate(_rows(dataset)):
        name = f"{index}" if row.get("id") is None else f"{index}/{row['id']}"  # ids may repeat
        try:
            items.append(_item(name, row, folder))
        except DataError as error:
            skipped[name] = str(error)
    return items, skipped


def _item(name: str, row: Row, folder: Path | None) -> MediaItem:
    answers = row.get("answer", row.get("answers"))
    answers = [answers] if isinstance(answers, str) else list(answers or [])
    kept = tuple(str(answer) for answer in answers if str(answer).strip())
    question, kind, source = (str(row.get(field) or "") for field in ("question", "question_type", "dataset"))
    media = _media(row.get("image"), folder)
    if not question.strip():
        raise DataError("empty question")
    if not kept:
        raise DataError("no answer")  # an empty one would be found in every text
    return MediaItem(name, kind or str(row.get("type") or ""), source, question, kept, media)


def _media(given: Any, folder: Path | None) -> bytes:
    """Bytes of an image, given as bytes, path, hub row or decoded picture (as PNG)."""
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
    raise DataError("no image")


def _rows(dataset: DatasetConfig) -> list[tuple[Row, Path | None]]:
    """Rows of the data set, each with the folder of its images (None: the hub's rows hold them)."""
    if dataset.path is None:
        local, split = "a local copy (jsonl, json or parquet)", dataset.split or "test"
        found = hub.load_rows(f"dataset={dataset.name}", local, dataset.hub_id, dataset.hub_config, split=split)
        return [(row, None) for row in found]
    path = Path(dataset.path).expanduser()
    return [(row, path.parent) for row in objects(path, "a question, an answer and an image")]
