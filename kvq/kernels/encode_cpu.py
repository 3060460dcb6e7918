"""Encoding in one pass on a CPU: `encode_loops` over slices of blocks that fit a core's second-level cache."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.quantizers import Parts, to_stored
from kvq.kernels.chain import Chain, Grids, gain_of, grids
from kvq.kernels.cpu import pool
from kvq.kernels.encode_loops import Loops, loops_for

ROWS = 2048
"""Tokens of a head that are encoded together: 1 MiB at 128 channels."""


def encode(chain: Chain, blocks: Float[Tensor, "batch blocks heads tokens head_dim"]) -> Parts:
    """The parts of `Codec.encode_block`, each `[batch, blocks, heads, rows, columns]`."""
    batch, count, heads, tokens, dim = blocks.shape
    flat = blocks.detach().transpose(1, 2).flatten(0, 2)
    step = max(1, ROWS // tokens)
    slices = [flat[start : start + step] for start in range(0, flat.shape[0], step)]
    loops = loops_for(dim, dim if chain.per_channel else chain.group(tokens, dim)[0])
    matrix = chain.matrix(dim, torch.empty(0))
    threads = min(torch.get_num_threads(), len(slices))
    if threads == 1:
        found = [_encode(chain, loops, matrix, some) for some in slices]
    else:
        found = list(pool(threads).map(lambda some: _encode(chain, loops, matrix, some), slices))
    return {
        name: torch.cat([parts[name] for parts in found]).unflatten(0, (batch, heads, count)).transpose(1, 2)
        for name in found[0]
    }


def _encode(chain: Chain, loops: Loops, matrix: Tensor | None, blocks: Float[Tensor, "blocks tokens dim"]) -> Parts:
    """Parts `[blocks, rows, columns]`."""
    count, tokens, dim = blocks.shape
    y = blocks.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if matrix is not None and chain.signs and dim.bit_count() == 1:
        loops.rotate(y.view(-1, dim).numpy(), matrix[:, 0].sign().numpy())
    elif matrix is not None:
        y = y @ matrix
    norms = torch.empty(count, tokens, 1)
    if chain.norm is not None:
        loops.normalize(y.view(-1, dim).numpy(), norms.view(-1).numpy(), dim**0.5 if chain.rms else 1.0)
    size, groups = chain.group(tokens, dim)
    shape = (count, groups, dim) if chain.per_channel else (count, tokens, groups)
    low, high = torch.empty(shape), torch.empty(shape)
    ranges = loops.channel_ranges if chain.per_channel else loops.token_ranges
    ranges(y.numpy(), size, low.numpy(), high.numpy())
    grid = grids(chain.quantizer, low, high)
    # A byte holds zeros after the last token.
    codes = torch.zeros(count, -(-tokens // 8) * 8, dim, dtype=torch.uint8)
    coder = loops.channel_codes if chain.per_channel else loops.token_codes
    coder(y.numpy(), size, grid.step.numpy(), grid.base.numpy(), grid.zero.numpy(), chain.top, codes.numpy())
    parts, shift = dict(grid.stored), 0
    for index, width in enumerate(chain.widths):
        parts[f"codes.{index}"] = plane = torch.empty(count, -(-tokens * width // 8), dim, dtype=torch.uint8)
        loops.pack(codes.numpy(), shift, width, plane.numpy())
        shift += width
    gain = None if chain.gain_name is None else _gain(chain, loops, y, codes, size, grid)
    if chain.norm is not None:
        parts[f"{chain.norm}.scale"] = to_stored(norms if gain is None else norms * gain, torch.float16)
    elif gain is not None:
        parts["gain"] = to_stored(gain, torch.float16)
    return parts


def _gain(chain: Chain, loops: Loops, y: Tensor, codes: Tensor, size: int, grid: Grids) -> Tensor:
    found = torch.empty(3, *y.shape[:2])
    low, scale, zero = (part.numpy() for part in (grid.low, grid.scale, grid.zero))
    loops.gains(y.numpy(), codes.numpy(), size, chain.per_channel, low, scale, zero, found.numpy())
    return gain_of(chain.quantizer.gain, *found)[..., None]
