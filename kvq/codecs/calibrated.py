"""Stages and quantizers with tables per layer, which are fitted on calibration data and bound to a codec."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.codecs.codec import Codec
from kvq.codecs.quantizers import Quantizer, with_prefix, without_prefix
from kvq.codecs.stages import Rope, Side, Stage, rope_argument
from kvq.errors import ConfigError, Unsupported

Tables = dict[str, Tensor]
States = Float[Tensor, "heads tokens head_dim"]
Components = Float[Tensor, "*lead tokens n"]
"""Of all heads of a token, n in all."""
Moments = Float[Tensor, "heads head_dim head_dim"]
QUANTIZER = "quantizer"
"""Name of the quantizer among a codec's calibrated parts; stages have their own names."""


class Calibrated:
    """Mixin of stages and quantizers with tables per layer.

    Attributes:
        is_calibrated: there are tables to fit; False for a quantizer around a codec that has none.
        wants_gradients: `fit` weights by squared gradients of the loss (the diagonal of the Fisher information).
        wants_moments: `fit` takes the side's `moments` (`kvq.calibration.collect.LayerStates.moments`).
        wants_pairs: of the moments, `fit` reads only the energy of each RoPE pair of channels, which RoPE keeps, so
            RoPE stages may precede the part; no stage may precede any other part that takes moments.
        wants_joint: the tables are of all heads of a token, and fitted with those of all layers
            (`kvq.calibration.budget`, `SharingQuantizer`).
        learned: the tables are learned against the model's loss (`kvq.calibration`), not fitted to states.
    """

    is_calibrated = True
    wants_gradients = False
    wants_moments = False
    wants_pairs = False
    wants_joint = False
    learned = False
    _tables: Mapping[str, Tensor] | None = None
    _shape: tuple[int, int] | None = None
    _cast: dict[tuple[str, torch.dtype, torch.device], Tensor]

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """Fit the tables to the states of one layer and the gradients of the loss at them, in nats per unit."""
        raise NotImplementedError(f"{type(self).__name__} is not fitted to states")

    def bind(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        """A copy for one layer of `heads` KV heads; without tables, one that only checks shapes."""
        other = copy.copy(self)
        other._tables, other._shape, other._cast = tables, (heads, head_dim), {}
        return other

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """The tables by name; none before it is bound to a layer."""
        return self._tables or {}

    def table(self, name: str, like: Tensor) -> Tensor:
        """A table in the dtype and on the device of `like`, which is `[..., heads, tokens, head_dim]`."""
        if self._tables is None or self._shape is None:
            raise Unsupported(
                f"{type(self).__name__} has no tables: calibrate first (python run.py method=... does, and "
                "kvq.bind_calibration takes its file), and ask the method for the codec of a layer"
            )
        if (like.shape[-3], like.shape[-1]) != self._shape:
            given, own = (f"{heads} KV heads of {dim} channels" for heads, dim in (like.shape[-3::2], self._shape))
            raise Unsupported(f"calibration: fitted to {own}, given {given}")
        key = (name, like.dtype, like.device)
        if key not in self._cast:
            self._cast[key] = self._tables[name].to(like.device, like.dtype)
        return self._cast[key]

    @property
    def multiplications(self) -> int | None:
        """Scalar multiplications by matrices over all heads to decode a token of the layer; None: no such matrices."""
        return None

    def check(self, head_dim: int) -> None:
        """Raise `Unsupported` where `head_dim` is not that of the calibration."""
        if self._shape is not None and self._shape[1] != head_dim:
            raise Unsupported(f"head_dim={head_dim}: the calibration is of a model with head_dim={self._shape[1]}")


def calibrated_parts(codec: Codec) -> dict[str, Calibrated]:
    """The calibrated stages by name, and the quantizer, in the order of encoding."""
    parts: dict[str, Stage | Quantizer] = {**dict(codec.stages), QUANTIZER: codec.quantizer}
    return {name: part for name, part in parts.items() if isinstance(part, Calibrated) and part.is_calibrated}


def bind_codec(codec: Codec, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Codec:
    """A copy of the codec with its tables, named `<part>.<table>`; None: a copy that only checks shapes."""
    bound = {}
    for name, part in calibrated_parts(codec).items():
        part_tables = None if tables is None else without_prefix(tables, f"{name}.")
        bound[name] = part.bind(part_tables, heads, head_dim)
    stages = [(name, bound.get(name, stage)) for name, stage in codec.stages]
    return codec.with_stages(stages, bound.get(QUANTIZER))  # type: ignore[arg-type]


def fit_codec(
    codec: Codec, x: States, gradients: States | None, rope: Rope | None, seed: int, moments: Moments | None = None
) -> Tables:
    """Fit every calibrated part to the output of the stages before it; returns the tables as `<part>.<table>`.

    Args:
        x: keys or values of one layer as a cache gets them, of all calibration tokens.
        gradients: of the loss at `x`; needed where `wants_gradients`.
        rope: the rotations (RoPE) of the tokens.
        moments: `LayerStates.moments` of the side (`kvq.calibration.collect`); needed where `wants_moments`.

    Only rotations of each head (`orthogonal`) or of whole tokens (`rotates_tokens`) may precede a fitted part, because
    statistics of a block and gradients cannot be carried through other stages; before a part that wants no gradients,
    also stages that take each token alone; before one that wants moments, none but those of RoPE (`wants_pairs`).
    """
    heads, _, head_dim = x.shape
    tables: Tables = {}
    left = set(calibrated_parts(codec))
    before: list[Stage] = []
    for name, part in [*codec.stages, (QUANTIZER, codec.quantizer)]:
        if not left:
            break
        if name in left:
            assert isinstance(part, Calibrated)
            left.discard(name)
            if part.wants_joint:
                raise ConfigError(f"stage '{name}': is fitted with all layers at once (kvq.calibration)")
            if part.learned:
                raise ConfigError(f"stage '{name}' is learned against the loss; no fitted part may precede it")
            wanted: dict[str, Moments] = {}
            if part.wants_moments:
                if moments is None or not all(part.wants_pairs and stage.uses_rope for stage in before):
                    raise ConfigError(f"stage '{name}': first in its codec, and fitted on a model's queries")
                wanted = {"moments": moments}
                other = rope is not None and (rope.interleaved or rope.cos.shape[-1] not in (0, head_dim // 2))
                if part.wants_pairs and other:
                    raise Unsupported(f"stage '{name}': RoPE pairs other channels than i and i + head_dim / 2")
            fitted = part.fit(x, gradients if part.wants_gradients else None, seed, **wanted)
            tables |= with_prefix(fitted, f"{name}.")
            bound = part.bind(fitted, heads, head_dim)
            part = cast("Stage | Quantizer", bound)
        if isinstance(part, Stage) and left:
            weighted = any(calibrated_parts(codec)[later].wants_gradients for later in left)
            if not (part.orthogonal or getattr(part, "rotates_tokens", False)) and (weighted or part.token_group != 1):
                raise ConfigError(f"stage '{name}': only rotations may precede a calibrated part")
            x = part.forward(x, **rope_argument(part, rope))[0]
            gradients = None if gradients is None else part.forward(gradients, **rope_argument(part, rope))[0]
            before.append(part)
    return tables


class JointTransform(Calibrated, Stage):
    """Transforms all KV heads of a token to components `(x - mean) T`; subclasses define T and its inverse.

    Table: `mean` `[1, n]`, n the channels of all heads, head after head.
    """

    token_group = 1
    wants_joint = True

    @abc.abstractmethod
    def _components(self, rows: Float[Tensor, "*lead tokens n"], like: Tensor) -> Float[Tensor, "*lead tokens m"]:
        """The m stored components of `rows`, states minus mean; `like`: a tensor of the states' shape and device."""

    @abc.abstractmethod
    def _states(self, components: Components, like: Tensor, some: slice) -> Float[Tensor, "*lead tokens channels"]:
        """Channels `some`, counted over all heads, of states minus mean, from the first m of `components`, the stored
        ones; `like`: as in `_components`."""

    def forward(self, x: Float[Tensor, "*lead heads tokens dim"]) -> tuple[Tensor, Side]:
        flat = x.transpose(-3, -2).flatten(-2) - self.table("mean", x)
        components = self._components(flat, x)
        components = torch.nn.functional.pad(components, (0, flat.shape[-1] - components.shape[-1]))
        return components.unflatten(-1, (x.shape[-3], -1)).transpose(-3, -2), {}

    def inverse(
        self, y: Float[Tensor, "*lead heads tokens dim"], side: Side, heads: slice | None = None
    ) -> Float[Tensor, "*lead _heads tokens dim"]:
        """The states that components `y` decode to, of a slice of the heads (None: all)."""
        first, end = (0, y.shape[-3]) if heads is None else (heads.start, heads.stop)
        some = slice(first * y.shape[-1], end * y.shape[-1])
        states = self._states(y.transpose(-3, -2).flatten(-2), y, some) + self.table("mean", y)[:, some]
        return states.unflatten(-1, (-1, y.shape[-1])).transpose(-3, -2).contiguous()


class SharingQuantizer(Calibrated, Quantizer):
    """A quantizer whose class fits the codecs of all layers, stages included, in one call of `fit_layers`."""

    @classmethod
    @abc.abstractmethod
    def fit_layers(
        cls, codecs: Mapping[tuple[str, int], Codec], states: Mapping[int, Any], positions: Int[Tensor, " tokens"]
    ) -> Mapping[tuple[str, int], Tables]:
        """Fit codecs that end in this class; returns their tables, named `<part>.<table>`, by side and layer.

        Args:
            codecs: the codec of each side and layer.
            states: `kvq.calibration.collect.LayerStates` by layer.
            positions: position in its text of each token of the states.
        """
