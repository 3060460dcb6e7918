"""Questions about images and recordings: how they are read, and how answers are scored, without a model.

OCRBench (arXiv 2305.07895) asks whether an answer is contained. MMAU-Pro (arXiv 2508.13992,
`evaluate_mmau_pro_comprehensive.py`) scores by category. Instructions are checked by its rules. Choices are matched
there by embeddings of NV-Embed-v2, a model of 7B; here by the words of MMAU's `evaluation.py` (arXiv 2410.19168), its
authors' string rule, so that accuracy is not MMAU-Pro's. Open answers (there: Qwen2.5-7B-Instruct) have no score.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from jaxtyping import Float32
from numpy import ndarray

from kvq.config import DatasetConfig
from kvq.data.rows import load_rows, read_objects
from kvq.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

JUDGED = "an open answer, which the benchmark's authors let a judge grade (Qwen2.5-7B-Instruct)"
"""Why an item of MMAU-Pro without choices and without instruction is skipped."""


@dataclass(frozen=True)
class MediaItem:
    """A question about media, `(modality, bytes)` each in the order of the prompt; scores are split by `kind`.

    `choices`: the answers that the prompt offers; `instruction`: what an answer has to follow: name, numbers, words.
    """

    name: str
    kind: str
    source: str
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    instruction: tuple[str, Mapping[str, Any]] | None = None
    media: tuple[tuple[str, bytes], ...] = ()

    @property
    def prompt(self) -> str:
        """The question and its choices, a line each; MMAU-Pro releases no words for them."""
        offer = ["Answer with one of these choices:", *self.choices] if self.choices else []
        return "\n".join([self.question, *offer])


def read_items(dataset: DatasetConfig, limit: int | None = None) -> tuple[list[MediaItem], dict[str, str]]:
    """The first `limit` items, and the skipped ones: name -> reason."""
    items, skipped = list[MediaItem](), dict[str, str]()
    if dataset.path is None:
        local, split = "a local copy (jsonl, json or parquet)", dataset.split or "test"
        rows = load_rows(f"dataset={dataset.name}", local, dataset.hub_id, dataset.hub_config, split=split)
    else:
        rows = read_objects(Path(dataset.path).expanduser(), "a question, an answer and an image or a recording")
    folder = Path(dataset.path or "").expanduser().parent  # of media; rows of the hub may hold them
    for index, row in enumerate(rows):
        if len(items) == limit:
            break
        name = f"{index}" if row.get("id") is None else f"{index}/{row['id']}"  # ids may repeat
        try:
            items.append(_item(name, row, folder))
        except DataError as error:
            skipped[name] = str(error)
    return items, skipped


def _item(name: str, row: Mapping[str, Any], folder: Path) -> MediaItem:
    answers = _listed(row.get("answer", row.get("answers")))
    kept = tuple(str(answer) for answer in answers if str(answer).strip())
    question, kind, source = (str(row.get(field) or "") for field in ("question", "question_type", "dataset"))
    media = tuple(
        (modality, _bytes(given, folder, modality))
        for modality, fields in {"image": ["image"], "audio": ["audio_path", "audio"]}.items()
        for given in next((_listed(row[field]) for field in fields if row.get(field) is not None), [])
    )
    if not media:
        raise DataError("no recording" if "category" in row else "no image")
    if not question.strip():
        raise DataError("empty question")
    choices = tuple(str(choice) for choice in _listed(row.get("choices")))
    instruction, kind = None, kind or str(row.get("type") or row.get("category") or "")
    if row.get("task_identifier"):
        wanted = row.get("kwargs") or {}  # parquet has every key in every row
        instruction = (str(row["task_identifier"]), {key: wanted[key] for key in wanted if wanted[key] is not None})
    elif not kept:
        raise DataError("no answer")  # an empty one would be found in every text
    return MediaItem(name, kind, source, question, kept, choices, instruction, media)


def _listed(given: Any) -> list[Any]:
    """A field that holds one value or several, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple, ndarray)) else [given]


