"""docs/models.md has what was measured, and all of it is exact."""

from __future__ import annotations

import json

import pytest

from tests.families import FAMILIES, MORE, family
from tests.models.table import LIMIT, MEASURED, PAGE, SIDES, held, rows

ROWS = json.loads(MEASURED.read_text("utf-8"))["families"]


def test_the_page_has_the_measured_families() -> None:
    assert ROWS
    assert ROWS.keys() <= {*FAMILIES, *MORE}
    assert rows() in PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_exact_and_of_what_the_configuration_says(name: str) -> None:
    row = ROWS[name]
    assert max(row[side] for side in SIDES) < LIMIT < 0.1 < row["quantized"]
    assert row["held"] == held(family(name).text_config)
