"""Tables and decoding of waterfill's transforms at the shape of an 8B model's layer, and attention on their codes.

No weights are needed. Moments are synthetic: heads whose states, and what noise in them costs, share a part, with
spectra that fall as powers of the rank. Bytes, multiplications and times are measured on them; loss is not.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import attention_bench
import torch
from torch import Tensor

from kvq.calibration.budget import fit_sharing, joint_parts
from kvq.codecs import Codec, JointMoments, bind_codec, rope_table
from kvq.methods.build import build_method

HEADS, DIM, TOKENS, BLOCK = 8, 128, 512, 32
BITS = (1.25, 2.25)
SEED, SHARED = 0, 0.5
"""Of the draws; the part of every head's variance, and of what noise costs, that is common to all heads."""
FALL = {"covariance": 1.5, "fisher": 1.0}
"""Eigenvalues of a head's part are the rank to the power of minus this: with all heads together, 55% of the components
have bits at 1.25 bits and 93% at 2.25 (of SmolLM2's about 60% and 84%)."""
TOGETHER = "value.stages.transform.heads_together"
KEYS_WITH_VALUES = "keys_with_values"
FORMS = {
    "together": ("waterfill", ()),
    "groups_of_4": ("waterfill", (f"{TOGETHER}=4",)),
    "groups_of_2": ("waterfill", (f"{TOGETHER}=2",)),
    "apart": ("waterfill", (f"{TOGETHER}=1",)),
    KEYS_WITH_VALUES: ("waterfill_kv", ()),
}
"""Of a layer's values, or of its keys, which are turned by RoPE, with them as further heads."""
DTYPES = ("float32", "float16")
ATTENDED = ("waterfill/scalar", "waterfill", "waterfill_kv")


