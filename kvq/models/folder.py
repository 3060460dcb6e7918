"""A model's folder: the files that loading reads, and what names the weights in them; torch is not imported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kvq.config.carried import carried_gguf
from kvq.config.limits import DISTRIBUTION, EMBEDDED, file_hash
from kvq.errors import ConfigError, DataError, did_you_mean, one_line
from kvq.models.gguf import check_gguf, local_gguf

if TYPE_CHECKING:
    from kvq.config import ModelConfig

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
    """
    kinds = _KINDS | ({".py"} if trust_remote_code else set())
    try:
        found = {
            file.name: file for file in sorted(folder.iterdir()) if file.suffix in kinds and file.name != _NOT_READ
        }
        if "adapter_config.json" in found:
            raise DataError(f"model.path={path}: holds an adapter; merge it into its model and save the whole")
        further = {name for index in [*found] if index.endswith(_INDEX) for name in shards_of(found[index], path)}
        further |= {str(Path(_TEMPLATES, file.name)) for file in (folder / _TEMPLATES).glob("*.jinja")}
        if (named := _named_weights(folder, path)) is not None:
            further |= {named, *(shards_of(folder / named, path) if named.endswith(_INDEX) else ())}
        inside = {name: folder / name for name in sorted(further - found.keys()) if (folder / name).exists()}
    except OSError as error:
        raise DataError(f"model.path={path}: cannot be read: {error.strerror}") from error
    return found | inside


def weight_files(folder: Path, path: str) -> list[Path]:
    """The files with the weights of a folder that transformers loads; none where it has none that is known here."""
    first = _named_weights(folder, path) or next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if first is None:
        return []
    return [folder / name for name in (shards_of(folder / first, path) if first.endswith(_INDEX) else [first])]


def shards_of(index: Path, path: str) -> list[str]:
    """The files that an index of weights names, sorted."""
    weights = _read_json(index, path, index.name).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise DataError(f"model.path={path}: {index.name} is no index of weights")
    return sorted({_check_inside(name, path, index.name) for name in weights.values()})


def _named_weights(folder: Path, path: str) -> str | None:
    """The file that `config.json` names in the place of `model.safetensors`."""
    config = folder / "config.json"
    named = _read_json(config, path, config.name).get("transformers_weights") if config.is_file() else None
    return _check_inside(named, path, config.name) if isinstance(named, str) else None


def _read_json(file: Path, path: str, name: str) -> dict[str, Any]:
    """The mapping in a JSON file, empty where it holds something else; `DataError` where it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"model.path={path}: {name} cannot be loaded: {one_line(error, 200)}") from error
    return content if isinstance(content, dict) else {}


def _check_inside(name: str, path: str, naming: str) -> str:
    """The name of a file in the folder. A link in it may lead outside, as those of the hub's cache do."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"model.path={path}: {naming} names {name[:100]}, which is outside of the folder")
    return name


DELTA_SETTINGS = "delta.json"
_WHOLE_OR_DELTA = ("config.json", DELTA_SETTINGS)


def model_folder(path: str) -> str:
    """A folder or hub id that transformers loads for `model.path`: `embedded:tiny` is shipped with the package.

    For a folder that holds what differs from another model (`delta_folder`) it is the other's.
    """
    delta = delta_folder(path)
    return str(_own_folder(path)) if delta is None else model_folder(_base_of(path, delta))


def delta_folder(path: str) -> Path | None:
    """The folder of `model.path` where it holds only what differs from another model (`kvq.models.weights`)."""
    folder = Path(_own_folder(path))
    return folder if (folder / DELTA_SETTINGS).is_file() else None


def _base_of(path: str, delta: Path) -> str:
    """The `model.path` of the base that a delta changes.

    Raises:
        DataError: `delta.json` names none, or one that is itself a delta.
    """
    try:
        base = json.loads((delta / DELTA_SETTINGS).read_text(encoding="utf-8"))["base"]
        if base != path and delta_folder(base) is None:
            return str(base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f'model.path={path}: {DELTA_SETTINGS} is not {{"base": <model.path>}}') from error
    raise DataError(f"model.path={path}: {DELTA_SETTINGS} names base={base}, which is no whole model")


def _own_folder(path: str) -> str:
    """The folder of an embedded model or an installed distribution; any other path unchanged."""
    if path.startswith(DISTRIBUTION):
        return str(carried_gguf("model.path", path).parent)
    if not path.startswith(EMBEDDED):
        return path
    name = path.removeprefix(EMBEDDED)
    folder = Path(__file__).parent / name
    if not any((folder / file).is_file() for file in _WHOLE_OR_DELTA):
        found = (file.parent.name for kind in _WHOLE_OR_DELTA for file in Path(__file__).parent.glob(f"*/{kind}"))
        names = sorted(found)
        hint = did_you_mean(name, names)
        raise ConfigError(f"model.path={path}: no such embedded model; there are: {', '.join(names) or 'none'}.{hint}")
    return str(folder)


def folder_fingerprint(config: ModelConfig) -> str | None:
    """The sha256 (hex) of a local folder's weights, configuration and tokenizer; None for a model of the hub.

    It covers what loading reads, also in subfolders (`files_read`), and of a delta the files of its base as well; of a
    GGUF file it is the file's own.
    """
    folder, delta = Path(model_folder(config.path)), delta_folder(config.path)
    if not folder.is_dir():
        return None
    if (file := local_gguf(config, folder)) is not None:
        digest_of_file = file_hash(file)
        check_gguf(config, file, digest_of_file)
        return digest_of_file
    digest = hashlib.sha256()
    try:
        for place in (folder, delta) if delta else (folder,):
            for name, file in files_read(place, config.path, config.trust_remote_code).items():
                digest.update(name.encode() + b"\0" + bytes.fromhex(file_hash(file)))
    except OSError as error:  # such as a link to nothing
        raise DataError(f"model.path={config.path}: {name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
