"""The value `bits`: one number for keys and values, or one for each; whole ones, unless a method takes any."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvq.errors import ConfigError, Unsupported

MIN_BITS, MAX_BITS = 1, 16
MIN_REAL = 0.5
"""Least bits of a method that takes any number, a mean over components of different widths."""
Widths = int | list[int]
"""Bits of a layer's keys or values: one number, or one for each KV head."""
WHOLE = 16
"""Among the bits of a layer's heads: that head stays in full precision."""
_NUMBER = r"\d{1,3}(?:\.\d{1,17})?"


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
    sides = [layer.key for layer in layers], [layer.value for layer in layers]
    key, value = (f"{round(sum(bits) / len(bits), 3):g}" for bits in sides)
    return key if key == value else f"k{key}v{value}"


@dataclass
class BitsByLayerConfig:
    """Bits of each layer, keys and values apart, in the place of `bits`; of an empty side, `bits` holds in all layers.

    A layer may have a list, a number for each KV head, of which 16 keeps the head in full precision: `[2, [2, 3, 16]]`.
    `at`: the method's settings at the bits that occur, by their labels; `kvq.config.resolve` writes them.
    """

    key: list[Any] = field(default_factory=list)
    value: list[Any] = field(default_factory=list)
    at: Any = None

    def __bool__(self) -> bool:
        return bool(self.key or self.value)

    def __post_init__(self) -> None:
        self.key, self.value = (self._checked(side, getattr(self, side)) for side in ("key", "value"))
        if self.key and self.value and len(self.key) != len(self.value):
            raise ConfigError(
                f"method.bits_by_layer: {len(self.key)} layers of keys and {len(self.value)} of values; as many of both"
            )

    @staticmethod
    def _checked(side: str, given: list[Any]) -> list[Widths]:
        """The numbers of a side; heads that all have the same are one number."""
        found: list[Widths] = []
        for own in given:
            widths = list(own) if isinstance(own, Sequence) and not isinstance(own, str) else [own]
            if not widths or not all(type(width) is int and MIN_BITS <= width <= MAX_BITS for width in widths):
                told = f"a whole number {MIN_BITS}-{MAX_BITS} for each layer, or a list of one for each KV head"
                raise ConfigError(f"method.bits_by_layer.{side}={given}: {told}")
            if len(widths) > 1 and set(widths) == {WHOLE}:
                raise ConfigError(f"method.bits_by_layer.{side}={given}: full_precision_layers for a whole layer")
            found.append(widths[0] if len(set(widths)) == 1 else widths)
        return found

    def widths(self, bits: Bits) -> list[tuple[Any, Any]]:
        """Bits of each layer's keys and values, `Widths`; `bits`: of the run, for a side that has none of its own."""
        count = len(self.key or self.value)
        return list(zip(self.key or [bits.key] * count, self.value or [bits.value] * count, strict=True))

    def layers(self, bits: Bits) -> list[Bits]:
        """Bits of each layer, means where its heads have bits of their own."""
        return [Bits(*map(mean_width, pair)) for pair in self.widths(bits)]

    def distinct_bits(self, bits: Bits) -> list[Bits]:
        """Every different pair of bits at which the method has to be composed for some layer or head."""
        asked = (at for pair in self.widths(bits) for side in bits_per_head(*pair) for at in side if at is not None)
        return list({at.label: at for at in asked}.values())


def bits_per_head(key: Widths, value: Widths) -> tuple[list[Bits | None], list[Bits | None]]:
    """Bits at which to compose the method for each KV head of a layer: a list for keys and one for values.

    None: the head stays in full precision. A side whose heads share one width has a list of one.
    """
    first = Bits(first_width(key), first_width(value))

    def at(side: str, widths: Any) -> list[Bits | None]:
        """The list of one side: its own width per head, and the first width of the other side."""
        if not isinstance(widths, list):
            return [first]
        return [None if width == WHOLE else replace(first, **{side: width}) for width in widths]

    return at("key", key), at("value", value)


def first_width(widths: Any) -> Any:
    """The bits of a layer; where its heads have their own, of the first that is quantized."""
    return next(own for own in widths if own != WHOLE) if isinstance(widths, Sequence) else widths


def mean_width(widths: Any) -> float | int:
    """Mean bits of a layer."""
    return sum(widths) / len(widths) if isinstance(widths, list) else widths


def check_range(method: str, limits: Sequence[int | float], bits: Bits, real: bool = False) -> None:
    """Refuse bits outside of the lowest and highest that a method can do; `real`: the lowest is at most 0.5."""
    lowest, highest = (min(limits[0], MIN_REAL) if real else limits[0]), limits[1]
    for side, number in (("keys", bits.key), ("values", bits.value)):
        if not lowest <= number <= highest:
            what = "" if bits.key == bits.value else f" for {side}"
            raise Unsupported(f"bits={bits.label}: {method} does {lowest} to {highest} bits{what}")


def parse_bits(given: Any, real: bool = False) -> Bits:
    """Read `2`, `"3"`, `"k3v2"`, `{"key": 3, "value": 2}`, `(3, 2)` or `Bits`.

    Args:
        real: fractions too, from 0.5 on: `2.25`, `"k2.5v1.75"`.
    """
    sides: tuple[Any, ...] = (given, given)
    if isinstance(given, Bits):
        sides = given.key, given.value
    elif isinstance(given, Mapping):
        sides = (given["key"], given["value"]) if set(given) == {"key", "value"} else (None,)
    elif isinstance(given, str):
        match = re.fullmatch(rf"k({_NUMBER})v({_NUMBER})", given.strip())
        sides = match.groups() if match else (given.strip(),) * 2
    elif isinstance(given, Sequence) and len(given) == 2:
        sides = tuple(given)
    numbers = [number for side in sides if (number := _parse_side(side, real)) is not None]
    if len(numbers) < 2 or not all((MIN_REAL if real else MIN_BITS) <= number <= MAX_BITS for number in numbers):
        shown = "null" if given is None else given
        raise ConfigError(
            f"bits={shown}: whole numbers {MIN_BITS}-{MAX_BITS} such as 3, k3v2 (keys 3, values 2), "
            f"{{key: 3, value: 2}} or, in Python, (3, 2); fractions from {MIN_REAL} where a method takes them"
        )
    return Bits(*numbers)


def _parse_side(side: Any, real: bool) -> float | int | None:
    """The bits of a side from a number or text: a whole one as int, others as float where `real`; None: none."""
    if isinstance(side, str) and re.fullmatch(_NUMBER if real else "[0-9]{1,3}", side):
        side = float(side)
    elif isinstance(side, bool) or not isinstance(side, int | (float if real else int)):
        return None
    if isinstance(side, float) and not math.isfinite(side):
        return None
    return int(side) if side == int(side) else float(side)
