"""Classes of wrong answers: another needle, pieces of several needles (bit-mixing), or something else (nsn)."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

SHORTEST_PIECE = 2
"""With pieces of one character, 87% of random digit strings would count as mixtures."""


class Outcome(enum.StrEnum):
    """What an answer is."""

    hit = "hit"
    wrong_needle = "wrong_needle"
    bit_mixing = "bit_mixing"
    other = "other"


def is_mixture(answer: str, planted: Sequence[str]) -> bool:
    """Whether `answer` is none of `planted` but splits into pieces of at least two characters taken from two or more.

    A piece is taken from a value that holds it at the same position, or anywhere as consecutive characters (which the
    first implies).
    """
    if answer in planted:
        return False
    # After each position: the one value that all pieces so far can come from, or None where two or more are needed.
    behind: list[set[int | None]] = [set() for _ in range(len(answer) + 1)]
    for end in range(SHORTEST_PIECE, len(answer) + 1):
        for start in range(end - SHORTEST_PIECE + 1):
            sources = {index for index, value in enumerate(planted) if answer[start:end] in value}
            if not sources:
                continue
            if start == 0:
                behind[end] |= sources
            for source in behind[start]:
                behind[end] |= {source if source == index else None for index in sources}
    return None in behind[len(answer)]


def classify(answer: str, wanted: str, planted: Sequence[str]) -> Outcome:
    """The class of `answer` where `wanted` was asked for and the prompt contained the values `planted`."""
    if answer == wanted:
        return Outcome.hit
    if answer in planted:
        return Outcome.wrong_needle
    return Outcome.bit_mixing if is_mixture(answer, planted) else Outcome.other


def random_rate(planted: Sequence[str], rng: np.random.Generator, draws: int) -> float:
    """Fraction of random numbers, with as many digits as the first of `planted`, that count as mixtures of them."""
    digits = len(planted[0])
    drawn = rng.integers(10 ** (digits - 1), 10**digits, size=draws)
    return sum(is_mixture(str(number), planted) for number in drawn.tolist()) / draws
