"""Where finished runs are sent in addition to their records; nothing here changes a run's numbers or key."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

from kvq.config.limits import Count, Natural, check_limits
from kvq.errors import ConfigError

_MAX_NAME = 128


class WandbMode(enum.StrEnum):
    """`offline`: files under `results_dir/wandb`, which `wandb sync` sends later; `disabled`: nothing is sent."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


_OLD_MODES = {"run": WandbMode.online, "shared": WandbMode.online, "dryrun": WandbMode.offline}


@dataclass
class NoLogger:
    """Records alone."""

    name: str = "none"

    def __post_init__(self) -> None:
        _check_name(self.name, "none")


@dataclass
class WandbLogger:
    """Weights & Biases. `entity`: null = the account's own; `group`: null = one for each sweep's command.
    `mode`: null = that of the environment variable `WANDB_MODE`, else online.

    `samples`: most rows of a run's table of samples; `timeout`: seconds to wait for the server before going on without.
    """

    name: str = "wandb"
    project: str = "kvq"
    entity: str | None = None
    group: str | None = None
    mode: WandbMode | None = None
    samples: Natural = 1000
    timeout: Count = 30

    def __post_init__(self) -> None:
        _check_name(self.name, "wandb")
        check_limits("logger", self)
        for setting in ("project", "entity", "group"):
            given = getattr(self, setting)
            if given is not None and not (0 < len(given) <= _MAX_NAME and not set(given) & set("/\\#?%:\n")):
                raise ConfigError(
                    f"logger.{setting}={given[:_MAX_NAME]}: 1 to {_MAX_NAME} characters, none of / \\ # ? % :"
                )
        if self.mode is None:
            self.mode = _mode_of_environment()


Logger = NoLogger | WandbLogger
LOGGERS: dict[str, type[Logger]] = {"none": NoLogger, "wandb": WandbLogger}


def _check_name(given: str, name: str) -> None:
    if given != name:
        raise ConfigError(f"logger.name={given}: choose another logger by logger=..., not by its name")


def _mode_of_environment() -> WandbMode:
    named = os.environ.get("WANDB_MODE", "").strip().lower() or "online"
    try:
        return _OLD_MODES.get(named) or WandbMode(named)
    except ValueError:
        raise ConfigError(f"WANDB_MODE={named}: one of {', '.join(WandbMode)}") from None
