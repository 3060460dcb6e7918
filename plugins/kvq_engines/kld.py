"""llama.cpp's files of log-probabilities: `kvq kld BASE OTHER` compares two, and runs write them.

`llama-perplexity --save-all-logits FILE` (or `--kl-divergence-base`) writes, in native byte order: `_logits_`; int32
context, vocabulary, chunks; int32 tokens `[chunks, context]`; then for each chunk one row for each position from
context/2 to context - 2, of 2 * ((vocabulary + 1) / 2) + 4 uint16: float32 scale and smallest log-probability, codes.
A log-probability is scale * code + smallest; logits more than 16 below the largest are clipped. Source:
`tools/perplexity/perplexity.cpp` of llama.cpp. One chunk is in memory at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvq.config.limits import file_hash
from kvq.errors import DataError, KvqError
from kvq.results import Record, Store, run_key
from kvq.results.metrics import units_of
from kvq.results.provenance import collect, utc_now
from kvq.results.statistics import delta_nll_of_samples, divergence_metrics

MAGIC: Final = b"_logits_"
CLIP: Final = 16.0
"""Logits this far below the largest are stored as if they were there, and such log-probabilities enter no KL."""
_ROWS: Final = 64


def row_words(vocab: int) -> int:
    """uint16 of a row: two floats, and the codes, padded to an even number."""
    return 2 * ((vocab + 1) // 2) + 4


@dataclass(frozen=True)
class LogitsFile:
    """A file of log-probabilities whose size fits its header."""

    version: ClassVar[int] = 1

    path: Path
    context: int
    vocab: int
    chunks: int

    @classmethod
    def open(cls, path: Path) -> LogitsFile:
        """Read and check a header.

        Raises:
            DataError: no such file, another format, or a truncated or longer one.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                head = stream.read(20)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        if len(head) < 20 or head[:8] != MAGIC:
            raise DataError(f"{path}: no file of llama-perplexity --save-all-logits")
        context, vocab, chunks = (int(number) for number in np.frombuffer(head[8:], np.int32))
        if not (3 <= context <= 1 << 24 and 2 <= vocab <= 1 << 24 and 1 <= chunks <= 1 << 24):
            raise DataError(f"{path}: context {context}, vocabulary {vocab}, chunks {chunks}: a broken header")
        found = cls(path, context, vocab, chunks)
        if size != (wanted := found.offset(chunks)):
            raise DataError(f"{path}: {size} bytes instead of {wanted} of {chunks} chunks: truncated or another format")
        return found

    @property
    def first_position(self) -> int:
        """The first position whose successor is scored."""
        return self.context // 2

    @property
    def rows(self) -> int:
        """Scored positions of a chunk."""
        return self.context - 1 - self.first_position

    def offset(self, chunk: int) -> int:
        """Position in the file, in bytes, at which the rows of a chunk begin."""
        return 20 + 4 * self.chunks * self.context + chunk * self.rows * 2 * row_words(self.vocab)

    def tokens(self) -> Int[np.ndarray, "chunks context"]:
        """All tokens of the text."""
        with self.path.open("rb") as stream:
            stream.seek(20)
            found = np.fromfile(stream, np.int32, self.chunks * self.context)
        return found.reshape(self.chunks, self.context)

    def chunk(self, index: int) -> Iterator[Float[Tensor, "rows vocab"]]:
        """The log-probabilities of a chunk, some rows at a time."""
        words = row_words(self.vocab)
        with self.path.open("rb") as stream:
            stream.seek(self.offset(index))
            for start in range(0, self.rows, _ROWS):
                count = min(_ROWS, self.rows - start)
                yield decode_rows(np.fromfile(stream, np.uint16, count * words).reshape(count, words), self.vocab)


def decode_rows(rows: Int[np.ndarray, "rows words"], vocab: int) -> Float[Tensor, "rows vocab"]:
    """The log-probabilities, in nats, that rows of a file hold."""
    numbers = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return torch.from_numpy(numbers[:, :1] * rows[:, 4 : 4 + vocab].astype(np.float32) + numbers[:, 1:])


