"""Quantizers around a codec: a low-rank part of its error, and differences of consecutive tokens.

Delta cache: each token as its difference from the decoded token before it, after tokens in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables, bind_codec, calibrated_parts, fit_codec
from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.packed import pack, pack_tokens, unpack
from kvq.codecs.quantizers import Parts, Quantizer, checked_choice, to_stored, with_prefix, without_prefix
from kvq.codecs.uniform import ScaleDtype
from kvq.errors import ConfigError, Unsupported, at_least, check_seed

_PROBES, _PROBE_SEED = 256, 2_718_281_829
Blocks = Float[Tensor, "blocks tokens dim"]
Factors = tuple[Float[Tensor, "blocks tokens rank"], Float[Tensor, "blocks rank dim"]]
CORRECTED = "base."
"""Prefix of the parts of the codec that is corrected."""
Svd = Literal["exact", "randomized"]
"""How the largest singular vectors are found: LAPACK's full decomposition, or `torch.svd_lowrank`."""


class DeltaQuantizer(Quantizer):
    """Closed loop: δ_t = k_t - k̂_{t-1} is encoded by `codec`, and k̂_t = k̂_{t-1} + its decoded form.

    The first token of a block is an anchor, stored in full precision, so a block depends on no other. Encoding and
    decoding take one step for each token of a block, for all blocks, heads and sequences together.

    Args:
        codec: encodes a difference, each token on its own.
        anchor_every: a block's tokens at multiples of it are anchors too; None: the first alone.
        anchor_threshold: a token of a head is also an anchor where |δ_t| > threshold · |k_t|; 0: none is.
        anchor_dtype: dtype of regular anchors (the paper's: float32); None: that of the states.

    Stores `anchors` and `delta.<part>` of the other tokens. With a threshold also `far`, one
    bit for each of these tokens and heads, and `far.anchors` `[..., 1, entries, dim]`, the anchors of all heads in the
    order of heads and tokens; their codes are stored and not read. Blocks of a batch have lists of equal length.

    Source: kvquant-plus-plus, sections 3.2 and 9.6.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        codec: Codec,
        anchor_every: int | None = None,
        anchor_threshold: float | int = 0,
        anchor_dtype: ScaleDtype | str | None = None,
    ) -> None:
        at_least("anchor_every", anchor_every, 1)
        at_least("anchor_threshold", anchor_threshold, 0)
        if not isinstance(codec, Codec):
            raise ConfigError(f"codec={codec}: a mapping whose _target_ is a kvq.codecs.Codec")
        check_nested(codec, "delta")
        if codec.token_group != 1:
            group = codec.token_group or "a block's"
            raise Unsupported(f"codec: {group} tokens share statistics; a delta is encoded before the next is known")
        self.codec, self.anchor_every, self.anchor_threshold = codec, anchor_every, anchor_threshold
        name = None if anchor_dtype is None else checked_choice(ScaleDtype, anchor_dtype, "anchor_dtype")
        self.anchor_dtype: torch.dtype | None = None if name is None else getattr(torch, name)

    @property
    def bits(self) -> float | int | None:
        """Bits per code of a difference; None: its quantizer has none."""
        return getattr(self.codec.quantizer, "bits", None)

    @property
    def variable_rows(self) -> bool:  # type: ignore[override]
        """Whether the number of anchors depends on the block: there is a threshold."""
        return self.anchor_threshold > 0

    def check(self, head_dim: int) -> None:
        """Raise `Unsupported` where the codec cannot encode `head_dim` channels, or errors would grow along tokens."""
        self.codec.check(head_dim)
        error = self.relative_error(head_dim)
        if not error < 1:
            raise Unsupported(
                f"deltas diverge: the codec's relative squared error is {error:.2f} at head_dim={head_dim}, and a "
                "closed loop needs one below 1 (more bits)"
            )

    def relative_error(self, head_dim: int) -> float:
        """E|δ - δ̂|² / E|δ|² of the codec on Gaussian deltas: the factor by which an error reaches the next token."""
        generator = torch.Generator().manual_seed(_PROBE_SEED)  # no rotation is drawn from it
        x = torch.randn(1, _PROBES, head_dim, generator=generator, dtype=torch.float64).float()
        rest = self.codec.decode_block(self.codec.encode_block(x), x.shape, x.dtype) - x
        return float(rest.square().sum() / x.square().sum())

    def _anchors(self, tokens: int) -> list[bool]:
        """For each of a block's `tokens` positions, whether it is a regular anchor (the first, or `anchor_every`)."""
        return [token % (self.anchor_every or tokens) == 0 for token in range(tokens)]

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        anchors, steps, far = [], [], []
        decoded = x[..., :1, :]
        for token, regular in zip(x.split(1, -2), self._anchors(x.shape[-2]), strict=True):
            if regular:
                anchors.append(to_stored(token, self.anchor_dtype or dtype))
                decoded = anchors[-1].to(x.dtype)
                continue
            delta = token - decoded
            steps.append(self.codec.encode_block(delta, dtype=dtype))
            decoded = decoded + self.codec.decode_block(steps[-1], delta.shape, delta.dtype)
            if self.variable_rows:
                size, limit = (torch.linalg.vector_norm(one, dim=-1, keepdim=True) for one in (delta, token))
                far.append(size > self.anchor_threshold * limit)
                decoded = torch.where(far[-1], to_stored(token, dtype).to(x.dtype), decoded)
        if steps:
            joined = {name: torch.cat([step[name] for step in steps], -2) for name in steps[0]}
            joined = pack_tokens(joined, self.codec.token_widths(x.shape[-3], x.shape[-1], x))
        else:  # a block of anchors has the same parts without rows
            one = self.codec.encode_block(torch.zeros_like(x[..., :1, :]))
            joined = {name: part[..., :0, :] for name, part in one.items()}
        parts = {"anchors": torch.cat(anchors, -2)} | with_prefix(joined, "delta.")
        if self.variable_rows:
            rest = [at for at, regular in enumerate(self._anchors(x.shape[-2])) if not regular]
            mask = torch.cat([x.new_zeros(*x.shape[:-2], 0, 1, dtype=torch.bool), *far], -2)
            flags = mask.to(torch.uint8)
            parts["far"] = pack(flags, 1)[0] if far else flags
            parts["far.anchors"] = _gather_masked(to_stored(x, dtype), rest, mask)
        return parts

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        regular = self._anchors(shape[-2])
        rest = Size((*shape[:-2], regular.count(False), shape[-1]))
        steps = iter(
            self.codec.decode_block(without_prefix(parts, "delta."), rest, dtype).split(1, -2) if rest[-2] else ()
        )
        anchors = iter(parts["anchors"].to(dtype).split(1, -2))
        far: list[tuple[Tensor, Tensor]] = []
        if self.variable_rows and rest[-2]:
            mask = unpack([parts["far"]], 1, rest[-2]).bool()
            kept = _scatter_masked(parts["far.anchors"].to(dtype), mask)
            far = list(zip(mask.split(1, -2), kept.split(1, -2), strict=True))
        out: list[Tensor] = []
        for is_anchor in regular:
            if is_anchor:
                out.append(next(anchors))
                continue
            decoded = out[-1] + next(steps)
            if far:
                mask, kept = far.pop(0)
                decoded = torch.where(mask, kept, decoded)
            out.append(decoded)
        return torch.cat(out, -2)


