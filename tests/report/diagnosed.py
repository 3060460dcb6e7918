"""Records of diagnostic tasks on a random model, for tests of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvq import build_method
from kvq.report.figures.drawing import write_drawings
from kvq.report.figures.every import drawings
from kvq.results import Record, Store
from kvq.tasks.measurement import Measurement, task_of
from tests.results import made
from tests.tasks.diagnosed import DiagnosedInputs, journal


def measured(folder: Path, task: Any, method: str, bits: int = 2, path: str = "random") -> Measurement:
    inputs: Any = DiagnosedInputs(task, path=path)
    return task_of(task).measure(inputs, build_method(method, bits, 32), None, journal(folder))


def drawn(store: Store, folder: Path) -> list[Path]:
    """Files of every diagnostic figure that the records of a store allow."""
    return write_drawings(drawings(store.scan()[0], store), folder, [])


def put(store: Store, folder: Path, task: Any, method: str, dataset: str = "pydocs", path: str = "random") -> Record:
    """Measure and store a run; all but full precision say that they have a baseline."""
    found = measured(folder, task, method, path=path)
    full = method == "fp16"
    settings = made.config(method, "" if full else "2", {"name": task.name}, dataset={"name": dataset})
    record = made.record(
        method,
        "" if full else "2",
        settings=settings,
        task=task.name,
        dataset=dataset,
        metrics=found.metrics,
        units=found.units,
        baseline_key=None if full else "b" * 64,
    )
    return store.put(record, found.samples)
