"""Loops that numba compiles, and a cache of their machine code on disk, so that the next process compiles nothing.

numba's own `cache=True` does not serve loops made by functions: what it names a closure's code by differs from process
to process where the closure holds other loops or emitted instructions, and it looks at one source file only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, no_type_check

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.extending import _Intrinsic
from numba.misc.appdirs import AppDirs

_ENDING = ".nbc"  # as numba's own
_READ = time.time()  # loops are imported after this


def compiled(options: dict[str, Any], *, keep: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options, under a name that says what the function holds; `keep`: on disk too.

    Loops called from Python are kept, with all that they call. What a kept loop does may depend on what it holds, on
    source files of its folder and on nothing else.
    """

    @no_type_check
    def decorate(function: Any) -> Any:
        digest = _digest("\n".join((_place(function), repr(sorted(options.items())), *_held(function))))
        # Symbols of kept code carry this name: one of another closure would be taken for it, its code with it.
        function.__qualname__ += f"_{digest[:20]}"
        loop = numba.njit(**options)(function)
        source = Path(function.__code__.co_filename)
        if keep and (folder := _folder(source.parent)) and (stamp := _stamp(source.parent)):
            loop._cache = _Kept(folder, f"{source.stem}.{function.__name__}", stamp, digest)
        return loop

    return decorate


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _place(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"


def _held(value: Any) -> Iterator[str]:
    """A description of a function's closure that is equal in every process, functions in it by theirs."""
    if isinstance(value, Dispatcher):
        yield from _held(value.py_func)
    elif isinstance(value, _Intrinsic):
        yield from _held(value._defn)
    elif isinstance(value, functools.partial):
        yield from _held((value.func, value.args, sorted(value.keywords.items())))
    elif isinstance(value, types.FunctionType):
        yield _place(value)
        yield from _held((value.__defaults__, [cell.cell_contents for cell in value.__closure__ or ()]))
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype.str} {value.shape} {value.tobytes().hex()}"
    elif dataclasses.is_dataclass(value):
        yield from _held((type(value), [getattr(value, field.name) for field in dataclasses.fields(value)]))
    elif isinstance(value, tuple | list):
        yield f"{len(value)} of"
        for part in value:
            yield from _held(part)
    elif hasattr(value, "__wrapped__"):
        yield from _held(value.__wrapped__)
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value)
    else:
        raise TypeError(f"a compiled loop holds a {type(value).__name__}, which has no lasting name")


@functools.cache
def _stamp(folder: Path) -> str | None:
    """Digest of the sources of a folder, and of this file; None: they were edited since this process read them."""
    paths = [Path(__file__), *sorted(folder.glob("*.py"))]
    if max(path.stat().st_mtime for path in paths) > _READ:
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _folder(sources: Path) -> Path | None:
    """Where code of these sources is kept: `NUMBA_CACHE_DIR`, else next to them, else in the user cache, else nowhere.

    The first of these that can be written; where the variable is set, no other.
    """
    own = f"{sources.name}_{_digest(str(sources))[:16]}"
    if given := getattr(config, "CACHE_DIR", ""):
        folders = [Path(given) / own]
    else:
        folders = [sources / "__pycache__", Path(AppDirs(appname="kvq", appauthor=False).user_cache_dir) / own]
    return next(filter(_writable, folders), None)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


class _Kept(_Cache):
    """One loop's machine code: a file for each signature and processor, which is named by all that it depends on.

    A file appears whole or not at all, so that any number of processes may read and write. Files of other sources
    are removed when one is written.
    """

    def __init__(self, folder: Path, name: str, stamp: str, digest: str) -> None:
        self._folder, self._name, self._stamp, self._digest = folder, name, stamp, digest

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        try:
            data = self._path(sig, target_context.codegen()).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data[32:]).digest() != data[:32]:  # a disk that was full, or damaged since
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(data[32:]))

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.lifted or data.library.has_dynamic_globals:
            return
        payload, path = dumps(data._reduce()), self._path(sig, data.codegen)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            part.write_bytes(hashlib.sha256(payload).digest() + payload)
            part.replace(path)
            for other in self._folder.glob(f"*{_ENDING}"):
                if f"-{self._stamp}-" not in other.name:
                    other.unlink(missing_ok=True)
        except OSError:  # the next process compiles again
            part.unlink(missing_ok=True)

    def _path(self, sig: Any, codegen: Any) -> Path:
        versions = (sys.version_info[:2], numba.__version__, llvmlite.__version__)
        key = _digest("\n".join(map(str, (self._digest, sig, codegen.magic_tuple(), versions))))
        return self._folder / f"{self._name}-{self._stamp}-{key[:40]}{_ENDING}"

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass
