"""Bits above the limit: which limit stands beside which run, and what is read off its curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.report.comparisons import Conditions, Limit, bits_above, conditions_of, limit_of, limits_of
from kvq.results import Record, Store

ROOT = Path(__file__).parents[3]
CURVE = tuple((bits / 4, 0.5 * 4.0 ** (-bits / 4)) for bits in range(1, 33))


@pytest.fixture(scope="module")
def found() -> tuple[Store, dict[str, Record]]:
    store = Store(ROOT / "results")
    return store, {record.key: record for record in store.scan()[0]}


def _run(known: dict[str, Record], **wanted: Any) -> Record:
    return next(
        r
        for r in known.values()
        if r.task == "ppl" and all(str(getattr(r, n, r.config["task"].get(n))) == v for n, v in wanted.items())
    )


def _with(record: Record, **metrics: float) -> Record:
    return record.model_copy(update={"metrics": record.metrics | metrics})


def test_bits_are_read_where_the_limit_has_the_runs_loss(found: tuple[Store, dict[str, Record]]) -> None:
    run = _run(found[1], model="tiny_hard", method="kivi", scoring="parallel")
    for bits in (0.5, 1.3, 2.25, 5.9):
        at = _with(run, delta_nll=float(0.5 * 4.0**-bits), bits_per_element=3.0)
        assert bits_above(at, CURVE) == pytest.approx(3.0 - bits, abs=1e-9)


@pytest.mark.parametrize("loss", [0.0, -0.1, 1.0, 1e-9])
def test_a_loss_off_the_curve_has_none(loss: float, found: tuple[Store, dict[str, Record]]) -> None:
    run = _run(found[1], model="tiny_hard", method="kivi", scoring="parallel")
    assert bits_above(_with(run, delta_nll=loss), CURVE) is None
    assert bits_above(run, ()) is None


def test_a_limit_is_that_of_the_runs_weights_text_and_context(found: tuple[Store, dict[str, Record]]) -> None:
    store, known = found
    limits = limits_of(list(known.values()), store.samples_of)
    assert len(limits) >= 5
    real = _run(known, model="smollm2_135m", method="kivi", scoring="parallel")
    limit = limit_of(real, limits)
    assert limit is not None
    curve = limit.curve
    rates, losses = np.array(curve).T
    assert rates[0] == 0.25
    assert rates[-1] == 8
    assert (np.diff(losses) < 0).all()
    joint = next(
        r
        for r in known.values()
        if r.task == "limit" and r.model == "smollm2_135m" and r.config["task"]["heads"] == "joint"
    )
    assert losses[list(rates).index(2.25)] == pytest.approx(joint.metrics["limit_loss_2.25"])
    assert limit_of(_run(known, model="smollm2_135m", method="kivi", scoring="generation"), limits) is None
    place = conditions_of(real)
    for other in (place._replace(context=5), place._replace(text=""), place._replace(model="")):
        assert limit_of(real, {other: limit}) is None
    assert limit_of(real, {Conditions(*place): Limit(curve, "")}) == (curve, "")


def test_a_limit_without_samples_is_left_out(found: tuple[Store, dict[str, Record]]) -> None:
    known = found[1]

    def rows(record: Record) -> list[dict[str, Any]]:
        return [{"kind": "curve", "bits": "many"}]

    assert limits_of(list(known.values()), rows) == {}
