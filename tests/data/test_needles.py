from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.data.text import ADJECTIVES, NOUNS, Needle, build_needle_prompt, draw_needles, plant_needles
from kvq.errors import DataError

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
    seed=st.integers(0, 2**32),
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    length=st.integers(400, 1500),
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
