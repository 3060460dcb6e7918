"""How attention on codes, and PyTorch's on a bf16 cache, gain from a second thread.

Each number of threads has a process of its own, in turns: a process that changes its number of threads gets new ones
from OpenMP, and these spin on a core that the timed ones need.

    python experiments/bench/threads_bench.py 2     # the medians with two threads, as JSON
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from attention_bench import clock, ratios, references, states_of

from kvq.kernels import attend
from kvq.methods.build import build_method

ROOT = Path(__file__).parents[2]
CELLS = (
    *((name, group, 32768) for name in ("kivi", "nsn", "oscar") for group in (1, 4)),
    *((name, 4, 131072) for name in ("kivi", "nsn")),
)
"""Methods at 2 bits, queries of a head, and tokens."""
HEADS, DIM, BITS = 8, 128, 2
WARM, CALLS = 4, 21


def medians(threads: int) -> dict[str, dict[str, float]]:
    """Seconds of a call by cell and way, each called in a row as the layers of a model call it."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for name, group, tokens in CELLS:
        shape = (1, HEADS, tokens, DIM)
        keys, values = (torch.randn(shape, generator=generator, dtype=torch.bfloat16) for _ in range(2))
        sides = states_of(build_method(name, bits=BITS, head_dim=DIM), keys, values)
        q = torch.randn(1, HEADS * group, 1, DIM, generator=generator, dtype=torch.bfloat16)
        ways = {
            "packed": lambda q=q, sides=sides: attend(q, *sides, DIM**-0.5),
            "sdpa": references(q, keys, values)["sdpa, queries of a head as rows"],
        }
        found[f"{name}_{group}q_{tokens // 1024}k"] = {
            label: statistics.median([clock(run, torch.device("cpu")) for _ in range(WARM + CALLS)][WARM:])
            for label, run in ways.items()
        }
    return found


def measure(pairs: int) -> dict[str, Any]:
    """Time with one thread over that with two, by cell; the machine needs two idle cores."""
    turns = [[_process(threads) for threads in (1, 2)] for _ in range(pairs)]
    return {
        cell: {
            way: ratios(*([turn[index][cell][way] for turn in turns] for index in (0, 1))) for way in turns[0][0][cell]
        }
        for cell in turns[0][0]
    }


def _process(threads: int) -> dict[str, dict[str, float]]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__, str(threads)], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(medians(int(sys.argv[1]))))
