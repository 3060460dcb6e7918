"""Closed forms as docs/methods.md prints them, such as `K b + k/R, V b + 32/D where k = 4 if R > 64 else 2`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

FUNCTIONS = {"ceil": math.ceil, "round": round, "max": max, "min": min, "Fraction": Fraction, "__builtins__": {}}
PRODUCT = re.compile(r"(?<=[\w)]) (?!(?:if|else)\b)(?<!\bif )(?<!\belse )(?=[\w(])")
"""A space between two factors; `64 round(...)` too."""


def evaluate(formula: str, names: Mapping[str, int | Fraction]) -> Fraction:
    """The exact value of one formula; a space multiplies."""
    exact = re.sub(r"\b\d+\b", r"Fraction(\g<0>)", PRODUCT.sub("*", formula))
    return Fraction(eval(exact, FUNCTIONS, {name: Fraction(value) for name, value in names.items()}))


def closed_forms(cell: str, names: Mapping[str, int]) -> tuple[Fraction, Fraction]:
    """Bits of keys and of values by a cell of the page, whose two formulas, if it has two, are marked K and V."""
    cell, *definitions = re.split(r" where ", cell)
    known: dict[str, int | Fraction] = dict(names)
    for definition in (part for text in definitions for part in re.split(r", (?=\w+ = )", text)):
        name, formula = definition.split(" = ")
        known[name] = evaluate(formula, known)
    key, value = sides.groups() if (sides := re.fullmatch(r"K (.+), V (.+)", cell)) else (cell, cell)
    return evaluate(key, known), evaluate(value, known)
