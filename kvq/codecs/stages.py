"""Invertible stages of a codec: norms of tokens, shifts and scales of a block's channels, rotary embeddings.

A stage maps `[..., heads, tokens, head_dim]` to the same shape and may keep side information, one tensor
`[..., heads or 1, rows, columns]` per name, which the codec stores and counts. `DoubleQuant` stores it in few bits.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.codecs.packed import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import Axis, Parts, check_group, checked_choice, to_stored
from kvq.errors import Unsupported, require

Side = dict[str, Tensor]
Tokens = Float[Tensor, "*lead tokens dim"]
Scope = Literal["head", "token"]
"""The channels that a token's norm covers: those of each head, or those of all heads together."""
Center = Literal["mean", "median"]
"""The vector that is subtracted: the mean of the tokens, or their geometric median."""


class Stage(abc.ABC):
    """One invertible step.

    Attributes:
        orthogonal: the step preserves the norm of every token in every head, so a gain commutes with it.
        takes_gain: the step's side information can absorb one factor per head and token.
        uses_rope: `forward` and `inverse` also take `rope`, the rotations of the block's tokens.
        token_group: tokens that share side information; 1: each token has its own, None: the whole block.
        joins_layers: the step takes the heads of all layers of a model together; its tables are stored for layer 0.
        policy: a `kvq.methods.policies.Policy` that every method with this stage has; None: none.
    """

    orthogonal = False
    takes_gain = False
    uses_rope = False
    token_group: int | None = None
    joins_layers = False
    policy: Any = None

    def check(self, head_dim: int) -> None:  # noqa: B027 - most stages work on any head dim
        """Raise `Unsupported` when the stage cannot work on `head_dim` channels."""

    @property
    def depends_on_model(self) -> bool:
        """Whether the architecture of a model decides what the stage computes, by `for_model`."""
        return False

    def for_model(self, config: Any) -> Stage:
        """The stage for a model with this transformers text configuration."""
        return self

    @abc.abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        """The transformed `[..., heads, tokens, head_dim]`, and the side information.

        Floating-point side information is stored in fp16, integers (packed codes) unchanged.
        """

    @abc.abstractmethod
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        """Undo `forward` given the stored side information."""

    def absorb(self, side: Side, factor: Tensor) -> Side:
        """Side information that also scales the decoded token by `factor` `[..., heads, tokens, 1]`."""
        raise NotImplementedError(f"{type(self).__name__} takes no gain")


def rope_argument(stage: Stage, rope: Rope | None) -> dict[str, Rope | None]:
    """The argument of `forward` and `inverse` besides states: `rope`, for stages that use it."""
    return {"rope": rope} if stage.uses_rope else {}


