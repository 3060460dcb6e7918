"""Presets in the form of a record's settings, for comparison with a run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from kvq.config import Config, MethodConfig, Scoring, compose, compose_part, conf_dir, outside
from kvq.config.explain import COMPOSE_ERRORS, choices
from kvq.config.identity import by_names
from kvq.results.record import canonical

Settings = Mapping[str, Any]


class Presets:
    """Presets by group and name, each composed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Any] = {}
        self._canonical: dict[tuple[str, str, str | None], Settings | None] = {}
        self._plain: dict[tuple[str, str], Settings | None] = {}

    def _read(self, group: str, name: str) -> Any:
        """A configuration with a preset in it; None where the name has no file or it does not compose."""
        if (group, name) not in self._known:
            self._known[group, name] = None
            if _file(group, name) is not None:
                with contextlib.suppress(*COMPOSE_ERRORS):
                    self._known[group, name] = _composed(group, name)
        return self._known[group, name]

    def method(self, name: str, bits: str, scoring: str | None) -> Settings | None:
        """`method` and `residual` of a preset as a run's key has them; None where there is no preset.

        Args:
            name: the method's, such as `oscar/cr_only`.
            bits: as a record labels them; empty: a fixed rate.
            scoring: of the task, which may quantize at once.
        """
        found = self._read("method", name)
        if found is None:
            return None
        place = (name, bits, scoring)
        if place not in self._canonical:
            self._canonical[place] = _canonical(found, bits, scoring)
        return self._canonical[place]

    def settings(self, group: str, name: str) -> Settings | None:
        """A preset of a task, model or dataset; None where there is none or a value is missing."""
        if (group, name) not in self._plain:
            whole = self._read(group, name)
            found = None if whole is None else whole[group]
            known = found is not None and not OmegaConf.missing_keys(found)
            self._plain[group, name] = canonical(OmegaConf.to_container(found, enum_to_str=True)) if known else None
        return self._plain[group, name]

    def model_path(self, name: str) -> str:
        """The `path` of a model that a record names; empty where there is no such preset."""
        return str((self.settings("model", name) or {}).get("path", ""))


def _composed(group: str, name: str) -> Any:
    chosen = [f"{group}={name}"]
    return compose_part(group, chosen) or compose(chosen)


def presets() -> Presets:
    """The presets of the folders that this process composes from."""
    return _presets_of(outside.folder_of())


@functools.cache
def _presets_of(own: Path | None) -> Presets:
    return Presets()


_choices = functools.cache(choices)


def _file(group: str, name: str) -> Path | None:
    """The file of a preset; None where the name (taken from a record) is of no preset."""
    own = outside.folder_of()
    folders = [conf_dir(), *([own] if own else [])]
    found = (folder / group / f"{name}.yaml" for folder in folders if name in _choices(own)[group])
    return next((path for path in found if path.is_file()), None)


def _canonical(whole: Any, bits: str, scoring: str | None) -> Settings | None:
    """A preset as `kvq.config.identity` writes it; None where it does not compose at these bits."""
    try:
        whole.bits = bits or 3
        method = OmegaConf.to_object(whole.method)
        assert isinstance(method, MethodConfig)
        task: Any = SimpleNamespace(scoring=Scoring(scoring) if scoring else Scoring.generation)
        found = canonical(by_names(Config(bits=bits or 3, method=method, task=task)))
    except COMPOSE_ERRORS:
        return None
    return {name: part for name, part in found.items() if name in ("method", "residual")}