def _masked_first(mask: Bool[Tensor, "*lead heads tokens 1"]) -> tuple[Tensor, Tensor]:
    """Indices `[..., heads * tokens]` that sort masked tokens to the front, and the masked count `[..., 1]`."""
    flat = mask.flatten(-3)
    return flat.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices, flat.sum(-1, keepdim=True)


def _gather_masked(x: Tensor, tokens: list[int], mask: Tensor) -> Float[Tensor, "*lead 1 entries dim"]:
    """The states of masked tokens of all heads, a list per block, padded with zeros to the length of the longest."""
    order, count = _masked_first(mask)
    most = int(count.max())
    states = x[..., tokens, :].flatten(-3, -2)
    entries = states.gather(-2, order[..., :most, None].expand(*order.shape[:-1], most, x.shape[-1]))
    empty = torch.arange(most, device=x.device) >= count
    return entries.masked_fill(empty[..., None], 0).unsqueeze(-3)


def _scatter_masked(entries: Tensor, mask: Tensor) -> Float[Tensor, "*lead heads tokens dim"]:
    """Inverse of `_gather_masked`: entries at the masked tokens, zeros at the others."""
    order, _ = _masked_first(mask)
    most, dim = entries.shape[-2:]
    flat = entries.new_zeros(*order.shape, dim)
    flat = flat.scatter(-2, order[..., :most, None].expand(*order.shape[:-1], most, dim), entries.squeeze(-3))
    return flat.unflatten(-2, mask.shape[-3:-1])


