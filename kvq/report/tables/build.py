"""Tables of runs: records grouped by protocol, their rows and notes; no model and no codec is loaded."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import RecordError, printable
from kvq.report import comparisons as compare
from kvq.report.labels import by_bits, is_variant, keeps_first, label, model_name
from kvq.report.labels import protocol as protocol_of
from kvq.report.tables.layout import LISTED, Continuation, Row, Table, Tables, Texts
from kvq.report.tables.notes import notes_of
from kvq.results import Broken, Record, Store, is_stale, run_key
from kvq.results.metrics import break_even
from kvq.results.presets import cache_dtype, departures_of, flatten, in_words, label_with, protocol_parts, settings_of
from kvq.results.statistics import holm

if TYPE_CHECKING:
    import pandas as pd

# Characters that are shown of a fingerprint, and of names in a file's name, which 255 bytes limit.
_HASH, _SLUG = 40, 150
_WEIGHTS = {"model.fingerprint": "weights", "dataset.fingerprint": "text"}
FRAME_METRICS: list[str] = LISTED["frame"]
"""Metrics that have a column; the others are in `kvq.results.Record.metrics`."""
_SETTINGS = ("scoring", "windows", "context", "stride", "max_windows", "lengths")


def build_tables(
    store: Store, *, keys: Collection[str] | None = None, scanned: tuple[list[Record], list[Broken]] | None = None
) -> Tables:
    """Group the records of a store into one table per protocol (task, model, dataset, seed with all their settings).

    `keys`: of the runs that are shown, with full precision's; `scanned`: what `read_records` gave.
    """
    records, broken = scanned or compare.read_records(store, keys)
    if keys is not None:
        wanted = set(keys) | {record.baseline_key for record in records if record.key in keys}
        records = [record for record in records if record.key in wanted]
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[run_key(protocol_parts(record))].append(record)
    asking: dict[str, set[str]] = defaultdict(set)
    for name, group in groups.items():
        for record in group:
            asking[record.baseline_key or ""].add(name)
    # Full precision that lacks settings of its runs (`task.free`) joins their table, if no others need it.
    for name, group in list(groups.items()):
        if len(group) == 1 and len(asked := asking[group[0].key]) == 1 and name not in asked:
            groups[asked.pop()] += groups.pop(name)
    unused: dict[Path, str] = {}
    comparisons = compare.Comparisons(lambda record: compare.samples_of(record, store, unused))
    tables = [_make_table(name, groups[name], comparisons) for name in sorted(groups)]
    reasons = {file.path: file.reason for file in broken} | unused
    files = tuple(Broken(path, reason) for path, reason in reasons.items())
    return Tables(tuple(sorted(distinguish_titles(tables), key=lambda table: table.slug)), files)


def distinguish_titles(tables: Sequence[Table]) -> list[Table]:
    """Give every table a title of its own: to equal titles the settings are added in which their tables differ."""
    groups: dict[str, list[Table]] = defaultdict(list)
    for table in tables:
        groups[table.title].append(table)
    out = []
    for title, group in groups.items():
        settings = [dict(table.settings) for table in group]
        known = sorted({name for own in settings for name in own})
        apart = [name for name in known if len({own.get(name) for own in settings}) > 1]
        for table, own in zip(group, settings, strict=True):
            name = title.removesuffix(f" ({table.words})")
            words = [in_words(_WEIGHTS.get(name, name), own[name][:_HASH]) for name in apart if name in own]
            more = ", ".join(filter(None, [table.words, *words]))
            out.append(replace(table, words=more, title=f"{name} ({more})") if words else table)
    return out


def _make_table(protocol: str, records: Sequence[Record], comparisons: compare.Comparisons) -> Table:
    """The table of all runs of one protocol, whose hash `protocol` is; arguments as what `build_tables` makes them."""
    first = min(records, key=lambda run: (run.task, run.model, run.dataset, run.key))
    rows, verdicts = _make_rows(records, comparisons)
    model = model_name(first.model)
    slug = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", name) or "_" for name in (first.task, model, first.dataset))
    words = ", ".join(departures_of(first).protocol)
    return Table(
        slug=f"{slug[:_SLUG]}-{protocol[:8]}",
        title=f"{first.task}: {model} on {first.dataset}" + (f" ({words})" if words else ""),
        protocol=_list_settings(first, records),
        rows=rows,
        notes=tuple(notes_of(rows, comparisons, verdicts)),
        words=words,
        about=protocol_of(first),
        settings=tuple((name, text) for name, text in flatten(protocol_parts(first)) if text != "null"),
        texts=texts_of(rows, comparisons.samples),
    )


def _make_rows(records: Sequence[Record], comparisons: compare.Comparisons) -> tuple[tuple[Row, ...], compare.Verdicts]:
    """The rows of a table of these runs, and verdicts on all pairs of methods and each name's neighbouring widths."""
    baselines = {record.baseline_key for record in records} | {r.key for r in records if r.method == "fp16"}
    names = _name_rows(records)
    done = [record for record in records if record.status == "done" and record.key not in baselines]
    known = {record.key: record for record in records}
    variants = {record.key for record in done if is_variant(record)}
    corrected = holm({r.key: r.metrics["p_value"] for r in done if "p_value" in r.metrics})
    noisy = {record.key for record in done if compare.is_noise(record, corrected.get(record.key))}
    methods = [record for record in done if record.key not in variants and not is_stale(record)]
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in done:
        by_name[names[record.key]].append(record)
    verdicts = compare.Verdicts(methods, comparisons, (two for own in by_name.values() for two in compare.widths(own)))
    rivals = [record for record in done if record.key not in variants or keeps_first(record)]
    rival_names = [f"{names[one.key]} {one.bits}".strip() for one in rivals]
    found = {record.key: break_even(record.metrics, [one.metrics for one in rivals]) for record in done}
    paying = {key: (own[0], "" if own[1] is None else rival_names[own[1]]) for key, own in found.items() if own}
    best, best_measured = (
        compare.frontier(methods, verdicts, bits) for bits in (compare.effective_bits, compare.measured_bits)
    )

    ordered = sorted(records, key=lambda r: (r.key not in baselines, names[r.key], by_bits(r.bits), r.key))
    failed = [record.key for record in ordered if record.status != "done"]
    footnotes = {key: number for number, key in enumerate(failed, 1)}
    rows = tuple(
        Row(
            record=record,
            name=names[record.key],
            bits=record.bits or (cache_dtype(record) if record.key in baselines else "fixed"),
            baseline=record.key in baselines,
            within_noise=record.key in noisy,
            best=record.key in best,
            best_measured=record.key in best_measured,
            stale=is_stale(record),
            footnote=footnotes.get(record.key),
            p_value=corrected.get(record.key),
            variant=record.key in variants,
            unquantized=record.key not in baselines and is_unquantized(record, known),
            pays=paying.get(record.key),
        )
        for record in ordered
    )
    return rows, verdicts


