"""A codec: named invertible stages in an order, then one quantizer. A method has one for keys and one for values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs.packed import UNIT, BlockRun, Packed, merge_runs
from kvq.codecs.quantizers import Gain, Parts, Passthrough, Quantizer, shared_group, to_stored, without_prefix
from kvq.codecs.stages import Rope, Stage, rope_argument
from kvq.errors import ConfigError, DataError, Unsupported, did_you_mean, require

_FULL = ("none", "ieee")
Blocks = Float[Tensor, "*lead heads tokens head_dim"]
States = Float[Tensor, "batch heads tokens head_dim"]
ELEMENTS_AT_ONCE = 2**24
"""Elements that are encoded or decoded together, 64 MiB of fp32: no long text has a copy in it; a block may."""


def blocks_at_once(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """How many blocks of `tokens` tokens are encoded or decoded together, at least 1 (`ELEMENTS_AT_ONCE`)."""
    return max(1, ELEMENTS_AT_ONCE // (batch * heads * tokens * head_dim))


@contextmanager
def isolated(gradients: bool = False) -> Iterator[None]:
    """A context (or decorator) in which torch computes as in a new process, without gradients.

    It overrides the caller's autocast, inference mode, default dtype, default device and precision of matrix products,
    so that constants cached inside are normal tensors. `gradients`: record gradients if the caller does.
    """
    probe = torch.empty(0)
    with ExitStack() as stack:
        if probe.is_inference():
            stack.enter_context(torch.inference_mode(False))  # switches gradients on
        if probe.is_inference() or not gradients:
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if probe.device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if probe.dtype != torch.float32:
            stack.callback(torch.set_default_dtype, probe.dtype)
            torch.set_default_dtype(torch.float32)
        for products in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul):  # type: ignore[attr-defined]
            if (precision := products.fp32_precision) not in _FULL:
                stack.callback(setattr, products, "fp32_precision", precision)
                products.fp32_precision = "ieee"
        yield


class Codec:
    """Encodes `[batch, heads, tokens, head_dim]` into stored tensors and back.

    Args:
        stages: stage by name; None drops the stage (an ablation).
        order: names of `stages` in the order they are applied when encoding.
        quantizer: turns the last stage's output into codes.
    """

    version: ClassVar[int] = 1
    fits_first_tokens = False
    """Tables are fitted to the first tokens of a sequence, and stored with them; later tokens are encoded by these."""

    stores_lists = False
    """Some parts are lists without an equal number of rows for each block, which only `decode` can read."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("encode", "decode"):
            if name in vars(cls):
                setattr(cls, name, isolated()(vars(cls)[name]))

    def __init__(self, stages: Mapping[str, Stage | None], order: Sequence[str], quantizer: Quantizer) -> None:
        for name in order:
            if name not in stages:
                raise ConfigError(f"order: unknown stage '{name}'.{did_you_mean(name, stages)}")
        require(len(set(order)) == len(order), "order", list(order), "each stage once")
        left_out = [name for name, stage in stages.items() if stage is not None and name not in order]
        if left_out:
            raise ConfigError(f"order={list(order)}: leaves out stage '{left_out[0]}'; set it to null to drop it")
        self.stages = [(name, stage) for name in order if (stage := stages[name]) is not None]
        self.quantizer = quantizer

    def with_stages(self, stages: Iterable[tuple[str, Stage]], quantizer: Quantizer | None = None) -> Codec:
        """A codec of the same class with `stages`, in their order, and `quantizer` (None: this codec's)."""
        chain = list(stages)
        return type(self)(dict(chain), [name for name, _ in chain], quantizer or self.quantizer)

    def with_more_bits(self, extra: int, most: int) -> Codec:
        """A copy whose quantizer has `extra` bits per code more, but at most `most`."""
        return self.with_stages(self.stages, self.quantizer.with_more_bits(extra, most))

    @property
    def uses_rope(self) -> bool:
        """Whether some stage needs the rotations of the tokens (`rope`) to encode and to decode."""
        return any(stage.uses_rope for _, stage in self.stages)

    @property
    def joins_layers(self) -> bool:
        """Some stage takes the heads of all layers together: states are `[batch, layers x heads, tokens, head_dim]`."""
        return any(stage.joins_layers for _, stage in self.stages)

    @property
    def token_group(self) -> int | None:
        """Tokens that share statistics or side information; 1: each token on its own, None: the whole block."""
        return shared_group([*(stage.token_group for _, stage in self.stages), self.quantizer.token_group])

    def for_later_tokens(self, stored: Packed | None) -> Codec:
        """The codec for the tokens after those `stored` so far (None: there are none); see `fits_first_tokens`."""
        return self

    @isolated()
    def apply_stages(self, x: Blocks, rope: Rope | None = None) -> Blocks:
        """Apply all stages to a block: the input of the quantizer, in the compute dtype."""
        y = x.detach().to(_compute_dtype(x.dtype))
        for _, stage in self.stages:
            y = stage.forward(y, **rope_argument(stage, rope))[0]
        return y

    def check(self, head_dim: int) -> None:
        """Raise `Unsupported` when some part of the chain cannot work on `head_dim` channels."""
        for _, stage in self.stages:
            stage.check(head_dim)
        self.quantizer.check(head_dim)

    @isolated()
    def encode(self, x: States, block: int | None = None, rope: Rope | None = None) -> Packed:
        """Encode all tokens as one block, or as blocks of `block` tokens (the last may be shorter), each by itself.

        `rope`: the rotations (RoPE) of the tokens, for a codec that undoes them.
        """
        batch, heads, tokens, head_dim = x.shape
        if not tokens:
            raise DataError(f"encode: shape {list(x.shape)} holds no tokens; at least 1")
        self._check_rope(rope, tokens)
        size = tokens if block is None else min(block, tokens)
        count, tail = divmod(tokens, size)
        step = 1 if self.quantizer.variable_rows else blocks_at_once(batch, heads, size, head_dim)
        whole = [(at * size, size, min(step, count - at)) for at in range(0, count, step)]
        runs: tuple[BlockRun, ...] = ()
        pieces = []
        for start, length, number in (*whole, (count * size, tail, 1)):
            if length and number:
                blocks = x[:, :, start : start + length * number].unflatten(2, (number, length)).transpose(1, 2)
                turned = None if rope is None else rope.narrow(start, length * number).blocks(length, number)
                parts = {name: part.transpose(1, 2) for name, part in self.encode_block(blocks, turned).items()}
                rows = {name: part.shape[-2] for name, part in parts.items()}
                runs = merge_runs(runs, (BlockRun(length, number, rows),))
                pieces.append({name: part.flatten(2, 3) for name, part in parts.items()})
        parts = pieces[0] if len(pieces) == 1 else {name: torch.cat([p[name] for p in pieces], 2) for name in pieces[0]}
        return Packed(parts, runs, batch, heads, head_dim, x.dtype)

    def token_widths(self, heads: int, head_dim: int, like: Tensor) -> dict[str, int]:
        """`Packed.token_widths` of encoded states `[heads, tokens, head_dim]`, of the dtype and device of `like`."""
        unit = torch.zeros(1, heads, UNIT, head_dim, dtype=like.dtype, device=like.device)
        return self.encode(unit, UNIT).token_widths

    def _check_rope(self, rope: Rope | None, tokens: int) -> None:
        for name, stage in self.stages:
            if stage.uses_rope and (rope is None or rope.tokens != tokens):
                given = "none" if rope is None else f"those of {rope.tokens}"
                raise Unsupported(f"stage '{name}' needs the rotations (rope) of {tokens} tokens; given: {given}")

    @isolated()
    def decode(self, packed: Packed, rope: Rope | None = None) -> States:
        """The reconstruction that attention reads, from the stored tensors alone, in the dtype of the original."""
        self._check_rope(rope, packed.tokens)
        shape = (packed.batch, packed.heads, packed.tokens, packed.head_dim)
        out, first = next(iter(packed.parts.values())).new_empty(shape, dtype=packed.dtype), 0
        for run, parts in packed.by_run():
            blocks = run.blocks(parts)
            step = blocks_at_once(packed.batch, packed.heads, run.tokens, packed.head_dim)
            for at in range(0, run.count, step):
                count = min(step, run.count - at)
                length = run.tokens * count
                some = {name: part.narrow(1, at, count) for name, part in blocks.items()}
                turned = None if rope is None else rope.narrow(first, length).blocks(run.tokens, count)
                of_blocks = Size((packed.batch, count, packed.heads, run.tokens, packed.head_dim))
                decoded = self.decode_block(some, of_blocks, _compute_dtype(packed.dtype), turned)
                piece = out.narrow(2, first, length).unflatten(2, (count, run.tokens))
                piece.copy_(to_stored(decoded, packed.dtype).transpose(1, 2))
                first += length
        return out

    def encode_block(self, blocks: Blocks, rope: Rope | None = None, dtype: torch.dtype | None = None) -> Parts:
        """Stored parts of blocks, each `[heads, tokens, head_dim]`; rows (dim -2) run along a block's tokens.

        `dtype`: dtype of the cache's states, for a codec inside a quantizer, where `blocks` are cast to the compute
        dtype (None: the dtype of `blocks`).
        """
        y = blocks.to(_compute_dtype(blocks.dtype))
        sides = []
        for _, stage in self.stages:
            y, side = stage.forward(y, **rope_argument(stage, rope))
            sides.append(side)
        parts, factor = self._quantize(y, dtype or blocks.dtype)
        if factor is not None:
            # Into the last token norm that only orthogonal stages follow; without one it is stored.
            at = len(sides) - 1
            while at >= 0 and self.stages[at][1].orthogonal and not self.stages[at][1].takes_gain:
                at -= 1
            if at >= 0 and self.stages[at][1].takes_gain:
                sides[at] = self.stages[at][1].absorb(sides[at], factor)
            else:
                parts["gain"] = to_stored(factor, torch.float16)
        for (name, _), side in zip(self.stages, sides, strict=True):
            for key, value in side.items():
                parts[f"{name}.{key}"] = to_stored(value, torch.float16) if value.is_floating_point() else value
        return parts

    def _quantize(self, y: Tensor, dtype: torch.dtype) -> tuple[Parts, Float[Tensor, "*lead tokens 1"] | None]:
        """The quantizer's stored parts of `y`, and a gain per token `[..., tokens, 1]` where the quantizer has one."""
        parts, gain = self.quantizer.encode(y, dtype), self.quantizer.gain
        return parts, None if gain == "none" else gain_factor(y, self.quantizer.decode(parts, y.shape, y.dtype), gain)

    def decode_block(self, parts: Parts, shape: Size, dtype: torch.dtype, rope: Rope | None = None) -> Blocks:
        """Inverse of `encode_block`, in the compute dtype `dtype`."""
        y = self.quantizer.decode(parts, shape, dtype)
        if "gain" in parts:
            y = y * parts["gain"].to(dtype)
        for name, stage in reversed(self.stages):
            kept = without_prefix(parts, f"{name}.").items()
            side = {key: part.to(dtype) if part.is_floating_point() else part for key, part in kept}
            y = stage.inverse(y, side, **rope_argument(stage, rope))
        return y