class DoubleQuant:
    """Round to nearest of side information `[..., rows, columns]`, one fp16 step per group.

    Args:
        bits: bits per code, 2-16.
        axis: `per_channel`: a group is `group_size` rows of one column (scales of tokens); `per_token`: that many
            columns of a row (means of channels). Codes pack along the same axis.
        group_size: None = all of it. A short last group has its own step.
        signed: step max|x| / (2^(b-1) - 1), codes ±(2^(b-1) - 1); else x >= 0, step max / (2^b - 1) and codes from 1
            up: code 0 is a true zero, so a value far below its group's maximum never becomes one.

    Source: NSNQuant (arXiv 2505.18231), section 3.5; QLoRA (arXiv 2305.14314), section 3.
    """

    version: ClassVar[int] = 1

    def __init__(self, bits: int, axis: Axis | str, group_size: int | None = None, signed: bool = False) -> None:
        require(2 <= bits <= MAX_BITS, "double_quant.bits", bits, f"2 to {MAX_BITS}", Unsupported)
        check_group("double_quant.group_size", group_size, "one group")
        self.bits, self.group_size, self.signed = bits, group_size, signed
        self.axis: Axis = checked_choice(Axis, axis, "double_quant.axis")
        self._top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1

    def _transpose(self, x: Tensor) -> Tensor:
        """The grouped axis as rows; its own inverse."""
        return x if self.axis == "per_channel" else x.mT

    def encode(self, x: Float[Tensor, "*lead rows columns"]) -> Parts:
        """`codes.<plane>` (uint8) and `step` (fp16)."""
        x = self._transpose(x)
        length = x.shape[-2]
        size = min(self.group_size or length, length)
        groups = torch.nn.functional.pad(x, (0, 0, 0, -length % size)).unflatten(-2, (-1, size))
        step = groups.abs().amax(-2, keepdim=True) / self._top
        codes = groups.div(step.masked_fill(step == 0, 1)).round_()
        if self.signed:
            codes = codes.clamp_(-self._top, self._top).add_(self._top)
        else:
            codes = codes.clamp_(1, self._top).masked_fill_(groups == 0, 0)
        parts = pack_parts(codes.flatten(-3, -2)[..., :length, :], self.bits)
        parts["step"] = to_stored(step.squeeze(-2), torch.float16)
        return {name: self._transpose(part) for name, part in parts.items()}

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`step * code` as `[..., rows, columns]`, from the stored step."""
        length = rows if self.axis == "per_channel" else columns
        parts = {name: self._transpose(part) for name, part in parts.items()}
        codes = unpack_parts(parts, self.bits, length).to(dtype)
        if self.signed:
            codes = codes.sub_(self._top)
        size = min(self.group_size or length, length)
        step = parts["step"].to(dtype).repeat_interleave(size, -2)[..., :length, :]
        return self._transpose(codes * step)


class TokenNorm(Stage):
    """Divide each token by its norm `s = ||x_t||` (nsn, OScaR), or by `||x_t|| / sqrt(D)` with `rms` (NSNQuant).

    Args:
        scope: `head`: one norm per head and token; `token`: one per token over all heads and channels (OScaR's code).
        rms: divide the norm by the square root of the number of elements it covers.
        double_quant: store norms in a few bits; tokens are divided by the decoded norm. None = fp16.

    An all-zero token stores 0 and decodes to zeros.
    """

    version: ClassVar[int] = 1

    def __init__(self, scope: Scope | str = "head", rms: bool = False, double_quant: DoubleQuant | None = None) -> None:
        self.scope: Scope = checked_choice(Scope, scope, "scope")
        self.rms = rms
        self.double_quant = double_quant

    @property
    def takes_gain(self) -> bool:  # type: ignore[override]
        """Only a norm per head and token, stored in fp16, can absorb a gain per head and token without much loss."""
        return self.scope == "head" and self.double_quant is None

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """Tokens that share side information: 1, or None (the block) where its norms are double quantized together."""
        return 1 if self.double_quant is None else None

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        over = (-1,) if self.scope == "head" else (-3, -1)
        norm = torch.linalg.vector_norm(x, dim=over, keepdim=True)
        if self.rms:
            count = x.shape[-1] * (x.shape[-3] if self.scope == "token" else 1)
            norm = norm / count**0.5
        side = encode_side("scale", norm, self.double_quant)
        norm = decode_side("scale", side, self.double_quant, x.shape[-2], 1, x.dtype)
        return x / norm.masked_fill(norm == 0, 1), side

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * decode_side("scale", side, self.double_quant, y.shape[-2], 1, y.dtype)

    def absorb(self, side: Side, factor: Tensor) -> Side:
        return {"scale": side["scale"] * factor}


def encode_side(name: str, value: Tensor, double_quant: DoubleQuant | None) -> Side:
    """Side information `[..., rows, columns]` under `name`, unchanged or double quantized."""
    if double_quant is None:
        return {name: value}
    return {f"{name}.{key}": part for key, part in double_quant.encode(value).items()}


def decode_side(
    name: str, side: Side, double_quant: DoubleQuant | None, rows: int, columns: int, dtype: torch.dtype
) -> Float[Tensor, "*lead rows columns"]:
    """Inverse of `encode_side`."""
    if double_quant is None:
        return side[name]
    parts = {key.removeprefix(f"{name}."): part for key, part in side.items()}
    return double_quant.decode(parts, rows, columns, dtype)


class ChannelShift(Stage):
    """Subtract one vector per head and block, so that the channels are centered.

    Args:
        center: `mean` (NSNQuant, section 3.2), or `median`: the geometric median (appendix D.1).
        double_quant: store the vector in a few bits; the decoded vector is subtracted. None = fp16.
    """

    version: ClassVar[int] = 1

    def __init__(self, center: Center | str = "mean", double_quant: DoubleQuant | None = None) -> None:
        self.center: Center = checked_choice(Center, center, "center")
        self.double_quant = double_quant

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        offset = x.mean(-2, keepdim=True)
        if self.center == "median":
            offset = geometric_median(x, offset)
        side = encode_side("offset", offset, self.double_quant)
        offset = decode_side("offset", side, self.double_quant, 1, x.shape[-1], x.dtype)
        return x - offset, side

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y + decode_side("offset", side, self.double_quant, 1, y.shape[-1], y.dtype)


def geometric_median(x: Tokens, start: Float[Tensor, "*lead 1 dim"]) -> Float[Tensor, "*lead 1 dim"]:
    """The point with the least sum of distances to the tokens, by Weiszfeld's iteration from `start`."""
    point = start
    for _ in range(32):  # the last moves the centre of 64 normalized tokens by less than fp16 resolves
        distance = torch.linalg.vector_norm(x - point, dim=-1, keepdim=True)
        # A token on the point would have infinite weight; a tiny distance lets it dominate without a division by zero.
        weight = 1 / distance.clamp_min(torch.finfo(x.dtype).eps)
        point = (x * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True)
    return point


class ChannelScale(Stage):
    """Divide each channel by its sample standard deviation over the tokens of the block (NSNQuant, appendix D.2).

    Stored in fp16, one number per head, channel and block. A constant channel stores 0 and decodes to 0, so this stage
    is for use after a `ChannelShift`, which makes such a channel 0.
    """

    version: ClassVar[int] = 1

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        away, free = x - x.mean(-2, keepdim=True), max(x.shape[-2] - 1, 1)
        deviation = (away.square().sum(-2, keepdim=True) / free).sqrt()
        return x / deviation.masked_fill(deviation == 0, 1), {"scale": deviation}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * side["scale"]


class ChannelRoot(Stage):
    """Divide each channel of a block by the square root of its largest magnitude (ZipCache, section 4.2)."""

    version: ClassVar[int] = 1

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        scale = x.abs().amax(-2, keepdim=True).sqrt()
        return x / scale.masked_fill(scale == 0, 1), {"scale": scale}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * side["scale"]


@dataclass(frozen=True)
class Rope:
    """The rotation of each token's channels: pure rotations of channel pairs, one per token and pair.

    Attributes:
        cos, sin: `[batch or 1, tokens, pairs]` (cut into blocks: `[batch or 1, blocks, 1, tokens, pairs]`), with
            cos² + sin² = 1: an attention factor (yarn, longrope) is left in the keys, where any norm absorbs it. Zero
            pairs: the model has no rotary embedding.
        interleaved: pairs are channels (2i, 2i+1) as in GPT-J, else (i, i + pairs) as in Llama. Channels from
            2 * pairs on are not rotated (partial rotary embeddings).
    """

    cos: Float[Tensor, "*lead tokens pairs"]
    sin: Float[Tensor, "*lead tokens pairs"]
    interleaved: bool = False

    @property
    def tokens(self) -> int:
        return self.cos.shape[-2]

    def narrow(self, start: int, length: int) -> Rope:
        """The rotations of `length` tokens from `start` on."""
        return replace(self, cos=self.cos.narrow(1, start, length), sin=self.sin.narrow(1, start, length))

    def at(self, positions: Int[Tensor, " chosen"]) -> Rope:
        """The rotations of the tokens at `positions`."""
        return replace(self, cos=self.cos[:, positions], sin=self.sin[:, positions])

    def to(self, device: torch.device | str) -> Rope:
        """The same on another device."""
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device))

    def blocks(self, length: int, number: int) -> Rope:
        """The rotations cut into blocks: `[batch or 1, number, 1, length, pairs]`, from `number * length` tokens."""
        shape = (number, 1, length)
        return replace(self, cos=self.cos.unflatten(1, shape), sin=self.sin.unflatten(1, shape))

    def rotate(self, x: Tokens, back: bool = False) -> Tokens:
        """Rotate the pairs of every token forward, or `back`."""
        pairs = self.cos.shape[-1]
        if not pairs:
            return x
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        away, towards = (1, -1) if back else (-1, 1)
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.split(pairs, -1)
        out = [(a * cos).addcmul_(b, sin, value=away), (b * cos).addcmul_(a, sin, value=towards)]
        if self.interleaved:
            out = [torch.stack(out, -1).flatten(-2)]
        return torch.cat([*out, rest], -1)


