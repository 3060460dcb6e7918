"""The choices of each configuration group: files of `conf/`, and rows of its tables.

A table is a file whose name begins with an underscore and that has `rows`: choices that differ in a few settings, such
as the ablations of a method. The row `no_shift` of `conf/method/nsnquant/_presets.yaml` is the choice
`nsnquant/no_shift`. A row has its one-line description, `about`, and settings as a file has them. `both` stands for
`key` and `value` with the same settings, where `${kvbits:side}` means the bits of each. The table's `defaults` are
those of rows without their own, its `package` is Hydra's `@package`. Hydra finds rows in its ConfigStore.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from kvq.errors import ConfigError

CONFIG_NAME = "config"
SIDES = ("key", "value")
_NAMED = ("method", "model")  # groups whose settings repeat the name of the choice
_TABLE = frozenset({"defaults", "package", "rows"})


class _Loader(yaml.CSafeLoader):
    """Reads numbers as OmegaConf does (1e-3 is one), in a fifth of its time."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


@dataclass(frozen=True)
class Choice:
    """A choice of a group: a file of its own, or a row of a table.

    Attributes:
        file: where it is written.
        about: what it is, in one line.
        settings: of a row, with the `defaults` list; None: the file holds them.
        package: where a row's settings go; None: to its group.
    """

    group: str
    name: str
    file: Path
    about: str
    settings: Mapping[str, Any] | None = None
    package: str | None = None

    def read(self) -> dict[str, Any]:
        """The settings as written, with the `defaults` list, for the caller to change."""
        return _read(self.file) if self.settings is None else copy.deepcopy(dict(self.settings))


def conf_dir() -> Path:
    """The folder of configuration files: next to the package in a checkout, in it when installed from a wheel."""
    package = Path(__file__).resolve().parents[1]
    return next(one for one in (package / "conf", package.parent / "conf") if (one / f"{CONFIG_NAME}.yaml").is_file())


def choices_in(folder: Path, within: str = "*") -> Iterator[Choice]:
    """All choices of a folder laid out as `conf/` is, or those of the group `within`, by group and name.

    Other files whose names begin with an underscore, and those in such folders, are parts of choices and left out.
    """
    found: list[Choice] = []
    for path in folder.glob(f"{within}/**/*.yaml"):
        group, *names = path.relative_to(folder).with_suffix("").parts
        if not any(name.startswith("_") for name in names):
            comments = (line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#")
            about = next((comment for comment in comments if "@package" not in comment), "")
            found.append(Choice(group, "/".join(names), path, about))
        elif path.name.startswith("_"):
            found += _rows_of(path, path.stat().st_mtime_ns, group, tuple(names[:-1]))
    yield from sorted(found, key=lambda choice: (choice.group, *choice.name.split("/")))


def find(group: str, name: str, *folders: Path) -> Choice | None:
    """A choice by name in the first folder that has it; None where none does."""
    return next((one for folder in folders for one in choices_in(folder, group) if one.name == name), None)


@functools.lru_cache(maxsize=256)
def _rows_of(path: Path, stamp: int, group: str, below: tuple[str, ...]) -> list[Choice]:
    """The rows of a table in the folder `below` its group, as it was last changed; none of a file that is no table."""
    table = _read(path)
    if "rows" not in table:
        return []
    wrong = sorted(table.keys() - _TABLE)
    if wrong or not isinstance(table["rows"], dict):
        raise ConfigError(f"{path}: a table has rows by name and may have {', '.join(sorted(_TABLE))}; not {wrong}")
    found = []
    for last, settings in table["rows"].items():
        name = "/".join([*below, str(last)])
        if not isinstance(settings, dict) or not isinstance(settings.get("about"), str):
            raise ConfigError(f"{path}: {name}: a row has about, one line that says what it is, and settings")
        own = {"name": name} if group in _NAMED else {}
        own |= {setting: value for setting, value in settings.items() if setting not in ("about", "both")}
        for side in SIDES if "both" in settings else ():
            if side in own:
                raise ConfigError(f"{path}: {name}: both and {side}; give one of them")
            own[side] = _name_side(settings["both"], side)
        if "defaults" in table:
            own.setdefault("defaults", table["defaults"])
        found.append(Choice(group, name, path, settings["about"], own, table.get("package")))
    return found


def _name_side(value: Any, side: str) -> Any:
    """A copy of a row's `both`, at any depth, in which `${kvbits:side}` names this side."""
    if isinstance(value, dict):
        return {name: _name_side(part, side) for name, part in value.items()}
    if isinstance(value, list):
        return [_name_side(part, side) for part in value]
    return value.replace("${kvbits:side}", f"${{kvbits:{side}}}") if isinstance(value, str) else value


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty where it holds something else."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    return content if isinstance(content, dict) else {}


class _LazyNode(ConfigNode):
    """A choice in Hydra's ConfigStore, whose configuration is made when Hydra loads it."""

    def __init__(self, group: str, name: str, load: Callable[[], Any], package: str | None) -> None:
        self.name, self.group, self.package, self.provider = f"{name}.yaml", group, package, "kvq"
        self.load = load

    @property
    def node(self) -> DictConfig:
        return OmegaConf.create(self.load())

    @node.setter
    def node(self, loaded: DictConfig) -> None:
        """Hydra gives its copy of a node the configuration that it has just read from it."""


def store_choice(group: str, name: str, load: Callable[[], Any], package: str | None = None) -> None:
    """Put a choice where Hydra finds it; `load` gives its settings or its schema when Hydra reads it."""
    *below, last = name.split("/")
    where = "/".join([group, *below])
    store = ConfigStore.instance()
    store.store(group=where, name=last, node={})
    store._open(where)[f"{last}.yaml"] = _LazyNode(group, name, load, package)


def register_rows(folder: Path) -> None:
    """Put all rows of a folder's tables where Hydra finds them."""
    for choice in choices_in(folder):
        if choice.settings is not None:
            store_choice(choice.group, choice.name, choice.read, choice.package)
