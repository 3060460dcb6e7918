"""Calibrations on disk: a safetensors file named by a hash of its inputs, and a second file with its cost."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

import kvq.codecs
from kvq.calibration.bind import Calibration
from kvq.calibration.text import fingerprint_of
from kvq.config.identity import canonical
from kvq.errors import DataError, RecordError
from kvq.models.inputs import Inputs
from kvq.results.files import write_file
from kvq.results.store import cause
from kvq.results.tensor_files import dump, read_tensors
from kvq.results.versions import code_hash, versions_of_parts

FOLDER = "calibration"
_NOT_FITTED = ("sink_tokens", "kept_keys", "sink_detection")
_FORMAT = "kvq-calibration-2"


def name_of(decides: Mapping[str, Any]) -> str:
    """The name of a calibration: a hash (64 hex digits) of all its inputs, given as JSON data."""
    text = json.dumps(dict(decides), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{_FORMAT}{text}".encode()).hexdigest()


def path_of(results: Path, name: str) -> Path:
    """Path of the calibration of this name in a results folder."""
    return results / FOLDER / f"{name}.safetensors"


def file_of(inputs: Inputs) -> Path:
    """Path of a run's calibration, whether or not the file exists.

    The name includes a hash of the fitting code, so tables of an earlier version of the code are never read.
    """
    whole = canonical(inputs.config, inputs.model_fingerprint, "", fingerprint_of(inputs))
    method = {name: item for name, item in whole["method"].items() if name not in _NOT_FITTED}
    # Sinks and kept keys do not change the tables, so methods with equal codecs share them.
    outside = {
        name: version for name, version in versions_of_parts(whole["method"]).items() if isinstance(version, str)
    }
    model = {name: item for name, item in whole["model"].items() if name != "cache_dtype"}
    decides = {"model": model, "method": method, "code": _fitting_code(), "outside": outside}
    return path_of(Path(inputs.config.results_dir), name_of(decides))


@functools.cache
def _fitting_code() -> str:
    folders = (Path(__file__).parent, Path(kvq.codecs.__path__[0]))
    return code_hash(*(file for folder in folders for file in folder.rglob("*.py")))


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of a calibration, so that one process makes it; the system frees the lock when its holder dies.

    Raises:
        RecordError: a folder that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent / ".locks"
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / f"{path.stem}.lock")
        lock.acquire()
    except OSError as error:
        raise RecordError(f"results_dir: cannot write under '{path.parent}': {cause(error)}") from error
    try:
        yield
    finally:
        lock.release()


def write(path: Path, calibration: Calibration) -> None:
    """Write the tables atomically, and their cost as `<name>.json` in the same folder.

    Raises:
        RecordError: a folder that cannot be written.
    """
    about = {
        "format": _FORMAT,
        "method": calibration.method,
        "model": calibration.model,
        "heads": list(calibration.heads),
        "head_dims": list(calibration.head_dims),
    }
    content = dump(calibration.tensors, about)
    cost = {
        "seconds": calibration.seconds,
        "peak_memory_bytes": calibration.peak_bytes,
        "table_bytes": calibration.nbytes,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    try:
        write_file(path.with_suffix(".json"), (json.dumps(about | cost, sort_keys=True, indent=1) + "\n").encode())
        write_file(path, content)
    except OSError as error:
        raise RecordError(f"results_dir: cannot write under '{path.parent}': {cause(error)}") from error


def read(path: str | Path) -> Calibration:
    """The calibration in a file.

    Raises:
        DataError: no file, or one that is not a calibration.
    """
    path = Path(path)
    about, tensors = read_tensors(path, "calibration", _FORMAT)
    try:
        described = (about["method"], about["model"], about["heads"], about["head_dims"])
    except KeyError as error:
        raise DataError(f"calibration {path}: cannot be read (KeyError: {error})") from error
    return Calibration(tensors, *described, **_cost(path))


def _cost(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return {"seconds": found["seconds"], "peak_bytes": found["peak_memory_bytes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
