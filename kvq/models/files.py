"""The files of a model's folder that loading reads; torch is not imported."""

from __future__ import annotations

import json
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from kvq.errors import DataError

# Weights, configuration, tokenizer and chat templates, in every format that transformers loads.
_KINDS = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken"}
_NOT_READ = "card.json"
_INDEX = ".index.json"
# In the order in which transformers looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TEMPLATES = "additional_chat_templates"


def files_read(folder: Path, path: str, trust_remote_code: bool = False) -> dict[str, Path]:
    """The files that loading a model may read, by their names in its folder: those in subfolders come last.

    Weights in subfolders are those that an index, or `transformers_weights` of `config.json`, names.

    Args:
        folder: the model's, which is there.
        path: the setting `model.path`, for errors.
        trust_remote_code: whether Python files are read.

    Raises:
        DataError: one of them is no regular file or cannot be read, names weights outside of the folder, or the folder
            holds an adapter, whose model is elsewhere.
    """
    kinds = _KINDS | ({".py"} if trust_remote_code else set())
    try:
        found = {
            file.name: file for file in sorted(folder.iterdir()) if file.suffix in kinds and file.name != _NOT_READ
        }
        _check_regular(found, path)
        if "adapter_config.json" in found:
            raise DataError(f"model.path={path}: holds an adapter; merge it into its model and save the whole")
        further = {name for index in [*found] if index.endswith(_INDEX) for name in shards_of(found[index], path)}
        further |= {str(Path(_TEMPLATES, file.name)) for file in (folder / _TEMPLATES).glob("*.jinja")}
        if (named := _named_weights(folder, path)) is not None:
            further |= {named, *(shards_of(folder / named, path) if named.endswith(_INDEX) else ())}
        inside = {name: folder / name for name in sorted(further - found.keys()) if (folder / name).exists()}
        _check_regular(inside, path)
    except OSError as error:
        raise DataError(f"model.path={path}: cannot be read: {error.strerror}") from error
    return found | inside


def weight_files(folder: Path, path: str) -> list[Path]:
    """The files with the weights of a folder that transformers loads; none where it has none that is known here.

    Raises:
        DataError: as `files_read`.
    """
    first = _named_weights(folder, path) or next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if first is None:
        return []
    return [folder / name for name in (shards_of(folder / first, path) if first.endswith(_INDEX) else [first])]


def shards_of(index: Path, path: str) -> list[str]:
    """The files that an index of weights names, sorted.

    Raises:
        DataError: it cannot be read, or names one outside of the model's folder.
    """
    weights = _json(index, path, index.name).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise DataError(f"model.path={path}: {index.name} is no index of weights")
    return sorted({_inside(name, path, index.name) for name in weights.values()})


def _named_weights(folder: Path, path: str) -> str | None:
    """The file that `config.json` names in the place of `model.safetensors`."""
    config = folder / "config.json"
    named = _json(config, path, config.name).get("transformers_weights") if config.is_file() else None
    return _inside(named, path, config.name) if isinstance(named, str) else None


def _json(file: Path, path: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"model.path={path}: {name} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    return content if isinstance(content, dict) else {}


def _inside(name: str, path: str, naming: str) -> str:
    """The name of a file in the folder. A link in it may lead outside, as those of the hub's cache do."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"model.path={path}: {naming} names {name[:100]}, which is outside of the folder")
    return name


def _check_regular(files: dict[str, Path], path: str) -> None:
    """Refuse what a reader would fail at or wait for."""
    for name, file in files.items():
        if not file.exists():
            raise DataError(f"model.path={path}: {name} is a link to nothing")
        if not stat.S_ISREG(file.stat().st_mode):
            raise DataError(f"model.path={path}: {name} is {'a folder' if file.is_dir() else 'no regular file'}")
