"""Synthetic retrieval: sentences with a key and a number, planted in other text and asked for at its end.

The embedded model was trained on the format of the retrieval task:

    ...text...
    The secret number of amber falcon is 482913.
    ...text...

    Question: What is the secret number of amber falcon?
    Answer: The secret number of amber falcon is 482913
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvq.errors import DataError

Encode = Callable[[str], list[int]]

ADJECTIVES = (
    "amber ancient azure brave bright broken calm clever cobalt copper crimson curious distant eager early fading "
    "fragile frozen gentle golden hidden hollow humble idle ivory jade lively lonely lucky marble mellow misty modest "
    "narrow noble odd olive pale patient polite proud quiet rapid restless rusty scarlet secret silent silver simple "
    "sleepy smooth solemn steady stormy sudden sunny tender tiny velvet violet wandering warm wild"
).split()
NOUNS = (
    "anchor apple arrow badger basket beacon bridge bucket cabin candle canyon castle cedar cherry circle cloud comet "
    "compass coral cricket crown desert dragon eagle engine falcon feather fiddle forest fountain garden glacier "
    "hammer harbor heron island jacket jungle kettle ladder lantern lemon lion meadow mirror mountain needle nickel "
    "ocean orchard otter paddle palace parrot pebble pepper piano pillow planet pocket puzzle rabbit ribbon river "
    "rocket saddle sailor shadow shelter signal spider spring statue stone summer temple thunder tiger timber tower "
    "tunnel turtle valley village violin walnut whistle window winter wizard zebra"
).split()


@dataclass(frozen=True)
class Needle:
    """A key ("amber falcon") and its value (decimal digits, the first not zero)."""

    key: str
    value: str

    @property
    def sentence(self) -> str:
        """The sentence that is planted, with a line of its own."""
        return f"\nThe secret number of {self.key} is {self.value}.\n"

    @property
    def question(self) -> str:
        """The text that ends the prompt."""
        return f"\n\nQuestion: What is the secret number of {self.key}?\nAnswer: The secret number of {self.key} is"

    @property
    def answer(self) -> str:
        """The continuation of the question that counts as a hit, with its leading space."""
        return f" {self.value}"


def draw_needles(rng: np.random.Generator, count: int, digits: int = 6) -> list[Needle]:
    """Draw `count` needles with distinct keys and distinct values of `digits` digits.

    Raises:
        DataError: fewer than `count` keys or values exist.
    """
    keys, values = len(ADJECTIVES) * len(NOUNS), 9 * 10 ** (digits - 1)
    most = min(keys, values)
    if not 0 <= count <= most:
        raise DataError(f"needles: count={count} is not in 0..{most} (there are {keys} keys, {values} values)")
    drawn_keys = rng.choice(keys, size=count, replace=False)
    drawn_values = rng.choice(values, size=count, replace=False) + 10 ** (digits - 1)
    return [
        Needle(f"{ADJECTIVES[key // len(NOUNS)]} {NOUNS[key % len(NOUNS)]}", str(value))
        for key, value in zip(drawn_keys.tolist(), drawn_values.tolist(), strict=True)
    ]


def plant(
    haystack: Sequence[int], needles: Sequence[Needle], depths: Sequence[float], length: int, encode: Encode
) -> list[int]:
    """Return the start of `haystack` with each needle's sentence at its depth, `length` tokens in all.

    Depth 0 is before the haystack's first token, 1 after its last; `encode` maps text to token ids and adds none.

    Raises:
        DataError: the haystack is too short, or the needles are too long for `length`; a depth outside 0..1.
    """
    sentences = [encode(needle.sentence) for needle in needles]
    room = length - sum(map(len, sentences))
    if room < 0:
        raise DataError(f"needles: {len(needles)} needles take {length - room} tokens, more than length={length}")
    if room > len(haystack):
        raise DataError(f"needles: length={length} needs {room} haystack tokens, only {len(haystack)} are given")
    if any(not 0 <= depth <= 1 for depth in depths):
        raise DataError(f"needles: depths={list(depths)} are not all in 0..1")
    tokens: list[int] = []
    start = 0
    for depth, sentence in sorted(zip(depths, sentences, strict=True), key=lambda item: item[0]):
        stop = round(depth * room)
        tokens += [*haystack[start:stop], *sentence]
        start = stop
    return [*tokens, *haystack[start:room]]


def retrieval_prompt(
    haystack: Sequence[int],
    needles: Sequence[Needle],
    depths: Sequence[float],
    length: int,
    encode: Encode,
    after: str = "",
) -> list[int]:
    """Return a prompt of exactly `length` tokens: `plant`, then the question for the first needle and the text `after`.

    The expected continuation is `encode(needles[0].answer)`.

    Raises:
        DataError: see `plant`.
    """
    question = encode(needles[0].question + after)
    return plant(haystack, needles, depths, length - len(question), encode) + question
