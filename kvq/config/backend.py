"""Methods whose arithmetic is another library's: the backends of transformers' own quantized cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from kvq.config.bits import Bits
from kvq.config.residual import Policy, PrefillBlock, Residual
from kvq.errors import ConfigError, Unsupported, at_least, did_you_mean

BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
"""Widths that each backend packs."""
MODE = "decode"
"""A flush quantizes anew all that was decoded, so codes depend on how often there was one."""


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


def installed(backend: str) -> bool:
    """Whether transformers finds the backend's package."""
    from transformers.utils import is_hqq_available, is_optimum_quanto_available  # seconds, which --help need not wait

    return bool({"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}[backend]())


def check_backend(method: str, backend: BackendConfig, bits: Bits, residual: Residual) -> None:
    """Refuse what the backend cannot do.

    Raises:
        Unsupported: a package that is not installed, bits it does not pack, another residual than transformers has.
    """
    known = BITS[backend.name]
    if bits.key != bits.value:
        raise Unsupported(f"bits={bits.label}: {method} has one number of bits for keys and values")
    if bits.key not in known:
        raise Unsupported(f"bits={bits.label}: {method} does {', '.join(map(str, known[:-1]))} or {known[-1]} bits")
    side = residual.key
    if residual.value != side or side.policy is not Policy.block or side.prefill_block is not PrefillBlock.whole:
        raise Unsupported(
            f"residual: {method} has that of transformers' cache, policy=block and prefill_block=whole, with one size "
            "for keys and values"
        )
    if not installed(backend.name):
        raise Unsupported(f"method={method}: needs a package that is not installed; pip install -e '.[{backend.name}]'")
