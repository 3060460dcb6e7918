"""Octave: levels under a scale that keeps the inner product, and first channels with a bit more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kvq.codecs.block_formats import LevelsQuantizer, in_groups
from kvq.codecs.channel_groups import TwoChannelGroups
from kvq.codecs.codec import Codec
from kvq.codecs.levels import look_up, nearest_level
from kvq.codecs.packed import pack_parts
from kvq.codecs.quantizers import Parts, to_stored
from kvq.errors import at_least, require


class LeadingChannels(TwoChannelGroups):
    """Two codecs: one for the first channels of a head, one for the others.

    Args:
        first: channels per head in the first group.
        high: codec of the first channels.
        low: codec of the others.

    Raises:
        ConfigError: no channel in the first group.
        Unsupported: a codec that needs token positions or stores lists.

    Source: rocm_octave.py in vLLM's pull request 59774, whose channels with rotary embeddings have a bit more.
    """

    version: ClassVar[int] = 1
    counted = "first"

    def __init__(self, first: int, high: Codec, low: Codec) -> None:
        at_least("first", first, 1)
        super().__init__(high, low)
        self.first, self.token_group = first, 1 if {high.token_group, low.token_group} == {1} else None

    def count(self, head_dim: int) -> int:
        """Channels of a head in the first group."""
        return self.first

    def _mask(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> Tensor:
        """uint8 `[..., heads, 1, dim]`: 1 for the first channels, 0 for the others."""
        mask = torch.arange(like.shape[-1], device=like.device) < self.first
        return mask.to(torch.uint8).expand(*like.shape[:-2], 1, -1)


class RmsLevelsQuantizer(LevelsQuantizer):
    """The nearest of fixed levels to values over their root mean square, under a scale that keeps the inner product.

    Per token and group, with v the levels: code = the nearest v to x `per_rms` / rms(x) (of two, the lower), then the
    scale d = |x|² / (x·v) with which x·x̂ = |x|², stored in fp16 as d `one`; x̂ = d v. A group of zeros has scale 0.

    Args:
        levels: 2 to 256 ascending numbers, the first of them negative.
        per_rms: where a value of the size of the root mean square lies among the levels.
        one: factor of stored scales, which keeps small ones from the subnormal numbers of fp16.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.

    Raises:
        ConfigError: as `LevelsQuantizer`; a number that is not positive.

    Source: `_quantize_lut` of rocm_octave.py in vLLM's pull request 59774.
    """

    version: ClassVar[int] = 1
    attended_as = None  # type: ignore[assignment]

    def __init__(
        self, levels: Sequence[float], per_rms: float, one: float = 64.0, group_size: int | None = None
    ) -> None:
        super().__init__(levels, group_size)
        require(per_rms > 0, "per_rms", per_rms, "above 0")
        require(one > 0, "one", one, "above 0")
        self.per_rms, self.one = per_rms, one

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`) and `scale` `[..., heads, tokens, groups]` in fp16."""
        groups = in_groups(x, self.group_size)
        levels = groups.new_tensor(self.levels)
        energy = groups.square().sum(-1, keepdim=True)
        counts = in_groups(torch.ones_like(x[..., :1, :]), self.group_size).sum(-1, keepdim=True)
        rms = (energy / counts).sqrt().clamp_min(1e-12)
        codes = nearest_level(groups / rms * self.per_rms, (levels[1:] + levels[:-1]) / 2)
        product = (groups * look_up(levels, codes)).sum(-1, keepdim=True)
        scale = torch.where(product > 0, energy / product.clamp_min(1e-30), 0) * self.one
        stored = {"scale": to_stored(scale.squeeze(-1), torch.float16)}
        return pack_parts(codes.flatten(-2)[..., : x.shape[-1]], self.bits) | stored

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * level / one`, from the stored scale."""
        return super().decode(parts, shape, dtype) / self.one
