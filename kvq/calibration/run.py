"""What a run of a calibrated method adds: its calibration text in the key, the step before measuring, its metrics."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import kvq.calibration
import kvq.codecs
from kvq.calibration import files
from kvq.calibration.bind import Calibration
from kvq.calibration.fit import calibrated
from kvq.calibration.text import CalibrationText, calibration_text, check_apart, dataset_of
from kvq.config.identity import canonical
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import Method
from kvq.methods.kept import bind_kept_keys
from kvq.models.inputs import Inputs
from kvq.results.metrics import units_of
from kvq.results.source import code_hash
from kvq.results.versions import versions_of_parts
from kvq.tasks.measurement import Measurement


def text_of(inputs: Inputs) -> CalibrationText | None:
    """The text that the run's method is calibrated on; None: it names none, or the task reads no model.

    Raises:
        ConfigError: the text under test, or a data set that cannot be calibrated on.
        DataError: too little text.
    """
    settings = inputs.config.method.calibration
    if settings.dataset is None or not inputs.reads_weights:
        return None
    check_apart(dataset_of(settings), inputs.config.dataset)
    name = repr((settings, inputs.config.model, inputs.model_fingerprint))
    return inputs.shared("calibration text", name, lambda: calibration_text(settings, inputs.tokenizer))


def fingerprint_of(inputs: Inputs) -> str | None:
    """What names that text."""
    text = text_of(inputs)
    return None if text is None else text.fingerprint


def check(inputs: Inputs, method: Method) -> None:
    """Raise what stands in the way of calibrating, and of sinks, without reading weights.

    Raises:
        ConfigError: no text to calibrate on, or windows longer than the model takes.
        Unsupported: a task that reads no weights.
    """
    if method.sink_tokens and not inputs.reads_weights:
        raise Unsupported(f"method.sink_tokens={method.sink_tokens}: task={inputs.config.task.name} counts no sinks")
    if method.kept_keys is not None:
        bind_kept_keys(method, inputs.tokenizer)  # complains of a text that is not one token
    if not method.is_calibrated:
        return
    settings, longest = inputs.config.method.calibration, inputs.longest_context
    if not inputs.reads_weights:
        raise Unsupported(
            f"task={inputs.config.task.name}: reads no model, on which method={method.name} is calibrated"
        )
    dataset_of(settings)
    if longest is not None and settings.length > longest:
        name = inputs.config.model.name
        raise ConfigError(f"method.calibration.length={settings.length}: model={name} takes at most {longest} tokens")


def file_of(inputs: Inputs) -> Path:
    """Where the run's calibration lies, made or not. Its name follows the code that fits, not versions alone.

    So whoever works on a fit never reads tables of the code before.
    """
    text = text_of(inputs)
    whole = canonical(inputs.config, inputs.model_fingerprint, "", None if text is None else text.fingerprint)
    method = {name: item for name, item in whole["method"].items() if name not in ("sink_tokens", "kept_keys")}
    # What keeps tokens apart in a cache decides no tables, so the same codecs share theirs.
    outside = {
        name: version for name, version in versions_of_parts(whole["method"]).items() if isinstance(version, str)
    }
    decides = {"model": whole["model"], "method": method, "code": _fitting_code(), "outside": outside}
    return files.path_of(Path(inputs.config.results_dir), files.name_of(decides))


@functools.cache
def _fitting_code() -> str:
    return code_hash(
        *(file for package in (kvq.calibration, kvq.codecs) for file in Path(package.__path__[0]).rglob("*.py"))
    )


def bound(inputs: Inputs, method: Method) -> tuple[Method, Calibration]:
    """The run's method with its tables, fitted now unless a file has them."""
    text = text_of(inputs)
    assert text is not None
    return calibrated(method, inputs.model, text.windows, inputs.config.method.calibration, file_of(inputs))


def with_metrics(result: Measurement, calibration: Calibration | None) -> Measurement:
    """What was measured, and the tables and cost of a calibration: apart from the bits stored per token.

    `calibration_bits`: bytes of the tables over the elements of one sequence of the measured length.
    """
    if calibration is None:
        return result
    measured = result.metrics
    found: dict[str, float | None] = {
        "calibration_bytes": calibration.nbytes,
        "calibration_bits": None,
        "calibration_seconds": calibration.seconds,
        "calibration_peak_bytes": calibration.peak_bytes,
    }
    if measured.get("total_bytes") and measured.get("effective_bits"):
        found["calibration_bits"] = calibration.nbytes * measured["effective_bits"] / measured["total_bytes"]
    extra = {name: float(value) for name, value in found.items() if value is not None}
    return replace(result, metrics=measured | extra, units=result.units | units_of(extra))
