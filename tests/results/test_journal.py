"""What a run has scored survives a kill, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.errors import RecordError
from kvq.results.files import Journal

ROWS = [{"item": f"item {index}", "sample": {"score": index / 3}, "cost": {}} for index in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "partial" / "key.jsonl"


def test_rows_are_found_again(path: Path) -> None:
    first = Journal(path, "code")
    assert not path.exists()
    first.add(ROWS[:2])
    first.add(ROWS[2:4])
    again = Journal(path, "code")
    assert list(again.rows.values()) == ROWS[:4]
    again.add(ROWS[4:])
    assert list(Journal(path, "code").rows.values()) == ROWS
    again.discard()
    assert not path.exists()
    assert again.rows == {}
    again.add(ROWS[:1])
    assert list(Journal(path, "code").rows.values()) == ROWS[:1]


def test_rows_of_other_code_are_not_taken(path: Path) -> None:
    Journal(path, "old").add(ROWS[:3])
    new = Journal(path, "new")
    assert new.rows == {}
    new.add(ROWS[3:])
    assert list(Journal(path, "new").rows.values()) == ROWS[3:]
    assert Journal(path, "old").rows == {}


def test_any_torn_end_is_dropped_and_written_over(path: Path) -> None:
    Journal(path, "code").add(ROWS[:3])
    content = path.read_bytes()
    whole = [content.index(b"\n") + 1]
    while whole[-1] < len(content):
        whole.append(content.index(b"\n", whole[-1]) + 1)
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        torn = Journal(path, "code")
        left = max(0, sum(end <= cut for end in whole) - 1)
        assert list(torn.rows.values()) == ROWS[:left], cut
        torn.add(ROWS[left:])
        assert list(Journal(path, "code").rows.values()) == ROWS


def test_without_a_path_it_is_memory(tmp_path: Path) -> None:
    journal = Journal()
    journal.add(ROWS)
    assert list(journal.rows.values()) == ROWS
    journal.discard()
    assert journal.rows == {}
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_one_line(tmp_path: Path, path: Path) -> None:
    (tmp_path / "partial").write_text("a file")
    with pytest.raises(RecordError, match="cannot write"):
        Journal(path, "code").add(ROWS)
    with pytest.raises(RecordError, match="cannot write"):
        Journal(tmp_path / "other.jsonl", "code").add([{"item": "a", "sample": {"score": float("nan")}}])
