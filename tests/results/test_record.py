"""A record is what was written, and its key is a function of what it measures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvq.errors import RecordError
from kvq.results import canonical, run_key
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.record import dump_record, parse_record
from tests.results import made

finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | finite | st.text()
trees = st.recursive(
    leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(), t, max_size=3), max_leaves=8
)
configs = st.dictionaries(st.text(), trees, max_size=4)


@given(
    settings=configs,
    metrics=st.dictionaries(st.text(), finite, max_size=5),
    reason=st.none() | st.text(),
    status=st.sampled_from(["done", "failed", "unsupported"]),
    moment=st.datetimes(timezones=st.timezones()),
)
def test_round_trip(settings: Any, metrics: Any, reason: Any, status: Any, moment: Any) -> None:
    if not 2 <= moment.year <= 9998:
        return  # in UTC it may lie outside what a date can say
    given = {"settings": settings, "metrics": metrics, "reason": reason, "status": status}
    record = made.record("kivi", **given, provenance=made.provenance(started=moment))
    content = dump_record(record)
    again = parse_record(content)
    assert again == record
    assert dump_record(again) == content
    assert again.provenance.started.utcoffset().total_seconds() == 0
    assert again.key == run_key(again.config)


@given(settings=configs, data=st.data())
def test_key_ignores_order_and_number_spelling(settings: dict[str, Any], data: st.DataObject) -> None:
    def respell(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: respell(value[name]) for name in data.draw(st.permutations(list(value)))}
        if isinstance(value, list):
            return tuple(respell(item) for item in value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            return float(value)
        return value

    assert run_key(respell(settings)) == run_key(settings)
    assert canonical(json.loads(json.dumps(canonical(settings)))) == canonical(settings)


def test_key_tells_values_apart() -> None:
    values = [None, True, 1, 1.5, "1", "", [], {}, [1], {"a": 1}, 2**53 + 1, 1e300, "True"]
    assert len({run_key({"x": value}) for value in values}) == len(values)


def test_key_is_pinned() -> None:
    # A change of spelling would orphan every record on disk.
    text = r'{"a":"\u00e9","b":[1,2.5],"c":null}'
    assert run_key({"b": [1.0, 2.5], "c": None, "a": "é"}) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {"b": [1, math.nan]}}, r"config\.a\.b\[1\] is nan"),
        ({"a": math.inf}, r"config\.a is inf"),
        ({"a": object()}, "type object"),
        ({"a": {1: 2}}, "a key of .1. is not a string"),
    ],
)
def test_key_refuses_what_json_cannot_say(settings: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        run_key(settings)


def test_records_are_frozen_and_closed_and_their_keys_name_their_settings() -> None:
    with pytest.raises(ValidationError, match="does not name this config"):
        made.record("kivi", "2", key="0" * 64)
    record = made.record("kivi", "2")
    with pytest.raises(ValidationError, match="frozen"):
        record.status = "failed"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        made.record("kivi", "2", colour="red")
    with pytest.raises(ValidationError, match="timezone"):
        made.provenance(started="2026-01-02T03:04:05")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"key": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not an object"),
        (b"{}", "schema_version is None; this kvq reads 2"),
        (b'{"schema_version": 1}', "schema_version is 1; this kvq reads 2"),
        (b'{"schema_version": 2, "metrics": {"a": NaN}}', "NaN is not a JSON number"),
        (b'{"schema_version": 2}', r"key: Field required \(and \d+ more\)"),
        (b"[" * 200_000, "recursion"),
    ],
)
def test_foreign_content_is_one_line(content: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        parse_record(content)
    assert "\n" not in str(caught.value)


@given(cut=st.integers(min_value=0), flip=st.integers(0, 255))
def test_damage_is_noticed_or_harmless(cut: int, flip: int) -> None:
    content = dump_record(made.record("kivi", "2", metrics={"nll": 1.25}))
    torn = content[: cut % (len(content) - 2)]
    with pytest.raises(RecordError):
        parse_record(torn)
    place = cut % len(content)
    changed = content[:place] + bytes([flip]) + content[place + 1 :]
    # A flipped byte may spell another number or name; what it may not do is escape as anything but a RecordError.
    with contextlib.suppress(RecordError):
        assert parse_record(changed).key == made.record("kivi", "2").key


def test_parts_and_errors_have_the_unit_of_the_whole() -> None:
    units = units_of(["accuracy[length=512]", "delta_accuracy_se", "effective_bits", "cut_items"])
    assert list(units.values()) == ["fraction", "fraction", "bits", "items"]


def test_a_metric_without_an_entry_is_refused_or_has_the_unit_that_is_given() -> None:
    with pytest.raises(RecordError, match=r"^metric 'tries': no unit is known; add it to METRICS"):
        units_of(["accuracy", "tries"])
    found = units_of(names := ("tries", "tries[task=one]", "accuracy", "accuracy_se"), dict.fromkeys(names, "1"))
    assert found == {"tries": "1", "tries[task=one]": "1", "accuracy": "fraction", "accuracy_se": "fraction"}


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


def test_what_cannot_be_written_is_one_line(tmp_path: Path, path: Path) -> None:
    (tmp_path / "partial").write_text("a file")
    with pytest.raises(RecordError, match="cannot write"):
        Journal(path, "code").add(ROWS)
    with pytest.raises(RecordError, match="cannot write"):
        Journal(tmp_path / "other.jsonl", "code").add([{"item": "a", "sample": {"score": float("nan")}}])