def encode_rows(log_probs: Float[Tensor, "rows vocab"]) -> Int[np.ndarray, "rows words"]:
    """Log-probabilities (nats) as the rows that llama.cpp would store; its logits are these up to a constant."""
    given = log_probs.float().numpy()
    top = given.max(1, keepdims=True)
    low = np.maximum(given.min(1, keepdims=True), top - np.float32(CLIP))
    scale = ((top - low) / np.float32(65535)).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    out = np.zeros((given.shape[0], row_words(given.shape[1])), np.uint16)
    out[:, :4] = np.concatenate([scale, low], 1).astype(np.float32).view(np.uint16)
    out[:, 4 : 4 + given.shape[1]] = np.where(given > low, np.rint(inverse * (given - low)), 0).astype(np.uint16)
    return out


class LogitsWriter:
    """Writes the log-probabilities of disjoint windows of equal length, in any order, as llama.cpp has them.

    Args:
        path: where to; it is there once all windows are written and `close` is called.
        tokens: of all windows.
        vocab: vocabulary size.

    Raises:
        DataError: a folder that cannot be written.
    """

    def __init__(self, path: Path, tokens: Int[Tensor, "windows context"], vocab: int) -> None:
        self._partial = path.with_name(f"{path.name}.partial")
        self.file = LogitsFile(path, tokens.shape[1], vocab, tokens.shape[0])
        try:
            self._stream = self._partial.open("wb")
        except OSError as error:
            raise DataError(f"task.save_logits={path}: {error.strerror or error}") from error
        header = np.array([self.file.context, vocab, self.file.chunks], np.int32)
        self._stream.write(MAGIC + header.tobytes() + tokens.to(torch.int32).numpy().tobytes())

    def write(self, window: int, target: int, log_probs: Float[Tensor, "targets vocab"]) -> None:
        """Store those of a window's targets from position `target` on that the format has rows for."""
        position = target - 1
        skipped = max(self.file.first_position - position, 0)
        rows = log_probs[skipped:]
        if rows.shape[0]:
            row = position + skipped - self.file.first_position
            self._stream.seek(self.file.offset(window) + row * 2 * row_words(self.file.vocab))
            self._stream.write(encode_rows(rows.cpu()).tobytes())

    def close(self) -> None:
        """Put the file in its place."""
        self._stream.close()
        self._partial.replace(self.file.path)