class StoredWithKeys(Codec):
    """Placeholder for the values' codec where the keys' codec stores both, values as further heads; never encodes."""

    version: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__({}, [], Passthrough())

    def with_stages(self, stages: Iterable[tuple[str, Stage]], quantizer: Quantizer | None = None) -> Codec:
        return self

    def encode_block(self, blocks: Blocks, rope: Rope | None = None, dtype: torch.dtype | None = None) -> Parts:
        """Always raise `Unsupported`."""
        raise Unsupported("values are stored with the keys, by the codec of these")


def check_nested(codec: Codec, outer: str, binds: bool = False) -> None:
    """Raise `Unsupported` for a codec that cannot work inside a quantizer (`outer`), which knows no token positions.

    `binds`: the quantizer binds calibrated tables to the codec's parts, so that these may be calibrated.
    """
    if codec.uses_rope:
        raise Unsupported(f"a {outer} has no token positions: put undo_rope and apply_rope around the {outer}")
    parts = (*(stage for _, stage in codec.stages), codec.quantizer)
    if not binds and any(getattr(part, "is_calibrated", False) for part in parts):
        raise Unsupported(f"a {outer} takes no calibrated part inside of it, where no calibration finds it")
    if codec.stores_lists:
        kind = type(codec).__name__
        raise Unsupported(f"a {outer} takes a kvq.codecs.Codec, not a {kind}: use {kind} for the codec around it")


def gain_factor(x: Tensor, x_hat: Tensor, gain: Gain) -> Float[Tensor, "*lead tokens 1"]:
    """The factor of kind `gain` (`Gain`) per head and token; 1 where its denominator is 0 (NSNQuant, section 3.3)."""
    if gain in ("unit", "norm"):
        top, bottom = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (x, x_hat))
        top = torch.ones_like(top) if gain == "unit" else top
    else:
        other = x_hat if gain == "l2" else x
        top, bottom = (x * other).sum(-1, keepdim=True), (x_hat * other).sum(-1, keepdim=True)
    return torch.where(bottom == 0, torch.ones_like(top), top / bottom.masked_fill(bottom == 0, 1))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
