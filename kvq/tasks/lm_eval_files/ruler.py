"""What lm-eval's task file `ruler_file` calls: items of RULER from a file, and their score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from kvq.data.rows import read_json_records
from kvq.errors import DataError, reason_of


def items(path: str, **_: Any) -> dict[str, Dataset]:
    """The items of a jsonl file of RULER's scripts (`input`, `outputs`), as lm-eval wants data sets: by split."""
    rows: list[dict[str, Any]] = []
    try:
        for row in read_json_records(Path(path)):
            item = {"input": str(row["input"]), "outputs": [str(answer) for answer in row["outputs"]]}
            rows.append(item)
    except (OSError, ValueError) as error:
        raise DataError(f"dataset.path={path}: {reason_of(error)}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"dataset.path={path}: row {len(rows) + 1} is no item of RULER (input, outputs)") from error
    if not rows:
        raise DataError(f"dataset.path={path}: no items")
    return {"test": Dataset.from_list(rows)}


def found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Share of the answers that an output contains, in any case (RULER, arXiv 2404.06654, `string_match_all`)."""
    said = results[0].lower()
    return {"string_match_all": sum(answer.lower() in said for answer in doc["outputs"]) / len(doc["outputs"])}
