"""What lm-eval's task file `ruler_file` calls: items of RULER from a file, and their score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from kvq.data.rows import objects
from kvq.errors import DataError


def items(path: str, **_: Any) -> dict[str, Dataset]:
    """The items of a file of RULER's scripts, as lm-eval wants data sets: by split.

    Args:
        path: jsonl, in each line `input` (the prompt with its question) and `outputs` (the answers).
    """
    rows: list[dict[str, Any]] = []
    try:
        for row in objects(Path(path), "input and outputs"):
            rows.append({"input": str(row["input"]), "outputs": [str(answer) for answer in row["outputs"]]})  # noqa: PERF401 - rows counts them
    except (KeyError, TypeError) as error:
        raise DataError(f"dataset.path={path}: row {len(rows) + 1} is no item of RULER (input, outputs)") from error
    return {"test": Dataset.from_list(rows)}


def found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share (0 to 1) of the answers that an output contains, in any case.

    Source: RULER (arXiv 2404.06654), `string_match_all` of its released scripts.
    """
    said = results[0].lower()
    return {"string_match_all": sum(answer.lower() in said for answer in doc["outputs"]) / len(doc["outputs"])}
