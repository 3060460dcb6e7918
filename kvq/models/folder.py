"""A model's folder: the files that loading reads, and what names the weights in them; torch is not imported.

A GGUF file may come with an installed Python distribution. One that is too large for a distribution lies in pieces
(`FILE.gguf.part00`, ...) in those that the named one requires and whose names begin with its name. They are joined
once, in the order of their names, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from pathlib import Path
from typing import Any

from kvq.config import ModelConfig
from kvq.config.limits import cache_folder, file_hash
from kvq.config.run import DISTRIBUTION, EMBEDDED
from kvq.errors import ConfigError, DataError, did_you_mean, one_line

# Weights, configuration, tokenizer and chat templates, in every format that transformers loads.
_KINDS = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken"}
_TEMPLATES = "additional_chat_templates"
DELTA_SETTINGS = "delta.json"
_WHOLE_OR_DELTA = ("config.json", DELTA_SETTINGS)
_INSTALL = "`make real MODELS=smollm2_135m,gemma3_270m` installs those of conf/model"


def files_read(folder: Path, path: str, trust_remote_code: bool = False) -> dict[str, Path]:
    """The files that loading a model may read, by their names in its folder; of subfolders, chat templates alone.

    `path`: the setting `model.path`, for errors; `trust_remote_code`: whether Python files are read.
    """
    kinds = _KINDS | ({".py"} if trust_remote_code else set())
    try:
        found = {one.name: one for one in sorted(folder.iterdir()) if one.suffix in kinds and one.name != "card.json"}
        further = {f"{_TEMPLATES}/{file.name}": file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    except OSError as error:
        raise DataError(f"model.path={path}: cannot be read: {error.strerror}") from error
    if "adapter_config.json" in found:
        raise DataError(f"model.path={path}: holds an adapter; merge it into its model and save the whole")
    return found | further


def _read_json(file: Path, path: str, name: str) -> dict[str, Any]:
    """The mapping in a JSON file, empty where it holds something else; `DataError` where it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"model.path={path}: {name} cannot be loaded: {one_line(error, 200)}") from error
    return content if isinstance(content, dict) else {}


def model_folder(path: str) -> str:
    """A folder or hub id that transformers loads for `model.path`: `embedded:tiny` is shipped with the package.

    For a folder that holds what differs from another model (`delta_folder`) it is the other's.
    """
    delta = delta_folder(path)
    if delta is None:
        return str(_own_folder(path))
    return model_folder(str(_read_json(delta / DELTA_SETTINGS, path, DELTA_SETTINGS).get("base")))


def delta_folder(path: str) -> Path | None:
    """The folder of `model.path` where it holds only what differs from another model (`kvq.models.weights`)."""
    folder = Path(_own_folder(path))
    return folder if (folder / DELTA_SETTINGS).is_file() else None


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

    It covers what loading reads, also in subfolders (`files_read`), of a delta its base's too; of a GGUF file, its own.
    """
    folder, delta = Path(model_folder(config.path)), delta_folder(config.path)
    if not folder.is_dir():
        return None
    if config.gguf is not None:
        file = folder / config.gguf
        if not file.is_file():
            raise DataError(f"model.path={config.path}: no file {config.gguf}")
        digest_of_file = file_hash(file)
        if config.sha256 not in (None, digest_of_file):
            raise DataError(
                f"model.path={config.path}: {file.name} is not the file that model={config.name} means (its sha256 is "
                f"{digest_of_file[:12]}...; it lies in {file.parent}: delete it, and install or copy it again)"
            )
        return digest_of_file
    digest = hashlib.sha256()
    try:
        for place in (folder, delta) if delta else (folder,):
            for name, file in files_read(place, config.path, config.trust_remote_code).items():
                digest.update(name.encode() + b"\0" + bytes.fromhex(file_hash(file)))
    except OSError as error:  # such as a link to nothing
        raise DataError(f"model.path={config.path}: {name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def carried_gguf(setting: str, given: str) -> Path:
    """The GGUF file that an installed distribution (`distribution:<name>`) carries, the first where it has several."""
    place, name = f"{setting}={given}", given.removeprefix(DISTRIBUTION)
    whole = _find_distribution(place, name)
    for entry in whole.files or ():
        if entry.suffix == ".gguf":
            return Path(str(entry.locate()))
    required = (re.split(r"[^\w.-]", requirement)[0] for requirement in whole.requires or ())
    carriers = [_find_distribution(place, other) for other in required if other.startswith(f"{name}-")]
    pieces = [entry for other in carriers for entry in other.files or () if re.search(r"\.gguf\.part\d+$", entry.name)]
    if not pieces:
        raise DataError(f"{place}: {name} {whole.version} carries no GGUF file")
    return _join_once(place, sorted(pieces, key=lambda piece: piece.name))


def _find_distribution(place: str, name: str) -> Distribution:
    """The installed distribution `name`; otherwise `DataError`, whose message begins with the setting `place`."""
    try:
        return distribution(name)
    except (PackageNotFoundError, ValueError) as error:
        raise DataError(f"{place}: the package {name} is not installed; {_INSTALL}") from error


def _join_once(place: str, pieces: list[PackagePath]) -> Path:
    """The path of the file joined from these pieces, in a folder named by their hashes; joined unless it is there.

    `model.sha256` shows whether it is whole.
    """
    hashes = [piece.hash.value if piece.hash else "" for piece in pieces]
    file = cache_folder() / hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] / Path(pieces[0].name).stem
    if file.is_file():  # appears whole
        return file
    from filelock import FileLock

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not file.is_file():
                temporary = file.with_suffix(".tmp")
                with temporary.open("wb") as joined:
                    for piece in pieces:
                        joined.write(Path(str(piece.locate())).read_bytes())
                temporary.replace(file)
    except OSError as error:
        raise DataError(f"{place}: cannot be joined in {file.parent}: {error}") from error
    return file
