"""Tables of the codecs that share bits over components, and what further passes over the calibration text decide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvq.calibration.budget import fit_sharing, joint_parts
from kvq.calibration.collect import Kept, Place, loss, ropes_of
from kvq.calibration.moments import moments_of
from kvq.codecs import Codec, ComponentQuantizer, JointMoments, Rope, Tables, bind_codec
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError
from kvq.models import LoadedModel

HELD_OUT = 4
"""Every so many windows one is held out for a choice."""
_kept_trial: Kept[dict[Place, JointMoments]] = {}


def fit_components(
    loaded: LoadedModel,
    codecs: Mapping[Place, Codec],
    windows: Int[Tensor, "samples length"],
    settings: CalibrationConfig,
    whole: int,
) -> tuple[dict[Place, Tables], float]:
    """Tables of all codecs, `<part>.<table>`, and the seconds that earlier methods of a sweep spent on their moments.

    Args:
        whole: first tokens of a text that stay in full precision.

    Raises:
        ConfigError: keys and values that leave out different numbers of tokens; a choice without windows to hold out.
        DataError, Unsupported: as `collect_joint`.
    """
    if not codecs:
        return {}, 0.0
    left_out = {found[1].left_out for codec in codecs.values() if (found := joint_parts(codec)) is not None}
    if len(left_out) > 1:
        raise ConfigError(f"left_out: keys and values leave out {sorted(left_out)} first tokens; the same number")
    how = (left_out.pop(), any(codec.uses_rope for codec in codecs.values()), False)
    moments, earlier = moments_of(loaded, windows, settings, how)
    tables = fit_sharing(codecs, moments)
    if any(isinstance(codec.quantizer, ComponentQuantizer) and codec.quantizer.chooses for codec in codecs.values()):
        held = held_out(len(windows))
        moments, more = moments_of(loaded, windows[~held], settings, how, _kept_trial)
        trial = fit_sharing(codecs, moments)
        losses = [loss_through(loaded, codecs, _unshrunk(trial, grown), windows[held], whole) for grown in (0, 1)]
        tables, earlier = _unshrunk(tables, int(losses[1] < losses[0])), earlier + more
    return tables, earlier


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


def loss_through(
    loaded: LoadedModel,
    codecs: Mapping[Place, Codec],
    tables: Mapping[Place, Tables],
    windows: Int[Tensor, "samples length"],
    whole: int,
) -> float:
    """Summed negative log-likelihood (nats) with keys and values quantized at once, but for `whole` first tokens."""
    bound: dict[Place, Codec] = {}

    def through(place: Place, x: Float[Tensor, "1 heads tokens dim"], rope: Rope | None) -> Tensor:
        if place not in codecs:
            return x
        codec = bound.setdefault(place, bind_codec(codecs[place], tables[place], x.shape[1], x.shape[-1]))
        first, rest = x[:, :, :whole], x[:, :, whole:]
        turns = None if rope is None or not codec.uses_rope else rope.narrow(whole, rest.shape[2]).to(x.device)
        return torch.cat([first, codec.decode(codec.encode(rest, rope=turns), turns)], 2)

    total = 0.0
    for window in windows:
        with ropes_of(loaded) as found:

            def see(index: int, key: Tensor, value: Tensor, found: dict[int, Rope] = found) -> tuple[Tensor, Tensor]:
                rope = found.get(index)
                return through(("key", index), key, rope), through(("value", index), value, rope)

            total += loss(loaded, window, see, backward=False)
    return total
