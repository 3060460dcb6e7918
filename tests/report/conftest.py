"""The committed records, read and judged once for all tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.report.comparisons import read_records
from kvq.results import Broken, Record, Store

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="session")
def committed() -> tuple[list[Record], list[Broken]]:
    return read_records(Store(RESULTS))
