"""Which versions of which parts made a record, and whether one has been raised since.

A class that decides numbers (a stage, a quantizer, a codec, a policy, the cache, a task's settings) has a
`version: ClassVar[int]`, raised by hand when what it computes changes; `tests/golden` fails where it changes and the
version does not. A part outside the package has no version to raise: the code of its file stands for it, hashed without
comments and docstrings (`code_hash`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import pkgutil
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType
from typing import Any, Final

from kvq.config import plugins
from kvq.config.method import current_names
from kvq.config.task import TaskConfig
from kvq.config.tasks import SCHEMAS
from kvq.errors import RecordError
from kvq.results.record import Record

Versions = dict[str, int | str]

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CLASS: Final = re.compile(
    r"^class (\w+)|^    version: ClassVar\[int\] = (\d+)$|^    name: str = \"(\w+)\"$", re.MULTILINE
)
# Settings of a method without a `_target_`, and the class that reads them.
_IMPLIED: Final = {
    "sink_tokens": "SinkSide",
    "gqa_compensation": "GqaCompensation",
    "merge_rotation": "MergedRotation",
    "merge_key_rotation": "MergedRotation",
    "kept_keys": "KeptSide",
    "backend": "BackendConfig",
    "calibration": "CalibrationConfig",
}
_LONG_TRELLIS: Final = 8  # bits of a state, above which a trellis is one
_ENGINES: Final = {"llamacpp": "LlamaCpp", "mlx": "Mlx"}


@functools.cache
def declared() -> Mapping[str, int]:
    """Version of every class of kvq and its plugins that has one, by name, and of every task; nothing is imported."""
    found: dict[str, int] = {}
    tasks = {task for plugin in plugins.installed().values() for task in plugin.tasks}
    for file in sorted(path for folder in (_PACKAGE, *plugins.packages()) for path in folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = task = ""
        for match in _CLASS.finditer(text) if "version: ClassVar[int]" in text else ():
            name, task = match[1] or name, "" if match[1] else match[3] or task
            if match[2] and found.setdefault(name, int(match[2])) != int(match[2]):
                raise RecordError(f"two classes named {name} have versions; a name stands for one class")
            if task in tasks and name in found:
                found[task] = found[name]
    return found | {name: schema.version for name, schema in SCHEMAS.items()}


def versions_of(config: Mapping[str, Any], task: type[TaskConfig] | None = None) -> Versions:
    """Versions of all that makes the numbers of a run, by name: its task, the cache, the parts of its method.

    A task outside the package is there by its version and, as the class of its settings, by the code of its file.

    Args:
        config: the run's canonical settings (`kvq.config.identity.canonical`); its `_target_`s are imported.
        task: the class of the task's settings (None: that of the package's task).

    Raises:
        RecordError: a part of the package without a version.
    """
    name = config["task"]["name"]
    task = task or SCHEMAS[name]
    names = {"KVCache"} if task.reads_cache else set()
    if config["model"].get("outliers"):
        names.add("OutliersConfig")
    if (engine := config["task"].get("engine")) is not None:
        names.add(_ENGINES[engine["name"]])
    own = {name: declared()[name] for name in names}
    found: Versions = {name: task.version, **own, **versions_of_method(config["method"])}
    if name not in declared():
        found |= _versions_of_class(task)
    return dict(sorted(found.items()))


def versions_of_method(method: Mapping[str, Any]) -> Versions:
    """Versions of all that a method's canonical settings ask for: the classes that they name, and those they imply.

    Raises:
        RecordError: as `versions_of_parts`.
    """
    names = {implied for setting, implied in _IMPLIED.items() if method.get(setting)}
    if any(isinstance(own, list) for layers in method.get("bits_by_layer", {}).values() for own in layers):
        names.add("HeadsCodec")
    return {**{name: declared()[name] for name in names}, **versions_of_parts(method)}


def versions_of_parts(method: Any) -> Versions:
    """Versions of the classes that a method's canonical settings name, which are imported.

    Raises:
        RecordError: a part of the package without a version.
    """
    found: Versions = {}
    for target in set(_targets(method)):
        found |= _versions_of_class(pkgutil.resolve_name(target))
    if any(memory > _LONG_TRELLIS for memory in _settings("memory", method)):
        found["LongTrellis"] = declared()["LongTrellis"]
    return found


def is_stale(record: Record) -> bool:
    """Return whether a part that made a record has another version since, or is gone; nothing is imported."""
    return staleness()(record)


def staleness() -> Callable[[Record], bool]:
    """Make an `is_stale` for many records: it reads each file outside the package once."""
    now = functools.cache(_now)
    return lambda record: any(now(name) != version for name, version in _deciding(record))


def _deciding(record: Record) -> Iterator[tuple[str, int | str]]:
    """The versions that decide whether a record is stale: of a task outside the package, the hash of its file."""
    by_file = record.task not in declared() and any(isinstance(version, str) for version in record.versions.values())
    return ((name, version) for name, version in record.versions.items() if not (by_file and name == record.task))


def _targets(value: Any) -> Iterator[str]:
    current = current_names()
    for target in _settings("_target_", value):
        if isinstance(target, str):
            yield current.get(target, target)


def _settings(name: str, value: Any) -> Iterator[Any]:
    """What a setting of that name is, wherever a method has one."""
    if isinstance(value, Mapping):
        yield from (own for key, own in value.items() if key == name)
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _settings(name, item)


def _versions_of_class(part: Any) -> Versions:
    """Versions of a class and its base classes; of what lies outside the package, a hash of its file."""
    found: Versions = {}
    versioned = {"kvq", *(name for name in plugins.installed() if plugins.installed()[name].has_versions)}
    for kind in inspect.getmro(part) if inspect.isclass(part) else (part,):
        if kind.__module__.partition(".")[0] in versioned:
            if kind.__name__ in declared():
                found[kind.__name__] = declared()[kind.__name__]
        elif kind.__module__ not in sys.stdlib_module_names and (file := file_of_module(kind.__module__)) is not None:
            found[f"{kind.__module__}.{kind.__qualname__}"] = code_hash(file)
    if not found:
        raise RecordError(f"{part.__module__}.{part.__qualname__}: no version: ClassVar[int] to tell its numbers by")
    return found


def _now(name: str) -> int | str | None:
    if name in declared():
        return declared()[name]
    parts = name.split(".")
    files = (file_of_module(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    found = next((file for file in files if file is not None), None)
    return None if found is None else code_hash(found)


# From Python 3.12 on an f-string is a run of tokens; before, it is one STRING token.
_OPENING = {getattr(tokenize, "FSTRING_START", None)} - {None}
_CLOSING = {getattr(tokenize, "FSTRING_END", None)} - {None}

# (line, column) pairs as tokenize counts them: lines from 1, columns in characters from 0.
Position = tuple[int, int]
Span = tuple[Position, Position]


def code_hash(*files: Path) -> str:
    """Return the SHA-256 (hex) of the code of `files`, in any order.

    Comments, docstrings, blank lines and trailing blanks do not count; everything else does, indentation included. The
    result is the same on every supported Python. A file that is not Python source (an extension) counts by its bytes.
    """
    digest = hashlib.sha256()
    for content in sorted(code_text(_decode(f)).encode() if f.suffix == ".py" else f.read_bytes() for f in files):
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def code_behind(function: Callable[..., Any]) -> str:
    """Return the SHA-256 (hex) of the code that a function runs, without comments and docstrings, as `code_hash`.

    That is the file it is written in, and the files in the same folder or below it that this one imports, anywhere in
    its code, in turn. What has no file counts by its bytecode, or by the name of its class.
    """
    function = inspect.unwrap(getattr(function, "func", function))  # a partial's
    names = _globals_of(function) or _globals_of(type(function))
    if names is None:
        code = getattr(function, "__code__", None)
        told = f"{type(function).__module__}.{type(function).__qualname__}" if code is None else repr(_bytecode(code))
        return hashlib.sha256(told.encode()).hexdigest()
    first = Path(names["__file__"]).resolve()
    files, todo = {first}, [first]
    while todo:
        found = set(_imported(todo.pop(), first.parent)) - files
        files |= found
        todo += found
    return code_hash(*files)


def _imported(file: Path, folder: Path) -> Iterator[Path]:
    """Files of `folder` and below that a file imports: by a statement at any place, or by a name in a string."""
    if file.suffix != ".py":
        return
    for node in ast.walk(ast.parse(_decode(file))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            names = [node.value]  # of `importlib.import_module`
        for parts in (name.strip(".").split(".") for name in names):
            if not all(map(str.isidentifier, parts)):
                continue
            ways = [parts[start:] for start in range(len(parts))]  # a.b.c, or b.c where a is the folder, or c
            for place in {near.joinpath(*way) for way in ways for near in (file.parent, folder)}:
                own = (place.with_suffix(".py"), place / "__init__.py")
                yield from (found.resolve() for found in own if found.is_file() and found.is_relative_to(folder))


def _globals_of(value: Any) -> dict[str, Any] | None:
    """The global names of the module that a function or class was made in; None where that has no file."""
    if isinstance(value, type):
        found: Any = vars(sys.modules[value.__module__]) if value.__module__ in sys.modules else {}
    else:
        found = getattr(value, "__globals__", None)
    file = found.get("__file__") if isinstance(found, dict) else None
    return found if isinstance(file, str) and Path(file).is_file() else None


def _bytecode(code: CodeType) -> tuple[Any, ...]:
    inner = [_bytecode(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    return code.co_code, code.co_names, inner


def file_of_module(name: str) -> Path | None:
    """File of a module, found without importing it or its packages; None where there is none."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _decode(path: Path) -> str:
    with tokenize.open(path) as file:
        return file.read()


