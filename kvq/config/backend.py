"""Methods that another library computes: the backends of transformers' own quantized cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from kvq.errors import ConfigError, at_least, did_you_mean

BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
"""Widths that each backend packs."""
MODE = "decode"
"""A flush quantizes the decoded past again, so codes depend on the number of flushes."""


@dataclass(frozen=True)
class BackendConfig:
    """A backend by name, its bits per code, and how many elements share a scale and a zero point."""

    version: ClassVar[int] = 1

    name: str
    bits: int
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.name not in BITS:
            raise ConfigError(
                f"method.backend.name={self.name}: one of {', '.join(BITS)}.{did_you_mean(self.name, BITS)}"
            )
        at_least("method.backend.group_size", self.group_size, 2)


def backend_of(given: Any) -> BackendConfig | None:
    """`method.backend` as a mapping, checked; None: the method has codecs.

    Raises:
        ConfigError: another backend than there are, or a setting that is unknown, missing or out of range.
    """
    if given is None or isinstance(given, BackendConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"method.backend={given}: null, or a mapping of name, bits and group_size")
    known = [entry.name for entry in fields(BackendConfig)]
    for setting in given:
        if setting not in known:
            hint = did_you_mean(str(setting), known)
            raise ConfigError(f"method.backend.{setting}: unknown setting; there are {', '.join(known)}.{hint}")
    try:
        return TypeAdapter(BackendConfig).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"method.backend.{first['loc'][0]}={first['input']}: {first['msg']}") from error
