"""Decode attention on packed codes, for every method with a `LinearChain`: in plain PyTorch, or by a plugin's kernel.

Here codes are unpacked for one piece of tokens at a time, never for all keys or values. An online softmax (as in
FlashAttention, arXiv 2205.14135) joins the pieces and the full-precision tokens after them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, UniformQuantizer
from kvq.codecs.codec import isolated
from kvq.codecs.packed import unpack_parts
from kvq.config.plugins import import_modules
from kvq.errors import Unsupported
from kvq.kernels import pieces
from kvq.kernels.linear_chain import LinearChain, PackedStates, build_linear_chain, is_affine, score_rotated
from kvq.kernels.pieces import TILE, Piece

Queries = Float[Tensor, "batch kv_heads group dim"]
Scores = Float[Tensor, "batch kv_heads group tokens"]
Step = Callable[[str], AbstractContextManager[Any]]
"""Opened around every step of attention, with its name: one of `STEPS`."""
STEPS = ("rotation", "scores", "norms", "shifts", "residual", "softmax", "values", "joining")
"""Queries rotated; their products with the codes of keys; factors of tokens made and multiplied, of keys and values;
shifts; products with tokens in full precision; weights; sums of the codes of values; sums rotated back and joined."""
_WATCH: ContextVar[Step | None] = ContextVar("_WATCH", default=None)


class Softmax:
    """Online softmax: `sums` (by name) of values weighted by exp(score - `top`), accumulated over pieces of tokens."""

    def __init__(self) -> None:
        self.top: Tensor | float = -math.inf
        self.total: Tensor | float = 0.0
        self.sums: dict[str, Tensor] = {}

    def add_scores(self, scores: Scores) -> Scores:
        """Weights of these tokens relative to the current maximum; earlier sums are rescaled to it."""
        top = scores.amax(-1, keepdim=True).clamp_min(self.top)
        weights, shrink = torch.exp(scores - top), torch.exp(self.top - top)
        self.top, self.total = top, self.total * shrink + weights.sum(-1, keepdim=True)
        self.sums = {name: part * shrink for name, part in self.sums.items()}
        return weights

    def add(self, name: str, mixed: Tensor) -> None:
        """Add weighted values of a piece to the sum of this name."""
        self.sums[name] = self.sums[name] + mixed if name in self.sums else mixed


def attend(
    query: Float[Tensor, "batch heads 1 dim"],
    keys: PackedStates,
    values: PackedStates,
    scaling: float,
    first: int = 0,
    softcap: float | None = None,
    step: Step = nullcontext,
) -> Float[Tensor, "batch heads 1 _dim"]:
    """Attention of one new token per sequence to all tokens held from token `first` on.

    Args:
        query: its heads are a multiple of those of `keys`; consecutive ones share a head.
        scaling: of the scores.
        softcap: scores become `softcap · tanh(score / softcap)` (Gemma 2).
        step: opened around each step, to time it.

    Computes in fp32 (fp64 for fp64 queries) and returns the query's dtype.
    """
    kind = torch.float64 if query.dtype is torch.float64 else torch.float32
    batch, heads = query.shape[0], keys.shape[1]
    q = query.to(kind).reshape(batch, heads, -1, query.shape[-1]) * scaling
    reader, mixer = _KeyReader(keys, q, step), _ValueReader(values, kind, step)
    softmax = Softmax()
    bounds = [first, *range(first + TILE, keys.tokens, TILE), keys.tokens]
    for start, stop in itertools.pairwise(bounds):
        scores = reader.scores(start, stop)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        with step("softmax"):
            weights = softmax.add_scores(scores)
        mixer.mix(softmax, weights, start, stop)
    with step("joining"):
        return (mixer.total(softmax) / softmax.total).reshape(batch, query.shape[1], 1, -1).to(query.dtype)


class _PieceReader:
    """Reads keys or values of successive ranges of tokens piece by piece; a range never starts before the last one."""

    def __init__(self, states: PackedStates, step: Step) -> None:
        self.states, self.step = states, step
        self.chain: LinearChain | None = None if states.codec is None else build_linear_chain(states.codec)
        self.joint = self.chain is not None and self.chain.joint is not None
        self._coming = iter(()) if self.chain is None or self.joint else pieces.iter_pieces(states, self.chain)
        self._held: list[Piece] = []

    def pieces_in(self, start: int, stop: int) -> list[tuple[Piece, slice, slice]]:
        """Pieces that overlap the tokens `start` to `stop`, with the slice of their tokens and that of the range."""
        self._held = [piece for piece in self._held if piece.stop > start]
        while not self._held or self._held[-1].stop < stop:
            piece = next(self._coming, None)
            if piece is None:
                break
            if piece.stop > start:
                self._held.append(piece)
        out = []
        for piece in self._held:
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin < end:
                out.append((piece, slice(begin - piece.start, end - piece.start), slice(begin - start, end - start)))
        return out

    def full_in(self, start: int, stop: int) -> tuple[Tensor, slice] | None:
        """Full-precision tokens of the range, and the slice of the range that they fill."""
        packed = self.states.packed_tokens
        begin = max(start, packed)
        if self.states.full is None or begin >= stop:
            return None
        return self.states.full[:, :, begin - packed : stop - packed], slice(begin - start, stop - start)


class _KeyReader(_PieceReader):
    """Scores of queries `[batch, kv_heads, group, dim]` with the keys."""

    def __init__(self, states: PackedStates, query: Queries, step: Step) -> None:
        super().__init__(states, step)
        self.query = query
        with step("rotation"):
            self.rotated = query if self.chain is None else self.chain.rotate(query)
        self._known: tuple[Piece, Tensor] | None = None

    def scores(self, start: int, stop: int) -> Scores:
        """Scores of the tokens `start` to `stop`."""
        out = self.query.new_empty(*self.query.shape[:3], stop - start)
        if self.joint and self.chain is not None:
            with self.step("scores"):
                for where, components in pieces.decode_components(self.states, start, stop, self.query.dtype):
                    keys = pieces.restore_joint_keys(self.states, self.chain, components, start + where.start)
                    out[..., where] = self.query @ keys.mT
        for piece, some, where in self.pieces_in(start, stop):
            out[..., where] = self._score_piece(piece)[..., some]
        if (rest := self.full_in(start, stop)) is not None:
            with self.step("residual"):
                out[..., rest[1]] = self.query @ rest[0].to(self.query.dtype).mT
        return out

    def _score_piece(self, piece: Piece) -> Scores:
        """Scores of a piece's tokens; those of the last piece are kept."""
        if self._known is not None and self._known[0] is piece:
            return self._known[1]
        assert self.chain is not None
        chain = self.chain
        with self.step("scores"):
            scores = _score_codes(chain, piece, self.rotated[:, None])
        with self.step("norms"):
            scores = _multiply_norms(chain, piece, scores, None)
        for shift in chain.shifts:
            with self.step("shifts"):
                offset = pieces.decode_shift(shift, piece.blocks, self.query.shape[-1], self.query.dtype)
                seen = chain.rotate(self.query, shift.rotations)[:, None]
                rope = piece.rope if shift.after_rope else None
                more = seen @ offset.mT if rope is None else score_rotated(seen, offset, rope)
                scores = scores + _multiply_norms(chain, piece, more, shift.norms)
        if (factors := piece.low_rank_factors(self.query.dtype)) is not None:
            with self.step("scores"):
                scores = scores + (self.query[:, None] @ factors[1].mT) @ factors[0].mT
        out = scores.permute(0, 2, 3, 1, 4).flatten(-2)
        self._known = (piece, out)
        return out


