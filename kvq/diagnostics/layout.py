"""Bytes of a cache by part, counted from the tensors that a codec stores, or from their shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.codecs import Codec, Rope
from kvq.errors import Unsupported

KINDS = ("codes", "scales", "norms", "shift", "other", "residual")


def kind_of(part: str) -> str:
    """Which of `KINDS` a stored part belongs to, by its name (`kvq.codecs.packed`) and its stage's."""
    first, *rest = [piece for piece in part.split(".") if piece not in ("high", "low", "base")]
    if first == "residual":
        return first
    if first in ("codes", "signs", "values"):
        return "codes"
    if first in ("scale", "zero_point", "gain"):
        return "scales"
    if first.startswith("norm") or first == "rest":
        return "norms"
    if rest and rest[0] == "offset":
        return "shift"
    return "scales" if rest and rest[0] == "scale" else "other"


def stored_parts(codec: Codec, states: Tensor, block: int | None, rope: Rope | None = None) -> dict[str, int]:
    """Bytes of every part that `codec` stores of `[batch, heads, tokens, head_dim]` states.

    On the `meta` device no values are computed, only shapes and dtypes.
    """
    if not states.shape[2]:
        return {}
    packed = codec.encode(states, block, rope if codec.uses_rope else None)
    return {name: part.numel() * part.element_size() for name, part in packed.parts.items()}


def layout(
    codec: Codec, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, block: int | None
) -> dict[str, int]:
    """Bytes of every part of `tokens` tokens without storing them: the bytes of one block times the number of blocks.

    Raises:
        Unsupported: one block (`block=None`) under a codebook whose search looks at values; bytes that follow values.
    """
    if codec.stores_lists:
        raise Unsupported(f"{type(codec).__name__}: its bytes follow the values, of which shapes say nothing")

    def of(count: int, device: str) -> dict[str, int]:
        states = torch.zeros(1, heads, count, head_dim, dtype=dtype, device=device)
        nothing = torch.zeros(1, count, 0, device=device)
        return stored_parts(codec, states, None, Rope(nothing, nothing))

    if block is None:
        try:
            return of(tokens, "meta") if tokens else {}
        except RuntimeError as error:
            raise Unsupported("residual.prefill_block=whole: this quantizer's layout needs values") from error
    count, tail = divmod(tokens, block)
    out: dict[str, int] = {}
    for size, number in ((block, count), (tail, 1)):
        if size and number:
            for name, held in of(size, "cpu").items():
                out[name] = out.get(name, 0) + held * number
    return out


def by_kind(parts: dict[str, int]) -> dict[str, int]:
    """Bytes by `KINDS`."""
    out = dict.fromkeys(KINDS, 0)
    for name, size in parts.items():
        out[kind_of(name)] += size
    return out


def plain_bytes(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys or values of one layer in full precision."""
    return tokens * heads * head_dim * dtype.itemsize
