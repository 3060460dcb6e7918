"""The text of a data set as one string, and its fingerprint; torch is not imported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvq.data.embedded import load_corpus
from kvq.data.rows import read_rows

if TYPE_CHECKING:
    from kvq.config import DatasetConfig


def joined_text(config: DatasetConfig) -> str:
    """Documents of an embedded corpus in the order of their hashes, or all rows, joined by `separator`.

    Raises:
        DataError: as `read_rows`.
    """
    if str(config.loader) == "embedded":
        return config.separator.join(_by_hash(load_corpus(config.name, config.split or "test").documents))
    return config.separator.join(read_rows(config))


def text_fingerprint(texts: Iterable[str]) -> str:
    """The sha256 (hex) of texts, each followed by a NUL byte."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _by_hash(documents: tuple[str, ...]) -> tuple[str, ...]:
    """Documents in an order that mixes their packages, so that a stream cut short is a sample of them all."""
    return tuple(sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest()))
