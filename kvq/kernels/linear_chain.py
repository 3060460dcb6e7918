"""A codec's chain as attention on codes uses it: rotations of query and output, and a factor per token.

Undoing a chain is linear in the quantizer's output: a rotation is one matrix for all tokens, a token norm one factor
per token, a shift one vector per block. For a query q, with M the product of the rotations, s_t the product of the
norms of token t, and y_t the decoded codes of token t,

    q · x_t = s_t (q M) · y_t + shifts,        Σ p_t x_t = (Σ p_t s_t y_t) Mᵀ + shifts.

Neither x_t nor y_t has to be computed for all tokens at once.

A transform T of all heads of a token together (`joint`) stands last of its stages and has no norms or shifts beside it:

    x_t = R_t (y_t T⁻¹ + mean),        Σ p_t x_t = (Σ p_t y_t) T⁻¹ + mean Σ p_t    (values: R_t = 1).

Values are summed as components, for each query those of all heads, and T⁻¹ is applied to the sums. Keys are decoded for
one piece of tokens at a time, because RoPE (R_t) stands between the query and T⁻¹, which turns it for each token. Where
a token's keys and values share the components y_t, keys take some columns of T⁻¹ and values the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import (
    Codec,
    HeadsCodec,
    JointTransform,
    LowRankCorrection,
    Packed,
    Rope,
    SignedMaxQuantizer,
    StoredWithKeys,
    TokenNorm,
    UniformQuantizer,
    VectorQuantizer,
)
from kvq.codecs.packed import BlockRun
from kvq.codecs.quantizers import Quantizer, without_prefix
from kvq.codecs.stages import ApplyRope, ChannelShift, Stage, UndoRope, decode_side
from kvq.errors import Unsupported

Rows = Float[Tensor, "*lead rows dim"]


@dataclass(frozen=True)
class PackedStates:
    """Keys or values of one layer as attention on packed codes reads them, oldest token first.

    Attributes:
        codec: codec of the packed tokens; None: all are in full precision.
        packed: the packed prefix.
        full: full-precision tokens `[batch, heads, tokens, head_dim]` after the prefix; None: there are none.
        rope: the rotations of the packed tokens, from the first on, for a codec that undoes them.
        sinks: so many tokens at the beginning of `full` come before the packed ones in the text. Attention is the same
            in any order of tokens that keys and values share.
        heads: of `packed`, these heads are meant, as others are of the other side (`StoredWithKeys`); None: all.
    """

    codec: Codec | None
    packed: tuple[Packed, ...]
    full: Float[Tensor, "batch heads _tokens head_dim"] | None
    rope: Rope | None = None
    sinks: int = 0
    heads: slice | None = None

    def select_heads(self, heads: slice) -> PackedStates:
        """The same tokens with only these heads; stored components, which all heads share, stay whole (`heads`)."""
        full = None if self.full is None else self.full[:, heads]
        return replace(self, full=full, heads=heads)

    def without_sinks(self, count: int) -> PackedStates:
        """The same tokens without the first `count` sinks."""
        if not count or self.full is None:
            return self
        return replace(self, full=self.full[:, :, count:], sinks=self.sinks - count)

    @property
    def packed_tokens(self) -> int:
        """Tokens of the packed prefix."""
        return sum(packed.tokens for packed in self.packed)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.packed_tokens + (0 if self.full is None else self.full.shape[2])

    def runs(self) -> Iterator[tuple[int, BlockRun, dict[str, Tensor]]]:
        """Each run of packed blocks: its first token, and its stored parts."""
        start = 0
        for packed in self.packed:
            for run, parts in packed.by_run():
                yield start, run, parts
                start += run.tokens * run.count

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads and head_dim."""
        if self.full is not None:
            return self.full.shape[0], self.full.shape[1], self.full.shape[3]
        first = self.packed[0]
        heads = first.heads if self.heads is None else self.heads.stop - self.heads.start
        return first.batch, heads, first.head_dim


