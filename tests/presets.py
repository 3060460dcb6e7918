"""Settings of the methods under conf/method, each composed once, and which of them differ in more than numbers."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest

from kvq.config import MethodConfig, compose, resolve_part
from kvq.config.explain import choices

ABOUT = choices()["method"]
"""The one-line description of every method; reading them all anew takes half a second."""
NAMES = sorted(ABOUT)
"""Every method, and every preset, which has a slash in its name."""
METHODS = [name for name in NAMES if "/" not in name]
LIBRARIES = {"quanto": "optimum", "hqq": "hqq"}
"""Methods that are other libraries' caches, without codecs, and the package that each needs."""


def lacks_package(name: str) -> bool:
    """Whether a method needs a package that is not installed."""
    return name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None


@functools.cache
def preset(name: str, *overrides: str) -> MethodConfig:
    """The method of a run with these overrides, without the run's other parts where they do not matter."""
    given = [f"method={name}", *overrides]
    return resolve_part(compose(given), "method")


def form(value: Any, side: str = "") -> frozenset[tuple[str, str, Any]]:
    """The parts of a method, by side, with their axes and grids: what is left without sizes, orders and numbers."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, dict):
        return frozenset()
    here = {(side, name, value[name]) for name in ("_target_", "axis", "symmetric", "policy") if name in value}
    return frozenset(here).union(*(form(part, side or name) for name, part in value.items()))


def one_of_each(names: Iterable[str]) -> list[Any]:
    """Parameters: a method without a slash and the first preset of each form; the others belong to the long half."""
    seen: set[Any] = set()
    found: list[Any] = []
    for name in sorted(names, key=lambda name: "/" in name):
        kind = form(preset(name, "bits=2"))
        quick = "/" not in name or kind not in seen
        seen.add(kind)
        found.append(name if quick else pytest.param(name, marks=pytest.mark.long))
    return found