class _ValueReader(_PieceReader):
    """Sums of the values, weighted by attention."""

    def __init__(self, states: PackedStates, kind: torch.dtype, step: Step) -> None:
        super().__init__(states, step)
        self.kind = kind

    def mix(self, softmax: Softmax, weights: Scores, start: int, stop: int) -> None:
        """Add the values of the tokens `start` to `stop` to the sums of `softmax`."""
        if self.joint:
            with self.step("values"):
                for where, components in pieces.decode_components(self.states, start, stop, self.kind):
                    part = weights[..., where]
                    mixed = part.flatten(1, 2) @ components.transpose(-3, -2).flatten(-2)
                    softmax.add("codes", mixed.unflatten(1, part.shape[1:3]))  # those of all heads, for each query
                    softmax.add("codes_total", part.sum(-1, keepdim=True))
        for piece, some, where in self.pieces_in(start, stop):
            spread = weights.new_zeros(*weights.shape[:3], piece.count * piece.tokens)
            spread[..., some] = weights[..., where]
            self._mix_piece(softmax, piece, spread.unflatten(-1, (piece.count, piece.tokens)).permute(0, 3, 1, 2, 4))
        if (rest := self.full_in(start, stop)) is not None:
            with self.step("residual"):
                softmax.add("full", weights[..., rest[1]] @ rest[0].to(self.kind))

    def _mix_piece(self, softmax: Softmax, piece: Piece, weights: Tensor) -> None:
        """Add a piece's values to the sums, with `weights` `[batch, blocks, heads, group, tokens]`."""
        assert self.chain is not None
        chain = self.chain
        with self.step("norms"):
            scaled = _multiply_norms(chain, piece, weights, None)
        with self.step("values"):
            softmax.add("codes", _mix_codes(chain, piece, scaled, self.states.shape[2]))
        for shift in chain.shifts:
            with self.step("shifts"):
                scaled = _multiply_norms(chain, piece, weights, shift.norms)
                offset = pieces.decode_shift(shift, piece.blocks, self.states.shape[2], self.kind)
                softmax.add(shift.name, (scaled.sum(-1, keepdim=True) * offset).sum(1))
        if (factors := piece.low_rank_factors(self.kind)) is not None:
            with self.step("values"):
                softmax.add("full", ((weights @ factors[0]) @ factors[1]).sum(1))

    def total(self, softmax: Softmax) -> Queries:
        """The weighted sum of all values, from the sums of codes, shifts, and corrections and full-precision values."""
        sums = softmax.sums
        if self.chain is None or "codes" not in sums:
            return sums["full"]
        if self.joint:
            out = pieces.restore_joint_values(self.states, self.chain, sums["codes"], sums["codes_total"])
        else:
            out = self.chain.rotate_back(sums["codes"], [sums[shift.name] for shift in self.chain.shifts])
        return out + sums["full"] if "full" in sums else out


