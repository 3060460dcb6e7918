"""Parts fitted to a calibration: KVQuant's levels with sparse outliers, rotations and orders (SpinQuant, RotateKV)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.levels import levels_1d, look_up, nearest_level
from kvq.codecs.packed import pack_parts, unpack_parts
from kvq.codecs.quantizers import Axis, Parts, Quantizer, checked_choice, to_stored
from kvq.codecs.rotations import RandomizedHadamard, hadamard_matrix, has_hadamard, per_block, per_head
from kvq.codecs.stages import Side, Stage
from kvq.errors import Unsupported, at_least, require

MAX_BITS = 8
INDICES = 2**16
TOGETHER = 32
"""Tokens whose outliers share a list; they leave a sliding residual in groups of this size."""
RotationStart = Literal["random_hadamard", "hadamard"]
"""The starting point of learning: a Hadamard matrix, with random signs of its rows (as released) or without."""


class NonUniformQuantizer(Calibrated, Quantizer):
    """Values scaled to [-1, 1] and rounded to the nearest of 2^bits levels; outliers are stored in fp16.

    Args:
        bits: bits per code, 1-8.
        axis: `per_channel`: ranges per head and channel from calibration (keys before RoPE); `per_token`: range of
            each token over all heads, stored in fp16 (values).
        outliers: share of entries that are outliers, half of it on each side; 0: none. They are those beyond the
            quantiles `outliers / 2` and `1 - outliers / 2` of their channel on the calibration data (keys), or at or
            beyond those of their token over all heads (values). How many a token of keys has varies.
        qnorm: decode to levels that are shifted and scaled so that, on the calibration data, decoded values have the
            mean and the deviation of the originals (Q-Norm).

    Stores `codes.<plane>`; `outlier.value` (fp16) and `outlier.index` (16 bits, among all channels of all heads)
    `[..., 1, tokens, kept]`, and `outlier.count` (16 bits) `[..., 1, tokens, 1]`. `kept` is the most of any token, the
    rest of a row being empty: `SparseCodec` stores rows without their empty ends. Per token also `center` and `reach`
    `[..., 1, tokens, 1]`.

    Source: KVQuant (arXiv 2401.18079), sections 3.2 to 3.5, and its released simulation. Calibration: levels by k-means
    of all scaled entries except outliers, weighted with squared gradients.
    """

    version: ClassVar[int] = 1
    wants_gradients = True

    def __init__(self, bits: int, axis: Axis | str, outliers: float = 0.01, qnorm: bool = False) -> None:
        require(1 <= bits <= MAX_BITS, "bits", bits, f"a lookup table has 1 to {MAX_BITS} bits", Unsupported)
        require(0 <= outliers < 0.5, "outliers", outliers, "a share of the entries, 0 to below 0.5")
        self.bits, self.outliers, self.qnorm = bits, outliers, qnorm
        self.axis: Axis = checked_choice(Axis, axis, "axis")

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """Tokens whose outliers share a list; 1 without outliers."""
        return TOGETHER if self.outliers else 1

    @property
    def index_bits(self) -> dict[str, int]:
        """Bits of each stored index, by the name of its part; none where their number varies."""
        return {} if self.outliers else {"codes": self.bits}

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`levels` and `decoded` `[2^bits]`; per channel also `center` and `reach` `[heads, 1, dim]`."""
        x = x.float()
        tables: Tables = {}
        if self.axis == "per_channel":
            ends = [quantiles(head.T, self.outliers / 2) for head in x]
            center, reach = _range(*(torch.stack(side).mT for side in zip(*ends, strict=True)))
            tables = {"center": center, "reach": reach}
        else:
            center, reach = _range(*(end.unsqueeze(-3) for end in quantiles(_join_heads(x), self.outliers / 2)))
        scaled = (x - center) / reach.masked_fill(reach == 0, 1)
        weights = torch.ones_like(x) if gradients is None else gradients.float().square()
        inside = (scaled.abs() <= 1).flatten()
        inside |= ~inside.any()  # of very few tokens, none may lie between the quantiles
        values = scaled.flatten()[inside]
        levels = levels_1d(values, weights.flatten()[inside], 2**self.bits, seed)
        decoded = levels
        if self.qnorm:  # shifted and scaled to the mean and the deviation of the values
            wide, rounded = values.double(), look_up(levels, nearest_level(values, _midpoints(levels.float())))
            spread = rounded.std(correction=0)
            factor = wide.std(correction=0) / spread if spread > 0 else 1.0
            decoded = (levels - rounded.mean()) * factor + wide.mean()
        return tables | {"levels": levels.float(), "decoded": decoded.float()}

    def _online(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Center and half-width `[..., 1, tokens, 1]` of each token's range over all heads, and a mask of outliers.

        The mask is `[..., tokens, heads * dim]`; None: outliers are not stored (`outliers` is 0).
        """
        flat = _join_heads(x)
        if not self.outliers:
            low, high, mask = flat.amin(-1, True), flat.amax(-1, True), None
        else:
            low, high = quantiles(flat, self.outliers / 2)
            mask = (flat <= low) | (flat >= high)
            rest = torch.where(mask, flat.median(-1, keepdim=True).values, flat)
            low, high = rest.amin(-1, True), rest.amax(-1, True)
        center, reach = _range(low, high)
        return center.unsqueeze(-3), reach.unsqueeze(-3), mask

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        parts: Parts = {}
        if self.axis == "per_channel":
            center, reach = self.table("center", x), self.table("reach", x)
            mask = _join_heads((x < center - reach) | (x > center + reach)) if self.outliers else None
        else:
            center, reach, mask = self._online(x)
            parts = {name: to_stored(part, torch.float16) for name, part in (("center", center), ("reach", reach))}
        if mask is not None:
            parts |= self._outlier_parts(_join_heads(x), mask)
        scaled = (x - center) / reach.masked_fill(reach == 0, 1)
        return pack_parts(nearest_level(scaled, _midpoints(self.table("levels", x))), self.bits) | parts

    def _outlier_parts(self, flat: Tensor, mask: Tensor) -> Parts:
        """The stored `outlier.*` parts (see the class) of the masked entries of `flat` `[..., tokens, width]`."""
        if flat.shape[-1] >= INDICES:
            raise Unsupported(f"{flat.shape[-1]} channels of all KV heads: the index of an outlier has 16 bits")
        count = mask.sum(-1, keepdim=True)
        most = int(count.max())
        # Indices of the mask's entries, ascending, then an index beyond the last channel for each empty place.
        index = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :most]
        value = to_stored(flat.gather(-1, index), torch.float16)
        empty = torch.arange(most, device=flat.device) >= count
        index, value = index.masked_fill(empty, flat.shape[-1]), value.masked_fill(empty, 0)
        parts = {"outlier.value": value, "outlier.index": (index - INDICES // 2).to(torch.int16)}
        parts["outlier.count"] = count.to(torch.int16)
        return {name: part.unsqueeze(-3) for name, part in parts.items()}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`level * reach + center`, with the outliers in their places."""
        codes = unpack_parts(parts, self.bits, shape[-2])
        like = torch.empty(shape[-3], 0, shape[-1], dtype=dtype, device=codes.device)
        levels = self.table("decoded", like)
        if self.axis == "per_channel":
            center, reach = self.table("center", like), self.table("reach", like)
        else:
            center, reach = parts["center"].to(dtype), parts["reach"].to(dtype)
        out = look_up(levels, codes) * reach + center
        if "outlier.index" in parts:
            index = parts["outlier.index"].squeeze(-3).long() + INDICES // 2
            flat = torch.nn.functional.pad(_join_heads(out), (0, 1))  # one more channel receives empty entries
            flat = flat.scatter(-1, index, parts["outlier.value"].squeeze(-3).to(dtype))[..., :-1]
            out = flat.unflatten(-1, (shape[-3], shape[-1])).transpose(-3, -2).contiguous()
        return out


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Center and half-width of the range from `low` to `high`."""
    return (high + low) / 2, (high - low) / 2


def _join_heads(x: Tensor) -> Tensor:
    """`[..., tokens, heads * dim]` of `[..., heads, tokens, dim]`."""
    return x.transpose(-3, -2).flatten(-2)


def _midpoints(levels: Tensor) -> Tensor:
    return (levels[1:] + levels[:-1]) / 2


def quantiles(x: Float[Tensor, "*lead n"], share: float) -> tuple[Tensor, Tensor]:
    """The quantiles `share` and `1 - share` along the last axis, interpolated linearly, `[*lead, 1]`.

    `torch.quantile` takes at most 2^24 elements, and a layer's calibration states can be more.
    """
    ordered = x.sort(-1).values
    at = share * (x.shape[-1] - 1)
    low = int(at)
    high = min(low + 1, x.shape[-1] - 1)
    ends = (ordered, ordered.flip(-1))
    first, last = (torch.lerp(end[..., low : low + 1], end[..., high : high + 1], at - low) for end in ends)
    return first, last


class TableRotation(Calibrated, Stage):
    """Rotates heads by the calibrated table `rotation`: `[dim, dim]` or `[1, dim, dim]` for all, or one for each."""

    orthogonal = True
    token_group = 1

    def check(self, head_dim: int) -> None:
        if not has_hadamard(head_dim):
            raise Unsupported(f"head_dim={head_dim}: no Hadamard matrix of this order to begin with")
        super().check(head_dim)

    def _rotate(self, x: Float[Tensor, "*lead heads tokens dim"], rotation: Tensor) -> Tensor:
        shared = rotation.ndim == 2 or len(rotation) == 1
        return per_block(x, rotation.view(rotation.shape[-2:])) if shared else per_head(x, rotation)

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._rotate(x, self.table("rotation", x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return self._rotate(y, self.table("rotation", y).mT)


class LearnedRotation(TableRotation):
    """An orthogonal matrix per layer, learned against the loss from a Hadamard matrix by Cayley SGD.

    Args:
        steps: gradient steps, each on one sample.
        rate: learning rate of the first step; it falls to 0 along a cosine.
        start: the matrix of the first step, see `RotationStart`.
        seed: of the random signs, one draw that all layers begin with (the released code: one for each).

    Table: `rotation` `[head_dim, head_dim]` in fp32.

    Source: SpinQuant (arXiv 2405.16406), R2; the step is that of Li et al. (arXiv 2002.01113), exact.
    """

    version: ClassVar[int] = 1
    learned = True

    def __init__(
        self, steps: int = 100, rate: float = 1.5, start: RotationStart | str = "random_hadamard", seed: int = 0
    ) -> None:
        at_least("steps", steps, 1)
        require(rate > 0, "rate", rate, "above 0")
        self.steps, self.rate, self.seed = steps, rate, seed
        self.start: RotationStart = checked_choice(RotationStart, start, "start")

    def initial_rotation(self, head_dim: int) -> Float[Tensor, "dim dim"]:
        """The orthogonal matrix that learning starts from, in fp64."""
        if self.start == "random_hadamard":
            return RandomizedHadamard(self.seed).matrix(head_dim, torch.empty(0, dtype=torch.float64))
        return hadamard_matrix(head_dim).double() / head_dim**0.5

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2


def cayley_step(
    rotation: Float[Tensor, "dim dim"], gradient: Float[Tensor, "dim dim"], rate: float
) -> Float[Tensor, "dim dim"]:
    """One step of descent that stays orthogonal: (I + rate/2 W)⁻¹ (I - rate/2 W) R, W the skew part of the gradient.

    The step is at most 1 / |Rᵀ W R|₁, as in SpinQuant's optimizer, which moves the transpose.
    """
    skew = gradient @ rotation.mT - rotation @ (rotation.mT @ gradient) @ rotation.mT / 2
    skew = skew - skew.mT
    rate = min(rate, 1 / (float(torch.linalg.matrix_norm(rotation.mT @ skew @ rotation, 1)) + 1e-8))
    one = torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)
    moved = torch.linalg.solve(one + rate / 2 * skew, (one - rate / 2 * skew) @ rotation)
    q, r = torch.linalg.qr(moved)  # keeps rounding errors from accumulating over steps
    return q * torch.sign(torch.diagonal(r))


class GroupedHadamard(Stage):
    """A Hadamard matrix over the channels of `heads` neighbouring KV heads of a token joined.

    Args:
        heads: number of heads joined; where it does not divide the number of KV heads, the largest smaller divisor.

    Source: RotateKV (arXiv 2501.16383): grouped-head rotation of 4 heads.
    """

    version: ClassVar[int] = 1
    token_group = 1
    rotates_tokens = True

    def __init__(self, heads: int = 4) -> None:
        at_least("heads", heads, 1)
        self.heads = heads

    def _matrix(self, x: Tensor) -> Tensor:
        together = max(count for count in range(1, self.heads + 1) if x.shape[-3] % count == 0)
        order = together * x.shape[-1]
        if not has_hadamard(order):
            raise Unsupported(f"head_dim={x.shape[-1]}: no Hadamard matrix of order {order} ({together} heads)")
        return (hadamard_matrix(order) / order**0.5).to(x.device, x.dtype)

    def _apply(self, x: Tensor, matrix: Tensor) -> Tensor:
        count = len(matrix) // x.shape[-1]
        joined = x.unflatten(-3, (-1, count)).transpose(-3, -2).flatten(-2)
        return per_block(joined.contiguous(), matrix).unflatten(-1, (count, -1)).transpose(-3, -2).flatten(-4, -3)

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._apply(x, self._matrix(x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return self._apply(y, self._matrix(y).mT)


class ChannelOrder(Calibrated, Stage):
    """Sorts the channels of all KV heads in ascending order of their sums over the calibration tokens.

    Neighbours, which share a scale per token, are then alike in size and sign. Table: `order` `[heads * head_dim]`.

    Source: RotateKV (arXiv 2501.16383): outlier-aware rotation; the released calibration sorts signed sums.
    """

    version: ClassVar[int] = 1
    token_group = 1
    rotates_tokens = True

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`order`: indices of the channels, that with the smallest sum first."""
        return {"order": x.double().sum(-2).flatten().argsort(stable=True).int()}

    def _order(self, x: Tensor) -> Tensor:
        # Exact in fp32 and fp64, the dtypes of computation: an index has at most 24 bits.
        return self.table("order", x).long()

    def _permute(self, x: Tensor, order: Tensor) -> Tensor:
        flat = x.transpose(-3, -2).flatten(-2).index_select(-1, order)
        return flat.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2).contiguous()

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._permute(x, self._order(x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return self._permute(y, self._order(y).argsort())
