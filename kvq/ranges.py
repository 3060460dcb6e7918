"""What a number among the settings may be."""

from __future__ import annotations

from kvq.errors import ConfigError

MAX_SEED = 2**32 - 1


def at_least(setting: str, value: int | float | None, lowest: int | float) -> None:
    """Raise `ConfigError` naming `setting` when `value` lies below `lowest`; None is no value."""
    if value is not None and value < lowest:
        raise ConfigError(f"{setting}={value}: at least {lowest}")


def check_seed(setting: str, value: int) -> None:
    """Raise `ConfigError` naming `setting` when `value` is no seed."""
    if not 0 <= value <= MAX_SEED:
        raise ConfigError(f"{setting}={value}: 0 to {MAX_SEED}")


def not_empty(setting: str, value: str | None) -> None:
    """Raise `ConfigError` naming `setting` when `value` is an empty text, such as that of an unset variable."""
    if value is not None and not value.strip():
        raise ConfigError(f"{setting}={value}: empty")
