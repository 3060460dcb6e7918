"""Synthetic keys with token-norm imbalance and channel outliers of chosen size."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.errors import ConfigError


def imbalanced(
    tokens: int,
    head_dim: int,
    sinks: int,
    lowness: float,
    outlier_channels: int,
    outlier_size: float,
    outlier_spread: float,
    sink_outliers: bool,
    heads: int = 1,
    seed: int = 0,
) -> Float[Tensor, "1 heads tokens head_dim"]:
    """Standard normal tokens, of which the first `sinks` are `lowness` times smaller.

    The same `outlier_channels` of every token have a mean of ±`outlier_size` (signs per channel) in addition to their
    unit deviation; `outlier_spread` is the relative deviation of that size over tokens. With `sink_outliers` the sinks
    have these outliers too, so they point in the direction of the other tokens; without, they have a direction of their
    own, as OScaR (arXiv 2605.19660, section 4) describes attention sinks. Norms of other tokens do not depend on
    `lowness`.

    Raises:
        ConfigError: more sinks than tokens or more outlier channels than channels.
    """
    if not 0 <= sinks <= tokens or not 0 <= outlier_channels <= head_dim:
        raise ConfigError(
            f"task.sinks={sinks}, task.outlier_channels={outlier_channels}: at most task.tokens={tokens} and "
            f"task.head_dim={head_dim}"
        )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, head_dim, generator=generator)
    channels = torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)])[:, :outlier_channels]
    signs = torch.randint(0, 2, (heads, outlier_channels), generator=generator).float() * 2 - 1
    sizes = 1 + outlier_spread * torch.randn(heads, tokens, outlier_channels, generator=generator)
    if not sink_outliers:
        sizes[:, :sinks] = 0
    x[0] += torch.zeros_like(x[0]).scatter_(
        2, channels[:, None].expand_as(sizes), sizes * signs[:, None] * outlier_size
    )
    x[:, :, :sinks] /= lowness
    return x
