"""The notes below a table: its marks, failed runs, and bit widths at which more bits did not help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from kvq.report.comparisons import Comparisons, Verdicts, widths
from kvq.report.labels import engine_of
from kvq.report.tables.layout import UNQUANTIZED, Row, Table
from kvq.results import Record
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE, SHORT
from kvq.results.presets import cache_dtype, settings_of
from kvq.results.statistics import ALPHA, fewest_to_differ

_MOST_NAMED = 5
_ALWAYS = ("Short: ", "Too short: ", "Tables: ", "[")
_DTYPE_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}

NOTES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""The notes that are more than a line, and of which some have fields."""


def notes_of(rows: Sequence[Row], comparisons: Comparisons, verdicts: Verdicts) -> list[str]:
    """Plain-text notes of a table, each one line; whoever writes them escapes them."""
    return [
        *(_explain_item_marks(rows) if any("items" in row.record.metrics for row in rows) else _explain_marks(rows)),
        *_note_short(rows, comparisons),
        *_note_storage(rows, comparisons),
        *_note_widths(rows, comparisons, verdicts),
        *_note_failures(rows),
    ]


def shortest_notes(table: Table) -> list[str]:
    """What a sweep prints below its table: the marks in one line, too few windows, and why runs failed."""
    marks = {
        "≈ within noise of full precision": any(row.within_noise for row in table.rows),
        "bold: frontier of bits and loss": any(row.best for row in table.rows),
        "† measured by an earlier version": any(row.stale for row in table.rows),
    }
    line = "; ".join(words for words, shown in marks.items() if shown)
    return [*([f"{line}."] if line else []), *(note for note in table.notes if note.startswith(_ALWAYS))]


def _explain_marks(rows: Sequence[Row]) -> Iterator[str]:
    """What ±, ≈, bold and variants mean in a table of losses, where it has them."""
    if any("delta_nll_se" in row.record.metrics and not row.baseline for row in rows):
        yield NOTES["error"]
    if any(row.within_noise for row in rows):
        yield "≈ within noise of full precision."
    if any("within_noise" in row.record.metrics for row in rows):
        yield NOISE_RULE
    if any(row.best for row in rows):
        yield FRONTIER_RULE
    if any(row.best for row in rows) and any(row.variant for row in rows):
        formats = any(engine_of(row.record.method) for row in rows)
        slash = "names with a slash, but for formats of engines," if formats else "names with a slash,"
        yield NOTES["frontier"].format(slash=slash)


def _note_short(rows: Sequence[Row], comparisons: Comparisons) -> Iterator[str]:
    """Rows in which no token left full precision, stale ones, few windows and how large a |t| then has to be."""
    if names := ", ".join(f"{row.name} {row.bits}" for row in rows if row.unquantized):
        yield NOTES["unquantized"].format(unquantized=UNQUANTIZED, names=names)
    if any(row.stale for row in rows):
        yield NOTES["stale"]
    full = {row.record.key: row.record for row in rows if row.baseline}
    pairs = [(row.record, full[key]) for row in rows if (key := row.record.baseline_key or "") in full]
    shown = [losses for pair in pairs for run in pair if (losses := comparisons.losses(run)) is not None]
    if min((len(losses.windows) for losses in shown), default=0) >= SHORT:
        return
    found = comparisons.compare_pairs(pairs)
    if 0 < found.windows < fewest_to_differ():
        least = f"no difference is told from noise with fewer than {fewest_to_differ()}"
        yield f"Too short: {found.windows} windows; {least}."
    elif 0 < found.windows < SHORT:
        needed = f"a difference from full precision is beyond noise from a t of ±{found.critical:.1f} on"
        yield f"Short: {found.windows} windows, fewer than {SHORT}: here {needed}."


def _explain_item_marks(rows: Sequence[Row]) -> Iterator[str]:
    """What ±, p and ≈ mean in a table of scored items, its noise floor, and which rows are not worse by the margin."""
    if any(row.p_value is not None for row in rows):
        yield NOTES["items"]
    if any(row.within_noise for row in rows):
        yield NOTES["items_noise"].format(alpha=ALPHA)
    floors = {row.record.metrics["noise_flips"] for row in rows if "noise_flips" in row.record.metrics}
    for floor in sorted(floors):
        yield NOTES["floor"].format(share=100 * floor)
    kept = [row for row in rows if row.record.metrics.get("not_worse") == 1]
    if kept:
        names = ", ".join(f"{row.name} {row.bits}" for row in kept)
        yield NOTES["not_worse"].format(alpha=ALPHA, names=names)


