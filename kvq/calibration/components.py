"""Tables of the codecs that share bits over components."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from jaxtyping import Int
from torch import Tensor

from kvq.calibration.budget import fit_sharing, joint_parts
from kvq.calibration.collect import Kept, Place
from kvq.calibration.moments import moments_of
from kvq.codecs import Codec, JointMoments, Tables
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models import LoadedModel

_kept: Kept[dict[Place, JointMoments]] = {}


def fit_components(
    loaded: LoadedModel,
    codecs: Mapping[Place, Codec],
    windows: Int[Tensor, "samples length"],
    settings: CalibrationConfig,
    both: bool = False,
) -> tuple[dict[Place, Tables], float]:
    """Tables of all codecs, `<part>.<table>`, and the seconds that earlier methods of a sweep spent on their moments.

    Args:
        both: codecs of keys take values as further heads (`Method.joins_sides`).

    Raises:
        ConfigError: keys and values that leave out different numbers of tokens.
        DataError: fewer tokens than channels, and as `collect_joint`.
        Unsupported: as `collect_joint`.
    """
    if not codecs:
        return {}, 0.0
    left_out = {found[1].left_out for codec in codecs.values() if (found := joint_parts(codec)) is not None}
    if len(left_out) > 1:
        raise ConfigError(f"left_out: keys and values leave out {sorted(left_out)} first tokens; the same number")
    folded = any(found[1].folded for codec in codecs.values() if (found := joint_parts(codec)) is not None)
    if folded and (norms := [name for name, _ in loaded.model.named_modules() if name.endswith("k_norm")]):
        raise Unsupported(f"folded=true: {norms[0]} stands between W_K and the keys; the components need matrices")
    how = (left_out.pop(), any(codec.uses_rope for codec in codecs.values()), both)
    moments, earlier = moments_of(loaded, windows, settings, how, _kept)
    moments = {("key", at): one for (_, at), one in moments.items()} if both else moments
    _check_tokens(windows, settings, codecs, moments)
    return fit_sharing(codecs, moments), earlier


FEW = 4
"""Tokens per channel, below which second moments are so uncertain that there is a warning."""


def _check_tokens(
    windows: Tensor,
    settings: CalibrationConfig,
    codecs: Mapping[Place, Codec],
    moments: Mapping[Place, JointMoments],
) -> None:
    """Warn of few tokens for the channels that share a transform. Raises: DataError: fewer tokens than channels."""
    channels, tokens = 0, 0
    for place, codec in codecs.items():
        parts, own = joint_parts(codec), moments[place]
        assert parts is not None
        together = min((parts[1].heads_together or own.heads) * (2 if parts[1].with_values else 1), own.heads)
        channels, tokens = max(channels, len(own.mean) // own.heads * together), own.tokens
    given = f"calibration.samples={len(windows)}, length={windows.shape[1]}"
    given += "" if settings.tokens is None else f", tokens={settings.tokens}"
    said = f"{given}: {tokens} tokens for transforms of {channels} channels"
    if tokens < channels:
        raise DataError(f"{said}; at least as many tokens as channels, better {FEW} times as many")
    if tokens < FEW * channels:
        warnings.warn(f"{said}; with fewer than {FEW} times as many, a method loses far more", stacklevel=2)
