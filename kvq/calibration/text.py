"""The text that a method is calibrated on: windows drawn from a training split, with a fingerprint of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvq.calibration.overlap import WORDS, shared_ngrams
from kvq.config import DatasetConfig, Loader, compose, resolve
from kvq.config.explain import COMPOSE_ERRORS, explain
from kvq.config.method import TEST_TEXT, CalibrationConfig
from kvq.data.text import load_tokens
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs

_WINDOWS_STREAM = 0x63616C69
"""Separates the draw of windows from other uses of the same seed."""


@dataclass(frozen=True)
class CalibrationText:
    """Windows to calibrate on; `fingerprint` (sha256, hex) is that of their tokens."""

    windows: Int[Tensor, "samples length"]
    fingerprint: str


def dataset_of(config: CalibrationConfig) -> DatasetConfig:
    """The data set that a calibration reads: the training split of the named one.

    Raises:
        ConfigError: no or an unknown data set, or one whose text is a file, which has no training split.
    """
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


def calibration_text(config: CalibrationConfig, tokenizer: Any, bos: int | None = None) -> CalibrationText:
    """`samples` disjoint windows of `length` tokens, drawn by `seed`; `bos`: the first token of each.

    Raises:
        ConfigError: as `dataset_of`.
        DataError: a text with fewer windows.
    """
    streams, room = load_tokens(dataset_of(config), tokenizer, config.length, bos).streams, config.length
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
    generator = torch.Generator().manual_seed(config.seed ^ _WINDOWS_STREAM)
    chosen = windows[torch.randperm(len(windows), generator=generator)[: config.samples]]
    return CalibrationText(chosen, hashlib.sha256(chosen.numpy().tobytes()).hexdigest())


def text_of(inputs: Inputs) -> CalibrationText | None:
    """The text that the run's method is calibrated on; None: it names none, or the task reads no model.

    Raises:
        ConfigError: a data set that cannot be calibrated on.
        DataError: too little text.
    """
    settings = inputs.config.method.calibration
    if settings.dataset is None or not inputs.reads_weights:
        return None
    name = repr((settings, inputs.config.model, inputs.model_fingerprint, inputs.bos))
    return inputs.shared("calibration text", name, lambda: calibration_text(settings, inputs.tokenizer, inputs.bos))


def fingerprint_of(inputs: Inputs) -> str | None:
    """SHA-256 (hex) of that text's tokens; None: no text."""
    text = text_of(inputs)
    return None if text is None else text.fingerprint


def shared_text(inputs: Inputs, texts: Sequence[str]) -> float:
    """Share (0 to 1) of n-grams that the windows of the run's calibration have in common with what it scores.

    Raises:
        ConfigError: a calibration on the text under test, unless its settings ask for that; as `text_of`.
        DataError: as `text_of`.
    """
    settings, text = inputs.config.method.calibration, text_of(inputs)
    share = 0.0 if text is None else shared_ngrams(inputs.tokenizer.batch_decode(text.windows), texts)
    if settings.allow_test_text or share <= TEST_TEXT:
        return share
    raise ConfigError(
        f"method.calibration.{f'path={settings.path}' if settings.path else f'dataset={settings.dataset}'}: shares "
        f"{100 * share:.0f}% of its sequences of {WORDS} words with the text under test, at most {100 * TEST_TEXT:g}%; "
        "use another text, or method.calibration.allow_test_text=true, which the tables mark"
    )


def check(inputs: Inputs, method: Method) -> None:
    """Check text and model for calibrating, without reading weights.

    Raises:
        ConfigError: no text to calibrate on, or windows longer than the model takes.
        Unsupported: a task that reads no weights.
    """
    if not method.is_calibrated or inputs.config.task.calibrates_itself:
        return
    settings, longest = inputs.config.method.calibration, inputs.longest_context
    if not inputs.reads_weights:
        raise Unsupported(
            f"task={inputs.config.task.name}: reads no model, on which method={method.name} is calibrated"
        )
    dataset_of(settings)
    if longest is not None and settings.length > longest:
        name = inputs.config.model.name
        raise ConfigError(f"method.calibration.length={settings.length}: model={name} takes at most {longest} tokens")
