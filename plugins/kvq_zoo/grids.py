"""Grids of inference engines: uniform ones, 8-bit floats, and TurboQuant's levels as servers compute them.

Each class adds settings to one of `kvq.codecs`, under whose name keys and records have it, and whose version counts.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs import Float8Quantizer, InnerProductQuantizer, LloydMaxQuantizer, UniformQuantizer, optimal_levels
from kvq.codecs.block_formats import in_groups, times_scale
from kvq.codecs.levels import Array
from kvq.codecs.lloyd_max import CodebookQuantizer
from kvq.codecs.packed import pack, unpack, unpack_parts
from kvq.codecs.quantizers import Gain, Parts, Quantizer, checked_choice, more_bits, to_stored
from kvq.codecs.uniform import Axis, Rounding, ScaleDtype, round_steps
from kvq.errors import ConfigError, at_least, require

Levels = Literal["odd", "full", "midpoint"]
"""Levels of a symmetric grid, with m = 2^(b-1).

`odd`: scale max|x| / (m - 1), codes ±(m - 1). `full`: scale max|x| / m, codes -m to m - 1, so that a largest value
that is positive is clipped. `midpoint`: scale max|x| and levels (code + 1/2) / m, of which none is 0.
"""
ZeroPoint = Literal["float", "ratio", "code"]
"""What is kept besides the scale of an asymmetric grid.

`float`: the group's minimum lo. `ratio`: -lo / scale, not rounded (LMDeploy). `code`: -lo / scale rounded and clamped
to a code, in place of the last bits of the fp32 scale (vLLM).
"""


class EngineUniformQuantizer(UniformQuantizer):
    """`UniformQuantizer` with further grids.

    Args:
        bits, axis, group_size, symmetric, min_scale, rounding, reciprocal, scale_dtype: as `UniformQuantizer`.
        zero_point: see `ZeroPoint`; of an asymmetric grid.
        levels: see `Levels`; of a symmetric grid.
        fixed_scale: a scale for all groups of a symmetric grid, which is not stored (None: each group has its own).

    A constant group of a `ratio` grid, where engines divide by zero, keeps its value.
    """

    def __init__(
        self,
        bits: int,
        axis: Axis | str,
        group_size: int | None = None,
        symmetric: bool = False,
        zero_point: ZeroPoint | str = "float",
        levels: Levels | str = "odd",
        fixed_scale: float | None = None,
        min_scale: float = 0.0,
        rounding: Rounding | str = "even",
        reciprocal: bool = False,
        scale_dtype: ScaleDtype | str = "float16",
    ) -> None:
        grid: Any = {"min_scale": min_scale, "rounding": rounding, "reciprocal": reciprocal, "scale_dtype": scale_dtype}
        super().__init__(bits, axis, group_size, symmetric, **grid)
        self.zero_point = checked_choice(ZeroPoint, zero_point, "zero_point")
        self.levels: Levels = checked_choice(Levels, levels, "levels")
        self.fixed_scale = fixed_scale
        require(self.symmetric or levels == "odd", "levels", levels, "of a symmetric grid; symmetric=true")
        said = "of a symmetric grid, above 0; null for a scale of each group"
        require(fixed_scale is None or (self.symmetric and fixed_scale > 0), "fixed_scale", fixed_scale, said)
        fits = zero_point != "code" or (self.scale_dtype == "float32" and bits <= 8)
        require(fits, "zero_point", zero_point, "with scale_dtype=float32 and at most 8 bits, for which it has room")

    @property
    def is_affine(self) -> bool:
        """As `UniformQuantizer`, of its own grids alone."""
        return super().is_affine and self.levels == "odd" and self.fixed_scale is None

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        """A copy with `extra` bits more, at most `most`."""
        return more_bits(self, extra, most)

    @property
    def _middle(self) -> int:
        """The code of the level 0; of `midpoint`, that of the level above 0."""
        return super()._middle + (self.levels != "odd")

    def _symmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        middle, top = self._middle, self._middle - (self.levels != "odd")
        if self.fixed_scale is not None:
            return {}, self._rounded(groups, groups.new_tensor(self.fixed_scale)).clamp_(-middle, top).add_(middle)
        scale = torch.linalg.vector_norm(groups, float("inf"), dim=self._dim, keepdim=True) * self.clip
        if self.levels == "midpoint":
            scale = scale.clamp_min(self.min_scale)
            codes = self._steps(groups.mul(middle), scale).add_(middle).floor_().clamp_(0, middle + top)
        else:
            scale = self._at_least(scale / middle)
            codes = self._rounded(groups, scale).clamp_(-middle, top).add_(middle)
        return {"scale": self._store_statistics(scale)}, codes

    def _asymmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        if self.zero_point == "float":
            return super()._asymmetric(groups)
        top = 2**self.bits - 1
        low, high = self._clipped_range(groups)
        scale = self._at_least((high - low) / top)
        if self.zero_point == "ratio":
            scale = torch.where(scale == 0, low.abs(), scale)
            scale = torch.maximum(scale, low.abs() / torch.finfo(getattr(torch, self.scale_dtype)).max)  # zero fits
            zero = low.neg().div_(scale.masked_fill(scale == 0, 1))
            codes = round_steps(self._steps(groups, scale).add_(zero), self.rounding).clamp_(0, top)
            return {"scale": self._store_statistics(scale), "zero_point": self._store_statistics(zero)}, codes
        used = scale.masked_fill(scale == 0, 1)
        zero = round_steps(low.neg().div_(used), self.rounding).clamp_(0, top)
        codes = round_steps(self._steps(groups, used).add_(zero), self.rounding).clamp_(0, top)
        used, zero = used.squeeze(self._dim), zero.squeeze(self._dim).int()
        stored = torch.empty_like(used, dtype=torch.float32).copy_(used).view(torch.int32)
        return {"scale": (stored & -(1 << self.bits) | zero).view(torch.float32)}, codes

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The values of the grid, from the stored statistics."""
        if self.symmetric and self.levels == "midpoint":
            groups = self._grouped(unpack_parts(parts, self.bits, shape[-2]).to(dtype))
            scale = self._per_element(parts["scale"].to(dtype))
            return self._ungroup(groups.sub(self._middle - 0.5).div_(self._middle).mul_(scale), shape[self._dim])
        if self.fixed_scale is not None:
            scale = torch.full((1, 1), self.fixed_scale, dtype=dtype, device=parts["codes.0"].device)
            parts = parts | {"scale": scale}
        elif not self.symmetric and self.zero_point == "code":
            stored, mask = parts["scale"].view(torch.int32), (1 << self.bits) - 1
            parts = parts | {"scale": (stored & ~mask).view(torch.float32), "zero_point": stored & mask}
        return super().decode(parts, shape, dtype)