@dataclass(frozen=True)
class Shift:
    """A stage that subtracts a vector from the tokens of a block.

    Attributes:
        name: of the stage in the codec.
        rotations: how many of the chain's rotations precede it in encoding.
        norms: names of the norms that precede it in encoding.
        after_rope: RoPE is undone before it, so RoPE at each token's position applies to the vector.
    """

    name: str
    stage: ChannelShift
    rotations: int
    norms: tuple[str, ...]
    after_rope: bool


@dataclass(frozen=True)
class LinearChain:
    """A codec whose stages are linear, so that attention applies them to query and output; see the module.

    `joint`: the transform of all heads of a token together, if there is one; then there is nothing else but RoPE.
    `low_rank`: the chain is that of the codec inside a `LowRankCorrection`, whose product of factors is added to its
    tokens: q · (x_t + V u_t) = q · x_t + (q V) · u_t, and values likewise.
    """

    codec: Codec
    rotations: tuple[Stage, ...]
    norms: dict[str, TokenNorm]
    shifts: tuple[Shift, ...]
    joint: JointTransform | None = None
    low_rank: bool = False

    def rotate(self, query: Rows, count: int | None = None, start: int = 0) -> Rows:
        """The query after the rotations `start` to `count` (None: to the last)."""
        for stage in self.rotations[start:count]:
            query = stage.forward(query)[0]
        return query

    def rotate_back(self, mixed: Rows, shifts: list[Rows] | None = None) -> Rows:
        """Undo the rotations of a weighted sum of decoded codes.

        `shifts`: weighted sums of each shift's vectors, which are added where decoding adds them; None: none.
        """
        out = mixed
        for index in range(len(self.rotations), -1, -1):
            for shift, part in () if shifts is None else zip(self.shifts, shifts, strict=True):
                if shift.rotations == index:
                    out = out + part
            if index:
                out = self.rotations[index - 1].inverse(out, {})
        return out

    def norm_factors(
        self, blocks: dict[str, Tensor], names: tuple[str, ...] | None, tokens: int, dtype: torch.dtype
    ) -> Float[Tensor, "*lead heads tokens"] | None:
        """The factor of each token of whole blocks: the product of its norms `names` (None: all, and the gain)."""
        out = None
        for name in self.norms if names is None else names:
            norm = decode_side("scale", side_of(blocks, name, dtype), self.norms[name].double_quant, tokens, 1, dtype)
            norm = norm[..., 0]
            out = norm if out is None else out * norm
        if names is None and "gain" in blocks:
            gain = blocks["gain"].to(dtype)[..., 0]
            out = gain if out is None else out * gain
        return out