def is_unquantized(record: Record, known: Mapping[str, Record]) -> bool:
    """Whether no token left full precision: no byte is packed, and effective bits are those of the run's baseline."""
    full, size = known.get(record.baseline_key or ""), compare.effective_bits(record)
    alike = full is not None and size is not None and size == compare.effective_bits(full)
    return alike and record.status == "done" and record.metrics.get("packed_bytes") == 0


def _name_rows(records: Sequence[Record]) -> dict[str, str]:
    """The label of each run by its key; where two runs share label and bits, the settings that differ are added."""
    by_label: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_label[label(record)].append(record)
    names: dict[str, str] = {}
    for name, runs in by_label.items():
        settings = {run.key: settings_of(run) for run in runs} if len({run.bits for run in runs}) < len(runs) else {}
        apart: set[str] = set()
        for bits in {run.bits for run in runs} if settings else ():
            twins = [settings[run.key] for run in runs if run.bits == bits]
            known = {setting for twin in twins for setting in twin}
            apart |= {setting for setting in known if len({twin.get(setting) for twin in twins}) > 1}
        for run in runs:
            own = settings.get(run.key, {})
            words = [in_words(setting, own[setting]) for setting in sorted(apart & own.keys())]
            names[run.key] = label_with(name, words)
    return names


