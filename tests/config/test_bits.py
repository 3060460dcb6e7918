"""The value `bits` in all its forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.config.bits import Bits, parse_bits
from kvq.errors import ConfigError

NUMBERS = st.integers(1, 16)


@given(NUMBERS)
def test_one_number_is_for_both_sides(number):
    forms = (number, str(number), {"key": number, "value": number}, (number, number), [number, str(number)])
    assert {parse_bits(form) for form in forms} == {Bits(number, number)}
    assert parse_bits(number).label == str(number)


@given(NUMBERS, NUMBERS)
def test_two_numbers(key, value):
    expected = Bits(key, value)
    for form in (f"k{key}v{value}", {"key": key, "value": value}, (key, value), expected):
        assert parse_bits(form) == expected


@given(NUMBERS, NUMBERS)
def test_a_label_reads_back(key, value):
    assert parse_bits(Bits(key, value).label) == Bits(key, value)


BAD = [0, 17, -1, 2.0, True, None, "", "banana", "k3", "k3v", "k0v2", "v2k3", "²", "3.5", (1, 2, 3), (3,), {}]
BAD += [float("nan"), float("inf"), -float("inf"), -1e400, 10**400, "nan", "inf", "1e400", "two"]
BAD += [
    {"key": 3},
    {"key": 3, "values": 2},
    {"key": 3, "value": 99},
    ("3", None),
    [[3], 2],
    {"key": 3, "value": 2, "x": 1},
]


@pytest.mark.parametrize("given", BAD, ids=repr)
def test_anything_else_is_refused_in_one_line(given):
    with pytest.raises(ConfigError, match=r"^bits=.*k3v2.*fractions from 0.5 where a method takes them") as caught:
        parse_bits(given, real=given != 2.0 and given != "3.5")
    assert "\n" not in str(caught.value)


@given(st.text(max_size=6))
def test_text_is_read_or_refused(text):
    try:
        bits = parse_bits(text)
    except ConfigError:
        return
    assert 1 <= bits.key <= 16
    assert 1 <= bits.value <= 16
