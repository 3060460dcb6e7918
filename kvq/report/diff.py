"""`python -m kvq.report.diff A B`: what changed from one results folder to another, beyond noise or not.

Runs are paired by key, then, where code or settings have moved on, by task, model, dataset, label and bits: an ablation
is never paired with its method. Both have scored the same windows or items, so their difference is a paired one; where
samples cannot be paired it says so.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.diff")

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from kvq.errors import RecordError
from kvq.report import command
from kvq.report.labels import label, labelled, model_name, named, protocol_departures
from kvq.report.tables.formats import Sheet, csv_of
from kvq.report.tables.layout import DASH, fixed
from kvq.report.tables.terminal import print_grid
from kvq.results import Record, Store
from kvq.results.noise import Family, differ_p, family
from kvq.results.presets import flatten
from kvq.results.statistics import ALPHA, Losses, delta_nll_of_samples, holm, losses, paired_mean

_MAIN = ("score", "accuracy", "nll")
_SHOWN_SETTINGS = 3
ALONE = ("only in A", "only in B")


class Change(NamedTuple):
    """One run in both folders, or in one. `difference`: B minus A, of `metric`; `p_value`: of items, before Holm;
    `place`: its task and model."""

    name: str
    metric: str
    before: float | None
    after: float | None
    difference: float | None
    error: float | None
    p_value: float | None
    bits: tuple[float | None, float | None]
    verdict: str
    why: str = ""
    place: str = ""


def compare(first: Store, second: Store) -> list[Change]:
    """Every run of two folders, paired where it can be.

    Raises:
        RecordError: a folder cannot be listed.
    """
    ours, theirs = ({record.key: record for record in labelled(store)[0]} for store in (first, second))
    pairs = [(ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    left = [record for key, record in ours.items() if key not in theirs]
    right = [record for key, record in theirs.items() if key not in ours]
    by_name = [_unique(records) for records in (left, right)]
    pairs += [(by_name[0][name], by_name[1][name]) for name in sorted(by_name[0].keys() & by_name[1].keys())]
    paired = {record.key for pair in pairs for record in pair}
    tested = _family(pairs, first, second)
    changes = _corrected([_change(before, after, first, second, tested) for before, after in pairs])
    for records, where in ((left, ALONE[0]), (right, ALONE[1])):
        changes += [_alone(record, where) for record in records if record.key not in paired]
    return sorted(changes, key=lambda change: change.name)


def _family(pairs: Iterable[tuple[Record, Record]], first: Store, second: Store) -> Family:
    """Test the losses of all pairs of the same windows together; results are by the key of the second run."""
    found: dict[str, tuple[Losses, Losses]] = {}
    for before, after in pairs:
        if _metric(after) == "nll":
            with contextlib.suppress(RecordError):
                found[after.key] = losses(second.samples_of(after)), losses(first.samples_of(before))
    return family(found)


def _name(record: Record) -> tuple[str, ...]:
    return record.task, record.model, record.dataset, label(record), record.bits


def _unique(records: Iterable[Record]) -> dict[tuple[str, ...], Record]:
    """Records by name, without names that several have."""
    records = list(records)
    counts = Counter(map(_name, records))
    return {_name(record): record for record in records if counts[_name(record)] == 1}


def _label(record: Record) -> str:
    words = ", ".join(protocol_departures(record))
    where = f"{record.task} {model_name(record.model)} {record.dataset}{f' ({words})' if words else ''}"
    return f"{where}: {named(record)}"


def _metric(record: Record) -> str:
    return next((name for name in _MAIN if name in record.metrics), next(iter(sorted(record.metrics)), ""))


def _alone(record: Record, where: str) -> Change:
    value = record.metrics.get(_metric(record))
    before, after = (value, None) if where.endswith("A") else (None, value)
    place = f"{record.task} {model_name(record.model)}"
    return Change(_label(record), _metric(record), before, after, None, None, None, (None, None), where, place=place)


def _change(before: Record, after: Record, first: Store, second: Store, tested: Family) -> Change:
    metric, why = _metric(after), _moved(before, after)
    values = [record.metrics.get(metric) for record in (before, after)]
    bits = tuple(record.metrics.get("bits_per_element") for record in (before, after))
    known = Change(_label(after), metric, values[0], values[1], None, None, None, (bits[0], bits[1]), "", why)
    if before.status != after.status:
        return known._replace(verdict=f"{before.status}, now {after.status}", why=after.reason or before.reason or why)
    if before.metrics == after.metrics:
        return known._replace(verdict="same")
    if values[0] is None or values[1] is None:
        return known._replace(verdict="cannot be told", why="no metric in both")
    known = known._replace(difference=values[1] - values[0])
    try:
        rows = first.samples_of(before), second.samples_of(after)
        return _loss_verdict(known, *rows, tested.p.get(after.key)) if metric == "nll" else _item_verdict(known, *rows)
    except (RecordError, KeyError, TypeError, ValueError) as error:
        return known._replace(verdict="cannot be told", why=f"no samples to pair: {error}")


Samples = Sequence[Mapping[str, Any]]


def _loss_verdict(change: Change, before: Samples, after: Samples, p_value: float | None) -> Change:
    found = delta_nll_of_samples(after, before)
    verdict = "too few windows" if p_value is None else "within noise" if p_value > ALPHA else "changed"
    return change._replace(difference=found.value, error=found.standard_error, verdict=verdict)


def _item_verdict(change: Change, before: Samples, after: Samples) -> Change:
    scores = [{row["item"]: float(row["score"]) for row in rows if "skipped" not in row} for rows in (before, after)]
    if scores[0].keys() != scores[1].keys():
        raise RecordError("other items were scored")
    theirs, ours = (np.array([scored[item] for item in scores[0]]) for scored in scores)
    found = paired_mean(ours, theirs)
    change = change._replace(difference=found.value, error=found.standard_error)
    p_value = differ_p(ours, theirs)
    if p_value is None:
        return change._replace(verdict="within noise" if np.array_equal(ours, theirs) else "too few items")
    return change._replace(p_value=p_value)


def _corrected(changes: Sequence[Change]) -> list[Change]:
    """Verdicts of items, by p-values corrected for being read together."""
    out = list(changes)
    tested = {place: change.p_value for place, change in enumerate(changes) if change.p_value is not None}
    for place, p_value in holm(tested).items():
        verdict = "within noise" if p_value > ALPHA else "changed"
        out[place] = out[place]._replace(p_value=p_value, verdict=verdict)
    return out


def _moved(before: Record, after: Record) -> str:
    """What differs between two runs of one name: settings, or only the versions of what made them."""
    if before.key == after.key:
        ours, theirs = before.versions, after.versions
        raised = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        return f"other version of {', '.join(raised)}" if raised else ""
    sides = [dict(flatten(record.config)) for record in (before, after)]
    names = sorted(name for name in sides[0].keys() | sides[1].keys() if sides[0].get(name) != sides[1].get(name))
    shown = [f"{name}: {sides[0].get(name, DASH)} to {sides[1].get(name, DASH)}" for name in names[:_SHOWN_SETTINGS]]
    more = f", and {len(names) - _SHOWN_SETTINGS} more" if len(names) > _SHOWN_SETTINGS else ""
    return "; ".join(shown) + more


def grid_of(changes: Sequence[Change], everything: bool = False) -> Sheet:
    """The changes as a table; runs that are the same, within noise or in one folder alone are shown only on demand.

    Otherwise they are counted, those of one folder by task and model.
    """
    quiet = ("same", "within noise")
    rows = []
    for change in changes:
        if not everything and (change.verdict in ALONE or (change.verdict in quiet and not change.why)):
            continue
        number = [DASH if value is None else fixed(value, 4) for value in (change.before, change.after)]
        difference = DASH if change.difference is None else fixed(change.difference, 4, signed=True)
        spread = "" if change.error is None else f" ± {fixed(change.error, 4)}"
        bits = [DASH if value is None else fixed(value, 3) for value in change.bits]
        moved = bits[0] if bits[0] == bits[1] else " to ".join(bits)
        rows.append([change.name, change.metric, *number, difference + spread, moved, change.verdict, change.why])
    counts = Counter(change.verdict for change in changes)
    notes = [", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) + "."]
    for verdict in () if everything else ALONE:
        only = Counter(change.place for change in changes if change.verdict == verdict)
        if only:
            where = ", ".join(f"{place} ({count})" for place, count in sorted(only.items()))
            notes.append(f"{verdict[0].upper()}{verdict[1:]}: {where}; --all names each.")
    notes.append("Differences are B minus A on the same windows or items; p-values of items are corrected (Holm).")
    return Sheet("A to B", ["run", "metric", "A", "B", "B - A", "bits", "verdict", "why"], rows, 1, notes=notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvq.report.diff", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=Path, metavar="A", help="a results folder")
    parser.add_argument("second", type=Path, metavar="B", help="the results folder that is compared with it")
    parser.add_argument("--all", action="store_true", help="show runs that did not change, too")
    parser.add_argument("--csv", type=Path, help="write every run as CSV")
    return command.run(parser.parse_args(arguments), _compare)


def _compare(given: argparse.Namespace) -> int:
    stores = Store(given.first), Store(given.second)
    for store in stores:
        records, broken = labelled(store)
        if not records:
            raise RecordError(f"no records under '{store.runs}'")
        command.say_skipped(broken)
    changes = compare(*stores)
    print_grid(grid_of(changes, given.all), Console())
    if given.csv:
        rows = csv_of([change._asdict() for change in changes])
        command.write_files("--csv", given.csv.parent, {given.csv.name: rows})
    return 0
