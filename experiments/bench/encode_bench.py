"""Encoding in one pass beside the codec's own: paired times, and the bytes that must move."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from attention_bench import in_turns, ratios, replayed

from kvq.codecs import Codec
from kvq.config.residual import PrefillBlock
from kvq.kernels import FusedCodec
from kvq.kernels.dispatch import encoder_for
from kvq.methods.build import build_method

PREFILL, FLUSHED = 4096, 128


def one(codec: Codec, states: torch.Tensor, block: int | None, bandwidth: float, pairs: int) -> dict[str, Any]:
    """Ratio fused / codec over `pairs` rounds in turns; bytes are states read once and parts written once."""
    mine = FusedCodec(codec)
    runs = {"fused": lambda: mine.encode(states, block), "codec": lambda: codec.encode(states, block)}
    found = in_turns({name: replayed(run, states.device) for name, run in runs.items()}, states.device, pairs)
    seconds = (found["fused"], found["codec"])
    moved = states.numel() * states.element_size() + mine.encode(states, block).nbytes
    median = statistics.median(seconds[0])
    return {
        **ratios(*seconds),
        "seconds_median": [statistics.median(kept) for kept in seconds],
        "fused": mine.chain is not None and encoder_for(mine.chain, states[:, None]) is not None,
        "bytes": moved,
        "fraction_of_copy_bandwidth": moved / median / bandwidth,
    }


def measure(
    names: tuple[str, ...], bits: tuple[int, ...], device: torch.device, bandwidth: float, *, pairs: int,
    heads: int = 8, dim: int = 128, prefill: int = PREFILL,
) -> dict[str, Any]:  # fmt: skip
    """A prefill and one flushed block of a layer's keys and values in bf16, as the method's residual cuts them."""
    generator = torch.Generator(device=device).manual_seed(0)
    draw = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    out = {}
    for name in names:
        for number in bits:
            method = build_method(name, bits=number, head_dim=dim)
            for side in ("key", "value"):
                codec, whole = getattr(method, side), getattr(method.residual, side).prefill_block is PrefillBlock.whole
                for tokens in (prefill, FLUSHED):
                    states = torch.randn(1, heads, tokens, dim, **draw)
                    block = None if whole else FLUSHED
                    out[f"{name}_{number}b_{side}_{tokens}"] = one(codec, states, block, bandwidth, pairs)
    return out
