"""The registry of metrics: units, and what is refused."""

from __future__ import annotations

import pytest

from kvq.errors import RecordError
from kvq.results.metrics import METRICS, units_of


def test_parts_and_errors_have_the_unit_of_the_whole() -> None:
    units = units_of(["accuracy[length=512]", "delta_accuracy_se", "effective_bits", "cut_items"])
    assert list(units.values()) == ["fraction", "fraction", "bits", "items"]


def test_a_metric_without_an_entry_is_refused_or_has_the_unit_that_is_given() -> None:
    with pytest.raises(RecordError, match=r"^metric 'tries': no unit is known; add it to METRICS"):
        units_of(["accuracy", "tries"])
    assert units_of(["tries", "tries[task=one]", "accuracy"], {"tries": "1", "accuracy": "1"}) == {
        "tries": "1",
        "tries[task=one]": "1",
        "accuracy": METRICS["accuracy"].unit,
    }
