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


def quantize_groups(
    x: Float[Tensor, "*lead size"], kind: int
) -> tuple[Integer[Tensor, "*lead size"], Float[Tensor, "*lead 1"], Float[Tensor, "*lead 1"]]:
    """Quantize groups to `kind` bits a coefficient: codes in uint8, and the scale and the shift of each group in fp16.

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


def code_numbers(codes: Integer[Tensor, "*lead size"], kind: int, dtype: torch.dtype) -> Float[Tensor, "*lead size"]:
    """The numbers that codes of `kind` bits stand for, before scale and shift are applied."""
    return (codes.view(_E4M3) if kind == 8 else codes).to(dtype)


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of coefficients: `sizes`, and `kinds` in bits of a coefficient, 0 where none is stored."""

    sizes: tuple[int, ...]
    kinds: tuple[int, ...]

    @property
    def coefficients(self) -> int:
        """Number of coefficients up to the end of the last group."""
        return sum(self.sizes)

    @property
    def bits_per_token(self) -> int:
        """Stored bits of one token, scales and shifts included."""
        return sum(group_bits(size, kind) for size, kind in zip(self.sizes, self.kinds, strict=True))

    @cached_property
    def layout(self) -> Layout:
        """Bits of each coefficient's code in a token's bit string, in order; scales and shifts are not part of it."""
        pairs = zip(self.sizes, self.kinds, strict=True)
        return Layout(tuple(kind for size, kind in pairs for _ in range(size)))

    @cached_property
    def batches(self) -> tuple[tuple[int, Tensor, Tensor], ...]:
        """Stored groups that can be quantized together, one entry for each size and kind.

        An entry is the kind, the indices of the groups' coefficients `[groups, size]` and the indices of their scales
        `[groups]`. Groups that are not stored have no scale.
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
    def stored_groups(self) -> int:
        """Number of groups that are stored, each with a scale and a shift."""
        return sum(kind > 0 for kind in self.kinds)


def group_bits(size: int, kind: int) -> int:
    """Stored bits of one group of one token: `size` codes of `kind` bits, a scale and a shift; 0 where kind is 0."""
    return size * kind + SIDE_BITS if kind else 0


@dataclass(frozen=True)
class GroupErrors:
    """Squared error of every possible group of n coefficients, summed over tokens.

    `energies` `[n]`: of each coefficient if it is not stored. `by_option[size, kind]` `[n - size + 1]`: of the group
    of this size and kind that begins at each coefficient.
    """

    energies: Float[np.ndarray, " n"]
    by_option: Mapping[tuple[int, int], Float[np.ndarray, " starts"]]

    @property
    def options(self) -> list[tuple[int, int]]:
        """Sizes and kinds that a group may have; the first is one coefficient that is not stored."""
        return [(1, 0), *self.by_option]


def measure_errors(z: Float[Tensor, "tokens n"], sizes: Sequence[int]) -> GroupErrors:
    """Quantize every group of these sizes at every kind and measure its error; sizes larger than n are left out."""
    found = {}
    for size in (size for size in sizes if size <= z.shape[1]):
        windows = z.unfold(1, size, 1)
        for kind in KINDS if size > 1 else KINDS[:1]:  # one coefficient is its shift, whatever the bits
            pieces = windows.split(max(1, 2**24 // (len(z) * size)), 1)  # in memory at once
            found[size, kind] = torch.cat([_squared_errors(piece, kind) for piece in pieces]).numpy()
    return GroupErrors(z.double().square().sum(0).numpy(), found)


def _squared_errors(x: Float[Tensor, "tokens groups size"], kind: int) -> Float[Tensor, " groups"]:
    """Squared error of each group quantized to `kind` bits a coefficient, summed over tokens, in fp64."""
    codes, scale, shift = quantize_groups(x, kind)
    out = code_numbers(codes, kind, x.dtype) * scale.to(x.dtype) + shift.to(x.dtype)
    return (out - x).square().sum((0, 2), dtype=torch.float64)


class _LeastErrors:
    """The least error of the first i of n coefficients in at most u units, for all i and u, by dynamic programming.

    A unit is `unit` bits of a token. `least` `[n + 1, most + 1]`: the errors; `last`, of the same shape: which option
    of `GroupErrors.options` the last group has.
    """

    def __init__(self, errors: GroupErrors, unit: int, most: int) -> None:
        n = len(errors.energies)
        self.errors, self.unit = errors, unit
        self.least = np.zeros((n + 1, most + 1))
        self.last = np.zeros((n + 1, most + 1), dtype=np.uint8)
        for end in range(1, n + 1):
            best = self.least[end - 1] + errors.energies[end - 1]
            for number, (size, kind) in enumerate(errors.options):
                spent = group_bits(size, kind) // unit
                if kind == 0 or size > end or spent > most:
                    continue
                tried = self.least[end - size, : most + 1 - spent] + errors.by_option[size, kind][end - size]
                better = tried < best[spent:]
                best[spent:][better] = tried[better]
                self.last[end, spent:][better] = number
            self.least[end] = best

    @property
    def curve(self) -> Float[np.ndarray, " units"]:
        """Least error of all n coefficients in at most 0, 1, ... units of `unit` bits of a token."""
        return self.least[-1]

    def groups(self, units: int) -> Groups:
        """The groups of least error in at most `units` units; coefficients after the last stored one are left out."""
        found, end = [], len(self.least) - 1
        while end:
            size, kind = self.errors.options[self.last[end, units]]
            found.append((size, kind))
            end, units = end - size, units - group_bits(size, kind) // self.unit
        while found and found[0][1] == 0:
            found.pop(0)
        return Groups(tuple(size for size, _ in reversed(found)), tuple(kind for _, kind in reversed(found)))


def plan_groups(layers: Sequence[GroupErrors], bits: int) -> list[Groups]:
    """Choose each layer's groups: least total error with at most `bits` bits of a token over all layers together."""
    unit = math.gcd(*(group_bits(*option) for errors in layers for option in errors.options)) or 1
    units = bits // unit
    curves = []
    for errors in layers:
        # Beyond this more bits change nothing: every coefficient in a group of its own, of the most bits.
        most = (
            max((group_bits(size, kind) / size for size, kind in errors.by_option), default=0.0)
            * len(errors.energies)
            / unit
        )
        curves.append(_LeastErrors(errors, unit, min(units, math.ceil(most))).curve)
    shares = _share_units(curves, units)
    return [_LeastErrors(errors, unit, share).groups(share) for errors, share in zip(layers, shares, strict=True)]


def _share_units(curves: Sequence[Float[np.ndarray, " units"]], units: int) -> list[int]:
    """Share out `units` among layers so that the sum of their errors is least; of equal shares, fewer for later layers.

    `curves`: of each layer its least error in at most 0, 1, ... units.
    """
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
