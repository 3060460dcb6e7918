"""The house keeps its shape: imports go one way, files stay small, names say something."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvq"

# What a room may import of kvq, beside itself and kvq.errors.
CODECS = {"codecs"}
KERNELS = CODECS | {"kernels"}
METHODS = CODECS | {"methods", "config", "explain", "ranges"}
CACHE = METHODS | {"cache", "kernels"}
INPUTS = {"models", "data", "hub"}
DIAGNOSTICS = {"diagnostics", "diagnostic_config"}
TASKS = CACHE | INPUTS | DIAGNOSTICS | {"tasks", "task_config", "speed_config", "results"}
CALIBRATION = CACHE | INPUTS | {"calibration", "calibration_config", "results"}
ALLOWED = {
    "errors": set(),
    "hub": set(),
    "codecs": set(),
    "kernels": KERNELS,
    "diagnostics": CODECS,
    "ranges": set(),
    "diagnostic_config": {"ranges"},
    "speed_config": {"ranges"},
    "task_config": {"diagnostic_config", "ranges", "speed_config"},
    "calibration_config": {"ranges"},
    "layout_config": set(),
    "logger_config": {"ranges"},
    "composing": set(),
    "config": {"calibration_config", "composing", "layout_config", "logger_config", "methods", "ranges", "task_config"},
    "sweep_loader": {"composing", "config"},
    "explain": {"config", "methods"},
    "methods": METHODS,
    "cache": CACHE,
    "models": {"cache", "config", "hub"},
    "identity": {"config", "methods", "task_config"},
    "data": {"config", "hub"},
    "results": set(),
    "report": {"results"},
    "calibration": CALIBRATION,
    "tracking": {"logger_config", "report", "results"},
    "tasks": TASKS,
    "calibrated_run": TASKS | CALIBRATION | {"identity"},
    "runner": TASKS | {"identity", "calibrated_run"},
    "sweep": TASKS | {"identity", "runner", "report", "tracking"},
    "experiments": {"config", "explain", "identity", "layout_config", "report", "results"},
    "cli": {"config", "experiments", "explain", "runner", "sweep", "__version__"},
    "__init__": {"methods", "cache", "calibration"},
}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Rooms of kvq that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "kvq":
                names |= {f"kvq.{alias.name}" for alias in node.names}
            else:
                names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("kvq.")}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in ALLOWED, f"{room} has no place in the order of imports"
    too_far = imported(path) - ALLOWED[room] - {room, "errors"}
    assert not too_far, f"{path.relative_to(ROOT)} imports {sorted(too_far)}"


def test_files_and_functions_stay_readable() -> None:
    long_files, long_functions = [], []
    for path in [*sources(), *(ROOT / "experiments").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            long_files.append(path.name)
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        long_functions += [f"{path.name}:{f.name}" for f in functions if (f.end_lineno or 0) - f.lineno > 60]
    assert not long_files
    assert not long_functions


def test_no_room_is_a_drawer() -> None:
    assert not [path for path in sources() if path.stem in {"utils", "util", "helpers", "helper", "misc", "common"}]