def moments_of_heads(heads: int) -> JointMoments:
    """Synthetic moments: each head's own part and one common to all, each head's directions its own."""
    generator = torch.Generator().manual_seed(SEED)

    def turns() -> Tensor:
        drawn = torch.randn(heads, DIM, DIM, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(drawn).Q

    def drawn(fall: float) -> Tensor:
        sizes = torch.arange(1, DIM + 1, dtype=torch.float64) ** -fall
        own, common = turns() * sizes.sqrt(), (turns() * sizes.sqrt()).flatten(0, 1)
        return (1 - SHARED) * torch.block_diag(*(part @ part.mT for part in own)) + SHARED * common @ common.mT

    mean = torch.zeros(heads * DIM, dtype=torch.float64)
    return JointMoments(mean, drawn(FALL["covariance"]), drawn(FALL["fisher"]), heads, TOKENS)


def states_of(moments: JointMoments) -> Tensor:
    """States with these moments, `[1, heads, tokens, channels]`."""
    root = torch.linalg.cholesky(moments.covariance)
    draw = torch.randn(TOKENS, len(root), generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return (draw @ root.mT).float().unflatten(1, (moments.heads, DIM)).transpose(0, 1)[None]


def attention(tokens: int, pairs: int) -> dict[str, Any]:
    """Decode attention on the codes of `tokens` tokens, at the keys of an 8B model and of SmolLM2.

    Beside SDPA, and beside decoding all of them; of the transform, the work goes with the square of heads and channels.
    """
    device = torch.device("cpu")
    bandwidth = attention_bench.copy_bandwidth(device)
    cells = {
        f"{name}_{heads}x{dim}_{group}q": attention_bench.measure(
            name, 2.25, device, bandwidth, batch=1, tokens=tokens, group=group, pairs=pairs, heads=heads, dim=dim
        )
        for name in ATTENDED
        for heads, dim in ((8, 128), (3, 64))
        for group in (1, 4)
    }
    return {"copy_bytes_per_second": bandwidth, "threads": torch.get_num_threads(), "cells": cells}


def core_seconds(work: Callable[[], object]) -> float:
    """What one run takes of the core of its one thread; waiting for others does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def fitted(
    name: str, overrides: tuple[str, ...], dtype: str, bits: float, moments: JointMoments
) -> tuple[Codec, dict[str, float]]:
    """The codec with its tables in a dtype, their bytes, and the seconds of fitting them."""
    side = "key" if moments.heads > HEADS else "value"
    tables_in = f"{side}.stages.transform.tables={dtype}"
    codec = getattr(build_method(name, bits=bits, head_dim=DIM, overrides=[*overrides, tables_in]), side)
    assert isinstance(codec, Codec)
    place, start = (side, 0), time.process_time()
    tables = fit_sharing({place: codec}, {place: moments})[place]
    took = time.process_time() - start
    held = {"table_bytes": sum(table.nbytes for table in tables.values()), "fit_seconds": took}
    return bind_codec(codec, tables, moments.heads, DIM), held


def measure(pairs: int) -> dict[str, Any]:
    """By form, dtype of tables and bits: bytes, multiplications, and million elements that a core decodes in a second.

    Blocks of 32 tokens are decoded in turns over all cells: strings to states, and of it the transform alone. Of
    `pairs` rounds behind one that warms up, the median counts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    drawn = {heads: moments_of_heads(heads) for heads in (HEADS, 2 * HEADS)}
    eigen = min(core_seconds(lambda: torch.linalg.eigh(drawn[HEADS].covariance)) for _ in range(3))
    cells, runs, elements, rope = {}, {}, {}, rope_table(TOKENS, DIM)
    for form, (name, overrides) in FORMS.items():
        moments = drawn[2 * HEADS if form == KEYS_WITH_VALUES else HEADS]
        states = states_of(moments)
        for dtype, bits in itertools.product(DTYPES, BITS):
            codec, held = fitted(name, overrides, dtype, bits, moments)
            parts, packed = joint_parts(codec), codec.encode(states, BLOCK, rope)
            assert parts is not None
            transform, cell = parts[1], f"{form}_{dtype}_{bits:g}b"
            blocks = transform.forward(states)[0].unflatten(2, (-1, BLOCK)).transpose(1, 2)
            cells[cell] = held | {"decode_multiplications": transform.multiplications / (moments.heads * DIM)}
            runs[f"{cell} decode"] = lambda codec=codec, packed=packed: codec.decode(packed, rope)
            runs[f"{cell} transform"] = lambda own=transform, blocks=blocks: own.inverse(blocks, {})
            elements[cell] = states.numel()
    rounds = [{run: core_seconds(work) for run, work in runs.items()} for _ in range(1 + pairs)][1:]
    for run in runs:
        cell, _, what = run.partition(" ")
        rate = elements[cell] / statistics.median(took[run] for took in rounds) / 1e6
        cells[cell][f"{what}_million_elements_per_second"] = rate
    torch.set_num_threads(threads)
    shape = {"kv_heads": HEADS, "head_dim": DIM, "tokens": TOKENS, "block": BLOCK}
    synthetic = {"seed": SEED, "shared": SHARED, "fall": FALL}
    return {
        "shape": shape,
        "synthetic": synthetic,
        "eigendecomposition_seconds": eigen,
        "rounds": pairs,
        "cells": cells,
    }


def show(found: dict[str, Any]) -> None:
    """Print what `measure` found."""
    for name, values in found["cells"].items():
        decode, transform = (values[f"{what}_million_elements_per_second"] for what in ("decode", "transform"))
        whose = "layer" if name.startswith(KEYS_WITH_VALUES) else "layer and side"
        print(
            f"{'joint_tables':<34}{name:<34}{values['table_bytes'] / 1e6:6.2f} MB a {whose}, "
            f"{values['decode_multiplications']:6.1f} multiplications an element, decodes {decode:.1f} M elements/s "
            f"(transform alone {transform:.1f}), fit in {values['fit_seconds']:.2f} s"
        )
    print(f"{'joint_tables':<34}{'eigendecomposition':<34}{found['eigendecomposition_seconds']:6.2f} s, fp64")
