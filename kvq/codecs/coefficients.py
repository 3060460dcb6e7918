"""KVTC's transform and quantizer: principal components of all KV heads of a token, in groups that share a scale.

Both are fitted with all layers at once, because the bits of a side are shared out over them (`kvq.calibration.budget`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Integer
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, JointTransform, Tables
from kvq.codecs.quantizers import Parts, Quantizer, choice, to_stored
from kvq.codecs.rotations import eigenvectors, per_block, signed
from kvq.codecs.trellis import Layout, read, write
from kvq.errors import ConfigError, Unsupported, at_least

KINDS = (2, 4, 8)
"""Bits of a coefficient that is stored: whole numbers of 2 and 4 bits, and e4m3."""
SIDE_BITS = 32
"""Of a group: a scale and a shift, each in fp16."""
_TOGETHER = 2**26
"""Numbers that are in fp64 at once while moments are summed up."""
_E4M3 = torch.float8_e4m3fn
_E4M3_MOST = 448.0


class Budget(enum.Enum):
    """Who shares bits: `side`: all layers, keys and values apart; `own`: those of one layer and side."""

    side = "side"
    own = "own"


class Layers(enum.Enum):
    """Whose heads a basis joins: `own`: those of a layer; `all`: those of all layers."""

    own = "own"
    all = "all"


class PrincipalComponents(JointTransform):
    """`(x - mean) V` of all KV heads of a token, V the eigenvectors of the states' covariance, by variance, descending.

    Args:
        left_out: first tokens of each calibration text that do not count, because they stay in full precision.
        layers: see `Layers`; with `all`, a cache encodes a token once every layer has its states, and `n` is the number
            of channels of all layers.

    Tables: `mean` `[1, n]` and `basis` `[n, m]`, in fp32, of the m of n components that are stored (at least one).

    Raises:
        ConfigError: a negative number of tokens, unknown layers.

    Source: KVTC (arXiv 2511.01815), section 3.1, where one basis joins all layers.
    """

    version: ClassVar[int] = 1

    def __init__(self, left_out: int = 4, layers: Layers | str = Layers.own) -> None:
        at_least("left_out", left_out, 0)
        self.left_out, self.layers = left_out, choice(Layers, layers, "layers")

    @property
    def joins_layers(self) -> bool:  # type: ignore[override]
        return self.layers is Layers.all

    @property
    def multiplications(self) -> int:
        return self.tables["basis"].numel()

    @staticmethod
    def fit_rows(rows: Float[Tensor, "tokens n"]) -> Tables:
        """The tables with all components; of fewer tokens than n, with one for each token."""
        pieces = rows.split(max(1, _TOGETHER // rows.shape[1]))
        mean = torch.stack([piece.double().sum(0) for piece in pieces]).sum(0) / len(rows)
        if len(rows) < rows.shape[1]:
            basis = signed(torch.linalg.svd(rows.double() - mean, full_matrices=False).Vh.mT)
        else:
            covariance = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
            for piece in pieces:
                wide = piece.double() - mean
                covariance += wide.mT @ wide / len(rows)
            basis = eigenvectors(covariance)[1].flip(1)
        return {"mean": mean.float()[None], "basis": basis.float().contiguous()}

    def _components(self, rows: Float[Tensor, "*lead tokens n"], like: Tensor) -> Float[Tensor, "*lead tokens m"]:
        return per_block(rows, self.table("basis", like))

    def _states(
        self, components: Float[Tensor, "*lead tokens n"], like: Tensor, some: slice
    ) -> Float[Tensor, "*lead tokens channels"]:
        basis = self.table("basis", like)
        return per_block(components[..., : basis.shape[1]], basis[some].mT)


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


class CoefficientQuantizer(Calibrated, Quantizer):
    """Coefficients of a token in consecutive groups of 0, 2, 4 or 8 bits, each with a scale and a shift of the token.

    Args:
        bits: any number from 0.5 to 8, the mean over the elements of those that share it (`budget`), scales and shifts
            included: 16 over the compression ratio before entropy coding.
        budget: see `Budget`.
        sizes: coefficients that a group may have.
        tokens: of the calibration, evenly spread, on which the errors of groups are measured.

    Stores `string` (uint8 `[..., 1, tokens, bytes]`): a token's codes, padded to a byte; `scale` and `shift` (fp16
    `[..., 1, tokens, groups]`).

    Tables: `sizes` and `kinds` `[groups]`, as `Groups`.

    Raises:
        ConfigError: an unknown budget, sizes or tokens below 1.
        Unsupported: other bits.

    Source: KVTC (arXiv 2511.01815), section 3.2 and appendix B.17, as public reproductions quote them: docs/methods.md.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(
        self,
        bits: float | int,
        budget: Budget | str = Budget.side,
        sizes: Sequence[int] = (1, 16, 64, 256, 1024),
        tokens: int = 256,
    ) -> None:
        self.budget = choice(Budget, budget, "budget")
        if not 0.5 <= bits <= 8:
            raise Unsupported(f"bits={bits}: a CoefficientQuantizer takes 0.5 to 8")
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"sizes={list(sizes)}: one or more numbers from 1")
        at_least("tokens", tokens, 1)
        self.bits, self.sizes, self.tokens = bits, tuple(sorted(set(sizes))), tokens
        self._groups: Groups | None = None

    @staticmethod
    def planned(groups: Groups) -> Tables:
        """The tables of groups."""
        return {"sizes": torch.tensor(groups.sizes).int(), "kinds": torch.tensor(groups.kinds).to(torch.uint8)}

    def bound(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        other = super().bound(tables, heads, head_dim)
        assert isinstance(other, CoefficientQuantizer)
        other._groups = None
        return other

    def groups(self, like: Tensor) -> Groups:
        """The groups of the layer. Raises: Unsupported: not bound, or to a layer of another shape."""
        self.table("kinds", like)
        if self._groups is None:
            assert self._tables is not None
            self._groups = Groups(*(tuple(self._tables[name].tolist()) for name in ("sizes", "kinds")))
        return self._groups

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        groups = self.groups(x)
        flat = x.transpose(-3, -2).flatten(-2)
        codes = torch.zeros(*flat.shape[:-1], groups.used, dtype=torch.uint8, device=x.device)
        scales = torch.zeros(2, *flat.shape[:-1], groups.scales, dtype=torch.float16, device=x.device)
        for kind, chosen, places in _on(groups, x.device):
            own, scale, shift = coded(flat.index_select(-1, chosen.flatten()).unflatten(-1, chosen.shape), kind)
            codes.index_copy_(-1, chosen.flatten(), own.flatten(-2))
            scales.index_copy_(-1, places, torch.stack([scale, shift]).squeeze(-1))
        string = write(codes, groups.layout).unsqueeze(-3)
        return {"string": string, "scale": scales[0].unsqueeze(-3), "shift": scales[1].unsqueeze(-3)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        string = parts["string"].squeeze(-3)
        groups = self.groups(torch.empty(shape[-3], 0, shape[-1], dtype=dtype, device=string.device))
        codes = read(string, groups.layout, groups.layout.widths).to(torch.uint8)
        flat = torch.zeros(*string.shape[:-1], shape[-3] * shape[-1], dtype=dtype, device=string.device)
        scale, shift = (parts[name].squeeze(-3).to(dtype) for name in ("scale", "shift"))
        for kind, chosen, places in _on(groups, string.device):
            own = codes.index_select(-1, chosen.flatten()).unflatten(-1, chosen.shape)
            values = values_of(own, kind, dtype) * scale.index_select(-1, places)[..., None]
            values = values + shift.index_select(-1, places)[..., None]
            flat.index_copy_(-1, chosen.flatten(), values.flatten(-2))
        return flat.unflatten(-1, (shape[-3], shape[-1])).transpose(-3, -2)


def _on(groups: Groups, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    for kind, chosen, places in groups.alike:
        yield kind, chosen.to(device), places.to(device)