def compare_files(base: LogitsFile, other: LogitsFile) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compare `other` with `base`: metrics, and a sample for each chunk, as in a record of `task=ppl`.

    Raises:
        DataError: files of other texts, or not finite numbers.
    """
    for what in ("context", "vocab", "chunks"):
        if (mine := getattr(base, what)) != (others := getattr(other, what)):
            raise DataError(f"{other.path}: {what} {others}; {base.path} has {mine}")
    tokens = base.tokens()
    if not np.array_equal(tokens, other.tokens()):
        raise DataError(f"{other.path}: other tokens than in {base.path}")
    if tokens.min() < 0 or tokens.max() >= base.vocab:
        raise DataError(f"{base.path}: a token outside of its vocabulary of {base.vocab}")
    samples: list[dict[str, Any]] = []
    baseline: list[dict[str, Any]] = []
    parts: list[Tensor] = []
    for index in tqdm(range(base.chunks), desc="chunks", leave=False, disable=None):
        targets = torch.from_numpy(tokens[index, base.first_position + 1 :].astype(np.int64))
        sums, kl = _compare_chunk(base.chunk(index), other.chunk(index), targets)
        if not (torch.isfinite(kl).all() and all(map(math.isfinite, sums))):
            raise DataError(f"{other.path}: chunk {index}: numbers that are not finite")
        parts.append(kl)
        samples.append(
            {"window": index, "tokens": len(targets), "nll": sums[1], "kl": float(kl.sum()), "top1": int(sums[2])}
        )
        baseline.append({"window": index, "tokens": len(targets), "nll": sums[0]})
    count = sum(row["tokens"] for row in samples)
    nll, base_nll = (sum(row["nll"] for row in rows) / count for rows in (samples, baseline))
    perplexities = {"perplexity": math.exp(min(nll, 700.0)), "base_perplexity": math.exp(min(base_nll, 700.0))}
    kl = torch.cat(parts)
    median = float(np.quantile(kl.numpy(), 0.5))
    delta = delta_nll_of_samples(samples, baseline).metrics("delta_nll")
    out = {"nll": nll, **perplexities, **delta, **divergence_metrics(kl.numpy()), "kl_median": median}
    out["top1_agreement"] = sum(row["top1"] for row in samples) / count
    return out | {"scored_tokens": float(count), "windows": float(base.chunks)}, samples


def _compare_chunk(
    base: Iterator[Tensor], other: Iterator[Tensor], targets: Int[Tensor, " rows"]
) -> tuple[tuple[float, float, float], Float[Tensor, " rows"]]:
    """Losses of both files and equal best tokens, summed, and the KL divergence of each row."""
    sums, parts, start = [0.0, 0.0, 0.0], [], 0
    for one, two in zip(base, other, strict=True):
        own = targets[start : start + len(one), None]
        start += len(one)
        for place, rows in enumerate((one, two)):
            sums[place] -= float(rows.gather(1, own).double().sum())
        sums[2] += float((one.argmax(1) == two.argmax(1)).sum())
        counted = torch.where(one > -CLIP, one.exp() * (one - two), 0)
        parts.append(counted.double().sum(1))
    return (sums[0], sums[1], sums[2]), torch.cat(parts)


def record_of(
    base: LogitsFile, other: LogitsFile, model: str, dataset: str, method: str
) -> tuple[Record, list[dict[str, Any]]]:
    """The record of a comparison: its key is that of both files' contents.

    Raises:
        DataError: as `compare_files`.
    """
    started = utc_now()
    metrics, samples = compare_files(base, other)
    config = {
        "task": {"name": "kld", "context": base.context, "windows": base.chunks, "clip": CLIP},
        "model": {"fingerprint": file_hash(base.path)},
        "dataset": {"fingerprint": hashlib.sha256(base.tokens().tobytes()).hexdigest()},
        "method": {"fingerprint": file_hash(other.path)},
        "seed": 0,
    }
    record = Record(
        task="kld",
        model=model,
        dataset=dataset,
        method=method,
        bits="",
        key=run_key(config),
        status="done",
        config=config,
        metrics=metrics,
        units=units_of(metrics),
        versions={"LogitsFile": LogitsFile.version},
        provenance=collect(
            dtype="uint16 codes of log-probabilities",
            seed=0,
            started=started,
            dataset_fingerprint=config["dataset"]["fingerprint"],  # type: ignore[index]
            model_fingerprint=config["model"]["fingerprint"],  # type: ignore[index]
        ),
    )
    return record, samples


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files of log-probabilities (`kvq kld`), store the record, print it; return the exit status."""
    parser = argparse.ArgumentParser(prog="kvq kld", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", type=Path, metavar="BASE", help="log-probabilities in full precision")
    parser.add_argument("other", type=Path, metavar="OTHER", help="log-probabilities with a quantized cache")
    for name, shown in (("model", "BASE"), ("dataset", "text"), ("method", "OTHER")):
        parser.add_argument(f"--{name}", help=f"how tables call it (default: {shown}'s name)")
    parser.add_argument("--results-dir", default="results", help="where the record goes")
    given = parser.parse_args(arguments)
    try:
        base, other = LogitsFile.open(given.base), LogitsFile.open(given.other)
        names = (given.model or given.base.stem, given.dataset or "text", given.method or given.other.stem)
        record, samples = record_of(base, other, *names)
        store = Store(given.results_dir)
        store.check_writable()
        store.put(record, samples)
    except KvqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, value in record.metrics.items():
        print(f"{name} {value:.6g} {record.units[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
