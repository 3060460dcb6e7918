"""Encoding in one pass beside the codec's own: paired times, and the bytes that must move."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from attention_bench import in_turns, ratios, replayed
from kvq_kernels.dispatch import FusedCodec, encoder_for

from kvq.codecs import Codec, trellis
from kvq.config.method import PrefillBlock
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


WIDTHS, ROWS, COMPONENTS = (0, 1, 2, 3, 4, 2), 256, 384


def trellis_rates(pairs: int) -> dict[str, Any]:
    """Million components a thread encodes and decodes in a second, in strings of mixed widths (2 bits on average)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(ROWS, COMPONENTS, generator=torch.Generator().manual_seed(0))
    layout, weights = trellis.Layout(WIDTHS * (COMPONENTS // len(WIDTHS))), torch.ones(COMPONENTS)
    out: dict[str, Any] = {}
    for memory in (6, 8, 10, 12):
        strings = trellis.encode(x, weights, layout, memory)
        runs = {
            "encode": lambda memory=memory: trellis.encode(x, weights, layout, memory),
            "decode": lambda memory=memory, strings=strings: trellis.decode(strings, layout, memory, torch.float32),
        }
        found = in_turns(runs, x.device, pairs)
        out[str(memory)] = {name: x.numel() / statistics.median(found[name]) / 1e6 for name in runs}
    torch.set_num_threads(threads)
    return out


def show(report: dict[str, Any]) -> None:
    """Print what a report has of encoding in one pass, and of trellises."""
    for name, values in report.get("fused_encode", {}).get("cells", {}).items():
        moved, of_copy = values["bytes"] / 1e6, values["fraction_of_copy_bandwidth"]
        print(
            f"{'fused_encode':<34}{name:<22}{values['ratio_median']:8.2f}x of the codec's; {moved:.1f} MB at "
            f"{of_copy:.2f} of copying"
        )
    for memory, rates in report.get("trellis_rates", {}).items():
        said = ", ".join(f"{name} {rate:.1f} M components/s" for name, rate in rates.items())
        print(f"{'trellis_rates':<34}{f'L = {memory}':<22}{said}")
