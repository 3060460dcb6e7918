"""Settings of the calibration step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvq.errors import ConfigError, at_least, check_path, check_seed

TEST_TEXT = 0.05
"""Largest share of n-grams in common with the scored text; texts that are apart share up to 0.01 (docs/methods.md)."""


@dataclass
class CalibrationConfig:
    """The data that a calibrated method is fitted to; `dataset` null: the method is not calibrated.

    Attributes:
        dataset: a configuration of `conf/dataset`. Its calibration text is not the text under test: the calibration
            split of an embedded corpus, else the split named by `split`.
        path: a local copy of that text (a file or a folder), as `dataset.path`.
        split: null: `calibration` of an embedded corpus, `train` of a data set on the hub; a local text has none.
        samples, length: number of sequences and their length in tokens; drawn by `seed`.
        tokens: number of tokens of all samples that are fitted to, drawn by `seed`; null: all.
        seed: of the draws of samples and tokens, and of the starting points of fits.
        allow_test_text: calibrate all the same on a text that shares more than `TEST_TEXT` of its n-grams with what is
            scored, for a bound on what a calibration can reach. Records have the share, tables mark it.
    """

    version: ClassVar[int] = 1

    dataset: str | None = None
    path: str | None = None
    split: str | None = None
    samples: int = 16
    length: int = 2048
    tokens: int | None = None
    seed: int = 0
    allow_test_text: bool = False

    def __post_init__(self) -> None:
        check_path("method.calibration.path", self.path)
        at_least("method.calibration.samples", self.samples, 1)
        at_least("method.calibration.length", self.length, 2)
        check_seed("method.calibration.seed", self.seed)
        if self.tokens is not None and self.tokens < self.samples:
            raise ConfigError(
                f"method.calibration.tokens={self.tokens}: at least one of each of {self.samples} samples"
            )
        if self.split == "test" and not self.allow_test_text:
            raise ConfigError("method.calibration.split=test: never the text under test; train, or null")
