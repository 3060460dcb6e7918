"""A hash of source code without comments and docstrings: the version of parts that declare none."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType
from typing import Any

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
    names = _names_behind(function) or _names_behind(type(function))
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


def _names_behind(value: Any) -> dict[str, Any] | None:
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
    for start, end in sorted(spans + docstrings, reverse=True):
        _blank(lines, start, end)
    out: list[str] = []
    for number, line in enumerate(lines, start=1):
        if number in kept:
            out.append(line)
        elif line.strip():
            out.append(line.rstrip())
    return "\n".join(out)


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
    spans: list[Span] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        text = node.body[0]
        assert text.end_lineno is not None
        assert text.end_col_offset is not None
        start = (text.lineno, _column(lines[text.lineno - 1], text.col_offset))
        spans.append((start, (text.end_lineno, _column(lines[text.end_lineno - 1], text.end_col_offset))))
    return spans


def _column(line: str, offset: int) -> int:
    """Characters before a byte offset: ast counts UTF-8 bytes, tokenize characters."""
    return len(line.encode("utf-8")[:offset].decode("utf-8"))


def _blank(lines: list[str], start: Position, end: Position) -> None:
    """Remove a span in place, leaving the lines' numbers as they are."""
    (first, left), (last, right) = start, end
    head, tail = lines[first - 1][:left], lines[last - 1][right:]
    for number in range(first, last + 1):
        lines[number - 1] = ""
    lines[first - 1] = head + tail if first == last else head
    if first != last:
        lines[last - 1] = tail
