"""KVQuant++'s look-ups: `python experiments/bench/product_bench.py [repeats]`, in float32 on one thread.

`nearest_level`: levels of 4,096 vectors of 128 channels, by the difference from every level (section 2.2.3, "before")
over the thresholds that kvq compares with; the paper's ratios are 14 at 2 bits and 22 at 4 bits. `attention`: one query
of each of 32 heads to 4,096 tokens of 8 heads in stored form (product codes by tables of the query, corrections of low
rank as factors, the inner-product form through the query's sketch), over decoding every token and attending to those,
and over dense attention to tokens that are decoded already. All are medians of paired ratios of times of one run:
`results/bench/product.json`.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import attention_bench
import torch
from joint_bench import core_seconds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvq.codecs.levels import nearest_level
from kvq.codecs.lloyd_max import codebook
from kvq.kernels.eager import attend
from kvq.methods.build import build_method
from kvq.results.provenance import cpu_name

OUT = Path(__file__).parents[2] / "results" / "bench" / "product.json"
TOKENS, DIM, HEADS, GROUP = 4096, 128, 8, 4
METHODS = ("turboquant/hadamard", "kvquant_plus_plus", "kvquant_plus_plus/low_rank", "kvquant_plus_plus/product")
"""At 2 bits, corrections and codebooks not counted."""


def paired(ways: dict[str, Callable[[], object]], over: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median over repeats of the time of `over` divided by that of each way, run in turn; the first turn warms up."""
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        base = core_seconds(over)
        for name, way in ways.items():
            seconds = core_seconds(way)
            if turn:
                ratios[name].append(base / seconds)
    return {name: round(statistics.median(found), 2) for name, found in ratios.items()}


def level_speedup(bits: int, repeats: int) -> dict[str, float]:
    """Time of the differences from every level, over those of kvq's thresholds and of a binary search."""
    generator = torch.Generator().manual_seed(bits)
    x = torch.nn.functional.normalize(torch.randn(TOKENS, DIM, generator=generator), dim=-1)
    levels = torch.from_numpy(codebook(bits, DIM)).float()
    middles = (levels[1:] + levels[:-1]) / 2

    def expanded() -> Tensor:
        return (x.unsqueeze(-1) - levels.view(1, 1, -1)).abs().argmin(-1)

    ways = {"thresholds": lambda: nearest_level(x, middles), "bucketize": lambda: torch.bucketize(x, middles)}
    for way in ways.values():
        assert float((way().long() != expanded()).float().mean()) < 1e-5  # but for ties
    return paired(ways, expanded, repeats)


def attention_speedup(name: str, repeats: int) -> dict[str, float]:
    """Times of decoding and attending, and of attending to decoded tokens, over that of attention on codes."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS * GROUP, 1, DIM, generator=generator)
    keys, values = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator)
    sides = attention_bench.states_of(build_method(name, bits=2, head_dim=DIM), keys, values)
    decode = attention_bench.decoding(q, sides)
    rows = q.reshape(1, HEADS, GROUP, DIM)

    def on_codes() -> Tensor:
        return attend(q, *sides, DIM**-0.5)

    difference = (on_codes().view_as(rows) - decode()).norm() / decode().norm()
    over_decoding = paired({"": on_codes}, decode, repeats)[""]
    over_dense = paired({"": on_codes}, lambda: sdpa(rows, keys, values), repeats)[""]
    return {
        "decoding_and_dense": over_decoding,
        "dense_of_decoded": over_dense,
        "difference": float(f"{difference:.1e}"),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with torch.inference_mode():
        found = {
            "nearest_level": {f"{bits} bits": level_speedup(bits, count) for bits in (2, 3, 4)},
            "attention": {name: attention_speedup(name, count) for name in METHODS},
        }
    about = {"cpu": cpu_name() or platform.processor(), "tokens": TOKENS, "channels": DIM, "heads": HEADS}
    OUT.write_text(
        json.dumps(about | {"queries_per_head": GROUP, "repeats": count} | found, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(found, indent=1))
