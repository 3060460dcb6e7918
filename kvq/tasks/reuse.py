"""`task=reuse`: a prefix that is stored, sent and read again: its size as it is, entropy coded, and the loss after it.

A file of a cache (`KVCache.save`) is written, compressed, decompressed and read, and the text goes on from what was
read. Sizes are of the file's tensors, whose numbers are coded byte by byte: of numbers of several bytes, all first
bytes together, then all second ones. Source of the case: KVTC (2511.01815), which ends in DEFLATE, and CacheGen
(2310.07240), whose coder is another.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from safetensors.torch import load_file
from torch import Tensor

from kvq.cache import KVCache
from kvq.config.writing import ReuseConfig
from kvq.errors import ConfigError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task, delta_metrics, scored_rows, storage_metrics
from kvq.tasks.reader import Reader, check_prefill
from kvq.tasks.windows import Window, cut_windows

Row = dict[str, Any]


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method whose cache no file holds, `ConfigError` for windows the model cannot take."""
    task: ReuseConfig = inputs.config.task
    inputs.check_context(task.context)
    if method.backend is not None:
        raise Unsupported(f"task=reuse: method={method.name} is transformers' cache, which has no form in a file")
    check_prefill(method, task.prefill)
    _zstandard()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("task=reuse: zstandard is not installed; pip install 'kvq-harness[storage]'") from error
    return zstandard


def planes(tensor: Tensor) -> list[UInt8[np.ndarray, " numbers"]]:
    """The bytes of a tensor's numbers by their place in a number, low ones first."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return list(np.ascontiguousarray(flat.reshape(-1, tensor.element_size()).T))


def order0_bytes(plane: UInt8[np.ndarray, " numbers"]) -> float:
    """What an ideal coder of independent bytes, which knows their frequencies, makes of them: n H / 8 bytes."""
    share = np.bincount(plane, minlength=256) / max(len(plane), 1)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum() * len(plane) / 8)


def deflated_bytes(plane: UInt8[np.ndarray, " numbers"]) -> int:
    """What DEFLATE makes of bytes at zlib's usual level: no header, no checksum (RFC 1951)."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return len(packer.compress(plane.tobytes())) + len(packer.flush())


class Stored:
    """A cache on its way through a file in `folder` and a compressor, timed."""

    def __init__(self, cache: KVCache, inputs: Inputs, method: Method, folder: Path) -> None:
        path, level = folder / "cache.safetensors", inputs.config.task.level
        self.seconds: dict[str, float] = {}
        self._timed("save", lambda: cache.save(path))
        parts = [plane for tensor in load_file(path).values() for plane in planes(tensor)]
        packer, unpacker = _zstandard().ZstdCompressor(level=level), _zstandard().ZstdDecompressor()
        packed = self._timed("compress", lambda: [packer.compress(part.tobytes()) for part in parts])
        self._timed("decompress", lambda: [unpacker.decompress(part) for part in packed])
        keep = inputs.config.cache.keep_decoded
        self.read: KVCache = self._timed("load", lambda: KVCache.load(path, inputs.model.model, method, keep))
        self.read.token_by_token = cache.token_by_token
        self.bytes = float(sum(map(len, parts)))
        self.zstd_bytes = float(sum(map(len, packed)))
        self.deflate_bytes = float(sum(map(deflated_bytes, parts)))
        self.order0_bytes = sum(map(order0_bytes, parts))

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = work()
        self.seconds[name] = time.perf_counter() - start
        return found


@torch.no_grad()
def row_of(inputs: Inputs, method: Method, window: Window, folder: Path) -> Row:
    """One window: its prefix is stored and read again, its other tokens are scored from both caches."""
    task: ReuseConfig = inputs.config.task
    reader = Reader(inputs.model, method, task.prefill, inputs.config.cache.keep_decoded)
    tokens = reader.tensor([window.tokens.tolist()])
    prefix, rest = tokens[:, : task.prefix], tokens[:, task.prefix :]
    cache, logits = reader.begin(prefix)
    stored = Stored(cache, inputs, method, folder)
    storage = storage_metrics(cache, 1)
    wide = storage["total_bytes"] * 16 / storage["effective_bits"]
    kept, _ = reader.log_probs(cache, logits, rest)
    again, _ = reader.log_probs(stored.read, logits, rest)
    cache.check_finite()
    rates = {f"{name}_rate": wide / 1e6 / seconds for name, seconds in stored.seconds.items()}
    names = ("zstd_bytes", "deflate_bytes", "order0_bytes")
    sizes = {"sent_bytes": stored.bytes} | {name: getattr(stored, name) for name in names}
    bits = {f"{name.removesuffix('_bytes')}_bits": 16 * size / wide for name, size in sizes.items()}
    off = float((kept - again).abs().max())
    losses = {"tokens": rest.shape[1], "nll": -float(kept.double().sum()), "reload_difference": off}
    return {**losses, **sizes, **bits, **rates, "storage": storage}


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each window; rates are medians over windows, in MB of the cache in 16 bits a second."""
    task: ReuseConfig = inputs.config.task
    windows = cut_windows(inputs.tokens.streams, task.context, limit=task.windows, bos=inputs.bos)
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:

        def score(index: int) -> Row:
            return {"window": index, **row_of(inputs, method, windows[index], Path(folder))}

        rows, samples = scored_rows(journal, "window", len(windows), score)
    metrics = _metrics(rows) | ({} if baseline is None else delta_metrics(samples, baseline.samples))
    return Measurement(metrics, units_of(metrics), samples)


def _metrics(rows: Sequence[Row]) -> dict[str, float]:
    tokens = sum(row["tokens"] for row in rows)
    metrics = dict(rows[-1]["storage"])
    metrics |= {"windows": float(len(rows)), "scored_tokens": float(tokens)}
    metrics["nll"] = sum(row["nll"] for row in rows) / tokens
    metrics["reload_difference"] = max(row["reload_difference"] for row in rows)
    means = [name for name in rows[0] if name.endswith(("_bytes", "_bits"))]
    rates = [name for name in rows[0] if name.endswith("_rate")]
    metrics |= {name: statistics.fmean(row[name] for row in rows) for name in means}
    return metrics | {name: statistics.median(row[name] for row in rows) for name in rates}


TASK = Task(check, measure, lambda inputs: inputs.tokens.fingerprint)
