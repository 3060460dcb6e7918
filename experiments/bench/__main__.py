"""`make bench`: paired ratios of what the product claims about its own speed and memory, as JSON and as a table.

Each figure is the median of ratios of runs made in turn (A B A B ...), so that a machine whose speed drifts does not
matter. Nothing here fails on time.

    python experiments/bench [--pairs 7] [--only packed_attention] [--out results/bench/cpu.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import attention_bench
import batch_bench
import bench_fits
import bench_report
import encode_bench
import joint_bench
import linear_bench
import peers_bench
import real_peers_bench
import threads_bench

from kvq.cache import KVCache
from kvq.codecs import rope_table
from kvq.config import compose, resolve
from kvq.config.diagnostics import TniConfig
from kvq.config.tasks import Prefill
from kvq.kernels import fuse_codec
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models.load import LoadedModel, load_model
from kvq.results.provenance import PeakMemory, bytes_in_use, cpu_name, device_name, package_versions
from kvq.tasks.measurement import capture
from kvq.tasks.reader import Reader
from kvq.tasks.scoring import parallel_method, score, scoring_bounds
from kvq.tasks.tni import NormStatistics

CONTEXT = 2048
METHODS = ("kivi", "nsn", "oscar")
BITS = 2
ENCODED = (
    ("nsnquant", 1),
    ("nsnquant", 2),
    ("nsnquant/e8p", 2),
    ("turboquant", 2),
    ("turboquant", 4),
    ("turboquant/hadamard", 2),
    ("turboquant/prod", 2),
)
TABLES = (("nsnquant", 1), ("nsnquant", 2), ("turboquant", 2), ("turboquant", 4), ("q4_0", 4))
TOKENS, HEADS = 512, 8
LONG = 32768


def paired(first: Callable[[], object], second: Callable[[], object], pairs: int) -> dict[str, Any]:
    """Ratios first/second of wall time over `pairs` alternating runs after one warm-up each."""
    first(), second()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        took = []
        for run in (first, second):
            start = time.perf_counter()
            run()
            took.append(time.perf_counter() - start)
        for kept, value in zip(seconds, took, strict=True):
            kept.append(value)
    return attention_bench.ratios(*seconds) | {"seconds_median": [statistics.median(kept) for kept in seconds]}


def consume(loaded: LoadedModel, method: Method, tokens: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
    """Score all targets of `tokens` and drop the logits."""
    for chunk in score(loaded, KVCache(loaded.model, method), tokens, 1, bounds):
        chunk.logits.amax()


def parallel_cost(loaded: LoadedModel, tokens: torch.Tensor, pairs: int) -> dict[str, Any]:
    """Codec and forward under `parallel` against the full-precision forward."""
    full, whole = build_method("fp16"), [(0, tokens.shape[1])]
    out = {}
    for name in METHODS:
        method = parallel_method(build_method(name, bits=BITS))
        out[name] = paired(
            lambda method=method: consume(loaded, method, tokens, whole),
            lambda: consume(loaded, full, tokens, whole),
            pairs,
        )
    return out


def chunked_speed(loaded: LoadedModel, tokens: torch.Tensor, pairs: int) -> dict[str, Any]:
    """Token-by-token decoding against exact chunks, T=1024, R=64."""
    tokens = tokens[:, :1024]
    out = {}
    for name in METHODS:
        method = build_method(name, bits=BITS, overrides=["residual.size=64"])
        single = [(i, i + 1) for i in range(tokens.shape[1] - 1)]
        chunks = scoring_bounds(method, tokens.shape[1] - 1)
        out[name] = paired(
            lambda method=method, single=single: consume(loaded, method, tokens, single),
            lambda method=method, chunks=chunks: consume(loaded, method, tokens, chunks),
            pairs,
        )
    return out


def shared_context(loaded: LoadedModel, tokens: torch.Tensor, pairs: int) -> dict[str, Any]:
    """40 options of 8 tokens behind a context of 1500: each request read by itself against the context read once."""
    context = tokens[:, :1500]
    options = [tokens[:, 1500 + index : 1508 + index] for index in range(40)]
    out = {}
    for name in ("fp16", *METHODS):
        reader = Reader(loaded, build_method(name, bits=BITS), Prefill.chunked)

        def alone(reader: Reader = reader) -> None:
            for option in options:
                reader.log_probs(*reader.begin(context), option)

        def shared(reader: Reader = reader) -> None:
            cache, logits = reader.begin(context)
            for option in options:
                reader.log_probs(cache.fork(), logits, option)

        out[name] = paired(alone, shared, pairs)
    return out


@torch.inference_mode()
def encode_speed(pairs: int) -> dict[str, Any]:
    """Keys encoded by one thread: time over kivi's at the same bits, and million elements per second.

    For vector codebooks also the bound that the scores set: the products of sub-vectors with 256 codewords alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, rope = torch.randn(1, HEADS, TOKENS, 128), rope_table(TOKENS, 128)
    tiles, codewords, scores = torch.randn(x.numel() // 8192, 1024, 9), torch.randn(9, 256), torch.empty(1024, 256)
    out = {}
    for name, bits in ENCODED:
        method, plain = build_method(name, bits=bits), build_method("kivi", bits=bits)
        first, second = ((m.key, m.residual.key.size) for m in (method, plain))
        found = paired(
            lambda codec=first: codec[0].encode(x, codec[1], rope),
            lambda codec=second: codec[0].encode(x, codec[1]),
            pairs,
        )
        found["million_elements_per_second"] = x.numel() / found["seconds_median"][0] / 1e6
        one_pass = paired(
            lambda codec=first: fuse_codec(codec[0]).encode(x, codec[1], rope),
            lambda codec=first: codec[0].encode(x, codec[1], rope),
            pairs,
        )
        found["one_pass_million_elements_per_second"] = x.numel() / one_pass["seconds_median"][0] / 1e6
        found["one_pass_over_codec"] = {key: one_pass[key] for key in ("ratio_median", "ratio_min", "ratio_max")}
        if name == "nsnquant":
            bound = paired(
                lambda: [torch.mm(tile, codewords, out=scores).shape for tile in tiles], lambda: x.clone(), pairs
            )
            found["matmul_bound_million_elements_per_second"] = x.numel() / bound["seconds_median"][0] / 1e6
        out[f"{name}_{bits}b"] = found
    torch.set_num_threads(threads)
    return out


def packed_attention(pairs: int) -> dict[str, Any]:
    """Decode attention on packed codes at 32K tokens, 8 KV heads and 2 bits, with 1 and 4 queries to a head."""
    device = torch.device("cpu")
    bandwidth = attention_bench.copy_bandwidth(device)
    cells = {
        f"{name}_{group}q": attention_bench.measure(
            name, BITS, device, bandwidth, batch=1, tokens=LONG, group=group, pairs=pairs
        )
        for name in (*METHODS, "quarot")
        for group in (1, 4)
    } | {
        f"{name}_{bits}b_{group}q": attention_bench.measure(
            name, bits, device, bandwidth, batch=1, tokens=LONG, group=group, pairs=pairs
        )
        for name, bits in TABLES
        for group in (1, 4)
    }
    return {"copy_bytes_per_second": bandwidth, "threads": torch.get_num_threads(), "cells": cells}


def peak(name: str) -> int:
    """Peak bytes above the loaded model in a process of its own, while one window is scored under `parallel`.

    `forward`: of a plain forward; `tni`: with `task=tni` looking on. glibc gives back what is freed: what it would keep
    for later changes from run to run.
    """
    code = f"import runpy; bench = runpy.run_path({__file__!r}); print(bench['measure_peak']({name!r}))"
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def _norms_peak(loaded: LoadedModel, tokens: torch.Tensor, norms: bool) -> int:
    """Peak bytes above the loaded model of one forward of a window, plain or with `task=tni` looking on."""
    capture(loaded, tokens[0, :256], lambda layer: None)
    if norms:
        look = NormStatistics(TniConfig(context=CONTEXT, windows=1)).add
        return _above_model(loaded, lambda: capture(loaded, tokens[0], look))
    with torch.no_grad():
        return _above_model(loaded, lambda: loaded.model.base_model(input_ids=tokens, use_cache=False))


def _above_model(loaded: LoadedModel, work: Callable[[], object]) -> int:
    """The high-water mark of this process during `work`, less what it held before."""
    before, memory = bytes_in_use(loaded.device), PeakMemory(loaded.device)
    work()
    return (memory.read() or 0) - before


def measure_peak(name: str) -> int:
    """See `peak`: of one scored window, or of a forward."""
    loaded, tokens = inputs()
    if name in ("forward", "tni"):
        return _norms_peak(loaded, tokens, name == "tni")
    method = parallel_method(build_method(name, bits=BITS)) if name != "fp16" else build_method("fp16")
    consume(loaded, method, tokens[:, :256], [(0, 256)])
    return _above_model(loaded, lambda: consume(loaded, method, tokens, [(0, tokens.shape[1])]))


def inputs() -> tuple[LoadedModel, torch.Tensor]:
    """The embedded model and one window of random tokens."""
    config = resolve(compose(["model=tiny", "method=fp16"]))
    loaded = load_model(config.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, loaded.text_config.vocab_size, (1, CONTEXT), generator=generator)
    return loaded, tokens.to(loaded.device)


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "cpu": cpu_name(),
        "device": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "packages": package_versions(),
    }


