"""The house keeps its shape: imports go one way, files stay small, names say something."""

from __future__ import annotations

import ast
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

from kvq.config.choices import Choice, choices_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvq"
PLUGINS = sorted(path for path in (ROOT / "plugins").iterdir() if (path / "__init__.py").is_file())

# What a room may import of kvq, beside itself and what imports nothing (errors, entry): the rooms that stand below it.
CODECS = {"codecs", "config"}
KERNELS = CODECS | {"kernels"}
INPUTS = {"config", "data", "models"}
CACHE = KERNELS | {"cache", "models", "results"}
METHODS = CACHE | {"methods"}
DIAGNOSTICS = CODECS | {"diagnostics"}
TASKS = METHODS | INPUTS | DIAGNOSTICS | {"calibration", "results", "tasks"}
ALLOWED = {
    "errors": set(),
    "entry": {"config"},
    "__main__": {"entry"},
    "config": set(),
    "results": {"config"},
    "codecs": {"config"},
    "kernels": KERNELS,
    "diagnostics": CODECS,
    "data": {"config"},
    "models": {"config", "data"},
    "methods": METHODS,
    "cache": CACHE,
    "tasks": TASKS,
    "calibration": METHODS | INPUTS | {"results"},
    "report": {"config", "results"},
    "papers": {"config", "report", "results"},
    "runs": TASKS | {"report"},
    "cli": {"config", "papers", "runs", "__version__"},
    "__init__": {"cache", "calibration", "methods", "report"},
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
    too_far = imported(path) - ALLOWED[room] - {room, "errors", "entry"}
    assert not too_far, f"{path.relative_to(ROOT)} imports {sorted(too_far)}"


def test_no_two_files_import_each_other() -> None:
    """Nor do more of them in a ring; imports for type checkers alone count too."""
    files = {".".join(one.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): one for one in sources()}
    house = networkx.DiGraph()
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                found = [f"{node.module}.{alias.name}" for alias in node.names]
                house.add_edges_from((name, inner if inner in files else node.module) for inner in found)
            elif isinstance(node, ast.Import):
                house.add_edges_from((name, alias.name) for alias in node.names if alias.name in files)
    assert house.number_of_edges() > len(files)
    assert not [ring for ring in networkx.strongly_connected_components(house) if len(ring) > 1]


def test_the_core_names_no_plugin() -> None:
    """Nor does one plugin name another."""
    names = {plugin.name for plugin in PLUGINS}
    assert names == {"kvq_engines", "kvq_kernels", "kvq_lab", "kvq_zoo"}
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "hydra_plugins").rglob("*.py")]
    assert not [path.name for path in texts if any(name in path.read_text(encoding="utf-8") for name in names)]
    for plugin in PLUGINS:
        others = names - {plugin.name}
        sources = [path for path in plugin.rglob("*.py") if "tests" not in path.relative_to(plugin).parts]
        assert not [path.name for path in sources if any(name in path.read_text(encoding="utf-8") for name in others)]


def test_the_core_asks_for_nothing_of_a_plugin() -> None:
    """No method, task or class of a plugin is named by the core's code or configurations."""
    presets = {choice.name for choice in plugins_choices("method")}
    classes = {name for plugin in PLUGINS for path in plugin.glob("*.py") for name in classes_of(path)}
    classes = {name for name in classes if re.search("[a-z][A-Z]", name)}  # others are words
    classes -= {name for path in sources() for name in classes_of(path)}
    asked = re.compile(
        r"(?:method=|/method/)(?:" + "|".join(sorted(map(re.escape, presets), key=len, reverse=True)) + r")(?![\w])"
        r"|\bengine/\w|task=(?:" + "|".join(sorted(choice.name for choice in plugins_choices("task"))) + r")\b"
        r"|\b(?:" + "|".join(sorted(classes)) + r")\b"
    )
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "kvq").rglob("*.yaml")]
    found = {str(path.relative_to(ROOT)): asked.findall(path.read_text(encoding="utf-8")) for path in texts}
    assert not {name: words for name, words in found.items() if words}


def plugins_choices(group: str) -> list[Choice]:
    """The choices of a group that plugins have."""
    folders = [plugin / "conf" for plugin in PLUGINS if (plugin / "conf").is_dir()]
    return [choice for folder in folders for choice in choices_in(folder) if choice.group == group]


