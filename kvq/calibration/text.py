"""The text that a method is calibrated on: windows drawn from a training split, with a fingerprint of their tokens.

How much of it is also in the text that is scored is measured by content: n-grams of words.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt64
from torch import Tensor

from kvq.config import DatasetConfig, Loader, compose, resolve
from kvq.config.explain import COMPOSE_ERRORS, explain
from kvq.config.method import TEST_TEXT, CalibrationConfig
from kvq.data.text import TokenData, load_tokens
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs

WORDS = 13
"""Words of an n-gram, as GPT-3 compares training with test text (arXiv 2005.14165, appendix C)."""
_FILES = "text"
"""The data set that a path stands for."""


def ngrams(texts: Iterable[str]) -> UInt64[np.ndarray, " distinct"]:
    """Hashes of the distinct n-grams of `WORDS` words within each text, ascending; valid in this process only.

    Words are runs of letters and digits in lower case, so spaces, line ends and punctuation make no difference.
    """
    found = [np.empty(0, np.uint64)]
    for text in texts:
        words = np.array([hash(word) for word in re.findall(r"\w+", text.lower())], np.int64).view(np.uint64)
        rows = np.zeros(max(0, len(words) - WORDS + 1), np.uint64)
        for start in range(WORDS):  # uint64 wraps around
            rows = rows * np.uint64(0x9E3779B97F4A7C15) + words[start : start + len(rows)]
            rows ^= rows >> np.uint64(29)
        found.append(rows)
    return np.unique(np.concatenate(found))


def shared_ngrams(one: Iterable[str], other: Iterable[str]) -> float:
    """Share (0 to 1) of the n-grams of whichever side has fewer that the other has too; 0 where a side has none."""
    mine, theirs = ngrams(one), ngrams(other)
    fewer = min(len(mine), len(theirs))
    return len(np.intersect1d(mine, theirs, assume_unique=True)) / fewer if fewer else 0.0


@dataclass(frozen=True)
class CalibrationText:
    """Windows of tokens to calibrate on."""

    windows: Int[Tensor, "samples length"]

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokens."""
        return hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()


def parts_of(config: CalibrationConfig) -> list[CalibrationConfig]:
    """The settings of each text of a mixture, `pydocs+pysource`, which share its samples; of one text, its own.

    Samples that are left over are those of the first texts. `path` is that of the part `text`.
    """
    names = [None] if config.dataset is None else config.dataset.split("+")
    if len(names) == 1:
        return [config]
    given = f"method.calibration.dataset={config.dataset}:"
    if len(set(names)) < len(names) or len(names) > config.samples:
        raise ConfigError(f"{given} each text once, and a sample of each; samples={config.samples}")
    if (config.path is not None) != (_FILES in names):
        raise ConfigError(f"{given} method.calibration.path is that of its part {_FILES}, and of no other")
    share, over = divmod(config.samples, len(names))
    return [
        replace(
            config,
            dataset=name,
            path=config.path if name == _FILES else None,
            samples=share + (place < over),
            tokens=None,
        )
        for place, name in enumerate(names)
    ]


def dataset_of(config: CalibrationConfig) -> DatasetConfig:
    """The data set that a calibration on one text reads: the training split of the named one."""
    if config.dataset is None:
        raise ConfigError("method.calibration.dataset=null: the method needs a text to calibrate on, such as pydocs")
    given = [f"dataset={config.dataset}"]
    try:
        found = resolve(compose(given)).dataset
    except COMPOSE_ERRORS as error:
        raise ConfigError(f"method.calibration.{explain(error, given, None)}") from error
    if found.loader is Loader.items:
        raise ConfigError(f"method.calibration.dataset={config.dataset}: holds items, not text; such as pydocs")
    split = config.split or ("calibration" if found.loader is Loader.embedded else "train")
    found = replace(found, split=split, max_tokens=None)
    if config.path is not None:
        return replace(found, loader=Loader.text, path=config.path, documents=None, data_files=None)
    if found.data_files is not None or (found.loader is not Loader.embedded and found.hub_id is None):
        raise ConfigError(
            f"method.calibration.dataset={config.dataset}: it names files without a training side; give "
            "method.calibration.path=, a text that is not under test"
        )
    return found


