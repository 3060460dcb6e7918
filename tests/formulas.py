"""Closed forms as docs/methods.md prints them, such as `K b + k/R, V b + 32/D where k = 4 if R > 64 else 2`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
COMPARE: dict[type[ast.cmpop], Callable[[Fraction, Fraction], bool]] = {ast.Gt: operator.gt, ast.Eq: operator.eq}
FUNCTIONS: dict[str, Callable[..., int | Fraction]] = {"ceil": math.ceil, "round": round, "max": max, "min": min}
PRODUCT = re.compile(r"(?<=[\w)]) (?=[\w(])")
"""A space between two factors; `64 round(...)` too."""
WORDS = re.compile(r" (if|else) ")


def evaluate(formula: str, names: Mapping[str, int | Fraction]) -> Fraction:
    """The exact value of one formula; a space multiplies. Raises: ValueError: anything that is no such formula."""
    pieces = [piece if piece in ("if", "else") else PRODUCT.sub("*", piece) for piece in WORDS.split(formula)]
    try:
        return _value(ast.parse(" ".join(pieces), mode="eval").body, names)
    except SyntaxError:
        raise ValueError(f"{formula!r}: no formula") from None


def _value(node: ast.expr, names: Mapping[str, int | Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Name(id=name) if name in names:
            return Fraction(names[name])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return Fraction(FUNCTIONS[name](*(_value(arg, names) for arg in args)))
        case ast.IfExp(test=ast.Compare(left=left, ops=[op], comparators=[right]), body=body, orelse=other):
            holds = COMPARE[type(op)](_value(left, names), _value(right, names))
            return _value(body if holds else other, names)
    raise ValueError(f"{ast.unparse(node)}: not a part of a formula in {', '.join(names)}")


def closed_forms(cell: str, names: Mapping[str, int]) -> tuple[Fraction, Fraction]:
    """Bits of keys and of values by a cell of the page, whose two formulas, if it has two, are marked K and V."""
    cell, *definitions = re.split(r" where ", cell)
    known: dict[str, int | Fraction] = dict(names)
    for definition in (part for text in definitions for part in re.split(r", (?=\w+ = )", text)):
        name, formula = definition.split(" = ")
        known[name] = evaluate(formula, known)
    key, value = sides.groups() if (sides := re.fullmatch(r"K (.+), V (.+)", cell)) else (cell, cell)
    return evaluate(key, known), evaluate(value, known)
