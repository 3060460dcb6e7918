"""One token's attention to a long cache in ONNX Runtime beside packed attention and SDPA, in turns on one thread.

    python experiments/bench/onnxruntime_bench.py [PAIRS]

8 KV heads of 128 channels, 32,768 tokens, one query and four for each KV head; writes results/bench/onnxruntime.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from attention_bench import in_turns, ratios, references, states_of
from kvq_engines.onnxruntime import PACKAGES, attention_session

from kvq.kernels import attend
from kvq.methods.build import build_method
from kvq.results.provenance import cpu_name

TOKENS, KV_HEADS, DIM = 32768, 8, 128
PACKED = (("q8_0", 8), ("q4_0", 4), ("kivi", 4), ("kivi", 2))
REPORT = Path(__file__).parents[2] / "results" / "bench" / "onnxruntime.json"


def in_onnxruntime(group: int, bits: int | None) -> Callable[[], object]:
    """A decoding step of `group` queries a KV head: the new token is stored behind `TOKENS` - 1 in a shared buffer."""
    session = attention_session(group * KV_HEADS, KV_HEADS, DIM, bits, bits is not None, scale=DIM**-0.5)
    generator, dim = np.random.default_rng(0), DIM // 2 if bits == 4 else DIM
    shape = (1, KV_HEADS, TOKENS, dim)
    fills: dict[int | None, Callable[[], Any]] = {
        None: lambda: generator.standard_normal(shape, dtype=np.float32),
        8: lambda: generator.integers(-127, 128, shape, dtype=np.int8),
        4: lambda: generator.integers(0, 256, shape, dtype=np.uint8),
    }
    binding = session.io_binding()
    for side in ("key", "value"):
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(fills[bits]())
        binding.bind_ortvalue_input(f"past_{side}", buffer)
        binding.bind_ortvalue_output(f"present_{side}", buffer)
    feed = {"query": generator.standard_normal((1, 1, group * KV_HEADS * DIM), dtype=np.float32)}
    feed |= {side: generator.standard_normal((1, 1, KV_HEADS * DIM), dtype=np.float32) for side in ("key", "value")}
    feed |= {"seqlens_k": np.array([TOKENS - 1], np.int32), "total": np.array([TOKENS], np.int32)}
    if bits is not None:
        feed |= {scale: np.full(KV_HEADS * DIM, 4 / 2 ** (bits - 1), np.float32) for scale in ("k_scale", "v_scale")}
    for name, array in feed.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("output")
    return lambda: session.run_with_iobinding(binding)


def measure(group: int, pairs: int) -> dict[str, Any]:
    """Median seconds of each way, and its ratio over SDPA of a bf16 cache, paired."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, KV_HEADS, TOKENS, DIM)] * 2 + [(1, KV_HEADS * group, 1, DIM)]
    keys, values, query = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    reference = "sdpa, queries of a head as rows"
    ways = {reference: references(query, keys, values)[reference]}
    ways["sdpa in fp32"] = references(*(x.float() for x in (query, keys, values)))[reference]
    for bits in (None, 8, 4):
        ways[f"ONNX Runtime {f'int{bits}' if bits else 'fp32'}"] = in_onnxruntime(group, bits)
    for name, width in PACKED:
        sides = states_of(build_method(name, bits=width, head_dim=DIM), keys, values)
        ways[f"packed {name} {width}"] = lambda sides=sides: attend(query, *sides, DIM**-0.5)
    seconds = in_turns(ways, torch.device("cpu"), pairs)
    return {
        label: {"seconds_median": statistics.median(times), **ratios(times, seconds[reference])}
        for label, times in seconds.items()
    }


def main() -> None:
    """Measure both numbers of queries, print them and write the report."""
    torch.set_num_threads(1)
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    report: dict[str, Any] = {"processor": cpu_name(), "threads": 1, "packages": PACKAGES, "torch": torch.__version__}
    report["shape"] = {"tokens": TOKENS, "kv_heads": KV_HEADS, "head_dim": DIM}
    report["queries_per_head"] = {str(group): measure(group, pairs) for group in (1, 4)}
    for group, ways in report["queries_per_head"].items():
        for label, way in ways.items():
            print(f"{group} {label:32} {1000 * way['seconds_median']:8.2f} ms  {way['ratio_median']:5.2f} of SDPA")
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
