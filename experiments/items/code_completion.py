"""Write LongBench's two subsets of code, `lcc.jsonl` and `repobench-p.jsonl`, from installed packages.

Where the hub cannot be had, these are items of the subsets' own form (context, input, answers) made by their recipes
from modules that `dataset=pysource` holds out: they are not LongBench's items, and scores do not compare with its.

    python experiments/items/code_completion.py code_items
    python run.py task=longbench dataset.path=code_items task.subsets=[lcc,repobench-p]
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvq.data.rows import find_modules, is_in_split
from kvq.results.files import write_file

MIN_CONTEXT = 4000
"""Characters before the line that is asked in lcc, whose items are single files."""
MAX_CONTEXT = 12000
"""Characters of a repobench-p prompt: the definitions that are imported, then the file up to the line asked."""
MIN_LINE = 12
"""Characters of a line that is asked: a bracket or `else:` tells nothing."""


def make_completion(source: str) -> tuple[str, str] | None:
    """A file up to a line, and that line: the first statement after MIN_CONTEXT characters (LCC, arXiv 2306.14893)."""
    lines = source.splitlines(keepends=True)
    before = 0
    starts = {node.lineno for node in ast.walk(_parse(source)) if isinstance(node, ast.stmt)}
    for number, line in enumerate(lines, start=1):
        if before >= MIN_CONTEXT and number in starts and len(line.strip()) >= MIN_LINE:
            return "".join(lines[: number - 1]), line.rstrip("\n")
        before += len(line)
    return None


def make_cross_file(path: str, source: str, modules: dict[str, Path]) -> tuple[str, str, str] | None:
    """Imported definitions, a file up to the first use of one of them, and that line (RepoBench's XF-F, 2306.03091)."""
    tree, lines = _parse(source), source.splitlines(keepends=True)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found: dict[str, str] = {}
    for node in imports:
        if isinstance(node, ast.ImportFrom) and (file := _find_file(path, node, modules)) is not None:
            definitions = _definitions(file[1])
            found |= {
                one.asname or one.name: f"# Path: {file[0]}\n{definitions[one.name]}\n"
                for one in node.names
                if one.name in definitions
            }
    last = max((node.end_lineno or 0 for node in imports), default=0)
    uses = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in found]
    line = min((number for number in uses if number > last), default=None)
    if line is None or len(lines[line - 1].strip()) < MIN_LINE:
        return None
    context, before = "".join(found.values()), "".join(lines[: line - 1])
    fits = len(context) + len(before) <= MAX_CONTEXT
    return (context, f"# Path: {path}\n{before}", lines[line - 1].rstrip("\n")) if fits else None


def make_items() -> dict[str, list[dict[str, Any]]]:
    """All items of both subsets; the first of them are of all packages."""
    modules, seen = find_modules(), set()
    whole, crossed = [], []
    for path, source in _read_held_out(modules):
        if (one := make_completion(source)) is not None:
            whole.append(_item(path, one[0], "", one[1]))
        # Modules whose names are deprecated all import one function, so each set of definitions is asked once.
        if (pair := make_cross_file(path, source, modules)) is not None and pair[0] not in seen:
            seen.add(pair[0])
            crossed.append(_item(path, *pair))
    return {"lcc": whole, "repobench-p": crossed}


def _item(path: str, context: str, before: str, answer: str) -> dict[str, Any]:
    """An item in the fields of LongBench's files; `length` in words."""
    length = len(f"{context} {before}".split())
    return {"context": context, "input": before, "answers": [answer], "_id": path, "length": length}


def _read_held_out(modules: dict[str, Path]) -> Iterator[tuple[str, str]]:
    for path, file in sorted(modules.items(), key=lambda one: hashlib.sha256(one[0].encode()).digest()):
        if is_in_split(path, "test") or is_in_split(path, "calibration"):
            yield path, file.read_text(encoding="utf-8").replace("\r\n", "\n")


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that newer versions of Python refuse
        return ast.parse(source)


@functools.cache
def _definitions(file: Path) -> dict[str, str]:
    """Name -> text of the functions and classes at the top of a module."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [node for node in _parse(source).body if isinstance(node, kinds)]
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in found}


def _find_file(path: str, node: ast.ImportFrom, modules: dict[str, Path]) -> tuple[str, Path] | None:
    """The module that an import names, of the same package."""
    package = path.split("/")[: -node.level] if node.level else []
    parts = [*package, *(node.module.split(".") if node.module else [])]
    for name in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
        if name in modules and name.split("/")[0] == path.split("/")[0]:
            return name, modules[name]
    return None


def main() -> None:
    """Write both files into the folder that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in make_items().items():
        write_file(folder / f"{name}.jsonl", "".join(json.dumps(item) + "\n" for item in items).encode())
        print(f"{folder / name}.jsonl: {len(items)} items")


if __name__ == "__main__":
    main()
