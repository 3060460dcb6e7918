"""Versions of engines' packages: caches are read as they lie in memory, which is known of one version each."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from kvq.errors import ConfigError


def check_installed(engine: str, packages: Mapping[str, str]) -> None:
    """Raise `ConfigError` where one of an engine's packages (name -> version) is not installed in that version."""
    for name, pinned in packages.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"task.engine={engine}: needs {name}=={pinned}; pip install -e '.[{engine}]'") from error
        if version != pinned:
            raise ConfigError(f"task.engine={engine}: {name}=={version} is installed; the cache is known of {pinned}")