class LowRankCorrection(Calibrated, Quantizer):
    """A codec, and for each head of a block the largest singular vectors of its error R = x - x̂.

    Decodes to x̂ + U V for U = U_r Σ_r and V = V_rᵀ, both in fp16, from the truncated decomposition of R. It is
    calibrated where the codec is: the codec's tables are its tables.

    Args:
        base: codec whose error is corrected, its stages included.
        rank: singular vectors per head, at most as many as tokens or channels.
        svd: `exact`, or `randomized` (in blocks of 64 tokens or more; shorter ones have `exact`).
        oversample, iterations, seed: of the randomized decomposition: further vectors, power iterations, its start.
        below: a base of so many bits or more is not corrected (KVQuant++, section 5.3: 4); None: every base is.

    Stores the codec's parts as `base.<name>`, `left` and `right` (fp16): `[..., heads, tokens * rank, 1]` and
    `[..., heads, rank, head_dim]`, 16 rank (1/tokens + 1/head_dim) bits per element.

    Source: KVQuant++, section 3.4. Halko, Martinsson and Tropp 2011 for the randomized decomposition.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        base: Codec,
        rank: int = 4,
        svd: Svd | str = "randomized",
        oversample: int = 10,
        iterations: int = 2,
        seed: int = 3,
        below: float | int | None = None,
    ) -> None:
        check_nested(base, "low-rank correction", binds=True)
        inner = calibrated_parts(base)
        if any(part.learned for part in inner.values()):
            raise Unsupported("a low-rank correction takes no learned part inside of it, where no training finds it")
        self.is_calibrated, self.wants_gradients = bool(inner), any(part.wants_gradients for part in inner.values())
        self.wants_moments = any(part.wants_moments for part in inner.values())
        at_least("rank", rank, 1)
        at_least("oversample", oversample, 0)
        at_least("iterations", iterations, 0)
        check_seed("seed", seed)
        self.base, self.rank, self.oversample, self.iterations, self.seed = base, rank, oversample, iterations, seed
        self.svd: Svd = checked_choice(Svd, svd, "svd")
        self.below = below

    @property
    def bits(self) -> float | int | None:
        """Bits per code of the base codec's quantizer; None: it has none."""
        return getattr(self.base.quantizer, "bits", None)

    @property
    def corrects(self) -> bool:
        """Whether the base's error is corrected."""
        return self.below is None or self.bits is None or self.bits < self.below

    @property
    def index_bits(self) -> dict[str, int]:
        return {f"{CORRECTED}{name}": bits for name, bits in self.base.quantizer.index_bits.items()}

    def check(self, head_dim: int) -> None:
        self.base.check(head_dim)

    def fit(self, x: States, gradients: States | None, seed: int, moments: Moments | None = None) -> Tables:
        return fit_codec(self.base, x, gradients, None, seed, moments)

    def bind(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        other: Any = super().bind(tables, heads, head_dim)
        other.base = bind_codec(self.base, tables, heads, head_dim)
        return other

    def _factors(self, rest: Blocks) -> Factors:
        rank = min(self.rank, *rest.shape[-2:])
        if self.svd == "exact" or rest.shape[-2] < 64:  # short (KVQuant++)
            return exact_svd(rest, rank)
        return randomized_svd(rest, rank, self.oversample, self.iterations, self.seed)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        parts = self.base.encode_block(x, dtype=dtype)
        if not self.corrects:
            return with_prefix(parts, CORRECTED)
        rest = x - self.base.decode_block(parts, x.shape, x.dtype)
        return with_prefix(parts, CORRECTED) | stored_factors(self._factors(rest.flatten(0, -3)), x.shape)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        out = self.base.decode_block(without_prefix(parts, CORRECTED), shape, dtype)
        return out + product(parts, shape, dtype) if self.corrects else out


def stored_factors(factors: Factors, shape: Size) -> Parts:
    """`left` and `right` in fp16, as parts of blocks of `shape` `[..., heads, tokens, head_dim]`."""
    left, right = (to_stored(factor, torch.float16) for factor in factors)
    return {"left": left.reshape(*shape[:-2], -1, 1), "right": right.reshape(*shape[:-2], -1, shape[-1])}


def product(parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
    """The low-rank matrix U V of each block, from the parts of `stored_factors`."""
    left = parts["left"].to(dtype).reshape(shape[:-2].numel(), shape[-2], -1)
    right = parts["right"].to(dtype).reshape(left.shape[0], -1, shape[-1])
    return torch.bmm(left, right).view(shape)


def exact_svd(x: Blocks, rank: int) -> Factors:
    """U_r Σ_r and V_rᵀ of the singular value decomposition of each block."""
    # Each in memory of its own, as where a block lies may decide the last bits.
    svds = [torch.linalg.svd(block.clone(), full_matrices=False) for block in x]
    return torch.stack([u[:, :rank] * s[:rank] for u, s, _ in svds]), torch.stack([vh[:rank] for _, _, vh in svds])


def randomized_svd(x: Blocks, rank: int, oversample: int, iterations: int, seed: int) -> Factors:
    """Approximate U_r Σ_r and V_rᵀ of each block, by `torch.svd_lowrank` from the same seed for every block.

    `torch.svd_lowrank` draws from the global generator, whose state is restored.
    """
    most = min(rank + oversample, *x.shape[-2:])
    left, right = [], []
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for block in x:
            (torch.cuda if x.is_cuda else torch.default_generator).manual_seed(seed)
            u, s, v = torch.svd_lowrank(block, most, niter=iterations)
            left.append(u[:, :rank] * s[:rank])
            right.append(v[:, :rank].mT)
    return torch.stack(left), torch.stack(right)
