"""`task=reuse`: bytes of a cache that is stored, sent and read again.

A prefix is written to a file (`KVCache.save`), compressed, decompressed and read, and the text goes on from it. Sizes
are of the file's tensors, coded byte by byte: of numbers of several bytes, all first bytes together, then all second
ones. Source of the case: KVTC (2511.01815), which ends in DEFLATE, and CacheGen (2310.07240), whose coder is another.
With `task.coder=exponents` the two planes of bfloat16 are its exponents, and its signs with its mantissas (DFloat11,
2504.11651, codes weights so): `method=fp16 cache.dtype=bfloat16` is then a lossless baseline of 16 bits.
"""

from __future__ import annotations

import statistics
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from scipy.stats import entropy
from torch import Tensor

from kvq.cache import KVCache
from kvq.cache.files import map_tensors, read_file
from kvq.errors import ConfigError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.provenance import timed
from kvq.results.statistics import delta_nll_of_samples
from kvq.tasks.measurement import Baseline, Measurement, Task, storage_metrics
from kvq.tasks.reader import Reader, check_prefill
from kvq.tasks.scoring import Window, cut_windows
from kvq_lab.settings import Coder, ReuseConfig
from kvq_lab.trajectory import Row, scored_rows


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method whose cache cannot be saved, `ConfigError` for windows the model cannot take."""
    task: ReuseConfig = inputs.config.task
    inputs.check_context()
    if method.replaces_layers:
        raise Unsupported(f"task=reuse: method={method.name} is transformers' cache, which has no form in a file")
    check_prefill(method, task.prefill)
    _import_zstandard()


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("task=reuse: zstandard is not installed; pip install 'kvq-harness[storage]'") from error
    return zstandard


def byte_planes(tensor: Tensor, exponents: bool = False) -> list[UInt8[np.ndarray, " numbers"]]:
    """One array per byte of the dtype: that byte of each of the tensor's numbers, the lowest byte first.

    `exponents`: of bfloat16 the mantissa over the sign, 7 + 1 bits, then the exponent.
    """
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if exponents and tensor.dtype is torch.bfloat16:
        words = flat.view(np.uint16)
        flat = (words << 1 | words >> 15).view(np.uint8)
    return list(np.ascontiguousarray(flat.reshape(-1, tensor.element_size()).T))


def join_planes(planes: Sequence[UInt8[np.ndarray, " numbers"]], like: Tensor, exponents: bool = False) -> Tensor:
    """The tensor, of the shape and dtype of `like`, whose `byte_planes` are `planes`."""
    flat = np.stack(planes, 1).ravel()
    if exponents and like.dtype is torch.bfloat16:
        words = flat.view(np.uint16)
        flat = (words >> 1 | words << 15).view(np.uint8)
    return torch.from_numpy(flat).view(like.dtype).reshape(like.shape)


def order0_bytes(plane: UInt8[np.ndarray, " numbers"]) -> float:
    """Size of `plane` in bytes by its order-0 entropy: n H / 8 for n bytes of H bits of Shannon entropy each."""
    return float(entropy(np.bincount(plane), base=2)) * len(plane) / 8 if len(plane) else 0.0


def deflated_bytes(plane: UInt8[np.ndarray, " numbers"]) -> int:
    """Size of bytes in bytes after DEFLATE at zlib's default level, without header and checksum (RFC 1951)."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return len(packer.compress(plane.tobytes())) + len(packer.flush())


