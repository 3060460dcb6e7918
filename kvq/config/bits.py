"""The value `bits`: one number for keys and values, or one for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.errors import ConfigError, Unsupported

MIN_BITS, MAX_BITS = 1, 16
_FORMS = f"{MIN_BITS}-{MAX_BITS} such as 3, k3v2 (keys 3, values 2), {{key: 3, value: 2}} or, in Python, (3, 2)"


@dataclass(frozen=True)
class Bits:
    """Bits per code of keys and of values."""

    key: int
    value: int

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
        return [
            Bits(*pair) for pair in zip(self.key or [bits.key] * count, self.value or [bits.value] * count, strict=True)
        ]


def check_range(method: str, limits: Sequence[int], bits: Bits) -> None:
    """Refuse bits outside of the lowest and highest that a method can do.

    Raises:
        Unsupported: such bits.
    """
    lowest, highest = limits
    for side, number in (("keys", bits.key), ("values", bits.value)):
        if not lowest <= number <= highest:
            what = "" if bits.key == bits.value else f" for {side}"
            raise Unsupported(f"bits={bits.label}: {method} does {lowest} to {highest} bits{what}")


def parse_bits(given: Any) -> Bits:
    """Read `2`, `"3"`, `"k3v2"`, `{"key": 3, "value": 2}`, `(3, 2)` or `Bits`.

    Raises:
        ConfigError: any other form, or a number outside 1-16.
    """
    if isinstance(given, Bits):
        return _checked(given.key, given.value, given)
    if isinstance(given, str):
        if match := re.fullmatch(r"k(\d{1,3})v(\d{1,3})", given.strip()):
            return _checked(match[1], match[2], given)
        return _checked(given.strip(), given.strip(), given)
    if isinstance(given, Mapping):
        known = set(given) == {"key", "value"}
        return _checked(given["key"] if known else None, given["value"] if known else None, dict(given))
    if isinstance(given, Sequence) and len(given) == 2:
        return _checked(given[0], given[1], tuple(given))
    return _checked(given, given, given)


def _checked(key: Any, value: Any, given: Any) -> Bits:
    numbers = [_whole(side) for side in (key, value)]
    if any(number is None or not MIN_BITS <= number <= MAX_BITS for number in numbers):
        raise ConfigError(f"bits={'null' if given is None else given}: whole numbers {_FORMS}")
    return Bits(*(number for number in numbers if number is not None))


def _whole(side: Any) -> int | None:
    if isinstance(side, int) and not isinstance(side, bool):
        return side
    if isinstance(side, str) and re.fullmatch(r"[0-9]{1,3}", side):
        return int(side)
    return None
