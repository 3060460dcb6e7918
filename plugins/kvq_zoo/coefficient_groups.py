"""KVTC's groups of coefficients: what a group stores, and the groups that lose least on a calibration's coefficients.

The error of every possible group is measured. Over the coefficients of a layer, in the order of their variances, the
least error at each number of bits follows from that of fewer coefficients; over layers, from that of fewer layers. Both
are exact. Source: KVTC (arXiv 2511.01815), section 3.2 and appendix B.17, as public reproductions quote them:
docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from kvq.codecs.quantizers import to_stored
from kvq.codecs.trellis import Layout

KINDS = (2, 4, 8)
"""Bits of a coefficient that is stored: whole numbers of 2 and 4 bits, and e4m3."""
SIDE_BITS = 32
"""Of a group: a scale and a shift, each in fp16."""
_E4M3 = torch.float8_e4m3fn
_E4M3_MOST = 448.0
_TOGETHER = 2**24
"""Numbers that are in memory at once while errors are measured."""
_NONE = (1, 0)


def coded(
    x: Float[Tensor, "*lead size"], kind: int
) -> tuple[Integer[Tensor, "*lead size"], Float[Tensor, "*lead 1"], Float[Tensor, "*lead 1"]]:
    """Codes of groups, and their scale and shift in fp16.

    2 and 4 bits: the shift is the least value, the scale the range over 2^kind - 1, halves go to the even code. 8 bits:
    e4m3 of what lies about the middle of the range, scaled to its largest number.
    """
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    if kind == 8:
        shift, scale = (low + high) / 2, (high - low) / (2 * _E4M3_MOST)
    else:
        shift, scale = low, (high - low) / (2**kind - 1)
    steps = (x - shift) / scale.masked_fill(scale == 0, 1)
    if kind == 8:
        codes = steps.float().clamp(-_E4M3_MOST, _E4M3_MOST).to(_E4M3).view(torch.uint8)
    else:
        codes = steps.round().clamp(0, 2**kind - 1).to(torch.uint8)
    return codes, to_stored(scale, torch.float16), to_stored(shift, torch.float16)


def values_of(codes: Integer[Tensor, "*lead size"], kind: int, dtype: torch.dtype) -> Float[Tensor, "*lead size"]:
    """What codes stand for, before scale and shift."""
    return (codes.view(_E4M3) if kind == 8 else codes).to(dtype)


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of coefficients: `sizes`, and `kinds` in bits of a coefficient, 0 where none is stored."""

    sizes: tuple[int, ...]
    kinds: tuple[int, ...]

    @property
    def used(self) -> int:
        """Coefficients up to the end of the last group."""
        return sum(self.sizes)

    @property
    def cost(self) -> int:
        """Bits of a token, scales and shifts included."""
        return sum(cost(size, kind) for size, kind in zip(self.sizes, self.kinds, strict=True))

    @cached_property
    def layout(self) -> Layout:
        """The fields of a token's string."""
        pairs = zip(self.sizes, self.kinds, strict=True)
        return Layout(tuple(kind for size, kind in pairs for _ in range(size)))

    @cached_property
    def alike(self) -> tuple[tuple[int, Tensor, Tensor], ...]:
        """Of all groups of one size and kind: the kind, their coefficients `[groups, size]`, their place among scales.

        Groups that are not stored have no scale.
        """
        found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        start = place = 0
        for size, kind in zip(self.sizes, self.kinds, strict=True):
            if kind:
                starts, places = found.setdefault((size, kind), ([], []))
                starts.append(start)
                places.append(place)
                place += 1
            start += size
        return tuple(
            (kind, torch.tensor(starts)[:, None] + torch.arange(size), torch.tensor(places))
            for (size, kind), (starts, places) in found.items()
        )

    @property
    def scales(self) -> int:
        """Groups that are stored."""
        return sum(kind > 0 for kind in self.kinds)


def cost(size: int, kind: int) -> int:
    """Bits of a group of a token: its coefficients, a scale and a shift."""
    return size * kind + SIDE_BITS if kind else 0


