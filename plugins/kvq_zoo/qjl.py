"""QJL: signs of a random sketch of keys, outlier channels apart; codecs of their own for the first layers."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs import Codec, Sketch
from kvq.codecs.lloyd_max import sketch_constant
from kvq.codecs.packed import pack, unpack
from kvq.codecs.quantizers import Parts, Quantizer, checked_choice, to_stored
from kvq.codecs.rotations import per_block, rotation
from kvq.errors import ConfigError, Unsupported, at_least
from kvq.methods.policies import Policy


class SketchQuantizer(Quantizer):
    """Signs of S·k and the norm |k|, separately for the outlier channels of a group of tokens and for the others.

    Decoding gives |k| / (m c) · Sᵀ sign(S k) on the group's own channels, c = E|s·u| for a unit vector u (√(2/π) for
    Gaussian rows): <q, decoded> is QJL's estimate of <q, k>, unbiased over draws of S, and attention is QJL's.

    Args:
        ratio: sketch coordinates m per channel; QJL has 256, in early layers 512, for 128 channels.
        outliers: channels with the largest sums of squares per head and group of tokens, sketched separately; 0 = none.
        outlier_ratio: coordinates of their sketch per channel of the whole head; QJL has 256, in early layers 128.
        shared_rows: the outliers' sketch is the first rows of the common one; else it is drawn separately.
        group_size: tokens that share a choice of outlier channels (None: the whole block); a short last one its own.
        sketch: `orthogonal` (as released): blocks of D orthogonal rows of length √D; or `gaussian` (the definition).
        seed: seed of S, independent of data seeds.

    Stores `signs`, `norm` (of the whole key, fp16), and with outliers `outlier_signs`, `outlier_norm` (fp16) and
    `channels` (one byte per outlier channel and group); the norm of the other channels follows from the two. Relative
    error of one decoded key is large by design: about (π/2) / ratio.

    Source: QJL (arXiv 2406.03482), definition 3.1; sizes, rows and norms of its released LongBench run.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        ratio: int = 2,
        outliers: int = 8,
        outlier_ratio: int = 2,
        shared_rows: bool = True,
        group_size: int | None = 32,
        sketch: Sketch | str = "orthogonal",
        seed: int = 1,
    ) -> None:
        at_least("ratio", ratio, 1)
        at_least("outliers", outliers, 0)
        at_least("outlier_ratio", outlier_ratio, 1)
        at_least("group_size", group_size, 1)
        if shared_rows and outliers and outlier_ratio > ratio:
            raise ConfigError(f"outlier_ratio={outlier_ratio}: at most ratio ({ratio}) where shared_rows=true")
        self.ratio, self.outliers, self.outlier_ratio, self.seed = ratio, outliers, outlier_ratio, seed
        self.shared_rows, self.group_size = shared_rows, group_size
        self.sketch: Sketch = checked_choice(Sketch, sketch, "sketch")

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """The tokens that share a choice of outlier channels."""
        return self.group_size if self.outliers else 1

    def check(self, head_dim: int) -> None:
        if self.outliers >= head_dim:
            raise Unsupported(f"outliers={self.outliers}: head_dim={head_dim} leaves no other channels")
        if self.outliers and head_dim > 256:
            raise Unsupported(f"head_dim={head_dim}: an outlier channel is named by one byte (at most 256 channels)")

    def _matrix(self, dim: int, like: Tensor, dtype: torch.dtype, outlier: bool) -> Float[Tensor, "coordinates dim"]:
        if not outlier:
            return tall_sketch(self.sketch, self.ratio, dim, 2 * self.seed, dtype, like.device)
        if self.shared_rows:
            return self._matrix(dim, like, dtype, False)[: self.outlier_ratio * dim]
        return tall_sketch(self.sketch, self.outlier_ratio, dim, 2 * self.seed + 1, dtype, like.device)

    def _signs(self, x: Tensor, outlier: bool) -> Tensor:
        """Packed signs of the sketch coordinates; 1: negative."""
        negative = per_block(x, self._matrix(x.shape[-1], x, x.dtype, outlier).mT) < 0
        return pack(negative.to(torch.uint8), 1)[0]

    def _estimate(self, signs: Tensor, norm: Tensor, shape: Size, dtype: torch.dtype, outlier: bool) -> Tensor:
        matrix = self._matrix(shape[-1], signs, dtype, outlier)
        plus_minus = unpack([signs], 1, shape[-2]).to(dtype).mul_(-2).add_(1)
        return per_block(plus_minus, matrix) * norm / (matrix.shape[0] * sketch_constant(self.sketch, shape[-1]))

    def _mask(self, channels: Tensor, shape: Size) -> Tensor:
        """1 at the outlier channels of every token."""
        per_group = torch.zeros(*channels.shape[:-1], shape[-1], device=channels.device, dtype=torch.bool)
        per_group.scatter_(-1, channels.long(), True)
        return per_group.repeat_interleave(self.group_size or shape[-2], -2)[..., : shape[-2], :]

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        self.check(x.shape[-1])
        norm = _norm(x)
        if not self.outliers:
            return {"signs": self._signs(x, False), "norm": norm}
        size = self.group_size or x.shape[-2]
        energy = torch.nn.functional.pad(x.square(), (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size)).sum(-2)
        channels = energy.topk(self.outliers, -1).indices.to(torch.uint8)
        mask = self._mask(channels, x.shape)
        apart = x.masked_fill(~mask, 0)
        out = {"signs": self._signs(x.masked_fill(mask, 0), False), "norm": norm, "channels": channels}
        return out | {"outlier_signs": self._signs(apart, True), "outlier_norm": _norm(apart)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The linear estimators of both groups on their channels, which give QJL's inner products with a query."""
        norm = parts["norm"].to(dtype)
        if not self.outliers:
            return self._estimate(parts["signs"], norm, shape, dtype, False)
        outlier_norm = parts["outlier_norm"].to(dtype)
        rest = (norm.square() - outlier_norm.square()).clamp_min(0).sqrt()  # rounding can make the part the larger
        x = self._estimate(parts["signs"], rest, shape, dtype, False)
        apart = self._estimate(parts["outlier_signs"], outlier_norm, shape, dtype, True)
        return torch.where(self._mask(parts["channels"], shape), apart, x)


def _norm(x: Tensor) -> Tensor:
    return to_stored(torch.linalg.vector_norm(x, dim=-1, keepdim=True), torch.float16)


@lru_cache(maxsize=64)
def tall_sketch(
    sketch: Sketch, ratio: int, dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "coordinates dim"]:
    """S with `ratio * dim` rows, one direction per row; orthogonal ones in blocks of `dim`."""
    if sketch == "orthogonal":
        blocks = [rotation(dim, 1000 * seed + i, torch.float64, torch.device("cpu")) for i in range(ratio)]
        return (torch.cat(blocks) * dim**0.5).to(device, dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ratio * dim, dim, generator=generator, dtype=torch.float64).to(device, dtype)


class FirstLayers(Policy):
    """Gives the first layers other codecs, as QJL does.

    Args:
        count: number of layers.
        key, value: their codecs; None: those of the other layers.
    """

    setting = "first_layers"
    does = "gives the first layers other codecs"
    excludes = frozenset({"same_stages", "two_codecs", "packed_attention"})

    def __init__(self, count: int, key: Codec | None = None, value: Codec | None = None) -> None:
        at_least("count", count, 1)
        self.count, self.key, self.value = count, key, value

    def codec(self, codec: Codec | None, side: str, layer: int) -> Codec | None:
        """Its own codec of `side` in the first `count` layers; the given one elsewhere, or where it has none."""
        return (getattr(self, side) if layer < self.count else None) or codec