def _bytes(given: Any, folder: Path, modality: str) -> bytes:
    """Bytes of an image or a recording, given as bytes, path, hub row or decoded picture (as PNG)."""
    if isinstance(given, Mapping):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes):
        return given
    if isinstance(given, str) and given:
        with contextlib.suppress(OSError):
            return (folder / given).read_bytes()
        raise DataError(f"{given}: no such file")
    if hasattr(given, "save"):
        stream = io.BytesIO()
        given.save(stream, format="PNG")
        return stream.getvalue()
    raise DataError("no image" if modality == "image" else "no recording")


def decode_image(data: bytes) -> Image:
    """Decode an image in any format of Pillow; raises `DataError` for other bytes."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise DataError("its image cannot be read") from error


def decode_recording(data: bytes, rate: int) -> Float32[ndarray, " samples"]:
    """Decode a wave file to one channel in [-1, 1], the mean of its own, at `rate` Hz; raises `DataError`."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks of other things than sound
            warnings.filterwarnings("error", "Reached EOF")
            own, samples = wavfile.read(io.BytesIO(data))
        if np.issubdtype(samples.dtype, np.integer):
            middle = 128 if samples.dtype == np.uint8 else 0
            samples = (samples.astype(np.float64) - middle) / (middle or -float(np.iinfo(samples.dtype).min))
        made = resample_poly(np.atleast_2d(samples.T).mean(axis=0), rate, own)
    except Exception as error:  # which ones depends on the byte where a file is torn
        raise DataError("its recording cannot be read as a wave file") from error
    if not len(made) or not np.isfinite(made).all():
        raise DataError("its recording has no samples, or some that are no numbers")
    return np.asarray(made, dtype=np.float32)


def ocrbench_score(source: str, answers: Sequence[str], text: str) -> float:
    """OCRBench (arXiv 2305.07895, `example.py`): 1 if the text contains an answer, both made plain, else 0."""

    def plain(given: str) -> str:
        if source == "HME100k":  # formulae, compared without spaces
            return given.strip().replace("\n", " ").replace(" ", "")
        return given.lower().strip().replace("\n", " ")

    return float(any(plain(answer) in plain(text) for answer in answers))


def choice_score(answer: str, choices: Sequence[str], text: str) -> float:
    """MMAU (`string_match`): 1 if the text has all words of the answer and none that only other choices have."""

    def words(given: str) -> set[str]:
        return set(re.findall(r"\w+", given.lower()))

    wanted, given = words(answer), words(text)
    return float(bool(given) and wanted <= given and not given & (set[str]().union(*map(words, choices)) - wanted))


def instruction_score(name: str, wanted: Mapping[str, Any], question: str, text: str) -> float:
    """MMAU-Pro (`evaluate_aif_sample`): 1 if the text follows instruction `name` of `instructions.yaml`, else 0."""
    rules = yaml.safe_load(files(__package__).joinpath("instructions.yaml").read_text("utf-8"))
    if (rule := rules.get(name)) is None:
        return 0.0
    item: dict[str, Any] = {"question": question.strip(), **wanted}
    if "without" in rule:
        text, *plain = (re.sub(rule["without"], "", str(part).lower()) for part in (text, *item.values()))
        item = dict(zip(item, plain, strict=True))

    def follows(word: str) -> bool:
        pattern = re.sub(r"{([a-z]\w*)}", lambda at: re.escape({"word": word, **item}.get(at[1], "")), rule["count"])
        count = len(re.findall(pattern, text))
        least, most = (item.get(rule[bound], rule[bound]) if bound in rule else count for bound in ("least", "most"))
        return bool(least <= count <= most)

    return float(all(map(follows, str(item.get(rule.get("each"), "")).split(", "))))


def score_answer(benchmark: str, item: MediaItem, text: str) -> dict[str, Any]:
    """The `score` of an answer from 0 to 1; of MMAU-Pro also the `rule`: `instruction`, or `words` of the choices."""
    if benchmark == "ocrbench":
        return {"score": ocrbench_score(item.source, item.answers, text)}
    if item.instruction is None:
        return {"rule": "words", "score": choice_score(item.answers[0], item.choices, text)}
    return {"rule": "instruction", "score": instruction_score(*item.instruction, item.question, text)}