@dataclass(frozen=True)
class Errors:
    """Squared errors of the groups of n coefficients, summed over tokens.

    `energies` `[n]`: of coefficients that are not stored. `of[size, kind]` `[n - size + 1]`: of the group that begins
    at a coefficient.
    """

    energies: Float[np.ndarray, " n"]
    of: Mapping[tuple[int, int], Float[np.ndarray, " starts"]]

    @property
    def options(self) -> list[tuple[int, int]]:
        """Sizes and kinds that a group may have; the first is one coefficient that is not stored."""
        return [_NONE, *self.of]


def measured(z: Float[Tensor, "tokens n"], sizes: Sequence[int]) -> Errors:
    """Errors of all groups of these sizes, those that are larger than n left out."""
    found = {}
    for size in (size for size in sizes if size <= z.shape[1]):
        windows = z.unfold(1, size, 1)
        for kind in KINDS if size > 1 else KINDS[:1]:  # one coefficient is its shift, whatever the bits
            pieces = windows.split(max(1, _TOGETHER // (len(z) * size)), 1)
            found[size, kind] = torch.cat([_error(piece, kind) for piece in pieces]).numpy()
    return Errors(z.double().square().sum(0).numpy(), found)


def _error(x: Float[Tensor, "tokens groups size"], kind: int) -> Float[Tensor, " groups"]:
    codes, scale, shift = coded(x, kind)
    out = values_of(codes, kind, x.dtype) * scale.to(x.dtype) + shift.to(x.dtype)
    return (out - x).square().sum((0, 2), dtype=torch.float64)


class _Table:
    """Least errors of the first i coefficients at up to u units of bits, `[n + 1, u + 1]`, and the last group."""

    def __init__(self, errors: Errors, unit: int, most: int) -> None:
        n = len(errors.energies)
        self.errors, self.unit = errors, unit
        self.least = np.zeros((n + 1, most + 1))
        self.last = np.zeros((n + 1, most + 1), dtype=np.uint8)
        for end in range(1, n + 1):
            best = self.least[end - 1] + errors.energies[end - 1]
            for number, (size, kind) in enumerate(errors.options):
                spent = cost(size, kind) // unit
                if kind == 0 or size > end or spent > most:
                    continue
                tried = self.least[end - size, : most + 1 - spent] + errors.of[size, kind][end - size]
                better = tried < best[spent:]
                best[spent:][better] = tried[better]
                self.last[end, spent:][better] = number
            self.least[end] = best

    @property
    def curve(self) -> Float[np.ndarray, " units"]:
        """Least error of all coefficients at up to each number of units."""
        return self.least[-1]

    def groups(self, units: int) -> Groups:
        """The groups of least error at up to `units`, without coefficients after the last that is stored."""
        found, end = [], len(self.least) - 1
        while end:
            size, kind = self.errors.options[self.last[end, units]]
            found.append((size, kind))
            end, units = end - size, units - cost(size, kind) // self.unit
        while found and found[0][1] == 0:
            found.pop(0)
        return Groups(tuple(size for size, _ in reversed(found)), tuple(kind for _, kind in reversed(found)))


def planned(layers: Sequence[Errors], bits: int) -> list[Groups]:
    """The groups of least total error whose bits of a token, over all layers, are at most `bits`."""
    unit = math.gcd(*(cost(*option) for errors in layers for option in errors.options)) or 1
    units = bits // unit
    curves = []
    for errors in layers:
        # Beyond this more bits change nothing: every coefficient in a group of its own, of the most bits.
        most = max((cost(size, kind) / size for size, kind in errors.of), default=0.0) * len(errors.energies) / unit
        curves.append(_Table(errors, unit, min(units, math.ceil(most))).curve)
    shares = _shares(curves, units)
    return [_Table(errors, unit, share).groups(share) for errors, share in zip(layers, shares, strict=True)]


def _shares(curves: Sequence[Float[np.ndarray, " units"]], units: int) -> list[int]:
    """Units of each layer, at which the sum of the curves is least; of equal ones, fewer for later layers."""
    total = np.zeros(units + 1)
    chosen = []
    for curve in curves:
        best, share = np.full(units + 1, np.inf), np.zeros(units + 1, dtype=np.int32)
        for own, error in enumerate(curve):
            tried = total[: units + 1 - own] + error
            better = tried < best[own:]
            best[own:][better], share[own:][better] = tried[better], own
        total = best
        chosen.append(share)
    left, shares = units, []
    for share in reversed(chosen):
        shares.append(int(share[left]))
        left -= shares[-1]
    return shares[::-1]