@functools.lru_cache(maxsize=256)
def code_text(source: str) -> str:
    """Return `source` without comments, docstrings, blank lines and trailing blanks.

    Blank lines and trailing blanks inside a string that is not a docstring are data and stay.
    """
    lines = source.split("\n")
    spans, kept = _comments_and_strings(source)
    docstrings = _docstrings(source, lines)
    for start, end in docstrings:
        kept.difference_update(range(start[0], end[0]))
    for (first, left), (last, right) in sorted(spans + docstrings, reverse=True):
        head, tail = lines[first - 1][:left], lines[last - 1][right:]
        # The lines keep their numbers.
        lines[first - 1 : last] = [head + tail] if first == last else [head, *[""] * (last - first - 1), tail]
    numbered = enumerate(lines, start=1)
    return "\n".join(
        line if number in kept else line.rstrip() for number, line in numbered if number in kept or line.strip()
    )


def _comments_and_strings(source: str) -> tuple[list[Span], set[int]]:
    """Spans of the comments, and the numbers of lines whose end lies inside a string."""
    comments: list[Span] = []
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start, token.end))
        elif token.type == tokenize.STRING:
            inside.update(range(token.start[0], token.end[0]))
        elif token.type in _OPENING:
            opened.append(token.start[0])
        elif token.type in _CLOSING:
            inside.update(range(opened.pop(), token.end[0]))
    return comments, inside


def _docstrings(source: str, lines: list[str]) -> list[Span]:
    def place(number: int | None, offset: int | None) -> Position:
        """ast counts UTF-8 bytes, tokenize characters."""
        assert number is not None
        return number, len(lines[number - 1].encode("utf-8")[:offset].decode("utf-8"))

    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    return [(place(t.lineno, t.col_offset), place(t.end_lineno, t.end_col_offset)) for t in texts]
