"""Bits that a run has above the limit of per-token Gaussian coding at equal loss (`task=limit`).

A limit is of all keys and values of a text quantized at once, so it stands beside runs that score so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvq.errors import RecordError
from kvq.results import Record

Curve = tuple[tuple[float, float], ...]
"""(bits per element, loss in nats per token), from few bits to many."""
Limits = Mapping["Place", Curve]


NOTE = (
    "Bits above the limit: measured bits minus those at which per-token Gaussian coding of all heads together would "
    "lose as much (`task=limit`, spectra of this text itself). Second order, so least sure where the loss is large."
)


class Place(NamedTuple):
    """What a limit is of: weights, text and tokens of a window."""

    model: str
    text: str
    context: int


def place_of(record: Record) -> Place:
    """The place of a run or of a limit. Settings of the model that change no weight are left out."""
    model = {name: value for name, value in record.config["model"].items() if not name.endswith("dtype")}
    text = record.provenance.dataset_fingerprint or json.dumps(record.config["dataset"], sort_keys=True)
    return Place(json.dumps(model, sort_keys=True), text, int(record.config["task"]["context"]))


def limits_of(records: Sequence[Record], samples: Callable[[Record], list[dict[str, Any]]]) -> dict[Place, Curve]:
    """The curve of each place with a record of `task=limit` of all heads together; of several, that of most windows.

    A record whose samples cannot be read gives none.
    """
    found: dict[Place, Curve] = {}
    for record in sorted(records, key=lambda one: (one.metrics.get("windows", 0.0), one.key)):
        task = record.config.get("task") or {}
        if record.task != "limit" or record.status != "done" or task.get("heads") != "joint":
            continue
        try:
            rows = [row for row in samples(record) if row.get("kind") == "curve"]
            found[place_of(record)] = tuple(sorted((float(row["bits"]), float(row["loss"])) for row in rows))
        except (RecordError, KeyError, TypeError, ValueError):
            continue
    return found


def limit_beside(record: Record, limits: Limits) -> Curve:
    """The limit that a run is measured against; empty where there is none or the run quantizes token by token."""
    task = record.config.get("task") or {}
    if not limits or record.task != "ppl" or task.get("scoring") != "parallel":
        return ()
    try:
        return limits.get(place_of(record), ())
    except (KeyError, TypeError, ValueError):
        return ()


def bits_above(record: Record, curve: Curve) -> float | None:
    """Measured bits per element minus the bits at which the limit has the run's loss.

    The curve is interpolated in the logarithm of its loss. None where the loss is not above 0, or beyond the curve.
    """
    loss, bits = record.metrics.get("delta_nll"), record.metrics.get("bits_per_element")
    if not curve or loss is None or bits is None:
        return None
    rates, losses = np.array(curve).T
    if not losses[-1] <= loss <= losses[0]:
        return None
    return bits - float(np.interp(-np.log(loss), -np.log(losses), rates))
