"""Published numbers: `results/reference/paper_results.csv`, one a line, as the papers print them."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvq.errors import RecordError
from kvq.results.store import cause

FILE = "paper_results.csv"
AXES = ("model", "method", "setting", "dataset", "metric")
_COLUMNS = ("paper", "table", "model", "method", "avg_bits", "setting", "dataset", "metric", "value", "note")


class Published(NamedTuple):
    """One number of a paper. `avg_bits` as printed; `note`: what we know of the number that its paper does not say."""

    paper: str
    table: str
    model: str
    method: str
    avg_bits: str
    setting: str
    dataset: str
    metric: str
    value: float
    note: str

    @property
    def is_approximate(self) -> bool:
        """Whether its paper gives it as approximate, which its note begins with."""
        return self.note.startswith("approximate")


def reference_path() -> Path:
    """The file: in a checkout under results/reference, inside the package when installed from a wheel."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "reference" / FILE
    return inside if inside.is_file() else package.parent / "results" / "reference" / FILE


class Reference:
    """The published figures by paper and table."""

    def __init__(self, rows: Sequence[Published]) -> None:
        self.tables: dict[tuple[str, str], list[Published]] = defaultdict(list)
        for row in rows:
            self.tables[row.paper, row.table].append(row)

    def find(self, paper: str, table: str | None, labels: Mapping[str, str]) -> Published | None:
        """The one number with these labels, whatever its labels on other axes; None where the table has none.

        Raises:
            RecordError: several figures have them.
        """
        rows = self.tables.get((paper, table), []) if table else []
        found = [row for row in rows if all(getattr(row, axis) == label for axis, label in labels.items())]
        if len(found) > 1:
            raise RecordError(f"{paper}, {table}: {len(found)} published figures have the labels {dict(labels)}")
        return found[0] if found else None


def read_reference(path: Path | None = None) -> Reference:
    """Every published figure.

    Raises:
        RecordError: the file is missing, lacks a column, or a value is no number; names the line.
    """
    path = path or reference_path()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise RecordError(f"{path.name}: lacks the columns {', '.join(sorted(missing))}")
            rows = [_row(line, reader.line_num, path) for line in reader]
    except OSError as error:
        raise RecordError(f"published figures: cannot read '{path}': {cause(error)}") from error
    return Reference(rows)


def _row(line: Mapping[str, str], number: int, path: Path) -> Published:
    try:
        value = float(line["value"])
    except ValueError:
        raise RecordError(f"{path.name}, line {number}: value {line['value']!r} is no number") from None
    text = {name: line[name] for name in _COLUMNS if name != "value"}
    return Published(value=value, **text)
