"""The value `bits`: one number for keys and values, or one for each; whole ones, unless a method takes any."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.errors import ConfigError, Unsupported

MIN_BITS, MAX_BITS = 1, 16
MIN_REAL = 0.5
"""Least bits of a method that takes any number, a mean over components of different widths."""
_FORMS = f"{MIN_BITS}-{MAX_BITS} such as 3, k3v2 (keys 3, values 2), {{key: 3, value: 2}} or, in Python, (3, 2)"


@dataclass(frozen=True)
class Bits:
    """Bits per code of keys and of values; fractions are means, of methods that take any number."""

    key: float | int
    value: float | int

    @property
    def label(self) -> str:
        """`"3"` when both sides agree, else `"k3v2"`."""
        return str(self.key) if self.key == self.value else f"k{self.key}v{self.value}"


def mean_label(layers: Sequence[Bits]) -> str:
    """The label of layers with bits of their own: means over the layers, such as `"3.25"` or `"k4v2.5"`."""
    key, value = (
        f"{round(sum(bits) / len(bits), 3):g}" for bits in zip(*((b.key, b.value) for b in layers), strict=True)
    )
    return key if key == value else f"k{key}v{value}"


@dataclass
class BitsByLayerConfig:
    """Bits of each layer, keys and values apart, in the place of `bits`; of an empty side, `bits` holds in all layers.

    `at`: the method's settings at the bits that occur, by their labels; `kvq.config.resolve` writes them.

    Raises:
        ConfigError: a number outside 1-16, or sides of different lengths.
    """

    key: list[int] = field(default_factory=list)
    value: list[int] = field(default_factory=list)
    at: Any = None

    def __bool__(self) -> bool:
        return bool(self.key or self.value)

    def __post_init__(self) -> None:
        for side in ("key", "value"):
            given = getattr(self, side)
            if any(not MIN_BITS <= number <= MAX_BITS for number in given):
                raise ConfigError(
                    f"method.bits_by_layer.{side}={given}: a whole number {MIN_BITS}-{MAX_BITS} for each layer"
                )
        if self.key and self.value and len(self.key) != len(self.value):
            raise ConfigError(
                f"method.bits_by_layer: {len(self.key)} layers of keys and {len(self.value)} of values; as many of both"
            )

    def layers(self, bits: Bits) -> list[Bits]:
        """Bits of each layer; `bits`: of the run, for a side that has none of its own."""
        count = len(self.key or self.value)
        keys: Sequence[float | int] = self.key or [bits.key] * count
        values: Sequence[float | int] = self.value or [bits.value] * count
        return [Bits(*pair) for pair in zip(keys, values, strict=True)]


def check_range(method: str, limits: Sequence[int | float], bits: Bits, real: bool = False) -> None:
    """Refuse bits outside of the lowest and highest that a method can do; `real`: the lowest is at most 0.5.

    Raises:
        Unsupported: such bits.
    """
    lowest, highest = (min(limits[0], MIN_REAL) if real else limits[0]), limits[1]
    for side, number in (("keys", bits.key), ("values", bits.value)):
        if not lowest <= number <= highest:
            what = "" if bits.key == bits.value else f" for {side}"
            raise Unsupported(f"bits={bits.label}: {method} does {lowest} to {highest} bits{what}")


def parse_bits(given: Any, real: bool = False) -> Bits:
    """Read `2`, `"3"`, `"k3v2"`, `{"key": 3, "value": 2}`, `(3, 2)` or `Bits`.

    Args:
        real: fractions too, from 0.5 on: `2.25`, `"k2.5v1.75"`.

    Raises:
        ConfigError: any other form, or a number outside 1-16.
    """
    if isinstance(given, Bits):
        return _checked(given.key, given.value, given, real)
    if isinstance(given, str):
        if match := re.fullmatch(rf"k({_NUMBER})v({_NUMBER})", given.strip()):
            return _checked(match[1], match[2], given, real)
        return _checked(given.strip(), given.strip(), given, real)
    if isinstance(given, Mapping):
        known = set(given) == {"key", "value"}
        return _checked(given["key"] if known else None, given["value"] if known else None, dict(given), real)
    if isinstance(given, Sequence) and len(given) == 2:
        return _checked(given[0], given[1], tuple(given), real)
    return _checked(given, given, given, real)


_NUMBER = r"\d{1,3}(?:\.\d{1,6})?"


def _checked(key: Any, value: Any, given: Any, real: bool) -> Bits:
    numbers = [_number(side, real) for side in (key, value)]
    lowest = MIN_REAL if real else MIN_BITS
    if any(number is None or not lowest <= number <= MAX_BITS for number in numbers):
        allowed = f"whole numbers {_FORMS}{f'; fractions from {lowest} where a method takes them' if real else ''}"
        raise ConfigError(f"bits={'null' if given is None else given}: {allowed}")
    return Bits(*(number for number in numbers if number is not None))


def _number(side: Any, real: bool) -> float | int | None:
    """A whole number as an int, and where `real`, any other as a float; None: no such number."""
    if isinstance(side, str) and re.fullmatch(_NUMBER if real else "[0-9]{1,3}", side):
        side = float(side)
    elif isinstance(side, bool) or not isinstance(side, int | (float if real else int)):
        return None
    return int(side) if side == int(side) else float(side)
