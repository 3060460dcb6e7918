"""Tables of the codecs that share bits over components, and what further passes over the calibration text decide."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvq.calibration.budget import fit_sharing, joint_parts
from kvq.calibration.collect import Kept, Place, drawn_positions, loss, ropes_of
from kvq.calibration.moments import moments_of
from kvq.codecs import Codec, ComponentQuantizer, JointMoments, Rope, Tables, bind_codec
from kvq.codecs.calibrated_levels import lloyd_levels
from kvq.codecs.components import normal_levels, used
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError
from kvq.models import LoadedModel

HELD_OUT = 4
"""Every so many windows one is held out for a choice."""
SAMPLE = 2**16
"""Values that levels are fitted to, at most."""
LEVELS_STREAM = 0x6C65766C
_kept: Kept[dict[Place, JointMoments]] = {}
_kept_trial: Kept[dict[Place, JointMoments]] = {}


@dataclass(frozen=True)
class Text:
    """The calibration text of a model.

    Attributes:
        left_out: first tokens of a window that do not count.
        both: codecs of keys take values as further heads (`Method.joins_sides`).
    """

    loaded: LoadedModel
    windows: Int[Tensor, "samples length"]
    settings: CalibrationConfig
    left_out: int
    both: bool


def fit_components(
    loaded: LoadedModel,
    codecs: Mapping[Place, Codec],
    windows: Int[Tensor, "samples length"],
    settings: CalibrationConfig,
    whole: int,
    both: bool = False,
) -> tuple[dict[Place, Tables], float]:
    """Tables of all codecs, `<part>.<table>`, and the seconds that earlier methods of a sweep spent on their moments.

    Args:
        whole: first tokens of a text that stay in full precision.
        both: codecs of keys take values as further heads (`Method.joins_sides`).

    Raises:
        ConfigError: keys and values that leave out different numbers of tokens; a choice without windows to hold out.
        DataError: fewer tokens than channels, and as `collect_joint`.
        Unsupported: as `collect_joint`.
    """
    if not codecs:
        return {}, 0.0
    left_out = {found[1].left_out for codec in codecs.values() if (found := joint_parts(codec)) is not None}
    if len(left_out) > 1:
        raise ConfigError(f"left_out: keys and values leave out {sorted(left_out)} first tokens; the same number")
    text = Text(loaded, windows, settings, left_out.pop(), both)
    how = (text.left_out, any(codec.uses_rope for codec in codecs.values()), both)

    def fitted(own: Text, kept: Kept[dict[Place, JointMoments]]) -> tuple[dict[Place, Tables], float]:
        moments, earlier = moments_of(loaded, own.windows, settings, how, kept)
        moments = {("key", at): one for (_, at), one in moments.items()} if both else moments
        _check_tokens(own, codecs, moments)
        return with_levels(own, codecs, fit_sharing(codecs, moments)), earlier

    tables, earlier = fitted(text, _kept)
    if any(isinstance(codec.quantizer, ComponentQuantizer) and codec.quantizer.chooses for codec in codecs.values()):
        held = held_out(len(windows))
        trial, more = fitted(replace(text, windows=windows[~held]), _kept_trial)
        apart = replace(text, windows=windows[held])
        losses = [loss_through(apart, codecs, _unshrunk(trial, grown), whole) for grown in (0, 1)]
        tables, earlier = _unshrunk(tables, int(losses[1] < losses[0])), earlier + more
    return tables, earlier


FEW = 4
"""Tokens per channel, below which second moments are so uncertain that there is a warning."""


def _check_tokens(text: Text, codecs: Mapping[Place, Codec], moments: Mapping[Place, JointMoments]) -> None:
    """Warn of few tokens for the channels that share a transform. Raises: DataError: fewer tokens than channels."""
    channels, tokens = 0, 0
    for place, codec in codecs.items():
        parts, own = joint_parts(codec), moments[place]
        assert parts is not None
        together = min(parts[1].heads_together or own.heads, own.heads)
        channels, tokens = max(channels, len(own.mean) // own.heads * together), own.tokens
    given = f"calibration.samples={len(text.windows)}, length={text.windows.shape[1]}"
    given += "" if text.settings.tokens is None else f", tokens={text.settings.tokens}"
    said = f"{given}: {tokens} tokens for transforms of {channels} channels"
    if tokens < channels:
        raise DataError(f"{said}; at least as many tokens as channels, better {FEW} times as many")
    if tokens < FEW * channels:
        warnings.warn(f"{said}; with fewer than {FEW} times as many, a method loses far more", stacklevel=2)


def with_levels(text: Text, codecs: Mapping[Place, Codec], tables: Mapping[Place, Tables]) -> dict[Place, Tables]:
    """The tables, with levels fitted to the components of the text where quantizers have such.

    Lloyd's steps begin at the levels of N(0, 1), so on the values that they are fitted to no squared error grows.
    """
    fitted = {place: codec for place, codec in codecs.items() if getattr(codec.quantizer, "fitted", False)}
    out = dict(tables)
    seen = values_of_widths(text, fitted, tables) if fitted else {}
    for place, by in seen.items():
        levels = [lloyd_levels(by[width], width, normal_levels(width)) for width in sorted(by)]
        out[place] = tables[place] | {"quantizer.levels": torch.cat(levels).float()}
    return out


def values_of_widths(
    text: Text, codecs: Mapping[Place, Codec], tables: Mapping[Place, Tables]
) -> dict[Place, dict[int, Float[Tensor, " values"]]]:
    """Components by width, of all components of a width and all tokens that count, places without widths left out.

    Memory: at most `SAMPLE` values in fp32 of a width of a layer and side; of more, as many are drawn by the seed.
    """
    found: dict[Place, dict[int, list[Tensor]]] = {}
    generator = torch.Generator().manual_seed(text.settings.seed ^ LEVELS_STREAM)
    bound, most = _binding(codecs, tables), max(1, SAMPLE // len(text.windows))
    for window, positions in drawn_positions(text.windows, text.settings.tokens, text.settings.seed):
        kept = positions[positions >= text.left_out]

        def see(place: Place, x: Tensor, rope: Rope, kept: Tensor = kept) -> Tensor:
            if place in codecs:
                rows = bound(place, x).staged(x, rope)[0].transpose(0, 1).flatten(1).cpu()[kept]
                widths = tables[place]["quantizer.widths"]
                for width in used(widths):
                    values = rows[:, widths == width].flatten()
                    if len(values) > most:
                        values = values[torch.randint(len(values), (most,), generator=generator)]
                    found.setdefault(place, {}).setdefault(width, []).append(values.float())
            return x

        _passed(text, window, see)
    return {place: {width: torch.cat(parts) for width, parts in by.items()} for place, by in found.items()}


def _passed(text: Text, window: Int[Tensor, " tokens"], through: Callable[[Place, Tensor, Rope], Tensor]) -> float:
    """Summed loss (nats) of a window, whose keys and values are `through(place, states, rotations)`, or `both` once."""
    with ropes_of(text.loaded) as found:

        def see(index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            none = key.new_zeros(1, key.shape[2], 0)
            rope = found.get(index, Rope(none, none)).to(key.device)
            if text.both:
                keys, values = through(("key", index), torch.cat([key, value], 1), rope).chunk(2, 1)
                return keys, values
            return through(("key", index), key, rope), through(("value", index), value, rope)

        return loss(text.loaded, window, see, backward=False)


def _binding(codecs: Mapping[Place, Codec], tables: Mapping[Place, Tables]) -> Callable[[Place, Tensor], Codec]:
    """The codecs bound to their tables, each as its states are first seen."""
    bound: dict[Place, Codec] = {}

    def of(place: Place, x: Float[Tensor, "1 heads tokens dim"]) -> Codec:
        if place not in bound:
            bound[place] = bind_codec(codecs[place], tables[place], x.shape[1], x.shape[-1])
        return bound[place]

    return of


def held_out(count: int) -> Bool[Tensor, " windows"]:
    """Which windows are held out: every fourth, so that all texts of a mixture are on both sides.

    Raises:
        ConfigError: fewer than four.
    """
    if count < HELD_OUT:
        raise ConfigError(f"method.calibration.samples={count}: unshrunk=chosen holds out one of {HELD_OUT} windows")
    return torch.arange(count) % HELD_OUT == HELD_OUT - 1


def _unshrunk(tables: Mapping[Place, Tables], grown: int) -> dict[Place, Tables]:
    """The tables, with this choice where there is one."""
    name = "quantizer.unshrunk"
    flags = {place: {name: torch.full_like(own[name], grown)} for place, own in tables.items() if name in own}
    return {place: own | flags.get(place, {}) for place, own in tables.items()}


def loss_through(text: Text, codecs: Mapping[Place, Codec], tables: Mapping[Place, Tables], whole: int) -> float:
    """Summed negative log-likelihood (nats) with keys and values quantized at once, but for `whole` first tokens."""
    bound = _binding(codecs, tables)

    def through(place: Place, x: Tensor, rope: Rope) -> Tensor:
        if place not in codecs:
            return x
        codec, rest = bound(place, x), x[:, :, whole:]
        turns = rope.narrow(whole, rest.shape[2]) if codec.uses_rope else None
        return torch.cat([x[:, :, :whole], codec.decode(codec.encode(rest, rope=turns), turns)], 2)

    return sum(_passed(text, window, through) for window in text.windows)