def _list_settings(run: Record, records: Sequence[Record]) -> tuple[str, ...]:
    """The lines above a table of `records`, one of them `run`: settings that are not null, and what was scored."""
    lines = []
    for name, value in protocol_parts(run).items():
        leaves = [f"{leaf}={text}" if leaf else text for leaf, text in sorted(flatten(value)) if text != "null"]
        if leaves:
            lines.append(f"{name}: {', '.join(leaves)}")
    done = [record for record in records if record.status == "done"]
    counts = {(r.metrics.get("windows"), r.metrics.get("scored_tokens")) for r in done}
    if len(counts) == 1 and None not in (found := next(iter(counts))):
        lines.append("scored: {:.0f} windows, {:.0f} tokens".format(*found))
    items = {(r.metrics["items"], r.metrics.get("skipped_items", 0.0)) for r in done if "items" in r.metrics}
    if len(items) == 1:
        lines.append("scored: {:.0f} items, {:.0f} skipped".format(*next(iter(items))))
    return tuple(lines)


def texts_of(rows: Sequence[Row], samples: Callable[[Record], list[dict[str, Any]]]) -> Texts | None:
    """The texts of the runs of a table, from their stored samples; None where they wrote none, or these are gone."""
    found = []
    for row in (row for row in rows if row.record.task == "generate" and row.record.status == "done"):
        with suppress(RecordError):
            first = next(iter(samples(row.record)), {})
            if all(isinstance(first.get(name), str) for name in ("prompt", "text")):
                found.append((row, printable(first["prompt"]), printable(first["text"])))
    if not found:
        return None
    full = next((text for row, _, text in found if row.baseline), None)
    return Texts(found[0][1], tuple(_compare_text(row, text, full) for row, _, text in found))


def _compare_text(row: Row, text: str, full: str | None) -> Continuation:
    """The text of a row's run, split where it leaves that of full precision, `full` (None: there is none)."""
    name = f"{row.name}, {row.bits} bits" if row.record.bits else row.name
    if row.baseline or full is None or text == full:
        return Continuation(name, "the same text as full precision" * (text == full and not row.baseline), text, "", "")
    same, metrics = os.path.commonprefix([text, full]), row.record.metrics  # noqa: RUF071 - of characters, not folders
    rest = text[len(same) :]
    cut = len(rest) - len(re.sub(r"^\s*\S*", "", rest))
    shared = f"{metrics.get('same_tokens', 0):.0f} of {metrics.get('new_tokens', 0):.0f} tokens as full precision"
    return Continuation(name, shared, same, rest[:cut], rest[cut:])


def load_results(folder: str | Path = "results") -> pd.DataFrame:
    """One row for each run on record of a results folder, by table, full precision first.

    At most 60 columns. `label`: the method with what departs from its preset; `method`, `bits`, `task`, `model`,
    `dataset`, `status`, `reason`: as records have them; `protocol`: what departs from the presets of task, model and
    text; `table`: runs with the same one may be compared; `baseline`, `within_noise`, `best`, `stale`, `p_holm`: the
    tables' verdicts; `task.*`: settings; a column for each of `FRAME_METRICS`, in the units of the records; `seconds`,
    `peak_memory_bytes`, `device`, `cpu`, `started`, `key`, `baseline_key`. `RecordError`: a folder without records.
    """
    import pandas as pd

    store = Store(folder)
    names = ("method", "bits", "task", "model", "dataset", "status", "reason")
    lines = [
        {"label": row.name, **{name: getattr(row.record, name) for name in names}}
        | {"protocol": table.words, "table": table.slug}
        | {name: getattr(row, name) for name in ("baseline", "within_noise", "best", "stale")}
        | {"p_holm": row.p_value}
        | {f"task.{name}": row.record.config.get("task", {}).get(name) for name in _SETTINGS}
        | {name: row.record.metrics.get(name) for name in FRAME_METRICS}
        | {"seconds": sum(row.record.provenance.wall_seconds.values())}
        | {name: getattr(row.record.provenance, name) for name in ("peak_memory_bytes", "device", "cpu", "started")}
        | {name: getattr(row.record, name) for name in ("key", "baseline_key")}
        for table in build_tables(store).tables
        for row in table.rows
    ]
    if not lines:
        raise RecordError(f"load_results: no records in {store.runs}")
    return pd.DataFrame(lines)
