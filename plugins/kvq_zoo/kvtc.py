"""KVTC's transform and quantizer: principal components of all KV heads of a token, in groups that share a scale.

Both are fitted with all layers at once, because the bits of a side are shared out over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Size, Tensor

from kvq.calibration.budget import last_stage
from kvq.calibration.collect import LayerStates, Place
from kvq.codecs.calibrated import Calibrated, JointTransform, SharingQuantizer, Tables
from kvq.codecs.codec import Codec
from kvq.codecs.quantizers import Parts, checked_choice
from kvq.codecs.rotations import eigenvectors, fix_signs, per_block
from kvq.codecs.stages import Rope
from kvq.codecs.trellis import read, write
from kvq.errors import ConfigError, DataError, Unsupported, at_least
from kvq_zoo.all_layers import AllLayers
from kvq_zoo.coefficient_groups import GroupErrors, Groups, code_numbers, measure_errors, plan_groups, quantize_groups

_TOGETHER = 2**26  # numbers that are in fp64 at once while moments are summed up
Budget = Literal["side", "own"]
"""Who shares bits: `side`: all layers, keys and values apart; `own`: those of one layer and side."""
Layers = Literal["own", "all"]
"""Whose heads a basis joins: `own`: those of a layer; `all`: those of all layers."""


class PrincipalComponents(JointTransform):
    """`(x - mean) V` of all KV heads of a token, V the eigenvectors of the states' covariance, by variance, descending.

    Args:
        left_out: first tokens of each calibration text that do not count, because they stay in full precision.
        layers: see `Layers`; with `all`, a cache encodes a token once every layer has its states, and `n` is the number
            of channels of all layers.

    Tables: `mean` `[1, n]` and `basis` `[n, m]`, in fp32, of the m of n components that are stored (at least one).

    Raises:
        ConfigError: a negative number of tokens, unknown layers.

    Source: KVTC (arXiv 2511.01815), section 3.1, where one basis joins all layers.
    """

    version: ClassVar[int] = 1

    def __init__(self, left_out: int = 4, layers: Layers | str = "own") -> None:
        at_least("left_out", left_out, 0)
        self.left_out = left_out
        self.layers: Layers = checked_choice(Layers, layers, "layers")

    @property
    def joins_layers(self) -> bool:  # type: ignore[override]
        return self.layers == "all"

    @property
    def policy(self) -> AllLayers | None:
        return AllLayers() if self.joins_layers else None

    @property
    def multiplications(self) -> int:
        """Multiplications that decode one token of the bound layer: n times m."""
        return self.tables["basis"].numel()

    @staticmethod
    def fit_rows(rows: Float[Tensor, "tokens n"]) -> Tables:
        """Fit `mean` `[1, n]` and `basis` `[n, components]`: n of them, or one per token if there are fewer."""
        pieces = rows.split(max(1, _TOGETHER // rows.shape[1]))
        mean = torch.stack([piece.double().sum(0) for piece in pieces]).sum(0) / len(rows)
        if len(rows) < rows.shape[1]:
            basis = fix_signs(torch.linalg.svd(rows.double() - mean, full_matrices=False).Vh.mT)
        else:
            covariance = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
            for piece in pieces:
                wide = piece.double() - mean
                covariance += wide.mT @ wide / len(rows)
            basis = eigenvectors(covariance)[1].flip(1)
        return {"mean": mean.float()[None], "basis": basis.float().contiguous()}

    def _components(self, rows: Float[Tensor, "*lead tokens n"], like: Tensor) -> Float[Tensor, "*lead tokens m"]:
        """Project centred states `rows` on the m components that are stored; `like` gives dtype and device."""
        return per_block(rows, self.table("basis", like))

    def _states(
        self, components: Float[Tensor, "*lead tokens n"], like: Tensor, some: slice
    ) -> Float[Tensor, "*lead tokens channels"]:
        """Centred states from the first m of the components: those of the slice `some` of the n channels."""
        basis = self.table("basis", like)
        return per_block(components[..., : basis.shape[1]], basis[some].mT)


class CoefficientQuantizer(SharingQuantizer):
    """Coefficients of a token in consecutive groups of 0, 2, 4 or 8 bits, each with a scale and a shift of the token.

    Args:
        bits: any number from 0.5 to 8, the mean over the elements of those that share it (`budget`), scales and shifts
            included: 16 over the compression ratio before entropy coding.
        budget: see `Budget`.
        sizes: coefficients that a group may have.
        tokens: of the calibration, evenly spread, on which the errors of groups are measured.

    Stores `string` (uint8 `[..., 1, tokens, bytes]`): a token's codes, padded to a byte; `scale` and `shift` (fp16
    `[..., 1, tokens, groups]`).

    Tables: `sizes` and `kinds` `[groups]`, as `Groups`.

    Raises:
        ConfigError: an unknown budget, sizes or tokens below 1.
        Unsupported: other bits.

    Source: KVTC (arXiv 2511.01815), section 3.2 and appendix B.17, as public reproductions quote them: docs/methods.md.
    """

    version: ClassVar[int] = 1
    token_group = 1
    attended_as = "components"

    def __init__(
        self,
        bits: float | int,
        budget: Budget | str = "side",
        sizes: Sequence[int] = (1, 16, 64, 256, 1024),
        tokens: int = 256,
    ) -> None:
        self.budget: Budget = checked_choice(Budget, budget, "budget")
        if not 0.5 <= bits <= 8:
            raise Unsupported(f"bits={bits}: a CoefficientQuantizer takes 0.5 to 8")
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"sizes={list(sizes)}: one or more numbers from 1")
        at_least("tokens", tokens, 1)
        self.bits, self.sizes, self.tokens = bits, tuple(sorted(set(sizes))), tokens
        self._groups: Groups | None = None

    @staticmethod
    def tables_of(groups: Groups) -> Tables:
        """The quantizer's tables `sizes` and `kinds`, each `[groups]`, that hold these groups."""
        return {"sizes": torch.tensor(groups.sizes).int(), "kinds": torch.tensor(groups.kinds).to(torch.uint8)}

    def bind(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        other = super().bind(tables, heads, head_dim)
        assert isinstance(other, CoefficientQuantizer)
        other._groups = None
        return other

    @classmethod
    def fit_layers(
        cls, codecs: Mapping[Place, Codec], states: Mapping[int, LayerStates], positions: Int[Tensor, " tokens"]
    ) -> dict[Place, Tables]:
        """As `SharingQuantizer`; tables of a basis of all layers stand under the first layer.

        Raises:
            ConfigError: as `grouped_parts`.
            DataError: all tokens are left out (`PrincipalComponents.left_out`).
        """
        codecs = {place: codec for place, codec in codecs.items() if not (codec.joins_layers and place[1])}

        def rows(place: Place) -> Tensor:
            codec, found = codecs[place], grouped_parts(codecs[place])
            assert found is not None
            seen = (positions >= found[1].left_out).nonzero()[:, 0]
            if not len(seen):
                raise DataError(f"calibration: all of {int(positions.max()) + 1} tokens of a window are left out")
            own = []
            for layer in states.values() if codec.joins_layers else [states[place[1]]]:
                x = getattr(layer, place[0])
                own.append(flatten_heads(codec, x if x.dtype == torch.float64 else x.float(), layer.rope)[seen])
            return own[0] if len(own) == 1 else torch.cat(own, 1)

        return fit_groups(codecs, rows)

    def groups(self, like: Tensor) -> Groups:
        """The groups of the bound layer. Raises: Unsupported: no tables are bound, or tables of another shape."""
        self.table("kinds", like)
        if self._groups is None:
            assert self._tables is not None
            self._groups = Groups(*(tuple(self._tables[name].tolist()) for name in ("sizes", "kinds")))
        return self._groups

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Parts as the class stores them: `string`, `scale` and `shift`."""
        groups = self.groups(x)
        flat = x.transpose(-3, -2).flatten(-2)
        codes = torch.zeros(*flat.shape[:-1], groups.coefficients, dtype=torch.uint8, device=x.device)
        scales = torch.zeros(2, *flat.shape[:-1], groups.stored_groups, dtype=torch.float16, device=x.device)
        for kind, chosen, places in _batches_on(groups, x.device):
            own, scale, shift = quantize_groups(
                flat.index_select(-1, chosen.flatten()).unflatten(-1, chosen.shape), kind
            )
            codes.index_copy_(-1, chosen.flatten(), own.flatten(-2))
            scales.index_copy_(-1, places, torch.stack([scale, shift]).squeeze(-1))
        string = write(codes, groups.layout).unsqueeze(-3)
        return {"string": string, "scale": scales[0].unsqueeze(-3), "shift": scales[1].unsqueeze(-3)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        string = parts["string"].squeeze(-3)
        groups = self.groups(torch.empty(shape[-3], 0, shape[-1], dtype=dtype, device=string.device))
        codes = read(string, groups.layout, groups.layout.widths).to(torch.uint8)
        flat = torch.zeros(*string.shape[:-1], shape[-3] * shape[-1], dtype=dtype, device=string.device)
        scale, shift = (parts[name].squeeze(-3).to(dtype) for name in ("scale", "shift"))
        for kind, chosen, places in _batches_on(groups, string.device):
            own = codes.index_select(-1, chosen.flatten()).unflatten(-1, chosen.shape)
            values = code_numbers(own, kind, dtype) * scale.index_select(-1, places)[..., None]
            values = values + shift.index_select(-1, places)[..., None]
            flat.index_copy_(-1, chosen.flatten(), values.flatten(-2))
        return flat.unflatten(-1, (shape[-3], shape[-1])).transpose(-3, -2)


def _batches_on(groups: Groups, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`Groups.batches` with the indices on a device."""
    for kind, chosen, places in groups.batches:
        yield kind, chosen.to(device), places.to(device)


def grouped_parts(codec: Codec | None) -> tuple[str, PrincipalComponents, CoefficientQuantizer] | None:
    """Name and object of the principal components, and the quantizer that codes them; None: the codec has neither.

    Raises:
        ConfigError: as `last_stage`.
    """
    quantizer = None if codec is None else codec.quantizer
    said = (
        "PrincipalComponents stand last of their stages, behind none but those of RoPE, and before a "
        "CoefficientQuantizer"
    )
    found = last_stage(codec, PrincipalComponents, isinstance(quantizer, CoefficientQuantizer), said)
    return None if found is None else (*found, cast(CoefficientQuantizer, quantizer))


def flatten_heads(codec: Codec, x: Float[Tensor, "heads tokens dim"], rope: Rope | None) -> Float[Tensor, "tokens n"]:
    """Apply the stages before the transform to a layer's states, and put all heads of a token into one row."""
    for _, stage in codec.stages[:-1]:
        x = stage.forward(x, rope=rope)[0]  # type: ignore[call-arg]
    return x.transpose(0, 1).flatten(1)


def fit_groups(
    codecs: Mapping[Place, Codec], rows: Callable[[Place], Float[Tensor, "tokens n"]]
) -> dict[Place, Tables]:
    """Fit basis and groups of every codec: its tables by `<part>.<table>`; layers share bits by `Budget`.

    Args:
        rows: gives the states of a side of a layer as `flatten_heads` does; called once for each.

    Raises:
        ConfigError: as `grouped_parts`.
    """
    parts = {place: found for place, codec in codecs.items() if (found := grouped_parts(codec)) is not None}
    tables: dict[Place, Tables] = {}
    errors: dict[Place, GroupErrors] = {}
    for place, (_, stage, quantizer) in parts.items():
        own = rows(place)
        tables[place] = stage.fit_rows(own)
        seen = own[:: max(1, len(own) // quantizer.tokens)][: quantizer.tokens].float()
        errors[place] = measure_errors((seen - tables[place]["mean"]) @ tables[place]["basis"], quantizer.sizes)
    shared: dict[object, list[Place]] = {}
    for place, (_, _, quantizer) in parts.items():
        shared.setdefault(place[0] if quantizer.budget == "side" else place, []).append(place)
    out: dict[Place, Tables] = {}
    for places in shared.values():
        bits = sum(parts[place][2].bits * tables[place]["mean"].shape[1] for place in places)
        for place, groups in zip(
            places, plan_groups([errors[place] for place in places], math.floor(bits)), strict=True
        ):
            name, _, quantizer = parts[place]
            basis = tables[place]["basis"][:, : max(groups.coefficients, 1)].contiguous()
            out[place] = {f"{name}.mean": tables[place]["mean"], f"{name}.basis": basis}
            out[place] |= {f"quantizer.{table}": found for table, found in quantizer.tables_of(groups).items()}
    return out
