"""A hash of source that follows the code and not its prose."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvq.results.record
import kvq.results.store
import kvq.results.versions
from kvq.results.versions import code_behind, code_hash, code_text

CODE = '''"""What it is."""

import math  # for pi


# A class.
class Disc:
    """A disc.

    Of some size.
    """

    def area(self, r):
        "Its área."
        text = """kept

          # not a comment
        """
        return f"{math.pi * r**2}" + text  # units: none

    async def empty(self): "é"; return 1
'''
BARE = '''import math
class Disc:
    def area(self, r):
        text = """kept

          # not a comment
        """
        return f"{math.pi * r**2}" + text
    async def empty(self): ; return 1'''


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_left() -> None:
    assert code_text(CODE) == BARE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("What it is", "What it was"),
        ("  # for pi", ""),
        ("# A class.\n", "# A class\n# of discs.\n\n"),
        ("Of some size", "\n    Of one size, it's said"),
        ("\n\n\n", "\n"),
        ("none\n", "none   \n"),
        ('"Its área."', "'''Its\n\n        area.'''"),
        ("\n", "\r\n"),
    ],
)
def test_prose_does_not_count(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    before = code_hash(write(tmp_path / "disc.py", CODE))
    assert code_hash(write(tmp_path / "disc.py", CODE.replace(old, new))) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("r**2", "r**3"),
        ("kept\n\n", "kept\n"),
        ("# not a comment", "# not the comment"),
        ("kept\n", "kept  \n"),
        ("        return f", "        if r:\n            return f"),
        ("Disc", "Disk"),
        ("return 1", "return 2"),
        ("import math", '"a string, not the docstring"\nimport math'),
    ],
)
def test_code_counts(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    before = code_hash(write(tmp_path / "disc.py", CODE))
    assert code_hash(write(tmp_path / "disc.py", CODE.replace(old, new))) != before


@given(comment=st.text(st.characters(exclude_categories=["C", "Z"])), place=st.sampled_from([0, 1, 2, 3]))
def test_any_comment_anywhere(comment: str, place: int) -> None:
    lines = ["def f(x):", "    y = '#' + x", "    return (y,", "            x)"]
    lines[place] += f"  # {comment}"
    assert code_text("\n".join(lines)) == "\n".join(line.split("  # ")[0] for line in lines)


@pytest.mark.parametrize("module", [kvq.results.versions, kvq.results.store, kvq.results.record])
def test_real_code_is_left_whole(module: ModuleType) -> None:
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    assert ast.dump(ast.parse(code_text(text))) == ast.dump(tree)


def test_order_does_not_count(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.py", "x = 1"), write(tmp_path / "two.py", "x = 2")
    assert code_hash(one, two) == code_hash(two, one)
    assert len({code_hash(one), code_hash(two), code_hash(one, two), code_hash()}) == 4


def test_an_extension_counts_by_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "fast.so"
    file.write_bytes(b"\x00# 1")
    before = code_hash(file)
    file.write_bytes(b"\x00# 2")
    assert code_hash(file) != before


@pytest.mark.parametrize(
    ("file", "changed"),
    [("score.py", True), ("inside.py", True), ("sub/deep.py", True), ("named.py", True), ("other.py", False)],
)
def test_the_code_behind_a_function_is_all_that_it_can_import(tmp_path: Path, file: str, changed: bool) -> None:
    """Imports within functions, of packages and by name too; a file beside it that nothing names does not count."""
    (tmp_path / "sub").mkdir()
    first = "def score():\n    from inside import part\n    return part()\n"
    texts = {
        "score.py": first,
        "inside.py": "def part():\n    import sub.deep as deep\n    return deep.HALF\n",
        "sub/__init__.py": "",
        "sub/deep.py": "import importlib\nHALF = importlib.import_module('named').NUMBER / 2\n",
        "named.py": "NUMBER = 1\n",
        "other.py": "NUMBER = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    names = {"__name__": "score", "__file__": str(tmp_path / "score.py")}
    exec(compile(first, "score.py", "exec"), names)
    before = code_behind(names["score"])
    path = tmp_path / file
    path.write_text(path.read_text(encoding="utf-8") + "MORE = 1\n", encoding="utf-8")
    assert (code_behind(names["score"]) != before) == changed
