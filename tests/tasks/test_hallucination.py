"""Mixtures of needles on answers made by hand, and at random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.data.text import ADJECTIVES, NOUNS, Needle, build_needle_prompt, draw_needles, plant_needles
from kvq.errors import DataError
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


HAYSTACK = [1000 + index for index in range(2000)]


def encode(text: str) -> list[int]:
    """One token to a character, all below the haystack's."""
    return [min(ord(letter), 999) for letter in text]


def decode(tokens: list[int]) -> str:
    return "".join(chr(token) if token < 1000 else "." for token in tokens)


def test_words_are_distinct():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES)
    assert len(set(NOUNS)) == len(NOUNS)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 40), digits=st.integers(2, 12))
def test_drawn_needles_differ_in_key_and_value(seed, count, digits):
    needles = draw_needles(np.random.default_rng(seed), count, digits)
    assert len({needle.key for needle in needles}) == len({needle.value for needle in needles}) == count
    assert all(len(needle.value) == digits and needle.value[0] != "0" for needle in needles)


def test_draws_follow_the_generator():
    first, again, other = (draw_needles(np.random.default_rng(seed), 5) for seed in (1, 1, 2))
    assert first == again != other


@given(
    seed=st.integers(0, 2**32), depths=st.lists(st.floats(0, 1), min_size=1, max_size=4), length=st.integers(400, 1500)
)
def test_prompt_has_its_length_and_keeps_the_haystack(seed, depths, length):
    needles = draw_needles(np.random.default_rng(seed), len(depths))
    tokens = build_needle_prompt(HAYSTACK, needles, depths, length, encode)
    assert len(tokens) == length
    hay = [token for token in tokens if token >= 1000]
    assert hay == HAYSTACK[: len(hay)]
    assert all(decode(tokens).count(needle.sentence) == 1 for needle in needles)
    assert decode(tokens).endswith(needles[0].question)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_needle_lies_at_its_depth(depth):
    (needle,) = draw_needles(np.random.default_rng(0), 1)
    sentence = encode(needle.sentence)
    tokens = plant_needles(HAYSTACK, [needle], [depth], 1000, encode)
    start = round(depth * (1000 - len(sentence)))
    assert tokens[start : start + len(sentence)] == sentence


def test_the_answer_completes_the_question_to_the_planted_sentence():
    needle = Needle("amber falcon", "482913")
    assert (needle.question + needle.answer + ".").endswith(needle.sentence.strip())


def test_needles_that_do_not_fit():
    needles = draw_needles(np.random.default_rng(0), 1)
    with pytest.raises(DataError, match="more than length=20"):
        plant_needles(HAYSTACK, needles, [0.5], 20, encode)
    with pytest.raises(DataError, match=r"task\.needles=10: there are \d+ keys, and 9 values of 1 digits"):
        draw_needles(np.random.default_rng(0), 10, digits=1)