def side_of(blocks: dict[str, Tensor], stage: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The stored side information of a stage, numbers in `dtype`."""
    side = without_prefix(blocks, f"{stage}.")
    return {name: part.to(dtype) if part.is_floating_point() else part for name, part in side.items()}


@functools.lru_cache(maxsize=1024)
def build_linear_chain(codec: Codec) -> LinearChain:
    """The stages of a codec by what attention on packed codes does with them."""
    if isinstance(codec, StoredWithKeys):
        raise Unsupported("cache.attention=packed: values that are stored with keys are read with them")
    if codec.stores_lists and not codec.fits_first_tokens:
        raise Unsupported(f"cache.attention=packed: {type(codec).__name__} stores lists, which need decoded tokens")
    if (joint := find_joint_transform(codec)) is not None:
        return LinearChain(codec, (), {}, (), joint)
    rotations: list[Stage] = []
    norms: dict[str, TokenNorm] = {}
    shifts: list[Shift] = []
    turns = 0
    for name, stage in codec.stages:
        if isinstance(stage, UndoRope | ApplyRope):
            turns += 1 if isinstance(stage, ApplyRope) else -1
        elif isinstance(stage, TokenNorm):
            norms[name] = stage
        elif isinstance(stage, ChannelShift):
            shifts.append(Shift(name, stage, len(rotations), tuple(norms), bool(turns)))
        elif is_rotation(stage) and not turns:
            rotations.append(stage)
        else:
            raise Unsupported(f"cache.attention=packed: stage '{name}' ({type(stage).__name__}) needs decoded tokens")
    if turns:
        raise Unsupported("cache.attention=packed: codes of keys before their rotary embedding need decoded tokens")
    if isinstance(codec, HeadsCodec):
        raise Unsupported("cache.attention=packed: heads with bits of their own need decoded tokens")
    quantizer = codec.quantizer
    if isinstance(quantizer, LowRankCorrection) and not codec.stages:
        base = build_linear_chain(quantizer.base)
        if base.joint is None:
            return replace(base, low_rank=True)
    if quantizer.attended_as != "states" or (not is_affine(quantizer) and quantizer.token_group != 1):
        raise Unsupported(f"cache.attention=packed: codes of {type(quantizer).__name__} cannot be scored as they are")
    return LinearChain(codec, tuple(rotations), norms, tuple(shifts))


def find_joint_transform(codec: Codec) -> JointTransform | None:
    """The joint transform of all heads that is a codec's last stage, with none but RoPE before it; else None."""
    if not codec.stages or codec.token_group != 1 or codec.quantizer.attended_as != "components":
        return None
    *before, last = (stage for _, stage in codec.stages)
    alone = all(isinstance(stage, UndoRope) for stage in before) and len(before) < 2
    return last if alone and isinstance(last, JointTransform) else None


def is_affine(quantizer: Quantizer) -> TypeGuard[UniformQuantizer]:
    """Whether values are `low + scale · code`, so that query and weights can absorb `low` and `scale`."""
    return isinstance(quantizer, UniformQuantizer) and quantizer.is_affine


def is_per_channel(quantizer: Quantizer) -> bool:
    """Whether a scale is shared by tokens of a channel, not by channels of a token."""
    return isinstance(quantizer, UniformQuantizer) and quantizer.axis == "per_channel"


def group_size(quantizer: Quantizer) -> int | None:
    """Tokens or channels that share a scale; None: all, or there is no scale."""
    return quantizer.group_size if isinstance(quantizer, UniformQuantizer | SignedMaxQuantizer) else None


def is_contiguous(run: BlockRun, quantizer: Quantizer) -> bool:
    """Whether the blocks of a run can be read as one block: each ends with whole bytes and whole groups."""
    if run.count == 1:
        return True
    whole_bytes = isinstance(quantizer, VectorQuantizer) or run.tokens % 8 == 0
    size = min(group_size(quantizer) or run.tokens, run.tokens)
    return whole_bytes and (not is_per_channel(quantizer) or run.tokens % size == 0)


def is_rotation(stage: Stage) -> bool:
    """Whether the stage multiplies every token by the same orthogonal matrix."""
    return stage.orthogonal and not stage.uses_rope and hasattr(stage, "matrix")


def score_rotated(
    query: Float[Tensor, "batch one heads group dim"], offset: Float[Tensor, "batch blocks heads 1 dim"], rope: Rope
) -> Float[Tensor, "batch blocks heads group tokens"]:
    """`q · R_t o` for the vector `o` of each block, from products of pairs of channels and the tokens' angles.

    `rope`: cut into blocks.
    """
    pairs = rope.cos.shape[-1]
    (turned, rest), (turned_offset, rest_offset) = (part.tensor_split([2 * pairs], -1) for part in (query, offset))
    if rope.interleaved:
        (qa, qb), (oa, ob) = ((part[..., 0::2], part[..., 1::2]) for part in (turned, turned_offset))
    else:
        (qa, qb), (oa, ob) = (part.tensor_split(2, -1) for part in (turned, turned_offset))
    # All heads are rows of one product with the angles of a block.
    along, across = (part.flatten(2, 3) for part in (qa * oa + qb * ob, qb * oa - qa * ob))
    cos, sin = (part[:, :, 0].to(query.dtype).mT for part in (rope.cos, rope.sin))
    scores = (along @ cos + across @ sin).unflatten(2, (-1, query.shape[-2]))
    return scores + (rest * rest_offset).sum(-1, keepdim=True)
