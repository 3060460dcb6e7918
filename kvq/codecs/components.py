"""Quantizers with a bit width for each component: a token's codes are one string of bits, without scales.

Equal widths need no calibration, so any chain whose channels are close to normal can end in one of these quantizers.
Different widths are for components of a `FisherTransform`; a calibration shares out the bits
(`kvq.calibration.budget`).
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs import trellis
from kvq.codecs.calibrated import Calibrated
from kvq.codecs.levels import nearest_level
from kvq.codecs.lloyd_max import cells, codebook, optimal_levels
from kvq.codecs.quantizers import Parts, Quantizer, checked_choice
from kvq.codecs.trellis import WIDEST, Layout, Rows, Strings, values_of, write
from kvq.errors import ConfigError, Unsupported, within

_FARTHEST = 64.0  # deviations, beyond which components are cut: far behind the last level
Widths = Literal["equal", "pooled", "own"]
"""Bit width of a component: `equal`: the same for all; `pooled`: from one bit budget for all layers and sides of a
model; `own`: from a budget for each layer and side.
"""
Deviation = Literal["one", "unit_norm"]
"""Standard deviation of a channel: 1, or 1 / sqrt(head_dim) for tokens of norm 1; for equal widths."""


class ComponentQuantizer(Calibrated, Quantizer):
    """Quantizes components of standard deviation 1 with 0 to 8 bits each; a token's codes are one string of bits.

    Args:
        bits: bits per component: a whole number for `equal` widths, else their mean, 0.5 to 8.
        widths: see `Widths`. `equal`: each head of a token has a string; else the heads of a token share one.
        deviation: see `Deviation`.
        unshrunk: decoded components are scaled by (1 - D)^(-1/2), D the mean squared error at their width, because
            centroids have a smaller variance, 1 - D, than the values.

    Stores `string` (uint8 `[..., heads or 1, tokens, bytes]`): a token's bits, padded to a byte.

    Tables: `widths` `[components]` in uint8, and `weights` λ `[components]` in fp32: noise of relative size d in a
    component costs λ d / 2 nats per token.
    """

    token_group = 1
    attended_as = "components"

    def __init__(
        self,
        bits: float | int,
        widths: Widths | str = "equal",
        deviation: Deviation | str = "one",
        unshrunk: bool = False,
    ) -> None:
        self.widths: Widths = checked_choice(Widths, widths, "widths")
        self.deviation: Deviation = checked_choice(Deviation, deviation, "deviation")
        equal = self.widths == "equal"
        if not (1 if equal else 0.5) <= bits <= self.widest or (equal and bits != int(bits)):
            numbers = f"a whole number from 1 to {self.widest}" if equal else f"0.5 to {self.widest}"
            raise Unsupported(f"bits={bits}: {type(self).__name__} with widths={self.widths} takes {numbers}")
        if not equal and self.deviation != "one":
            raise ConfigError(f"deviation={self.deviation}: with widths=equal; a transform gives deviations of 1")
        self.bits, self.unshrunk = bits, unshrunk
        self._layouts: dict[int, Layout] = {}

    @property
    def widest(self) -> int:
        """The most bits that a component can have."""
        return WIDEST

    @property
    def is_calibrated(self) -> bool:  # type: ignore[override]
        """Whether the widths are tables of a calibration, not all equal."""
        return self.widths != "equal"

    @property
    @abc.abstractmethod
    def errors(self) -> tuple[float, ...]:
        """Mean squared error on N(0, 1) at 0, 1, ... bits."""

    def bind(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        other: Any = super().bind(tables, heads, head_dim)
        other._layouts = {}
        return other

    def _layout(self, like: Tensor) -> Layout:
        """The fields of a bit string: the channels of a head with equal widths, else the components of all heads."""
        dim = like.shape[-1]
        if dim not in self._layouts:
            widths = [int(self.bits)] * dim if self.widths == "equal" else self.table("widths", like).int().tolist()
            self._layouts[dim] = Layout(tuple(widths))
        return self._layouts[dim]

    def _scale(self, dim: int) -> float:
        return dim**-0.5 if self.deviation == "unit_norm" else 1.0

    def _rows(self, x: Tensor) -> Tensor:
        """`x` with the components of one bit string along the last axis: `[..., heads or 1, tokens, components]`."""
        return x if self.widths == "equal" else x.transpose(-3, -2).flatten(-2).unsqueeze(-3)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`string`, the packed codes of each token (see the class)."""
        layout, rows = self._layout(x), self._rows(x / self._scale(x.shape[-1]))
        weights = x.new_ones(rows.shape[-1])
        if self.widths != "equal":
            weights = self.table("weights", x)
            weights = weights / weights.max().clamp_min(torch.finfo(torch.float32).tiny)
        flat = rows.reshape(-1, rows.shape[-1]).clamp(-_FARTHEST, _FARTHEST)
        return {"string": self.strings(flat, weights, layout).view(*rows.shape[:-1], -1)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        strings = parts["string"]
        like = torch.empty(shape[-3], 0, shape[-1], dtype=dtype, device=strings.device)
        layout = self._layout(like)
        flat = self.levels(strings.flatten(0, -2), layout, dtype)
        factors = _factors(layout, self.errors, self._scale(shape[-1]), self.unshrunk)
        if factors is not None:
            flat = flat * factors.to(flat.device, dtype)
        if self.widths == "equal":
            return flat.view(shape)
        return flat.view(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)

    @abc.abstractmethod
    def strings(self, x: Rows, weights: Float[Tensor, " components"], layout: Layout) -> Strings:
        """Quantize each row and pack its codes into one bit string."""

    @abc.abstractmethod
    def levels(self, strings: Strings, layout: Layout, dtype: torch.dtype) -> Rows:
        """Unpack and dequantize bit strings to components `[rows, components]`."""


class ScalarQuantizer(ComponentQuantizer):
    """Rounds each component to the nearest of the 2^width Lloyd-Max levels of N(0, 1); see `ComponentQuantizer`.

    Args:
        bits, widths, deviation, unshrunk: as `ComponentQuantizer`.

    Source: Max 1960, Table I.
    """

    version: ClassVar[int] = 1

    @property
    def errors(self) -> tuple[float, ...]:
        """Mean squared error on N(0, 1) at 0 to 8 bits."""
        return scalar_errors()

    def strings(self, x: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        widths, books = torch.tensor(layout.widths, device=x.device), _books(x.dtype, x.device)
        for width in sorted(set(layout.widths) - {0}):
            places = (widths == width).nonzero()[:, 0]
            levels = books[width - 1, : 2**width]
            indices = nearest_level(x.index_select(-1, places), (levels[1:] + levels[:-1]) / 2)
            codes.index_copy_(-1, places, indices.to(torch.uint8))
        return write(codes, layout)

    def levels(self, strings: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
        return values_of(strings, layout, layout.widths, _books(dtype, strings.device))


class TrellisQuantizer(ComponentQuantizer):
    """One trellis of 2^`memory` states runs through the components of a string; see `ComponentQuantizer`.

    Args:
        bits, widths, deviation, unshrunk: as `ComponentQuantizer`; at most `memory` bits.
        memory: bits of a state, 6 to 12.

    Source: `kvq.codecs.trellis`. Widths that change from component to component, and least weighted error, are ours.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        bits: float | int,
        memory: int = 8,
        widths: Widths | str = "equal",
        deviation: Deviation | str = "one",
        unshrunk: bool = False,
    ) -> None:
        within("memory", memory, trellis.LEAST_MEMORY, trellis.MOST_MEMORY)
        self.memory = memory
        super().__init__(bits, widths, deviation, unshrunk)

    @property
    def widest(self) -> int:
        return min(WIDEST, self.memory)

    @property
    def errors(self) -> tuple[float, ...]:
        """Mean squared error on N(0, 1) at 0, 1, ... bits of the trained trellis."""
        return (1.0, *trellis.mean_squared_errors(self.memory))

    def strings(self, x: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return trellis.encode(x, weights, layout, self.memory)

    def levels(self, strings: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
        return trellis.decode(strings, layout, self.memory, dtype)


@functools.lru_cache(maxsize=128)
def _factors(
    layout: Layout, errors: tuple[float, ...], scale: float, unshrunk: bool
) -> Float[Tensor, "*components"] | None:
    """Factors on decoded components, `[components]` or a scalar; None: all 1."""
    if not unshrunk:
        return None if scale == 1 else torch.tensor(scale, dtype=torch.float64)
    grown = [(1 - errors[width]) ** -0.5 if width else 0.0 for width in layout.widths]
    return torch.tensor(grown, dtype=torch.float64) * scale


@functools.lru_cache(maxsize=16)
def _books(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "widths levels"]:
    """Lloyd-Max levels of N(0, 1) at 1 to 8 bits, rows padded with zeros."""
    out = torch.zeros(WIDEST, 2**WIDEST, dtype=torch.float64)
    for width in range(1, WIDEST + 1):
        out[width - 1, : 2**width] = torch.from_numpy(codebook(width, math.inf))
    return out.to(device, dtype)


@functools.cache
def scalar_errors() -> tuple[float, ...]:
    """Mean squared error of the Lloyd-Max levels of N(0, 1) at 0 to 8 bits: 1 - Σ p c²."""
    errors = [1.0]
    for width in range(1, WIDEST + 1):
        half = optimal_levels(width, math.inf)
        errors.append(float(1 - 2 * (cells(half, math.inf)[0] * half**2).sum()))
    return tuple(errors)