Float8 = Literal["e4m3", "e5m2"]
"""8-bit floats: e4m3 (3 mantissa bits, largest 448, no infinities) and e5m2 (2 mantissa bits, largest 57344)."""


class EngineFloat8Quantizer(Float8Quantizer):
    """8-bit floats without a scale, cast as they are, or with one for a token's channels.

    A scale that is fixed, per layer or per head is a stage before this quantizer, without one of its own.

    Args:
        format: see `Float8`.
        scale: `none`, or `token`: max|x| / (largest number of the format) of a token's channels in a head.
        min_scale: scales below it become it.
        saturate: clamp to the largest number before the cast; else overflow is torch's: e5m2 gets infinite.
        scale_dtype: dtype of stored scales, see `ScaleDtype`. Codes use the unrounded scale.
        reciprocal: multiply by the reciprocal of the scale (vLLM) instead of dividing by the scale.
        group_size: channels that share a scale; None = all of the head.
    """

    token_group = 1
    attended_as = "states"

    def __init__(
        self,
        format: Float8 | str = "e4m3",  # noqa: A002 - the name of the setting
        scale: Literal["token", "none"] = "none",
        min_scale: float = 0.0,
        saturate: bool = True,
        scale_dtype: ScaleDtype | str = "float16",
        reciprocal: bool = False,
        group_size: int | None = None,
    ) -> None:
        self.scale = checked_choice(Literal["token", "none"], scale, "scale")
        self.scale_dtype: ScaleDtype = checked_choice(ScaleDtype, scale_dtype, "scale_dtype")
        self._dtype = torch.float8_e4m3fn if checked_choice(Float8, format, "format") == "e4m3" else torch.float8_e5m2
        if group_size is not None and (group_size < 1 or self.scale != "token"):
            raise ConfigError(f"group_size={group_size}: at least 1, with scale=token")
        at_least("min_scale", min_scale, 0)
        self.min_scale, self.saturate, self.reciprocal, self.group_size = min_scale, saturate, reciprocal, group_size

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`values` in the format's dtype, as `x`, and `scale` `[..., heads, tokens, groups]`."""
        limit, side = torch.finfo(self._dtype).max, Parts()
        if self.scale == "token":
            groups = in_groups(x, self.group_size)
            scale = groups.abs().amax(-1, keepdim=True) / limit
            if self.min_scale:
                scale = scale.clamp_min(self.min_scale)
            used = scale.masked_fill(scale == 0, 1)
            groups = groups * used.reciprocal() if self.reciprocal else groups / used
            side = {"scale": to_stored(scale.squeeze(-1), getattr(torch, self.scale_dtype))}
            x = groups.flatten(-2)[..., : x.shape[-1]]
        return {"values": (x.clamp(-limit, limit) if self.saturate else x).to(self._dtype), **side}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * value`, from the stored scale."""
        values = parts["values"].to(dtype)
        return times_scale(values, parts["scale"].to(dtype), self.group_size) if "scale" in parts else values


Marginal = Literal["normal", "trapezoid"]
"""The density of a coordinate: N(0, 1/head_dim), the limit of a unit vector's (LMDeploy).

`trapezoid`: the same with sums in place of integrals, see `trapezoid_levels` (vLLM).
"""


def trapezoid_levels(bits: int, dim: int) -> Array:
    """All 2^bits levels for N(0, 1/dim) as vLLM finds them: at most 200 steps with 200 trapezoids for a cell.

    Source: `solve_lloyd_max` of vLLM's turboquant/centroids.py.
    """
    count, deviation = 2**bits, dim**-0.5
    levels: Array = 3.5 * deviation * (2 * np.arange(count) + 1 - count) / count
    for _ in range(200):
        ends = np.concatenate([[-10.5 * deviation], (levels[1:] + levels[:-1]) / 2, [10.5 * deviation]])
        at = np.linspace(ends[:-1], ends[1:], 201)
        mass = np.exp(-((at / deviation) ** 2) / 2)
        found = np.trapezoid(at * mass, axis=0) / np.trapezoid(mass, axis=0)
        if np.abs(found - levels).max() < 1e-10:
            break
        levels = found
    return levels


def normal_codebook(bits: int, dim: int, marginal: Marginal) -> Array:
    """The codebook with 2^bits levels, ascending, of a coordinate of N(0, 1/dim)."""
    if marginal == "trapezoid":
        half = trapezoid_levels(bits, dim)[2 ** (bits - 1) :]
    else:
        half = optimal_levels(bits, math.inf) / dim**0.5
    return np.concatenate([-half[::-1], half])


class NormalQuantizer(LloydMaxQuantizer):
    """`LloydMaxQuantizer` with the levels of a normal coordinate, which any head dim has.

    Args:
        bits, gain: as `LloydMaxQuantizer`.
        marginal: see `Marginal`.
        unit: decoded tokens are scaled to norm 1 (vLLM's "norm correction"); the stored norm stays that of the token.
    """

    def __init__(
        self, bits: int, gain: Gain | str = "none", marginal: Marginal | str = "normal", unit: bool = False
    ) -> None:
        CodebookQuantizer.__init__(
            self, bits, gain, normal_codebook, (checked_choice(Marginal, marginal, "marginal"),), unit
        )

    def check(self, head_dim: int) -> None:
        """Any head dim has a normal codebook."""


class SignedRestQuantizer(InnerProductQuantizer):
    """TurboQuant-prod without a sketch: a sign stands for the coordinate of the error itself (LMDeploy).

    Decoding adds |r| / √D · sign(r), and |r| / √D is stored: a smaller error than with a sketch, but biased.

    Args:
        bits: bits per element, 2-8: one less for the codes, 1 for the signs.
        sketch: `identity`: there is none.
        marginal: of the codes, as `NormalQuantizer`.
    """

    score = Quantizer.score  # there is no sketch that a query could meet

    def __init__(
        self, bits: int, sketch: Literal["identity"] = "identity", marginal: Marginal | str = "normal"
    ) -> None:
        super().__init__(bits)
        self._codes = NormalQuantizer(bits - 1, marginal=marginal)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`, `signs` and `rest` `[..., heads, tokens, 1]`."""
        parts = self._codes.encode(x, dtype)
        rest = x - self._codes.decode(parts, x.shape, x.dtype)
        norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return parts | {"signs": pack((rest < 0).to(torch.uint8), 1)[0], "rest": to_stored(norm, torch.float16)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The codes' values plus `rest` with the stored signs."""
        x = self._codes.decode({k: part for k, part in parts.items() if k.startswith("codes.")}, shape, dtype)
        signs = unpack([parts["signs"]], 1, shape[-2]).to(dtype).mul_(-2).add_(1)
        return torch.addcmul(x, signs, parts["rest"].to(dtype))
