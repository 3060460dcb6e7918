"""What a model decides of a method's codecs: rotations in its weights, in the place of a first stage, and bits for GQA.

Values: v_proj writes rotated values, o_proj turns what attention makes of them back. Keys: q_proj and k_proj write
rotated queries and keys, whose products are the same. Where a model has rotary embeddings (RoPE), keys cannot be merged
so: RoPE stands between k_proj and the cache, and turns pairs of channels that a rotation mixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvq.cache.rotary import styles_of
from kvq.codecs import Codec, Hadamard, RandomizedHadamard
from kvq.errors import ConfigError, Unsupported
from kvq.methods.policies import Policy

_MARK = "kvq_rotated"
Rotation = Hadamard | RandomizedHadamard
# Sides by the setting that merges them: what rotates them, and what an attention may do with them alone.
_SETTINGS = {"value": "merge_rotation", "key": "merge_key_rotation"}
_PARTS = {"value": ("value", "output"), "key": ("query", "key")}
_NAMES = {"value": "v_proj and o_proj", "key": "q_proj and k_proj"}
_TURNED = (
    "method.merge_key_rotation: {} turns keys by RoPE between k_proj and the cache; method.merge_rotation=true rotates "
    "its values in the weights, and keys stay with the codec"
)
_MORE = {"value": "does more with values than sum them", "key": "does more with queries and keys than multiply them"}


@dataclass(frozen=True)
class MergedRotation(Policy):
    """Rotates values, or keys and queries, by the weights of a model instead of by the codec.

    Source: QuaRot (arXiv 2404.00456), section 4, for values; OScaR (arXiv 2605.19660), Algorithm 1.

    Attributes:
        rotations: the stage that a side's codec loses, by side.
    """

    rotations: Mapping[str, Rotation]
    version: ClassVar[int] = 1
    setting = "merge_rotation"
    does = "rotates states by the model's weights"
    needs = frozenset({"same_stages", "uncalibrated"})
    excludes = frozenset({"codecs_alone", "expanded_latent", "sides_apart"})

    @contextmanager
    def in_weights(self, model: nn.Module) -> Iterator[None]:
        """Rotate the sides in all layers while the context lasts; the same weights, bit for bit, come back after it.

        A second copy of the projections is held meanwhile.
        """
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        sides = {side: _projection_pairs(model, text, side) for side in self.rotations}
        if "key" in sides and any(style is not None for style, _ in styles_of(model)):
            raise Unsupported(_TURNED.format(type(model).__name__))
        matrices = {heads.matrix for layers in sides.values() for pair in layers for heads in pair}
        before = {part: part.detach().clone() for matrix in matrices for part in matrix.parameters(recurse=False)}
        try:
            for side, layers in sides.items():
                self._merge(model, side, layers, _head_dim(text))
            setattr(text, _MARK, frozenset(sides))
            yield
        finally:
            for part, own in before.items():
                part.data.copy_(own)
            if hasattr(text, _MARK):
                delattr(text, _MARK)

    def check_model(self, config: Any) -> None:
        """Raises: Unsupported: keys, and a text configuration that says that the model has rotary embeddings."""
        turned = getattr(config, "rope_parameters", None) or getattr(config, "rotary_dim", None)
        if "key" in self.rotations and turned and not getattr(config, "alibi", False):
            raise Unsupported(_TURNED.format((config.architectures or [type(config).__name__])[0]))

    def for_model(self, method: Any, config: Any) -> Any:
        """The method unchanged. Raises: Unsupported: outside of `in_weights`, where the weights do not rotate."""
        for side in self.rotations:
            if side not in getattr(config, _MARK, ()):
                raise Unsupported(
                    f"method.{_SETTINGS[side]}: the weights do not rotate {side}s; run the model and its cache within "
                    "`with method.merged.in_weights(model):`"
                )
        return method

    def _merge(self, model: nn.Module, side: str, layers: list[tuple[Heads, Heads]], head_dim: int) -> None:
        """Multiply both projections of a side by the rotation. Raises: Unsupported: the model's logits changed."""
        expected = _logits(model)
        for pair in layers:
            for heads in pair:
                weight: Tensor = heads.matrix.weight  # type: ignore[assignment]
                heads.rotate(self.rotations[side].matrix(head_dim, weight.double()))
        if not torch.allclose(_logits(model), expected, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise Unsupported(f"method.{_SETTINGS[side]}: {type(model).__name__} {_MORE[side]}")


def check_unrotated(config: Any) -> None:
    """Raise `Unsupported` for a text configuration whose model's weights rotate keys or values now."""
    if hasattr(config, _MARK):
        raise Unsupported("quantize: an outer `with` rotates the model's weights (merge_rotation); leave it first")


def merged_rotation(
    name: str, codecs: Mapping[str, Codec | None], sides: Mapping[str, bool]
) -> tuple[dict[str, Codec | None], MergedRotation | None]:
    """The codecs without the rotations that the weights take over (on the `sides` that ask for it), and the latter."""
    left, rotations = dict(codecs), {}
    for side in (side for side, asked in sides.items() if asked):
        codec = codecs[side]
        first = codec.stages[0][1] if codec is not None and codec.stages else None
        if codec is None or not isinstance(first, Hadamard | RandomizedHadamard) or not first.orthogonal:
            raise ConfigError(f"method.{_SETTINGS[side]} of {name}: {side}s whose first stage is a Hadamard rotation")
        left[side], rotations[side] = codec.with_stages(codec.stages[1:]), first
    return left, MergedRotation(rotations) if rotations else None


def _projection_pairs(model: nn.Module, text: Any, side: str) -> list[tuple[Heads, Heads]]:
    """For each layer the two projections that rotate a side: v_proj and o_proj, or q_proj and k_proj.

    Raises:
        Unsupported: a layer without both as plain matrices.
    """
    first, second = _PARTS[side]
    modules = (projections(module, _head_dim(text)) for module in model.modules())
    found = [(parts[first], parts[second]) for parts in modules if {first, second} <= parts.keys()]
    if len(found) != text.num_hidden_layers:
        where = f"in {len(found)} of {text.num_hidden_layers} layers"
        raise Unsupported(f"method.{_SETTINGS[side]}: {type(model).__name__} has {_NAMES[side]} {where}")
    return found


def _head_dim(config: Any) -> int:
    """Channels per head, from a transformers text configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """`[1, 16, vocabulary]`: the logits of the tokens with ids 0 to 15, to compare a model before and after."""
    embedding = model.get_input_embeddings().weight
    tokens = torch.arange(16, device=embedding.device)[None] % embedding.shape[0]
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


_APART = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
_OUTPUTS = ("o_proj", "out_proj")
_JOINED = {"c_attn": "c_proj", "Wqkv": "out_proj", "query_key_value": "dense"}
"""Queries, keys and values from one matrix, and what reads the outputs."""
_BY_HEAD = "query_key_value"
"""Holds the query, key and value of a head side by side; the others hold all queries first, then keys, then values."""


@dataclass(frozen=True)
class Heads:
    """The channels of a weight matrix that belong to heads of attention, head after head; None: all of them.

    `written`: they are what the matrix writes, else what it reads.
    """

    matrix: nn.Module
    written: bool
    channels: Int[Tensor, " channels"] | None = None

    def rotate(self, rotation: Float[Tensor, "dim dim"]) -> None:
        """Multiply each head's channels by the rotation, in place, computed in double precision."""
        weight: Tensor = self.matrix.weight.data  # type: ignore[assignment]
        transposed = isinstance(self.matrix, Conv1D)  # of a linear layer
        last = weight.T if self.written != transposed else weight
        self._rotate_columns(last, rotation)
        bias = getattr(self.matrix, "bias", None)
        if self.written and bias is not None:
            self._rotate_columns(bias.data[None], rotation)

    def _rotate_columns(self, rows: Float[Tensor, "rows channels"], rotation: Float[Tensor, "dim dim"]) -> None:
        """Multiply the chosen channels of each row, head by head, by the rotation, in place."""
        chosen = slice(None) if self.channels is None else self.channels.to(rows.device)
        heads = rows[:, chosen].double().unflatten(1, (-1, rotation.shape[0]))
        rows[:, chosen] = (heads @ rotation.to(rows.device)).flatten(1).to(rows.dtype)


def projections(attention: nn.Module, head_dim: int) -> Mapping[str, Heads]:
    """The heads of `query`, `key`, `value` and `output` of an attention, those that are in plain matrices.

    Quantized weights are no plain matrices.
    """
    found = {name: Heads(part, True) for name, child in _APART.items() if (part := _plain_matrix(attention, child))}
    if found:
        outputs = [part for child in _OUTPUTS if (part := _plain_matrix(attention, child))]
        return found | ({"output": Heads(outputs[0], False)} if outputs else {})
    for child, reader in _JOINED.items():
        joined, output = _plain_matrix(attention, child), _plain_matrix(attention, reader)
        if joined is None or output is None or isinstance(joined, Conv1D) != (child == "c_attn"):
            continue
        size, width = _output_channels(joined), _output_channels(output)
        if size != 3 * width or width % head_dim:
            continue
        places = torch.arange(size)
        by_head = child == _BY_HEAD
        parts = places.view(-1, 3, head_dim).unbind(1) if by_head else places.view(3, -1).unbind(0)
        heads = (Heads(joined, True, part.flatten()) for part in parts)
        return dict(zip(_APART, heads, strict=True)) | {"output": Heads(output, False)}
    return {}


def _plain_matrix(attention: nn.Module, name: str) -> nn.Module | None:
    """The submodule of that name where it is a linear layer of floating-point weights, else None."""
    part = getattr(attention, name, None)
    return part if isinstance(part, nn.Linear | Conv1D) and part.weight.is_floating_point() else None


def _output_channels(matrix: nn.Module) -> int:
    """Number of output channels of a linear layer."""
    weight: Tensor = matrix.weight  # type: ignore[assignment]
    return weight.shape[1] if isinstance(matrix, Conv1D) else weight.shape[0]


MOST = 8


@dataclass(frozen=True)
class GqaCompensation(Policy):
    """Raises the bits of codecs by ceil(log4 g) for g query heads of each KV head, up to 8 bits.

    Source: KVQuant++ (`gqa`), +⌈log₄ g⌉ bits, cap 8.
    """

    version: ClassVar[int] = 1
    setting = "gqa_compensation"
    does = "adds bits by the query heads of a model"
    needs = frozenset({"same_stages"})
    excludes = frozenset({"codecs_alone", "fixed_bits"})

    def extra_bits(self, config: Any) -> int:
        """Bits that are added in a model: 0 for one query head, 1 up to 4, 2 up to 16."""
        heads = int(config.num_attention_heads)
        shared, bits = heads // int(getattr(config, "num_key_value_heads", None) or heads), 0
        while 4**bits < shared:
            bits += 1
        return bits

    def for_model(self, method: Any, config: Any) -> Any:
        """The method with the bits of its codecs raised in every layer, and without this policy."""
        extra = self.extra_bits(config)
        codecs = {side: codec for side in ("key", "value") if (codec := getattr(method, side)) is not None}
        more = {side: codec.with_more_bits(extra, MOST) for side, codec in codecs.items()}
        by_layer = tuple(self.for_model(one, config) for one in method.by_layer)
        return replace(method.without_policies(self.setting), by_layer=by_layer, **more)

    def check(self, codec: Codec | None) -> None:
        """Raises: Unsupported: a codec without bits to raise."""
        if codec is not None:
            codec.with_more_bits(0, MOST)
