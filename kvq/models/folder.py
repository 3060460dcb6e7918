"""A model's folder and what names the weights in it; torch is not imported."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.config.files import DISTRIBUTION, EMBEDDED, carried_gguf, file_hash
from kvq.errors import ConfigError, DataError, did_you_mean
from kvq.models.files import files_read
from kvq.models.gguf import check_gguf, local_gguf, read_header

if TYPE_CHECKING:
    from kvq.config import ModelConfig

# Classes of transformers that take a tokenizer as its file has it.
_AS_WRITTEN = ("TokenizersBackend", "PreTrainedTokenizerFast")
DELTA_SETTINGS = "delta.json"
_WHOLE_OR_DELTA = ("config.json", DELTA_SETTINGS)


def model_folder(path: str) -> str:
    """A folder or hub id that transformers loads for `model.path`: `embedded:tiny` is shipped with the package.

    For a folder that holds what differs from another model (`delta_folder`) it is the other's.

    Raises:
        ConfigError: no such embedded model.
        DataError: a delta's folder does not say whose it is.
    """
    delta = delta_folder(path)
    return str(_own_folder(path)) if delta is None else model_folder(_base_of(path, delta))


def delta_folder(path: str) -> Path | None:
    """The folder of `model.path` where it holds only what differs from another model (`kvq.models.delta`).

    Raises:
        ConfigError: no such embedded model.
    """
    folder = Path(_own_folder(path))
    return folder if (folder / DELTA_SETTINGS).is_file() else None


def _base_of(path: str, delta: Path) -> str:
    """The `model.path` of the model that a delta changes, which is whole itself."""
    try:
        base = json.loads((delta / DELTA_SETTINGS).read_text(encoding="utf-8"))["base"]
        if base != path and delta_folder(base) is None:
            return str(base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f'model.path={path}: {DELTA_SETTINGS} is not {{"base": <model.path>}}') from error
    raise DataError(f"model.path={path}: {DELTA_SETTINGS} names base={base}, which is no whole model")


def _own_folder(path: str) -> str:
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


def folder_writes_bos(config: ModelConfig) -> bool | None:
    """Whether the tokenizer in a local folder begins a text with its begin-of-text token, without transformers.

    None: only transformers can say, whose older tokenizer classes change what the file of a tokenizer says.
    """
    folder = Path(model_folder(config.path))
    if (file := local_gguf(config, folder)) is not None:
        return read_header(file).writes_bos
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if settings["tokenizer_class"] not in _AS_WRITTEN or "add_bos_token" in settings:
            return None
        token = settings.get("bos_token")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    try:
        return token is not None and _first_token(folder / "tokenizer.json") == token
    except Exception:  # the library's own, for a file that is missing or cut short: loading says it
        return None


@lru_cache(maxsize=64)
def _first_token(file: Path) -> str | None:
    from tokenizers import Tokenizer

    return next(iter(Tokenizer.from_file(str(file)).encode("a").tokens), None)


def folder_fingerprint(config: ModelConfig) -> str | None:
    """The sha256 (hex) of a local folder's weights, configuration and tokenizer; None for a model of the hub.

    It covers what loading reads, also in subfolders (`files_read`), and of a delta the files of its base as well; of a
    GGUF file it is the file's own.

    Raises:
        ConfigError: no such embedded model.
        DataError: a delta's folder does not say whose it is; a GGUF file that is not there, or not the one meant; or as
            `files_read`.
    """
    folder, delta = Path(model_folder(config.path)), delta_folder(config.path)
    if not folder.is_dir():
        return None
    if (file := local_gguf(config, folder)) is not None:
        digest_of_file = file_hash(file)
        check_gguf(config, file, digest_of_file)
        return digest_of_file
    digest = hashlib.sha256()
    for place in (folder, delta) if delta else (folder,):
        for name, file in files_read(place, config.path, config.trust_remote_code).items():
            digest.update(name.encode() + b"\0" + bytes.fromhex(file_hash(file)))
    return digest.hexdigest()
