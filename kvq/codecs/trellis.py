"""Trellises for N(0, 1): 2^L states whose values a string of bits runs through, and Viterbi's search for the string.

State s is the last L bits of the string, so a component of k bits moves it to (s 2^k + code) mod 2^L, whose value it
decodes to. There is one table of values for each k. The bits before a string are zeros.

Source: trellis-coded quantization, Marcellin and Fischer 1990; the bit-shift trellis with a table, QTIP
(arXiv 2406.11235). Tables are trained by `experiments/trellises.py`.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from safetensors.torch import load_file
from torch import Tensor

from kvq.codecs.bit_strings import FRONT, MOST, Layout, levels_of, read, write

FILE = Path(__file__).parent / "trellis.safetensors"
LEAST_MEMORY, MOST_MEMORY = 6, 12
WIDEST = MOST
_TOGETHER = 2**24
"""Costs that are in memory at once where no numba is installed, or on another device."""


def books_name(memory: int, width: int) -> str:
    """Name of a table in the file."""
    return f"{memory}.{width}"


@functools.cache
def _file() -> dict[str, Tensor]:
    return load_file(FILE)


@functools.lru_cache(maxsize=32)
def books(memory: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "widths states"]:
    """Values of the 2^`memory` states for components of 1, 2, ... bits; widths above `memory` have none."""
    count = min(memory, WIDEST)
    return torch.stack([_file()[books_name(memory, width)] for width in range(1, count + 1)]).to(device, dtype)


def errors(memory: int) -> tuple[float, ...]:
    """Mean squared error on N(0, 1) at 1, 2, ... bits, as measured when the tables were trained."""
    return tuple(_file()[f"{memory}.errors"][: min(memory, WIDEST)].tolist())


@functools.cache
def compiled() -> bool:
    """Whether numba is installed (the extra `cpu`); without it the same search runs in torch, several times slower."""
    return importlib.util.find_spec("numba") is not None


def encode(
    x: Float[Tensor, "rows components"], weights: Float[Tensor, " components"], layout: Layout, memory: int
) -> UInt8[Tensor, "rows nbytes"]:
    """The string of each row whose weighted squared error is least; of equal ones, that of the lowest earlier states.

    In fp32, token by token: a row's bits do not depend on the others.
    """
    x, weights = x.float(), weights.float()
    if compiled() and x.device.type == "cpu":
        from kvq.codecs.trellis_loops import loops_for

        loops, widths = loops_for(memory), np.array(layout.widths, np.uint8)
        codes = np.zeros(x.shape, np.uint8)
        table = books(memory, torch.float32, x.device).numpy()
        loops.search(x.contiguous().numpy(), widths, weights.contiguous().numpy(), table, codes)
        strings = np.zeros((len(x), layout.nbytes), np.uint8)
        loops.write(codes, widths, strings)
        return torch.from_numpy(strings)
    rows = max(1, _TOGETHER // (2**memory * max(1, x.shape[1])))
    return torch.cat([write(_search(piece, weights, layout, memory), layout) for piece in x.split(rows)])


def _search(
    x: Float[Tensor, "rows components"], weights: Float[Tensor, " components"], layout: Layout, memory: int
) -> Int[Tensor, "rows components"]:
    """Viterbi's search in torch: the codes."""
    table = books(memory, torch.float32, x.device)
    cost = torch.full((len(x), 2**memory), torch.inf, device=x.device)
    cost[:, 0] = 0
    back: list[Tensor] = []
    for place, width in enumerate(layout.widths):
        if width:
            ways = cost.view(len(x), 2**width, -1)
            least = ways.amin(1)
            back.append(ways.argmin(1).to(torch.uint8))  # of equal ones, the first
            error = x[:, place, None] - table[width - 1]
            cost = error * error * weights[place] + least.repeat_interleave(2**width, 1)
    codes = torch.zeros(x.shape, dtype=torch.long, device=x.device)
    state = cost.argmin(1)
    for place in reversed(range(len(layout.widths))):
        if width := layout.widths[place]:
            codes[:, place] = state & (2**width - 1)
            prefix = state >> width
            state = prefix | (back.pop().gather(1, prefix[:, None])[:, 0].long() << (memory - width))
    return codes


def decode(
    strings: UInt8[Tensor, "rows nbytes"], layout: Layout, memory: int, dtype: torch.dtype
) -> Float[Tensor, "rows components"]:
    """The values of the states that each string runs through."""
    if compiled() and strings.device.type == "cpu" and dtype is torch.float32:
        from kvq.codecs.trellis_loops import loops_for

        padded = torch.nn.functional.pad(strings, (FRONT, 2))
        out = np.empty((len(strings), len(layout.widths)), np.float32)
        table = books(memory, dtype, strings.device).numpy()
        loops_for(memory).read(padded.numpy(), np.array(layout.widths, np.uint8), table, out)
        return torch.from_numpy(out)
    states = read(strings, layout, [memory] * len(layout.widths))
    return levels_of(states, layout.widths, books(memory, dtype, strings.device))
