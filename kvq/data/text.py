"""Texts as tokens: data sets as streams, chat templates, and prompts with planted sentences for synthetic retrieval.

A data set is one stream of joined text, or one stream for each cropped document. Sentences with a key and a number
are planted in other text ("The secret number of amber falcon is 482913.", on a line of its own) and asked for at its
end ("Question: What is the secret number of amber falcon? Answer: ..."), as the embedded model was trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from jaxtyping import Int
from torch import Tensor

from kvq.data.rows import read_joined_text, read_rows, text_fingerprint
from kvq.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kvq.config import DatasetConfig


# Added to the seed of the generator of random documents, so that no other use of the same seed draws the same numbers.
_MESSAGE = "MESSAGE-OF-THE-USER"
Encode = Callable[[str], list[int]]
_WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS = (_WORDS[kind].split() for kind in ("adjectives", "nouns"))


@dataclass(frozen=True)
class TokenData:
    """Token streams of a dataset: windows never cross from one stream into another.

    `fingerprint` is the sha256 (hex) of the text (of the crops' tokens, for documents), `text_bytes` the UTF-8 bytes
    that all tokens together stand for, so that bits per byte = nats / ln 2 / bytes does not depend on the tokenizer.
    """

    name: str
    streams: list[Int[Tensor, " tokens"]]
    fingerprint: str
    text_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens in all streams."""
        return sum(len(stream) for stream in self.streams)


def load_tokens(config: DatasetConfig, tokenizer: Any, context: int, bos: int | None = None) -> TokenData:
    """The dataset of `config` as int64 streams, each long enough for a window of `context` tokens.

    - `loader=embedded`, `loader=text`: documents in the order of their hashes, or all rows, joined by `separator`,
      tokenized once (WikiText-2 in GPTQ's protocol).
    - `loader=documents`: `documents` random rows of at least `context` tokens, each cropped to `context` tokens at a
      random place (C4 in GPTQ's protocol, without replacement); drawn by nothing but `seed`.

    `bos`: the token that every window begins with, for which a window keeps room; a stream then has none. `max_tokens`
    cuts the stream, or the number of documents.
    """
    loader, room = str(config.loader), context - (bos is not None)
    if config.max_tokens is not None and config.max_tokens < room:
        raise DataError(f"dataset.max_tokens={config.max_tokens} is less than one window, task.context={context}")
    return (_load_documents if loader == "documents" else _load_joined)(config, tokenizer, room, bos)


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Token ids of `text`, with the tokens that `tokenizer` always adds if `special`."""
    return check_token_ids(tokenizer, tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def check_token_ids(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return `ids`. Raises: DataError: an id for which the model's embedding has no row."""
    rows, odd = getattr(tokenizer, "embedding_rows", None), max(ids, default=0)
    if rows is not None and odd >= rows:
        raise DataError(f"tokenizer: {tokenizer.decode([odd])!r} is token {odd}, the model's embedding has {rows} rows")
    return ids


def begins_with_bos(tokenizer: Any, chat: bool = False) -> bool:
    """Whether `tokenizer` begins a text (`chat`: a conversation by its template) with its begin-of-text token."""
    text = render_chat(tokenizer, "a") if chat else "a"
    return tokenizer.bos_token_id is not None and encode(tokenizer, text)[:1] == [tokenizer.bos_token_id]


def render_chat(tokenizer: Any, text: str) -> str:
    """The chat template's text of a conversation whose one message is `text`, up to where the answer begins."""
    if not tokenizer.chat_template:
        raise ConfigError("task.chat_template=true: the model's tokenizer has no chat template")
    chat = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def split_chat(tokenizer: Any) -> tuple[str, str]:
    """What `render_chat` writes before and after the message."""
    before, mark, after = render_chat(tokenizer, _MESSAGE).partition(_MESSAGE)
    if not mark or _MESSAGE in after:
        raise ConfigError("task.chat_template=true: the chat template does not write a message once, as it is")
    return before, after


def set_bos(tokenizer: Any, ids: Sequence[int], bos: int | None) -> list[int]:
    """`ids` after exactly one `bos` (None: after none), whatever the tokenizer or a chat template put there."""
    text = itertools.dropwhile(lambda one: one == tokenizer.bos_token_id, ids)
    return [*([] if bos is None else [bos]), *text]


def draw_piece(streams: Sequence[list[int]], length: int, rng: np.random.Generator) -> list[int]:
    """`length` tokens from a random place of a random stream, each of which has `length` tokens or more."""
    stream = streams[int(rng.integers(len(streams)))]
    start = int(rng.integers(len(stream) - length + 1))
    return stream[start : start + length]


def _encode_stream(tokenizer: Any, text: str, bos: int | None) -> list[int]:
    """Token ids of a whole text; without its begin-of-text token if each window begins with one (`bos` is not None)."""
    ids = encode(tokenizer, text)
    return ids if bos is None else set_bos(tokenizer, ids, None)


def _load_joined(config: DatasetConfig, tokenizer: Any, room: int, bos: int | None) -> TokenData:
    """One stream of the joined text, at least `room` tokens long; other arguments as `load_tokens`."""
    text = read_joined_text(config)
    if not text.strip():
        raise DataError(f"dataset={config.name}: the text is empty")
    ids = _encode_stream(tokenizer, text, bos)
    if len(ids) < room:
        context = room + (bos is not None)
        raise DataError(f"dataset={config.name}: the text has {len(ids)} tokens, fewer than task.context={context}")
    text_bytes = len(text.encode())
    if config.max_tokens is not None and len(ids) > config.max_tokens:
        ids = ids[: config.max_tokens]
        text_bytes = _count_bytes(tokenizer, ids)
    return TokenData(config.name, [torch.tensor(ids)], text_fingerprint([text]), text_bytes)


def _load_documents(config: DatasetConfig, tokenizer: Any, room: int, bos: int | None) -> TokenData:
    """A stream of `room` tokens for each random document; other arguments as `load_tokens`."""
    rows = read_rows(config)
    if not any(row.strip() for row in rows):
        raise DataError(f"dataset={config.name}: the text is empty")
    wanted = len(rows) if config.documents is None else config.documents
    streams = list(itertools.islice(_draw_crops(rows, tokenizer, room, bos, config.seed), wanted))
    if not streams or (config.documents is not None and len(streams) < wanted):
        context = room + (bos is not None)
        raise DataError(
            f"dataset={config.name}: {len(streams)} of {len(rows)} documents have task.context={context} tokens or "
            f"more, dataset.documents={config.documents} are asked for"
        )
    if config.max_tokens is not None:
        streams = streams[: config.max_tokens // room]
    text_bytes = sum(_count_bytes(tokenizer, stream.tolist()) for stream in streams)
    # Of the crops: what else the file holds decides where they lie.
    crops = [" ".join(map(str, stream.tolist())) for stream in streams]
    return TokenData(config.name, streams, text_fingerprint(crops), text_bytes)


def _draw_crops(
    rows: tuple[str, ...], tokenizer: Any, room: int, bos: int | None, seed: int
) -> Iterator[Int[Tensor, " tokens"]]:
    """Yield `room` token ids from a random place of each row that has as many, rows in random order."""
    rng = np.random.default_rng([0x646F6373, seed])  # apart from other draws
    for index in rng.permutation(len(rows)).tolist():
        text = rows[index]
        # A token stands for at least one byte, but for the few that the tokenizer adds.
        if len(text.encode()) + 8 < room:
            continue
        ids = _encode_stream(tokenizer, text, bos)
        if len(ids) >= room:
            start = int(rng.integers(len(ids) - room + 1))
            yield torch.tensor(ids[start : start + room])


def _count_bytes(tokenizer: Any, ids: list[int]) -> int:
    """UTF-8 bytes of the text that tokens stand for, without special tokens."""
    return len(tokenizer.decode(ids, skip_special_tokens=True).encode())


@dataclass(frozen=True)
class Needle:
    """A key ("amber falcon") and its value (decimal digits, the first not zero), with the sentences around them."""

    key: str
    value: str
    template: str = "\nThe secret number of {key} is {value}.\n"
    asking: str = "\n\nQuestion: What is the secret number of {key}?\nAnswer: The secret number of {key} is"

    @property
    def sentence(self) -> str:
        """The sentence that is planted, by default with a line of its own."""
        return self.template.format(key=self.key, value=self.value)

    @property
    def question(self) -> str:
        """The text that ends the prompt."""
        return self.asking.format(key=self.key)

    @property
    def answer(self) -> str:
        """The continuation of the question that counts as a hit, with its leading space."""
        return f" {self.value}"


def draw_needles(rng: np.random.Generator, count: int, digits: int = 6) -> list[Needle]:
    """Draw `count` needles with distinct keys and distinct values of `digits` digits."""
    keys, values = len(ADJECTIVES) * len(NOUNS), 9 * 10 ** (digits - 1)
    if count > min(keys, values):
        raise DataError(f"task.needles={count}: there are {keys} keys, and {values} values of {digits} digits")
    drawn_keys = rng.choice(keys, size=count, replace=False)
    drawn_values = rng.choice(values, size=count, replace=False) + 10 ** (digits - 1)
    return [
        Needle(f"{ADJECTIVES[key // len(NOUNS)]} {NOUNS[key % len(NOUNS)]}", str(value))
        for key, value in zip(drawn_keys.tolist(), drawn_values.tolist(), strict=True)
    ]


def plant_needles(
    haystack: Sequence[int], needles: Sequence[Needle], depths: Sequence[float], length: int, encode: Encode
) -> list[int]:
    """The start of `haystack` with needles' sentences at their depths (0: its start, 1: end), `length` tokens."""
    sentences = [encode(needle.sentence) for needle in needles]
    room = length - sum(map(len, sentences))
    if room < 0:
        raise DataError(f"needles: {len(needles)} needles take {length - room} tokens, more than length={length}")
    tokens: list[int] = []
    start = 0
    for depth, sentence in sorted(zip(depths, sentences, strict=True), key=lambda item: item[0]):
        stop = round(depth * room)
        tokens += [*haystack[start:stop], *sentence]
        start = stop
    return [*tokens, *haystack[start:room]]


def build_needle_prompt(
    haystack: Sequence[int],
    needles: Sequence[Needle],
    depths: Sequence[float],
    length: int,
    encode: Encode,
    after: str = "",
) -> list[int]:
    """`plant_needles`, then the question for the first needle and the text `after`: exactly `length` tokens."""
    question = encode(needles[0].question + after)
    return plant_needles(haystack, needles, depths, length - len(question), encode) + question