def pass_through_file(
    cache: KVCache, inputs: Inputs, method: Method, folder: Path
) -> tuple[KVCache, dict[str, float], dict[str, float]]:
    """Save, compress, decompress and load a cache; returns the loaded one, seconds by step, and bytes by coding."""
    path, level, seconds = folder / "cache", inputs.config.task.level, dict[str, float]()
    exponents = inputs.config.task.coder is Coder.exponents
    with timed(seconds, "save"):
        cache.save(path)
    tensors: list[Tensor] = []
    map_tensors(read_file(path), lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    packer, unpacker = _import_zstandard().ZstdCompressor(level=level), _import_zstandard().ZstdDecompressor()
    with timed(seconds, "split"):
        planes = [byte_planes(tensor, exponents) for tensor in tensors]
    pairs, parts = list(zip(planes, tensors, strict=True)), [plane for own in planes for plane in own]
    with timed(seconds, "compress"):
        packed = [packer.compress(part.tobytes()) for part in parts]
    with timed(seconds, "decompress"):
        unpacked = iter([np.frombuffer(unpacker.decompress(part), np.uint8) for part in packed])
    with timed(seconds, "join"):
        joined = [join_planes([next(unpacked) for _ in own], like, exponents) for own, like in pairs]
    again = [plane for tensor in joined for plane in byte_planes(tensor, exponents)]
    assert all(map(np.array_equal, again, parts)), "a coder lost bits"
    with timed(seconds, "load"):
        read = KVCache.load(path, inputs.model.model, method, inputs.config.cache.keep_decoded)
    read.token_by_token = cache.token_by_token
    sizes = {
        "sent_bytes": float(sum(map(len, parts))),
        "zstd_bytes": float(sum(map(len, packed))),
        "deflate_bytes": float(sum(map(deflated_bytes, parts))),
        "order0_bytes": sum(map(order0_bytes, parts)),
    }
    return read, seconds, sizes


@torch.no_grad()
def measure_window(inputs: Inputs, method: Method, window: Window, folder: Path) -> Row:
    """One window: its prefix is stored and read again, its other tokens are scored from both caches."""
    task: ReuseConfig = inputs.config.task
    reader = Reader.of(inputs, method)
    tokens = reader.tensor([window.tokens.tolist()])
    prefix, rest = tokens[:, : task.prefix], tokens[:, task.prefix :]
    cache, logits = reader.begin(prefix)
    read, seconds, sizes = pass_through_file(cache, inputs, method, folder)
    storage = storage_metrics(cache, 1)
    wide = storage["total_bytes"] * 16 / storage["effective_bits"]
    kept, _ = reader.log_probs(cache, logits, rest)
    again, _ = reader.log_probs(read, logits, rest)
    cache.check_finite()
    rates = {f"{name}_rate": wide / 1e6 / took for name, took in seconds.items()}
    bits = {f"{name.removesuffix('_bytes')}_bits": 16 * size / wide for name, size in sizes.items()}
    coding = sum(seconds[name] for name in ("split", "compress", "decompress", "join"))
    rates["break_even_rate"] = max(0.0, wide - sizes["zstd_bytes"]) / 1e6 / coding
    off = float((kept - again).abs().max())
    losses = {"tokens": rest.shape[1], "nll": -float(kept.double().sum()), "reload_difference": off}
    return {**losses, **sizes, **bits, **rates, "storage": storage}


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each window; rates are medians over windows, in MB of the cache in 16 bits a second.

    `break_even_rate`: of a link, in MB/s of what is sent, below which to split, compress, send, decompress and join
    takes less time than to send 16 bits: W / v = c + Z / v for W bytes in 16 bits, Z after zstd, and c seconds of the
    four steps; 0 where nothing is saved. The method's own encoding, done when a cache is filled, is not counted.
    """
    task: ReuseConfig = inputs.config.task
    windows = cut_windows(inputs.tokens.streams, task.context, limit=task.windows, bos=inputs.bos)
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:

        def score(index: int) -> Row:
            return {"window": index, **measure_window(inputs, method, windows[index], Path(folder))}

        rows, samples = scored_rows(journal, "window", len(windows), score)
    metrics = summarize_rows(rows)
    if baseline is not None:
        metrics |= delta_nll_of_samples(samples, baseline.samples).metrics("delta_nll")
    return Measurement(metrics, units_of(metrics), samples)


def summarize_rows(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of all windows: sums of losses, means of sizes, medians of rates."""
    tokens = sum(row["tokens"] for row in rows)
    metrics = {**rows[-1]["storage"], "windows": float(len(rows)), "scored_tokens": float(tokens)}
    metrics["nll"] = sum(row["nll"] for row in rows) / tokens
    metrics["reload_difference"] = max(row["reload_difference"] for row in rows)
    means = [name for name in rows[0] if name.endswith(("_bytes", "_bits"))]
    rates = [name for name in rows[0] if name.endswith("_rate")]
    metrics |= {name: statistics.fmean(row[name] for row in rows) for name in means}
    return metrics | {name: statistics.median(row[name] for row in rows) for name in rates}


TASK = Task(check, measure, settings=ReuseConfig)
