"""A model's rotary embedding as a codec needs it: how each attention rotates its keys, found by a probe."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from kvq.cache.hooks import attentions, call_before, layer_number
from kvq.codecs import Growable
from kvq.codecs.packed import append_rows
from kvq.codecs.stages import Rope
from kvq.errors import Unsupported
from kvq.models.load import base_of, device_of

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference relative to the largest key; RoPE tables have the dtype of the model."""
_PROBED: weakref.WeakKeyDictionary[nn.Module, list[tuple[Style | None, int]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Style:
    """The layout of a RoPE: which columns of the cosine and sine tables to use, and which channels form a pair.

    `columns`: those that hold the angle of each channel pair once. `interleaved`: channels 2i and 2i + 1 are a pair
    (GPT-J), else i and i + rotary_dim / 2 (Llama).
    """

    columns: Literal["first_half", "even", "every"]
    interleaved: bool

    def rope(self, cos: Float[Tensor, "rows tokens columns"], sin: Float[Tensor, "rows tokens columns"]) -> Rope:
        """The rotations of cosine and sine tables, without their attention factor (YaRN, LongRoPE): keys contain it."""
        pairs = cos.shape[-1] // 2
        pick = {"first_half": slice(0, pairs), "even": slice(0, None, 2), "every": slice(None)}[self.columns]
        cos, sin = (part[..., pick].to(torch.promote_types(part.dtype, torch.float32)) for part in (cos, sin))
        size = torch.hypot(cos, sin)
        return Rope(cos / size, sin / size, self.interleaved)


STYLES = (
    Style("first_half", False),  # Llama and most others
    Style("even", True),  # Cohere
    Style("first_half", True),  # GLM-4
    Style("every", False),  # gpt-oss
    Style("every", True),  # GPT-J
)


class RopeTable:
    """RoPE rotations (cosines, sines) of a cache's tokens, shared by layers that rotate alike; not in `nbytes`."""

    saved = ("_parts",)
    """Attributes that a file contains, as it has no positions from which to compute them."""

    def __init__(self, style: Style | None) -> None:
        self.style = style
        self._parts: tuple[Growable, Growable] | None = None

    @property
    def tokens(self) -> int:
        return 0 if self._parts is None else self._parts[0].rows

    @property
    def rope(self) -> Rope:
        """The rotations, from the first token on."""
        assert self._parts is not None
        cos, sin = self._parts
        return Rope(cos.view, sin.view, self.style is not None and self.style.interleaved)

    def after(self, tokens: int) -> Rope:
        """The rotations without those of the first `tokens` tokens."""
        rope = self.rope
        return rope.narrow(tokens, rope.tokens - tokens) if tokens else rope

    def extend(self, held: int, queries: int, tables: tuple[Tensor, Tensor] | None, like: Tensor) -> None:
        """Add `tables` (None: empty ones, like `like`) as the rotations of `queries` tokens after the first `held`."""
        if self.tokens == held + queries:
            return
        self.keep(held)  # without those of a forward that was refused or broke off
        if self.style is None or tables is None:
            none = like.new_zeros(1, queries, 0)
            rope = Rope(none, none)
        else:
            cos, sin = tables
            if len(cos) > 1 and not all(torch.equal(part, part[:1].expand_as(part)) for part in (cos, sin)):
                raise Unsupported("position_ids: a method that undoes RoPE needs the same for every sequence")
            rope = self.style.rope(cos[:1], sin[:1])
        before = self._parts or (None, None)
        self._parts = append_rows(before[0], rope.cos), append_rows(before[1], rope.sin)

    def keep(self, tokens: int) -> None:
        """Keep the rotations of the first `tokens` tokens only."""
        if self._parts is not None and tokens < self.tokens:
            cos, sin = (Growable(part.view[:, :tokens].clone()) for part in self._parts)
            self._parts = (cos, sin) if tokens else None

    def fork(self) -> RopeTable:
        """A copy that shares the rotations so far and grows independently."""
        other = RopeTable(self.style)
        other._parts = None if self._parts is None else (self._parts[0].fork(), self._parts[1].fork())
        return other


def angles(module: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The tables `[rows, tokens, columns]` of cosines and sines in an attention's arguments; None: it has none."""
    cos_sin = arguments.get("position_embeddings")
    if cos_sin is not None:
        cos, sin = cos_sin
        if cos.ndim == 4:  # one table per axis of an image, the same for text
            if not torch.equal(cos, cos[:1].expand_as(cos)):
                raise Unsupported("position_ids: a method that undoes rotary embeddings takes text, not images")
            cos, sin = cos[0], sin[0]
        return cos, sin
    table, positions = getattr(module, "embed_positions", None), arguments.get("position_ids")
    if isinstance(table, Tensor) and positions is not None:  # GPT-J and CodeGen
        sin, cos = table.to(positions.device)[positions].chunk(2, -1)
        return cos, sin
    return None


class KeyRecorder(DynamicCache):
    """A `DynamicCache` that also keeps the keys `[batch, heads, tokens, head_dim]` each layer added last, in `seen`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen[layer_idx] = key_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def styles_of(model: Any) -> list[tuple[Style | None, int]]:
    """Style of each layer that computes keys (None: it rotates nothing), and its group; layers of a group rotate alike.

    The model reads a few tokens. Each attention is then called again with the same tokens, all at position 0, where
    RoPE does nothing; the style whose inverse maps the first keys to these is the layer's.
    """
    if model in _PROBED:
        return _PROBED[model]
    base = base_of(model)
    calls: dict[int, tuple[Any, dict[str, Any]]] = {}

    def keep(module: Any, arguments: dict[str, Any]) -> None:
        calls[layer_number(module, arguments)] = module, arguments

    recorder, embedding = KeyRecorder(model.config), model.get_input_embeddings()
    tokens = torch.arange(1, 25, device=device_of(embedding)) % embedding.weight.shape[0]  # 24 that probe
    with call_before(attentions(base), keep):
        base(input_ids=tokens[None], past_key_values=recorder, use_cache=True)
    out: list[tuple[Style | None, int]] = []
    tables: list[tuple[Style | None, Tensor | None]] = []
    for layer in sorted(recorder.seen):
        module, arguments = calls[layer]
        cos_sin = angles(module, arguments)
        style = _find_style(module, arguments, recorder.seen[layer], cos_sin)
        cos = None if style is None or cos_sin is None else cos_sin[0]
        group = next((i for i, known in enumerate(tables) if _rotate_alike(known, (style, cos))), len(tables))
        if group == len(tables):
            tables.append((style, cos))
        out.append((style, group))
    _PROBED[model] = out
    return out


def _rotate_alike(first: tuple[Style | None, Tensor | None], second: tuple[Style | None, Tensor | None]) -> bool:
    """Whether two pairs of style and table of cosines are equal."""
    if first[0] != second[0] or first[1] is None or second[1] is None:
        return first[0] == second[0]
    return first[1].device == second[1].device and torch.equal(first[1], second[1])


def _find_style(
    module: Any, arguments: dict[str, Any], keys: Tensor, cos_sin: tuple[Tensor, Tensor] | None
) -> Style | None:
    """The style that produced `keys` from an attention's arguments and tables `cos_sin` (None: it rotates nothing)."""
    tolerance = _TOLERANCE.get(keys.dtype, 2e-2)
    if cos_sin is None:  # nothing says how they turn; then moving tokens must move their keys and nothing else
        moved = _rerun_keys(module, arguments | {"hidden_states": arguments["hidden_states"].roll(1, 1)})
        if _relative_error(moved, keys.roll(1, 2)) <= tolerance:
            return None
        raise Unsupported(f"model: {type(module).__name__} turns its keys in a way that kvq does not know")
    at_first = dict(arguments)
    if arguments.get("position_embeddings") is not None:
        table = arguments["position_embeddings"]
        at_first["position_embeddings"] = tuple(part[..., :1, :].expand_as(part) for part in table)
    else:
        at_first["position_ids"] = torch.zeros_like(arguments["position_ids"])
    still = _rerun_keys(module, at_first)
    if _relative_error(still, keys) <= tolerance:  # it is handed tables and does not use them (Falcon with ALiBi)
        return None
    for style in STYLES:
        rope = style.rope(cos_sin[0][:1], cos_sin[1][:1])
        if 2 * rope.cos.shape[-1] <= keys.shape[-1] and rope.cos.shape[-1] == rope.sin.shape[-1]:
            one = Rope(rope.cos[:, None], rope.sin[:, None], rope.interleaved)
            wide = keys.to(rope.cos.dtype)
            back = one.rotate(wide, back=True)
            if _relative_error(back, still) <= tolerance and _relative_error(one.rotate(back), wide) <= tolerance:
                return style
    raise Unsupported(f"model: {type(module).__name__} turns its keys in a way that kvq does not know")


def _rerun_keys(module: Any, arguments: dict[str, Any]) -> Tensor:
    """Call an attention with these arguments and an empty cache; return the keys it adds."""
    recorder = KeyRecorder(None)
    replaced = {name: recorder if isinstance(value, DynamicCache) else value for name, value in arguments.items()}
    module(**replaced)
    return recorder.seen[layer_number(module, arguments)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, divided by the largest absolute value of `expected`."""
    expected = expected.to(actual.dtype)
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(actual.dtype).tiny))
