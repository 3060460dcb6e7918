"""The embedded corpora: English docstrings and Python sources of the pinned scientific packages.

Nothing is downloaded: the text is what these packages carry, the same wherever the same versions are installed, and has
a fingerprint. Whole modules are held out by a hash of their path, for both kinds at once; docstrings that modules copy
from each other are dropped from the training side. The calibration split is a small part of the training modules.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvq.errors import DataError, check_choice

KINDS = ("pydocs", "pysource")
SPLITS = ("train", "test", "calibration")
PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sklearn", "sympy")
TEST_FRACTION = 0.05
CALIBRATION_FRACTION = 0.05
# Shorter docstrings ("Return a copy.") recur everywhere and say nothing, so none could be held out.
MIN_WORDS = 12
# Tables of constants and glyphs are neither prose nor code.
MAX_DIGITS = 0.15
ANCHOR_WORDS = 8

_SKIPPED_FOLDERS = {
    *("tests", "testing", "benchmarks"),
    *("externals", "array_api_compat", "array_api_extra"),  # vendored: the same file in several packages
    "_antlr",  # generated
    "distutils",  # installed for some Python versions only
}
# Written at build time, so they differ between wheels of one version.
_SKIPPED_FILES = {
    *("__config__.py", "_version.py", "_version_meson.py", "version.py"),
    *("conftest.py", "_distributor_init.py"),
}
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind and split, by their modules' paths; `fingerprint` as of `text_fingerprint`."""

    documents: tuple[str, ...]
    fingerprint: str


@lru_cache(maxsize=4)
def load_corpus(kind: str, split: str) -> Corpus:
    """The corpus of a kind and split: held-out modules (test), as many others, or all others (tens of seconds)."""
    check_choice("dataset.name", kind, KINDS)
    check_choice("dataset.split", split, SPLITS)
    texts = _drop_copies(_read_texts(kind, split), set()) if split == "test" else _train_documents(kind, split)
    documents = tuple(texts)
    return Corpus(documents, text_fingerprint(documents))


def text_fingerprint(texts: Iterable[str]) -> str:
    """The sha256 (hex) of texts, each followed by a NUL byte."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def is_in_split(path: str, split: str) -> bool:
    """Whether the module at package-relative posix `path` ("numpy/linalg/_linalg.py") is in a split."""
    share = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64
    if split == "calibration":
        return TEST_FRACTION <= share < TEST_FRACTION + CALIBRATION_FRACTION
    return (share < TEST_FRACTION) == (split == "test")


def find_modules() -> dict[str, Path]:
    """Return package-relative posix path -> file for all modules of the corpus, sorted."""
    modules = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise DataError(f"the embedded corpus needs the package {package}, which is not installed")
        root = Path(spec.origin).parent
        for file in root.rglob("*.py"):
            parts = file.relative_to(root).parts
            if file.name not in _SKIPPED_FILES and not _SKIPPED_FOLDERS.intersection(parts[:-1]):
                modules["/".join((package, *parts))] = file
    return dict(sorted(modules.items()))


def extract_docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of the module, classes and functions of `source`, in order, of at least MIN_WORDS words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    for node in _iter_definitions(tree):
        text = ast.get_docstring(node, clean=True)
        if text is not None and len(_WORD.findall(text)) >= MIN_WORDS:
            yield text.strip()


def normalize(text: str) -> str:
    """Return the lower-case words of `text` joined by spaces, by which copies of a docstring are recognized."""
    return " ".join(_WORD.findall(text.lower()))


def contains_any(text: str, held_out: dict[str, tuple[str, ...]]) -> bool:
    """Whether the normalized `text` contains a document of `held_out` (from `index_by_anchor`) as consecutive words."""
    words = text.split(" ")
    padded = f" {text} "
    for start in range(len(words) - ANCHOR_WORDS + 1):
        anchored = held_out.get(" ".join(words[start : start + ANCHOR_WORDS]))
        if anchored and any(f" {document} " in padded for document in anchored):
            return True
    return False


def index_by_anchor(documents: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Index normalized `documents` by their first ANCHOR_WORDS words, for `contains_any`."""
    index: dict[str, tuple[str, ...]] = {}
    for document in documents:
        anchor = " ".join(document.split(" ")[:ANCHOR_WORDS])
        index[anchor] = (*index.get(anchor, ()), document)
    return index


def _iter_definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the module and the classes and functions in it, in order; expressions, which hold none, are not entered."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        stack.extend(child for child in reversed(list(ast.iter_child_nodes(node))) if not isinstance(child, ast.expr))


def _read_texts(kind: str, split: str) -> Iterator[str]:
    """Yield the sources of `split`, or the docstrings in them, without empty files and tables of numbers."""
    for path, file in find_modules().items():
        if is_in_split(path, split):
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n").strip()
            if text and sum(map(str.isdigit, text)) <= MAX_DIGITS * len(text):
                yield from extract_docstrings(text) if kind == "pydocs" else (text,)


def _train_documents(kind: str, split: str) -> Iterator[str]:
    """Yield the texts of a training split that copy no text and contain no docstring of the test split."""
    held_out = {normalize(text) for text in load_corpus("pydocs", "test").documents}
    index = index_by_anchor(held_out)
    sources = {normalize(text) for text in load_corpus("pysource", "test").documents}
    for text in _drop_copies(_read_texts(kind, split), held_out | sources):
        if not contains_any(normalize(text), index):
            yield text


def _drop_copies(texts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yield the texts whose normalized form is neither in `seen` nor that of an earlier text."""
    hashes = {hashlib.sha256(text.encode()).digest() for text in seen}
    for text in texts:
        digest = hashlib.sha256(normalize(text).encode()).digest()
        if digest not in hashes:
            hashes.add(digest)
            yield text