def _multiply_norms(chain: LinearChain, piece: Piece, numbers: Tensor, names: tuple[str, ...] | None) -> Tensor:
    """`numbers` `[batch, blocks, heads, group, tokens]` times the norms `names` of their tokens (None: all)."""
    norms = chain.norm_factors(piece.blocks, names, piece.length, numbers.dtype)
    return numbers if norms is None else numbers * norms[..., None, piece.inner]


def affine_codes(quantizer: UniformQuantizer, piece: Piece, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a piece, and step and lowest value of every group: a code decodes to `low + step · code`."""
    codes = unpack_parts(piece.blocks, quantizer.bits, piece.tokens).to(kind)
    scale = piece.blocks["scale"].to(kind)
    if quantizer.symmetric:
        return codes, scale, scale * -(2 ** (quantizer.bits - 1) - 1)
    zero = piece.blocks["zero_point"].to(kind)
    return codes, scale, zero if quantizer.zero_point == "float" else -scale * zero


def _score_codes(chain: LinearChain, piece: Piece, query: Float[Tensor, "batch 1 heads group dim"]) -> Tensor:
    """`q · y_t`, `[batch, blocks, heads, group, tokens]`, with `y_t` what token t's codes stand for."""
    quantizer, dim = chain.codec.quantizer, query.shape[-1]
    if not is_affine(quantizer):
        return quantizer.score(piece.blocks, query, piece.tokens)
    codes, scale, low = affine_codes(quantizer, piece, query.dtype)
    if quantizer.axis == "per_channel":
        grouped = _split_groups(codes, -2, scale.shape[-2], quantizer, piece.length)
        folded = query.unsqueeze(-3) * scale.unsqueeze(-2)  # [batch, blocks, heads, groups, group, dim]
        scores = folded @ grouped.mT + (query @ low.mT).mT.unsqueeze(-1)
        return scores.transpose(-3, -2).flatten(-2)[..., : piece.tokens]
    grouped = _split_groups(codes, -1, scale.shape[-1], quantizer, dim).transpose(-3, -2)
    parts = _split_groups(query, -1, scale.shape[-1], quantizer, dim).transpose(-3, -2)
    scores = (parts @ grouped.mT) * scale.mT.unsqueeze(-2) + parts.sum(-1, keepdim=True) * low.mT.unsqueeze(-2)
    return scores.sum(-3)


def _mix_codes(chain: LinearChain, piece: Piece, weights: Tensor, dim: int) -> Float[Tensor, "batch heads group dim"]:
    """`Σ w_t y_t` over a piece's tokens t, from `weights` `[batch, blocks, heads, group, tokens]`."""
    quantizer = chain.codec.quantizer
    if not is_affine(quantizer):
        return quantizer.mix(piece.blocks, weights, dim)
    codes, scale, low = affine_codes(quantizer, piece, weights.dtype)
    if quantizer.axis == "per_channel":
        grouped = _split_groups(codes, -2, scale.shape[-2], quantizer, piece.length)
        parts = _split_groups(weights, -1, scale.shape[-2], quantizer, piece.length).transpose(-3, -2)
        mixed = (parts @ grouped) * scale.unsqueeze(-2) + parts.sum(-1, keepdim=True) * low.unsqueeze(-2)
        return mixed.sum((1, 3))
    grouped = _split_groups(codes, -1, scale.shape[-1], quantizer, dim).transpose(-3, -2)
    mixed = (weights.unsqueeze(-3) * scale.mT.unsqueeze(-2)) @ grouped  # [batch, blocks, heads, groups, group, size]
    mixed = mixed + (weights @ low).mT.unsqueeze(-1)
    return mixed.transpose(-3, -2).flatten(-2)[..., :dim].sum(1)


def _split_groups(x: Tensor, axis: int, groups: int, quantizer: UniformQuantizer, length: int) -> Tensor:
    """The axis in `groups` groups of the quantizer's size, a short last one padded with zeros.

    `length` is that of the whole axis, of which `x` may hold a part.
    """
    size = min(quantizer.group_size or length, length) if quantizer.group_size else x.shape[axis]
    short = groups * size - x.shape[axis]
    if short:
        x = torch.nn.functional.pad(x, (0, short) if axis == -1 else (0, 0, 0, short))
    return x.unflatten(axis, (groups, size))


@runtime_checkable
class Kernels(Protocol):
    """A module that a plugin registers for the extension point `kernels`: fused attention and encoding."""

    def attention_for(
        self, query: Tensor, keys: PackedStates, values: PackedStates, softcap: float | None
    ) -> tuple[str, Callable[..., Tensor]] | None:
        """Name and function of a kernel that reads these keys and values; None: there is none.

        The function takes what `attend` takes and agrees with it up to rounding.
        """

    def fuse(self, codec: Codec) -> Codec:
        """A codec that makes the same parts faster where it can.

        A code may differ where a value is halfway between two codes up to rounding, as sums have another order.
        """


@functools.cache
def load_kernels() -> Sequence[Kernels]:
    """The kernels of the plugins in use."""
    return cast("list[Any]", import_modules("kernels"))


@contextmanager
def time_steps(step: Step) -> Iterator[None]:
    """Within the context, attention runs in PyTorch, each of its steps within `step(name)`, which times it.

    All steps together run within `step("attention")`.
    """
    token = _WATCH.set(step)
    try:
        yield
    finally:
        _WATCH.reset(token)


def choose_kernel(
    query: Tensor, keys: PackedStates, values: PackedStates, softcap: float | None = None
) -> tuple[str, Callable[..., Tensor]]:
    """Name and function of the first plugin's kernel that reads these keys and values, else `eager` in PyTorch."""
    offered = (kernels.attention_for(query, keys, values, softcap) for kernels in load_kernels())
    return next((kernel for kernel in offered if kernel is not None), ("eager", attend))


@isolated()
def attend_packed(
    query: Float[Tensor, "batch heads 1 dim"],
    keys: PackedStates,
    values: PackedStates,
    scaling: float,
    first: int = 0,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 _dim"]:
    """`attend` by the kernel that `choose_kernel` names; sinks count among the tokens before `first`."""
    if keys.sinks or values.sinks:
        if (keys.sinks, keys.packed_tokens) != (values.sinks, values.packed_tokens):
            raise Unsupported("cache.attention=packed: first tokens in full precision need keys and values in step")
        hidden = min(first, keys.sinks)
        keys, values, first = keys.without_sinks(hidden), values.without_sinks(hidden), first - hidden
    if (step := _WATCH.get()) is not None:
        with step("attention"):
            return attend(query, keys, values, scaling, first, softcap, step)
    return choose_kernel(query, keys, values, softcap)[1](query, keys, values, scaling, first, softcap)


def fuse_codec(codec: Codec) -> Codec:
    """The codec, or one of a plugin that makes the same parts faster."""
    return functools.reduce(lambda made, kernels: kernels.fuse(made), load_kernels(), codec)
