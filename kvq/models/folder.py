"""A model's folder and what names the weights in it; torch is not imported."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from kvq.config import ModelConfig

EMBEDDED = "embedded:"
# Classes of transformers that take a tokenizer as its file has it.
_AS_WRITTEN = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Weights, configuration and tokenizer, in every format that transformers loads.
_MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt"}


def model_folder(path: str) -> str:
    """A folder or hub id for `model.path`; `embedded:tiny` is the folder shipped with the package.

    Raises:
        ConfigError: no such embedded model.
    """
    if not path.startswith(EMBEDDED):
        return path
    name = path.removeprefix(EMBEDDED)
    folder = Path(__file__).parent / name
    if not (folder / "config.json").is_file():
        names = sorted(p.parent.name for p in Path(__file__).parent.glob("*/config.json"))
        hint = did_you_mean(name, names)
        raise ConfigError(f"model.path={path}: no such embedded model; there are: {', '.join(names) or 'none'}.{hint}")
    return str(folder)


def folder_writes_bos(path: str) -> bool | None:
    """Whether the tokenizer in a local folder begins a text with its begin-of-text token, without transformers.

    None: only transformers can say, whose older tokenizer classes change what the file of a tokenizer says.
    """
    folder = Path(model_folder(path))
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if settings["tokenizer_class"] not in _AS_WRITTEN or "add_bos_token" in settings:
            return None
        token = settings.get("bos_token")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token is not None and _first_token(folder / "tokenizer.json") == token


@lru_cache(maxsize=64)
def _first_token(file: Path) -> str | None:
    from tokenizers import Tokenizer

    return next(iter(Tokenizer.from_file(str(file)).encode("a").tokens), None)


def folder_fingerprint(config: ModelConfig) -> str | None:
    """The sha256 (hex) of a local folder's weights, configuration and tokenizer; None for a model of the hub.

    Raises:
        ConfigError: no such embedded model.
    """
    folder = Path(model_folder(config.path))
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    kinds = _MODEL_FILES | ({".py"} if config.trust_remote_code else set())
    for file in sorted(file for file in folder.iterdir() if file.suffix in kinds and file.name != "card.json"):
        digest.update(file.name.encode() + b"\0" + _file_hash(file, file.stat().st_mtime_ns, file.stat().st_size))
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _file_hash(file: Path, modified: int, size: int) -> bytes:  # a changed file is hashed again
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