def rope_table(tokens: int, head_dim: int, start: int = 0) -> Rope:
    """The rotations of a plain rotary embedding at positions `start` to `start + tokens - 1` (arXiv 2104.09864)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(start, start + tokens, dtype=torch.float64)[:, None] * frequencies
    return Rope(angles.cos()[None], angles.sin()[None])


class _RopeStage(Stage):
    orthogonal = True
    uses_rope = True
    token_group = 1
    back: bool

    def __init__(self, before_values: bool = False) -> None:
        self.before_values = before_values

    def _rotate(self, x: Float[Tensor, "*lead heads tokens dim"], rope: Rope | None, back: bool) -> Tensor:
        assert rope is not None
        if not self.before_values:
            return rope.rotate(x, back)
        keys, values = x.chunk(2, -3)
        return torch.cat([rope.rotate(keys, back), values], -3)

    def forward(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Side]:
        return self._rotate(x, rope, self.back), {}

    def inverse(self, y: Tensor, side: Side, rope: Rope | None = None) -> Tensor:
        return self._rotate(y, rope, not self.back)


class UndoRope(_RopeStage):
    """Undo the rotary embedding of keys, which reach a cache after it.

    Needs the tokens' rotations: `Codec.encode(x, rope=...)`. A model without a rotary embedding has nothing to undo.

    Args:
        before_values: the second half of the heads are values (`StoredWithKeys`), which have no rotary embedding.
    """

    version: ClassVar[int] = 1
    back = True


class ApplyRope(_RopeStage):
    """Apply the rotary embedding to keys again, as a pure rotation, behind an `UndoRope` of the same codec."""

    version: ClassVar[int] = 1
    back = False
