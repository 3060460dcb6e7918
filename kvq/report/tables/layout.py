"""Tables before they are written as Markdown, CSV, LaTeX or on a terminal."""

from __future__ import annotations

from dataclasses import dataclass

from kvq.results import Broken, Record


@dataclass(frozen=True)
class Row:
    """One run. `name` is its label, with the settings in which it differs from other rows of that label.

    `variant`: a preset's variant or a run that departs from its preset, which takes no part in the frontier;
    `unquantized`: every item was shorter than the residual. `p_value` is that of its paired difference to full
    precision, corrected for all rows of the table (Holm).
    """

    record: Record
    name: str
    bits: str
    baseline: bool = False
    within_noise: bool = False
    best: bool = False
    stale: bool = False
    footnote: int | None = None
    p_value: float | None = None
    variant: bool = False
    unquantized: bool = False


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


@dataclass(frozen=True)
class Tables:
    """All tables of a store, and the files in it that are not records."""

    tables: tuple[Table, ...]
    broken: tuple[Broken, ...] = ()
