"""Exact bit packing: b-bit codes take b bits, for every b from 1 to 16.

A b-bit code is split into planes of 8, 4, 2 or 1 bits (a 3-bit code is a 2-bit and a 1-bit plane, the wider plane
holding the lower bits), and a plane of w bits packs 8/w *consecutive tokens* of one channel into a byte. Planes
therefore concatenate along tokens, and unpacking is a shift and a mask over contiguous channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Integer, UInt8
from torch import Tensor

from kvq.errors import ConfigError

MAX_BITS = 16
_WIDTHS = (8, 4, 2, 1)


def plane_widths(bits: int) -> tuple[int, ...]:
    """Widths in bits of the planes that hold a `bits`-bit code, widest (lowest bits) first: 3 -> (2, 1), 16 -> (8, 8).

    Raises:
        ConfigError: when `bits` is not in 1-16.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ConfigError(f"bits={bits}: codes of 1 to {MAX_BITS} bits can be packed")
    widths, left = [], bits
    for width in _WIDTHS:
        while left >= width:
            widths.append(width)
            left -= width
    return tuple(widths)


def pack(codes: Integer[Tensor, "*lead tokens cols"], bits: int) -> list[UInt8[Tensor, "*lead _rows cols"]]:
    """Pack codes in `[0, 2**bits)` into one byte tensor per plane; plane w has `ceil(tokens * w / 8)` rows.

    A last byte that the tokens do not fill is padded with zeros (its bytes count).
    """
    planes, shift = [], 0
    for width in plane_widths(bits):
        plane = codes if width == bits else (codes >> shift) & ((1 << width) - 1)
        planes.append(_pack_plane(plane.to(torch.uint8), width))
        shift += width
    return planes


def unpack(planes: list[Tensor], bits: int, tokens: int) -> Integer[Tensor, "*lead tokens cols"]:
    """Inverse of `pack`: uint8 codes up to 8 bits, int32 above."""
    dtype = torch.uint8 if bits <= 8 else torch.int32
    codes, shift = None, 0
    for plane, width in zip(planes, plane_widths(bits), strict=True):
        part = _unpack_plane(plane, width, tokens).to(dtype)
        codes = part if codes is None else codes | (part << shift)
        shift += width
    assert codes is not None
    return codes


def pack_parts(codes: Tensor, bits: int, name: str = "codes") -> dict[str, Tensor]:
    """Stored parts `<name>.<plane>` of whole numbers in `[0, 2**bits)` of any dtype, `[..., tokens, cols]`."""
    planes = pack(codes.to(torch.uint8 if bits <= 8 else torch.int32), bits)
    return {f"{name}.{index}": plane for index, plane in enumerate(planes)}


def unpack_parts(
    parts: Mapping[str, Tensor], bits: int, tokens: int, name: str = "codes"
) -> Integer[Tensor, "*lead tokens cols"]:
    """Inverse of `pack_parts`, as `unpack`."""
    return unpack([parts[f"{name}.{index}"] for index in range(len(plane_widths(bits)))], bits, tokens)


def _pack_plane(codes: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    if per_byte == 1:
        return codes.contiguous()
    short = -codes.shape[-2] % per_byte
    if short:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, short))
    slots = codes.unflatten(-2, (-1, per_byte))
    out = slots[..., 0, :].clone()
    for i in range(1, per_byte):
        out |= slots[..., i, :] << (width * i)
    return out


def _unpack_plane(plane: Tensor, width: int, tokens: int) -> Tensor:
    per_byte = 8 // width
    if per_byte == 1:
        return plane
    rows, cols = plane.shape[-2:]
    out = plane.new_empty(*plane.shape[:-2], rows, per_byte, cols)
    for i in range(per_byte):
        torch.bitwise_and(plane >> (width * i), (1 << width) - 1, out=out[..., i, :])
    return out.flatten(-3, -2)[..., :tokens, :]
