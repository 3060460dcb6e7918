"""GGUF files that installed Python distributions carry, whole or in pieces. No torch here.

A file too large for one distribution lies in pieces (`FILE.gguf.part00`, ...) in those that the named one requires and
whose names begin with its name. They are joined once, in the order of their names, in the user's cache folder.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from pathlib import Path

from kvq.config.limits import DISTRIBUTION
from kvq.errors import DataError

_INSTALL = "`make real MODELS=smollm2_135m,gemma3_270m` installs those of conf/model"


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


def cache_folder() -> Path:
    """Where joined files lie: `$XDG_CACHE_HOME/kvq`, or `~/.cache/kvq`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvq"


def _join_once(place: str, pieces: list[PackagePath]) -> Path:
    """The path of the file joined from these pieces, in a folder named by their hashes; joined unless it is there."""
    digest = hashlib.sha256("".join(_hash(piece) for piece in pieces).encode()).hexdigest()
    file = cache_folder() / digest[:16] / Path(pieces[0].name).stem
    if file.is_file():  # appears whole
        return file
    from filelock import FileLock

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not file.is_file():
                _join(place, pieces, file)
    except OSError as error:
        raise DataError(f"{place}: cannot be joined in {file.parent}: {error.strerror}") from error
    return file


def _hash(piece: PackagePath) -> str:
    """The sha256 of a file in its distribution's RECORD (URL-safe base64 without padding); empty: none is there."""
    return piece.hash.value if piece.hash else ""


def _join(place: str, pieces: list[PackagePath], file: Path) -> None:
    """Write the pieces one after the other to `file`, atomically, each checked against its hash in RECORD.

    Raises:
        DataError: a piece is missing or broken; the message begins with the setting `place`.
    """
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as joined:
        for piece in pieces:
            found = Path(str(piece.locate()))
            # As a distribution's RECORD writes a sha256.
            digest = base64.urlsafe_b64encode(hashlib.sha256(found.read_bytes()).digest()) if found.is_file() else b""
            if digest.rstrip(b"=").decode() != _hash(piece):
                raise DataError(
                    f"{place}: the piece {found} is {'broken' if found.exists() else 'missing'}; "
                    "make real with the same MODELS and PIP_ARGS=--force-reinstall installs it again"
                )
            with found.open("rb") as stream:
                shutil.copyfileobj(stream, joined, 1 << 20)
    temporary.replace(file)