def classes_of(path: Path) -> set[str]:
    """The public classes that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def test_the_core_stands_without_plugins() -> None:
    """Its methods and tasks compose, and none of them builds on one of a plugin."""
    code = (
        "from kvq.config import compose, conf_dir, plugins; from kvq.config.choices import choices_in\n"
        "names = [(c.group, c.name) for c in choices_in(conf_dir()) if c.group in ('method', 'residual')]\n"
        "[compose([f'{group}={name}']) for group, name in names]\n"
        "print(len(names), len(plugins.conf_dirs()))"
    )
    environment = os.environ | {"KVQ_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    methods, folders = map(int, done.stdout.split())
    assert methods > 100
    assert folders == 1


def test_a_plugin_imports_public_names() -> None:
    """Of kvq; what begins with an underscore may change."""
    for path in (path for plugin in PLUGINS for path in plugin.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvq":
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not [name for name in names if name.startswith("_") and name != "__version__"], path
            if isinstance(node, ast.Import) and "tests" not in path.relative_to(ROOT).parts:
                assert "kvq._" not in " ".join(alias.name for alias in node.names), path


def test_plugins_emit_no_instructions() -> None:
    """Kernels are plain numba: no LLVM code of their own, and no names of numba that a release may change."""
    for path in (path for plugin in PLUGINS for path in plugin.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
            parts = [tuple(name.split(".")) for name in names]
            assert not [name for name in parts if name[0] == "llvmlite"], path
            assert not [name for name in parts if name[:2] in {("numba", "core"), ("numba", "extending")}], path


def test_the_house_keeps_its_budgets() -> None:
    """Lines and files of each part; `budgets.csv` is raised only with a reason in its last column."""
    with (ROOT / "tests" / "budgets.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} >= {"kvq", "tests", "conf", "results", *(plugin.name for plugin in PLUGINS)}
    over = []
    for row in rows:
        files = [path for path in (ROOT / row["folder"]).rglob(row["files_like"]) if path.is_file()]
        files = [path for path in files if row["part"] == "tests" or "tests" not in path.relative_to(ROOT).parts]
        files = [path for path in files if "__pycache__" not in path.parts and not ignored(path)]
        lines = sum(path.read_bytes().count(b"\n") for path in files) if row["lines"] else 0
        if lines > int(row["lines"] or 0) or len(files) > int(row["files"]):
            over.append(f"{row['part']}: {lines} lines in {len(files)} files")
    assert not over


def ignored(path: Path) -> bool:
    """Whether a file is a product of runs, which git ignores."""
    own = path.relative_to(ROOT)
    if own.parts[0] != "results":
        return False
    made = ".locks" in own.parts or (own.parts[1] == "tables" and path.suffix in (".csv", ".tex"))
    return made or own.parts[1] not in ("runs", "tables", "reference", "bench", "searches")


def test_a_cache_knows_no_method_by_name() -> None:
    policies = {path.stem for path in (PACKAGE / "methods").glob("*.py")} - {"__init__", "build", "method"}
    assert policies >= {"kept_keys", "mixed_precision", "tiers"}
    for path in (PACKAGE / "cache").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "kvq.methods" not in text.replace("`kvq.methods.method.Method`", ""), path.name


def test_settings_need_no_torch() -> None:
    code = "import sys, kvq.config.identity; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "set()\n"


def test_rooms_are_few() -> None:
    assert len({path.relative_to(PACKAGE).parts[0] for path in sources()} - {"__init__.py", "__main__.py"}) <= 20


def test_files_and_functions_stay_readable() -> None:
    long_files, long_functions = [], []
    for path in [
        *sources(),
        *(path for folder in ("experiments", "tests", "plugins") for path in (ROOT / folder).rglob("*.py")),
    ]:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            long_files.append(path.name)
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        long_functions += [f"{path.name}:{f.name}" for f in functions if (f.end_lineno or 0) - f.lineno > 60]
    assert not long_files
    assert not long_functions


def test_no_room_is_a_drawer() -> None:
    assert not [path for path in sources() if path.stem in {"utils", "util", "helpers", "helper", "misc", "common"}]