def calibration_text(
    config: CalibrationConfig, tokenizer: Any, bos: int | None = None, tokens: TokenData | None = None
) -> CalibrationText:
    """`samples` disjoint windows of `length` tokens of one text, drawn by `seed`; `bos`: the first token of each.

    `tokens`: of the data set, where they are at hand.
    """
    streams, room = (tokens or load_tokens(dataset_of(config), tokenizer, config.length, bos)).streams, config.length
    if bos is not None:
        room -= 1
    windows = torch.cat([s[: len(s) // room * room].view(-1, room) for s in streams])
    if bos is not None:
        windows = torch.nn.functional.pad(windows, (1, 0), value=bos)
    if len(windows) < config.samples:
        raise DataError(
            f"method.calibration.samples={config.samples}: the text of {config.dataset} has {len(windows)} windows of "
            f"{config.length} tokens"
        )
    generator = torch.Generator().manual_seed(config.seed ^ 0x63616C69)  # apart from other draws
    return CalibrationText(windows[torch.randperm(len(windows), generator=generator)[: config.samples]])


def load_text(inputs: Inputs) -> CalibrationText | None:
    """The text that the run's method is calibrated on; None: it names none, or the task reads no model."""
    settings = inputs.config.method.calibration
    if settings.dataset is None or not inputs.reads_weights:
        return None
    model = (inputs.config.model, inputs.model_fingerprint, inputs.bos)

    def tokens(part: CalibrationConfig) -> TokenData:
        """Those of the whole text, which calibrations of other sizes and seeds share; crops have the length asked."""
        source = dataset_of(part)
        name = repr((source, settings.length if source.loader is Loader.documents else None, model))
        load = functools.partial(load_tokens, source, inputs.tokenizer, settings.length, inputs.bos)
        return inputs.shared("calibration tokens", name, load)

    def made() -> CalibrationText:
        parts = parts_of(settings)
        texts = [calibration_text(part, inputs.tokenizer, inputs.bos, tokens(part)) for part in parts]
        return CalibrationText(torch.cat([text.windows for text in texts]))

    return inputs.shared("calibration text", repr((settings, model)), made)


def fingerprint_of(inputs: Inputs) -> str | None:
    """SHA-256 (hex) of that text's tokens; None: no text."""
    text = load_text(inputs)
    return None if text is None else text.fingerprint


def shared_text(inputs: Inputs, texts: Sequence[str]) -> float:
    """Share (0 to 1) of n-grams that the windows of the run's calibration have in common with what it scores.

    Raises: ConfigError: more than `TEST_TEXT`, unless `allow_test_text`.
    """
    settings, text = inputs.config.method.calibration, load_text(inputs)
    share = 0.0 if text is None else shared_ngrams(inputs.tokenizer.batch_decode(text.windows), texts)
    if settings.allow_test_text or share <= TEST_TEXT:
        return share
    raise ConfigError(
        f"method.calibration.{f'path={settings.path}' if settings.path else f'dataset={settings.dataset}'}: shares "
        f"{100 * share:.0f}% of its sequences of {WORDS} words with the text under test, at most {100 * TEST_TEXT:g}%; "
        "use another text, or method.calibration.allow_test_text=true, which the tables mark"
    )


def check(inputs: Inputs, method: Method) -> None:
    """Check text and model for calibrating, without reading weights."""
    if not method.needs_calibration or inputs.config.task.calibrates_itself:
        return
    settings = inputs.config.method.calibration
    if not inputs.reads_weights:
        raise Unsupported(f"task={inputs.config.task.name}: reads no model to calibrate method={method.name} on")
    for part in parts_of(settings):
        dataset_of(part)
    inputs.check_tokens(settings.length, f"method.calibration.length={settings.length}:")
