"""Files that settings name: GGUF files of installed Python distributions, and what a file holds. No torch here."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvq.errors import DataError

EMBEDDED, DISTRIBUTION = "embedded:", "distribution:"
"""Begin a `model.path` of a model of the package, or a file that an installed Python distribution carries."""


def carried_gguf(setting: str, given: str) -> Path:
    """The GGUF file that an installed distribution (`distribution:<name>`) carries, the first where it has several.

    Raises:
        DataError: it is not installed, or carries none; the line begins with `setting`.
    """
    name = given.removeprefix(DISTRIBUTION)
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError) as error:
        hint = "`make real` installs that of smollm2_135m"
        raise DataError(f"{setting}={given}: the package {name} is not installed; {hint}") from error
    for entry in found.files or ():
        if entry.suffix == ".gguf":
            return Path(str(found.locate_file(entry)))
    raise DataError(f"{setting}={given}: {name} {found.version} carries no GGUF file")


def file_hash(file: Path) -> str:
    """The sha256 (hex) of a file, which is read once in a process unless it changes."""
    state = file.stat()
    return _file_hash(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _file_hash(file: Path, modified: int, size: int) -> str:  # a changed file is hashed again
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