def full_report(pairs: int, records: int) -> dict[str, Any]:
    """Everything this script measures, the report on `records` synthetic records."""
    with torch.inference_mode():
        loaded, tokens = inputs()
        report = {
            "machine": machine(),
            "settings": {"context": CONTEXT, "bits": BITS, "model": "tiny"},
            "parallel_over_full_precision": parallel_cost(loaded, tokens, pairs),
            "token_by_token_over_chunks": chunked_speed(loaded, tokens, max(3, pairs // 2)),
            "own_context_over_shared": shared_context(loaded, tokens, 1),
        }
    full = peak("fp16")
    report["peak_bytes_over_full_precision"] = {
        name: {"bytes": (used := peak(name)), "full_precision_bytes": full, "ratio": used / full} for name in METHODS
    }
    return report | {name: measure(pairs, records) for name, measure in ALONE.items()}


def norms_peak() -> dict[str, Any]:
    """Peak memory of a forward at which `task=tni` looks, beside a plain one."""
    plain, looked_at = peak("forward"), peak("tni")
    return {"bytes": looked_at, "forward_bytes": plain, "ratio": looked_at / plain}


def _attention(pairs: int, records: int) -> dict[str, Any]:
    with torch.inference_mode():
        return packed_attention(3 * pairs)


def _joint_attention(pairs: int, records: int) -> dict[str, Any]:
    with torch.inference_mode():
        return joint_bench.attention(LONG, pairs)


def fused_encode(pairs: int) -> dict[str, Any]:
    """Encoding in one pass over the codec's own, of a prefill of 4096 tokens and of one block of 128."""
    device = torch.device("cpu")
    bandwidth = attention_bench.copy_bandwidth(device)
    with torch.inference_mode():
        cells = encode_bench.measure((*METHODS, "quarot"), (2, 4), device, bandwidth, pairs=pairs)
    return {"copy_bytes_per_second": bandwidth, "threads": torch.get_num_threads(), "cells": cells}


# Parts that can be measured on their own, which keeps the rest of the file.
ALONE: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "packed_attention": _attention,
    "joint_attention": _joint_attention,
    "fused_encode": lambda pairs, records: fused_encode(pairs),
    "batches": lambda pairs, records: batch_bench.measure(inputs()[0], pairs),
    "calibration_fits": lambda pairs, records: bench_fits.measure(),
    "trellis_rates": lambda pairs, records: encode_bench.trellis_rates(pairs),
    "joint_tables": lambda pairs, records: joint_bench.measure(pairs),
    "encode_over_kivi": lambda pairs, records: encode_speed(3 * pairs),
    "one_thread_over_two": lambda pairs, records: threads_bench.measure(max(2, pairs // 2)),
    "torch_linear_over_onednn": lambda pairs, records: linear_bench.measure(paired, pairs),
    "peers": lambda pairs, records: peers_bench.measure(pairs),
    "real_peers": lambda pairs, records: real_peers_bench.measure(pairs),
    "tni_peak_over_forward": lambda pairs, records: norms_peak(),
    "report_on_synthetic_records": lambda pairs, records: bench_report.measure(records),
}


def show(report: dict[str, Any]) -> None:
    """Print what a report holds."""
    for figure, unit in (
        ("parallel_over_full_precision", "ratio_median"),
        ("token_by_token_over_chunks", "ratio_median"),
        ("own_context_over_shared", "ratio_median"),
    ):
        for name, values in report.get(figure, {}).items():
            print(
                f"{figure:<34}{name:<8}{values[unit]:8.2f}x  ({values['ratio_min']:.2f} to {values['ratio_max']:.2f})"
            )
    for name, values in report.get("encode_over_kivi", {}).items():
        speed, bound = (values.get(f"{part}million_elements_per_second") for part in ("", "matmul_bound_"))
        of = f" of {bound:.0f}" if bound else ""
        fast = values.get("one_pass_million_elements_per_second", speed)
        print(
            f"{'encode_over_kivi':<34}{name:<24}{values['ratio_median']:8.2f}x  ({speed:.1f}{of} M elements/s; packed "
            f"caches {fast:.1f})"
        )
    for figure in ("packed_attention", "joint_attention"):
        for name, values in report.get(figure, {}).get("cells", {}).items():
            print(f"{figure:<34}{name:<24}{attention_bench.said(values)}")
    for name, ways in report.get("one_thread_over_two", {}).items():
        gains = ", ".join(f"{way} {values['ratio_median']:.2f}x" for way, values in ways.items())
        print(f"{'one_thread_over_two':<34}{name:<12}{gains}")
    for name, values in report.get("torch_linear_over_onednn", {}).items():
        print(f"{'torch_linear_over_onednn':<34}{name:<12}{values['ratio_median']:8.2f}x")
    encode_bench.show(report)
    if found := report.get("joint_tables"):
        joint_bench.show(found)
    if found := report.get("batches"):
        batch_bench.show(found)
    if found := report.get("peers"):
        peers_bench.show(found)
    if found := report.get("real_peers"):
        real_peers_bench.show(found)
    if found := report.get("calibration_fits"):
        bench_fits.show(found)
    for name, values in report.get("peak_bytes_over_full_precision", {}).items():
        mebibytes = values["bytes"] / 2**20
        print(f"{'peak_bytes_over_full_precision':<34}{name:<8}{values['ratio']:8.2f}x  ({mebibytes:.0f} MiB)")
    if found := report.get("tni_peak_over_forward"):
        mebibytes = found["bytes"] / 2**20
        print(f"{'tni_peak_over_forward':<34}{'':<8}{found['ratio']:8.2f}x  ({mebibytes:.0f} MiB; below 2x)")
    if found := report.get("report_on_synthetic_records"):
        print(
            f"{'report_on_synthetic_records':<34}{found['records']:<8}{found['total_seconds']:8.0f}s  "
            f"({found['peak_bytes'] / 2**20:.0f} MiB; at most {bench_report.LIMITS['seconds']:.0f} s and 1 GB)"
        )


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs per figure (default 7)")
    parser.add_argument("--records", type=int, default=2000, help="synthetic records for the tables (default 2000)")
    parser.add_argument("--only", choices=list(ALONE), help="measure this alone, and keep the rest of the file")
    parser.add_argument("--out", type=Path, default=Path("results/bench/cpu.json"), help="where the JSON goes")
    args = parser.parse_args()
    if args.only:
        report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
        report[args.only] = ALONE[args.only](args.pairs, args.records)
        report.setdefault("machine_of", {})[args.only] = machine()
    else:
        report = full_report(args.pairs, args.records)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    show({args.only: report[args.only]} if args.only else report)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
