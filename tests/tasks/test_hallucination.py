"""Mixtures of needles on answers made by hand, and at random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.tasks.niah import classify, is_mixture, random_rate

PLANTED = ["123456", "987654", "555000"]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("123456", "hit"),
        ("987654", "wrong_needle"),
        ("123654", "bit_mixing"),  # the first half of one, the last half of another, in their places
        ("983456", "bit_mixing"),
        ("129855", "bit_mixing"),  # three pieces of two
        ("987123", "bit_mixing"),  # consecutive characters, not in their places
        ("98712345", "bit_mixing"),  # of another length
        ("123444", "other"),  # the end is in no needle
        ("123412", "other"),  # pieces of one needle alone
        ("23", "other"),
        ("193857", "other"),  # single characters do not count
        ("", "other"),
        ("about 7", "other"),
    ],
)
def test_answers_by_hand(answer: str, outcome: str) -> None:
    assert classify(answer, PLANTED[0], PLANTED) == outcome


def test_a_piece_that_two_needles_share_may_come_from_either() -> None:
    assert is_mixture("1299", ["1234", "1299x", "9900"])
    assert not is_mixture("1212", ["12", "34"])
    assert is_mixture("1212", ["12", "12x"])


values = st.lists(st.text("0123", min_size=2, max_size=5), min_size=2, max_size=4, unique=True)


@given(planted=values, answer=st.text("0123", max_size=7))
def test_the_classifier_is_the_definition(planted: list[str], answer: str) -> None:
    found = False
    for cuts in itertools.product([False, True], repeat=max(0, len(answer) - 1)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(answer)]
        pieces = [answer[a:b] for a, b in itertools.pairwise(edges)]
        if any(len(piece) < 2 for piece in pieces):
            continue
        sources = [{v for v in planted if piece in v} for piece in pieces]
        # Two needles are really used, or could be, if the pieces do not all insist on one.
        found |= all(sources) and any(len(set(choice)) > 1 for choice in itertools.product(*sources))
    assert is_mixture(answer, planted) == (found and answer not in planted)


def test_random_strings_are_rarely_mixtures() -> None:
    rng = np.random.default_rng(0)
    needles = [str(number) for number in rng.integers(10**5, 10**6, size=5)]
    rate = random_rate(needles, rng, 4000)
    assert 0.001 < rate < 0.05
    # Single characters would make almost everything a mixture: the reason for two.
    digits = set("".join(needles))
    assert np.mean([set(str(n)) <= digits for n in rng.integers(10**5, 10**6, size=1000).tolist()]) > 0.5
