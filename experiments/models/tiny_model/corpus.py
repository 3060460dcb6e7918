"""Training data of the embedded model: its tokenizer, token streams on disk, and batches of text and retrieval."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvq.data.rows import Corpus, load_corpus
from kvq.data.text import draw_needles, plant_needles
from tiny_model.recipe import Recipe, Stage

VOCABULARY = 4096
END = "<|endoftext|>"
SEPARATOR = "\n\n"
# How many needles a sample may have.
NEEDLES = (1, 2, 3, 4, 8, 16)


def train_tokenizer(corpora: dict[str, Corpus]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over all prose and as many characters of code; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    prose, code = corpora["pydocs"].documents, corpora["pysource"].documents
    every = max(1, round(sum(map(len, code)) / sum(map(len, prose))))
    tokenizer.train_from_iterator([*prose, *code[::every]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def corpus_hash(corpora: dict[str, Corpus]) -> str:
    """Return the sha256 (hex) over the names and fingerprints of the training corpora."""
    text = "".join(f"{name} {corpus.fingerprint}\n" for name, corpus in sorted(corpora.items()))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TrainingData:
    """Tokenizer and memory-mapped token streams of the training split; `data_hash` names the text."""

    tokenizer: PreTrainedTokenizerFast
    streams: dict[str, Int[np.ndarray, " tokens"]]
    data_hash: str

    @classmethod
    def prepare(cls, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> TrainingData:
        """Read the corpora, train a tokenizer unless one is given and encode; then reuse what lies in `folder`."""
        corpora = {kind: load_corpus(kind, "train") for kind in ("pydocs", "pysource")}
        data_hash = corpus_hash(corpora)
        target = folder / data_hash[:16]
        if not (target / "done").exists():
            target.mkdir(parents=True, exist_ok=True)
            tokenizer = tokenizer or train_tokenizer(corpora)
            tokenizer.save_pretrained(target)
            for kind, corpus in corpora.items():
                np.save(target / f"{kind}.npy", _encode_documents(tokenizer, corpus.documents))
            (target / "done").touch()
        return cls.open(folder, data_hash)

    @classmethod
    def open(cls, folder: Path, data_hash: str) -> TrainingData:
        """Open what `prepare` has left in `folder`."""
        target = folder / data_hash[:16]
        tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
        streams = {kind: np.load(target / f"{kind}.npy", mmap_mode="r") for kind in ("pydocs", "pysource")}
        return cls(tokenizer, streams, data_hash)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


@dataclass(frozen=True)
class Batch:
    """`tokens[:, 1:]` are the targets of `tokens[:, :-1]`; `weights` are theirs in the loss; text rows come first."""

    tokens: Int[np.ndarray, "batch tokens"]
    weights: Float[np.ndarray, "batch tokens-1"]
    text_rows: int


class Sampler:
    """Draws the parts of steps; each is a function of the recipe and its number, whoever draws it.

    Text is read without replacement: it is cut into sequences at another offset each time, in an order shuffled each
    time.
    """

    def __init__(self, data: TrainingData, recipe: Recipe) -> None:
        self.data = data
        self.recipe = recipe
        (self.end,) = data.encode(END)
        self._orders: dict[tuple[str, int], tuple[int, int, Int[np.ndarray, " sequences"]]] = {}

    def part(self, step: int, part: int, stage: Stage, length: int, read: int) -> Batch:
        """Return a part of a step before which `read` sequences of this length were drawn."""
        rng = np.random.default_rng([self.recipe.seed, 2, step, part])
        rows = self.recipe.parts(length)[1]
        retrieval = int(rng.binomial(rows, stage.retrieval))
        tokens = np.empty((rows, length + 1), dtype=np.int64)
        weights = np.ones((rows, length), dtype=np.float32)
        for row in range(rows - retrieval):
            kind = "pydocs" if rng.random() < stage.prose else "pysource"
            tokens[row] = self._text(kind, length, read + part * rows + row)
        for row in range(rows - retrieval, rows):
            make = self._copies if rng.random() < stage.copies else self._retrieval
            tokens[row], weights[row] = make(rng, length + 1, stage)
        return Batch(tokens, weights, rows - retrieval)

    def _text(self, kind: str, length: int, number: int) -> Int[np.ndarray, " tokens"]:
        stream = self.data.streams[kind]
        sequences = (len(stream) - 1) // length - 1
        offset, order = self._order(kind, length, sequences, number // sequences)
        start = offset + int(order[number % sequences]) * length
        return stream[start : start + length + 1]

    def _order(self, kind: str, length: int, sequences: int, turn: int) -> tuple[int, Int[np.ndarray, " sequences"]]:
        """Offset and order of the sequences of a text when it is read the `turn`-th time at this length."""
        known = self._orders.get((kind, length))
        if known is None or known[0] != turn:
            rng = np.random.default_rng([self.recipe.seed, 0, sorted(self.data.streams).index(kind), length, turn])
            known = turn, int(rng.integers(length)), rng.permutation(sequences)
            self._orders[kind, length] = known
        return known[1], known[2]

    def _retrieval(
        self, rng: np.random.Generator, length: int, stage: Stage
    ) -> tuple[Int[np.ndarray, " tokens"], Float[np.ndarray, " tokens-1"]]:
        """One retrieval sample, or several short ones behind each other, of `length` tokens in all."""
        pieces = int(rng.choice(stage.pieces))
        lengths = [length // pieces] * (pieces - 1)
        tokens: list[int] = []
        weights: list[float] = []
        for piece in [*lengths, length - sum(lengths)]:
            sample, sample_weights = self._sample(rng, piece, stage)
            tokens += sample
            weights += sample_weights
        return np.array(tokens), np.array(weights[1:], dtype=np.float32)

    def _copies(
        self, rng: np.random.Generator, length: int, _stage: Stage
    ) -> tuple[Int[np.ndarray, " tokens"], Float[np.ndarray, " tokens-1"]]:
        """A few shuffled tokens of prose, again and again; the first time counts for nothing in the loss."""
        stream = self.data.streams["pydocs"]
        period = int(rng.integers(16, length // 3))
        start = int(rng.integers(len(stream) - period))
        tokens = np.resize(rng.permutation(stream[start : start + period]), length)
        weights = np.ones(length - 1, dtype=np.float32)
        weights[: period - 1] = 0
        return tokens, weights

    def _sample(self, rng: np.random.Generator, length: int, stage: Stage) -> tuple[list[int], list[float]]:
        """A haystack with one to sixteen needles (more room, more needles), all asked for in random order; weights."""
        encode = self.data.encode
        counts = [count for count in NEEDLES if count <= max(1, length // 96)]
        needles = draw_needles(rng, int(rng.choice(counts)), digits=int(rng.integers(4, 8)))
        tail: list[int] = []
        answers: list[slice] = []
        for index in rng.permutation(len(needles)):
            tail += encode(needles[index].question)
            answer = encode(needles[index].answer)
            answers.append(slice(len(tail), len(tail) + len(answer) + 1))
            tail += [*answer, *encode(".")]
        tail.append(self.end)
        stream = self.data.streams["pydocs" if rng.random() < stage.prose else "pysource"]
        start = int(rng.integers(len(stream) - length))
        room = length - len(tail)
        haystack = stream[start : start + room].tolist()
        context = plant_needles(haystack, needles, rng.random(len(needles)).tolist(), room, encode)
        weights = [1.0] * length
        for answer_span in answers:
            for index in range(room + answer_span.start, room + answer_span.stop):
                weights[index] = stage.answer_weight
        return context + tail, weights


def _encode_documents(tokenizer: PreTrainedTokenizerFast, documents: tuple[str, ...]) -> Int[np.ndarray, " tokens"]:
    """Encode the documents and a separator behind each, in slices that keep the encoder's memory small."""
    return np.concatenate(list(_encoded_slices(tokenizer, documents)))


def _encoded_slices(
    tokenizer: PreTrainedTokenizerFast, documents: tuple[str, ...], size: int = 512
) -> Iterator[Int[np.ndarray, " tokens"]]:
    for start in range(0, len(documents), size):
        texts = [document + SEPARATOR for document in documents[start : start + size]]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            yield np.array(ids, dtype=np.uint16)
