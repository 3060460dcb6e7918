"""The rotation of values in the weights: v_proj writes rotated values, o_proj turns what attention makes of them back.

Keys cannot be merged so: RoPE stands between k_proj and the cache, and turns pairs of channels that a rotation mixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvq.codecs import Codec, Hadamard, RandomizedHadamard
from kvq.errors import ConfigError, Unsupported

_MARK = "kvq_rotated_values"


@dataclass(frozen=True)
class MergedRotation:
    """Rotates values by the weights of a model instead of by the codec (QuaRot, arXiv 2404.00456, section 4).

    Attributes:
        rotation: the stage that the codec of values loses.
    """

    rotation: Hadamard | RandomizedHadamard
    version: ClassVar[int] = 1

    @contextmanager
    def in_weights(self, model: nn.Module) -> Iterator[None]:
        """Rotate the values of all layers while the context lasts; the same weights, bit for bit, come back after it.

        A second copy of the projections of values and outputs is held meanwhile.

        Raises:
            Unsupported: attention without plain v_proj and o_proj in every layer, or that does more between the two
                than sum values.
        """
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        projections = _projections(model, text.num_hidden_layers)
        before = {
            part: part.detach().clone()
            for v, o in projections
            for part in (v.weight, o.weight, v.bias)
            if part is not None
        }
        expected = _logits(model)
        try:
            for v, o in projections:
                self._merge(v, o, _head_dim(text))
            if not torch.allclose(_logits(model), expected, rtol=1e-2, atol=1e-2, equal_nan=True):
                raise Unsupported(f"method.merge_rotation: {type(model).__name__} does more with values than sum them")
            setattr(text, _MARK, True)
            yield
        finally:
            for part, own in before.items():
                part.data.copy_(own)
            if hasattr(text, _MARK):
                delattr(text, _MARK)

    def check(self, config: Any) -> None:
        """Raise `Unsupported` for a cache of a model whose weights do not rotate values now."""
        if not getattr(config, _MARK, False):
            raise Unsupported(
                "method.merge_rotation: the weights do not rotate values; run the model and its cache within "
                "`with method.merged.in_weights(model):`"
            )

    def _merge(self, v: nn.Linear, o: nn.Linear, head_dim: int) -> None:
        """Values v become v M in rows of `v`; columns of `o` take them back."""
        matrix = self.rotation.matrix(head_dim, v.weight.double())
        v.weight.data.copy_(_turned(v.weight.T, matrix).T)
        if v.bias is not None:
            v.bias.data.copy_(_turned(v.bias[None], matrix)[0])
        o.weight.data.copy_(_turned(o.weight, matrix.to(o.weight.device)))


def merged_rotation(name: str, codec: Codec | None) -> tuple[Codec, MergedRotation]:
    """The codec of values without its rotation, and what rotates in its place.

    Raises:
        ConfigError: values whose first stage is no Hadamard rotation.
    """
    first = codec.stages[0][1] if codec is not None and codec.stages else None
    if codec is None or not isinstance(first, (Hadamard, RandomizedHadamard)) or not first.orthogonal:
        raise ConfigError(f"method.merge_rotation of {name}: values whose first stage is a Hadamard rotation")
    return codec.rebuilt(codec.stages[1:]), MergedRotation(first)


def _turned(rows: Float[Tensor, "rows channels"], matrix: Float[Tensor, "dim dim"]) -> Float[Tensor, "rows channels"]:
    """Every head's channels of each row times the matrix, in double precision."""
    return (rows.double().unflatten(1, (-1, matrix.shape[0])) @ matrix).flatten(1)


def _projections(model: nn.Module, layers: int) -> list[tuple[nn.Linear, nn.Linear]]:
    both = ((_plain(module, "v_proj"), _plain(module, "o_proj")) for module in model.modules())
    found = [(v, o) for v, o in both if v is not None and o is not None]
    if len(found) != layers:
        raise Unsupported(
            f"method.merge_rotation: {type(model).__name__} has v_proj and o_proj in {len(found)} of {layers} layers"
        )
    return found


def _plain(module: nn.Module, name: str) -> nn.Linear | None:
    """A matrix of floating-point numbers; quantized weights are none."""
    part = getattr(module, name, None)
    return part if isinstance(part, nn.Linear) and part.weight.is_floating_point() else None


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    embedding = model.get_input_embeddings().weight
    tokens = torch.arange(16, device=embedding.device)[None] % embedding.shape[0]
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
