"""What plugins in use add to the tests of every method: attributes of their modules `tests.held`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from kvq.config.plugins import installed


def of_plugins(name: str) -> Iterator[Any]:
    """The attribute of that name of each plugin that has it."""
    for plugin in installed():
        try:
            module = importlib.import_module(f"{plugin}.tests.held")
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(f"{plugin}.tests"):
                raise
            continue
        if hasattr(module, name):
            yield getattr(module, name)
