"""How much text a calibration shares with what is scored, by content: n-grams of words."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt64

WORDS = 13
"""Words of an n-gram, as GPT-3 compares training with test text (arXiv 2005.14165, appendix C)."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


def ngrams(texts: Iterable[str]) -> UInt64[np.ndarray, " distinct"]:
    """Hashes of the distinct n-grams of `WORDS` words within each text, ascending; valid in this process alone.

    Words are runs of letters and digits in lower case, so spaces, line ends and punctuation make no difference.
    """
    found = [np.empty(0, np.uint64)]
    for text in texts:
        words = np.array([hash(word) for word in re.findall(r"\w+", text.lower())], np.int64).view(np.uint64)
        rows = np.zeros(max(0, len(words) - WORDS + 1), np.uint64)
        for start in range(WORDS):  # uint64 wraps around
            rows = rows * _MIX + words[start : start + len(rows)]
            rows ^= rows >> np.uint64(29)
        found.append(rows)
    return np.unique(np.concatenate(found))


def shared_ngrams(one: Iterable[str], other: Iterable[str]) -> float:
    """Share (0 to 1) of the n-grams of whichever side has fewer that the other has too; 0 where a side has none."""
    mine, theirs = ngrams(one), ngrams(other)
    fewer = min(len(mine), len(theirs))
    return len(np.intersect1d(mine, theirs, assume_unique=True)) / fewer if fewer else 0.0