def _note_storage(rows: Sequence[Row], comparisons: Comparisons) -> Iterator[str]:
    """Standard error, dtypes, residuals (some names where they differ), where tables pay, transformers' own caches."""
    for row in rows:
        error = comparisons.perplexity_error(row.record) if row.baseline and row.record.status == "done" else None
        if error is not None:
            yield NOTES["perplexity"].format(name=row.name, error=error)
    records = [row.record for row in rows if "effective_bits" in row.record.metrics]
    for dtype, stored in sorted({(record.provenance.dtype, cache_dtype(record)) for record in records}):
        size = stored + (f": {_DTYPE_BITS[stored]} bits per element" if stored in _DTYPE_BITS else "")
        what = f"the run's compute dtype ({size})" if stored == dtype else f"{size}, computed in {dtype}"
        yield f"Full-precision rows and residual tokens are stored in {what}; effective bits count them so."
    names: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.record.status == "done" and not row.baseline:
            settings = sorted(settings_of(row.record).items())
            residual = [(name, value) for name, value in settings if name.startswith("residual.")]
            text = ", ".join(f"{name.removeprefix('residual.')}={value}" for name, value in residual)
            names[text].add(row.name)
    for text in sorted(names.keys() - {""}):
        own = sorted(names[text])
        more = f" and {len(own) - _MOST_NAMED} more" if len(own) > _MOST_NAMED else ""
        whose = "" if len(names) == 1 else f" of {', '.join(own[:_MOST_NAMED])}{more}"
        yield f"Residual{whose}: {text}."
    if any(row.pays is not None for row in rows):
        yield NOTES["tables"]
    if decoding := sorted({row.name for row in rows if (row.record.config.get("method") or {}).get("backend")}):
        yield NOTES["decoding"].format(names=", ".join(decoding))


def _note_widths(rows: Sequence[Row], comparisons: Comparisons, verdicts: Verdicts) -> Iterator[str]:
    """For which methods perplexity does not fall from one bit width to the next, and that it does for all others."""
    methods: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        if row.record.status == "done" and not row.baseline and "perplexity" in row.record.metrics:
            methods[row.name].append(row.record)
    falls, exceptions = 0, []
    for name in sorted(methods):
        for fewer, more in widths(methods[name]):
            if verdicts.beats(more, fewer):
                falls += 1
            else:
                exceptions.append(f"{name}: {_describe_step(fewer, more, comparisons, verdicts)}")
    yield from exceptions
    if falls:
        others, every = "all other pairs of bit widths of a method", "every method measured at several bit widths"
        which = others if exceptions else every
        yield f"For {which} perplexity falls beyond noise from each bit width to the next."


def _describe_step(fewer: Record, more: Record, comparisons: Comparisons, verdicts: Verdicts) -> str:
    """Why the step from `fewer` to `more` bits of a method is no fall of perplexity beyond noise, in words."""
    where = f"from {fewer.bits} to {more.bits} bits"
    found = comparisons.delta_nll(more, fewer)
    if found is None:
        return f"whether perplexity falls {where} cannot be told: the samples of the two runs cannot be paired."
    if found.standard_error is None or not verdicts.knows(more):
        return f"whether perplexity falls {where} cannot be told: too few windows."
    verb = "rises beyond noise" if verdicts.beats(fewer, more) else "does not fall beyond noise"
    return f"perplexity {verb} {where}: ΔNLL {found.value:+.4f} ± {found.standard_error:.4f} nats/token."


def _note_failures(rows: Sequence[Row]) -> Iterator[str]:
    """Full-precision runs without a record here that rows are paired with; why each row failed, by its footnote."""
    keys = {row.record.key for row in rows}
    lost = sorted({r.baseline_key for row in rows if (r := row.record).baseline_key and r.baseline_key not in keys})
    for key in lost:
        yield f"The full-precision run {key[:12]} that rows are paired with has no record here."
    for row in rows:
        if row.footnote is not None:
            reason = " ".join((row.record.reason or "no reason recorded").split())
            yield f"[{row.footnote}] {row.name}, {row.bits} bits, {row.record.status}: {reason}"
