"""Tables before they are written as Markdown, CSV, LaTeX or on a terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq.results import Broken, Record
from kvq.results.metrics import length_of


@dataclass(frozen=True)
class Row:
    """One run. `name` is its label, with the settings in which it differs from other rows of that label.

    `variant`: a preset's variant or a run that departs from its preset, which takes no part in the frontier;
    `unquantized`: every item was shorter than the residual; `best`: on the frontier of effective bits,
    `best_measured`: on that of measured bits. `p_value` is that of its paired difference to full
    precision, corrected for all rows of the table (Holm). `tokens`: the length that a line of `task=memory` is of.
    """

    record: Record
    name: str
    bits: str
    baseline: bool = False
    within_noise: bool = False
    best: bool = False
    best_measured: bool = False
    stale: bool = False
    footnote: int | None = None
    p_value: float | None = None
    variant: bool = False
    unquantized: bool = False
    tokens: int | None = None


@dataclass(frozen=True)
class Continuation:
    """A text in three parts: what it shares with full precision's, the word that differs first, and what follows.

    `said`: how many tokens it shares.
    """

    name: str
    said: str
    same: str
    differs: str
    rest: str


@dataclass(frozen=True)
class Texts:
    """A prompt and its continuations, full precision's first."""

    prompt: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True)
class Table:
    """Runs of one protocol: full precision first, then methods by name and bits.

    `words`: what departs from the presets of task, model and text, which the title has too; `about`: the protocol in a
    line, for a figure; `protocol` and `settings`: every setting, as lines and as (name, JSON text).
    `texts`: what the runs wrote, where writing was their task.
    """

    slug: str
    title: str
    protocol: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    words: str = ""
    about: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    texts: Texts | None = None

    @property
    def lines(self) -> tuple[Row, ...]:
        """The rows as they are shown: of `task=memory` one for each run and length, shortest length first."""
        if not self.is_of_memory:
            return self.rows
        lengths = [{n for name in row.record.metrics if (n := length_of(name))} for row in self.rows]
        known = [(tokens, row) for row, own in zip(self.rows, lengths, strict=True) for tokens in own]
        without = [row for row, own in zip(self.rows, lengths, strict=True) if not own]
        return (*(replace(row, tokens=n) for n, row in sorted(known, key=lambda pair: pair[0])), *without)

    @property
    def is_of_memory(self) -> bool:
        """Whether the runs of this table measured bytes at several lengths."""
        return bool(self.rows) and self.rows[0].record.task == "memory"


@dataclass(frozen=True)
class Tables:
    """All tables of a store, and the files in it that are not records."""

    tables: tuple[Table, ...]
    broken: tuple[Broken, ...] = ()
