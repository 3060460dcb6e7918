"""TriAttention: eviction by the attention that keys would receive from an average query, by their distance."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide
from kvq.codecs import Rope
from kvq.errors import at_least
from kvq_zoo.eviction import EvictingLayer, Eviction, Scores, Seen, States, When


class TriAttention(Eviction):
    """Keeps the keys of the highest scores, chosen every `every` tokens, by centres of the queries before RoPE.

    Pairs of channels that RoPE turns are complex numbers, one for each band f of frequency w_f. Of a query head, c_f is
    the mean over queries before RoPE, and m_f the mean magnitude. After n tokens, a key k at position p (before RoPE)
    has for a query d tokens later

        s(d) = Re sum_f c_f conj(k_f) exp(i w_f (n - p + d)) + sum_f (m_f - |c_f|) |k_f|.

    Its score is the mean over d = 1, 2, 4, ... up to `reach`, less the mean over the head's keys, over their standard
    deviation; of the query heads of a KV head the largest counts. No attention weights are needed.

    Args:
        budget, least, when: see `Eviction`; under `always` the cache may hold `every` - 1 tokens more.
        every: tokens between two evictions, at positions that are multiples of it.
        reach: the largest distance, a number of tokens.

    Source: the released code of TriAttention (arXiv 2604.04921, of which the abstract was read), its triattention.py
    with `per_layer_perhead_pruning` (the default averages over layers) and `allow_prefill_compression`. Ours: c and m
    are of the queries that the layer has read in this text, the release fits them to another text beforehand; channels
    without RoPE are bands of frequency 0.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        budget: float | int = 0.25,
        least: int = 64,
        when: When | str = "always",
        every: int = 128,
        reach: int = 65536,
    ) -> None:
        super().__init__(budget, least, when)
        at_least("every", every, 1)
        at_least("reach", reach, 1)
        self.every, self.reach = every, reach

    def make_layer(self, like: KVCacheLayer) -> EvictingLayer:
        """A layer that evicts, and receives the rotations of its tokens."""
        sides = [RotatedSide(one.codec, one.residual, one.label, one.keep_decoded) for one in (like.key, like.value)]
        return CentredLayer(sides[0], sides[1], self)

    def keep(self, seen: Seen, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        return seen.scores.topk(allowed, -1).indices.sort(-1).values

    def ahead(self, rope: Rope) -> Complex[Tensor, " pairs"]:
        """Mean over the distances d of exp(i w (n + d)) for each pair, by the rotations of all n tokens."""
        turns = torch.complex(rope.cos[0].double(), rope.sin[0].double())
        speed = (turns[1:2] * turns[:1].conj()).angle()  # of one position
        distances = 2.0 ** torch.arange(self.reach.bit_length(), dtype=torch.float64, device=speed.device)
        return turns[-1] * torch.exp(1j * speed * (1 + distances[:, None])).mean(0)


class RotatedSide(CacheSide):
    """Keys or values of a layer that asks for the rotations of its tokens."""

    uses_rope = True


class CentredLayer(EvictingLayer):
    """A layer that evicts by `TriAttention`. `_received`: sums over the queries of their bands, and of magnitudes."""

    eviction: TriAttention

    def observe(self, attended: Attended) -> None:
        """Add a forward's queries to the sums, then evict after the prompt or every `every` tokens."""
        queries, rope = attended.query.shape[2], self._rope
        back = rope.narrow(rope.tokens - queries, queries).rotate(_wide(attended.query), back=True)
        bands = to_bands(back, rope)
        sums = torch.stack([bands.sum(2), bands.abs().sum(2).to(bands.dtype)], 2)
        self._received = sums if self._received is None else self._received + sums
        if self.eviction.when == "prompt":
            self._append_kept()
            self._received = None
        elif rope.tokens // self.eviction.every > (rope.tokens - queries) // self.eviction.every:
            self._evict()

    @property
    def _rope(self) -> Rope:
        assert self.key.rope is not None
        return self.key.rope.rope

    def _scores(self, keys: States) -> Scores:
        """`TriAttention`'s scores of keys after RoPE, which contain exp(i w p) already."""
        assert self._received is not None
        rope, bands = self._rope, to_bands(_wide(keys), self._rope)
        centre, size = (self._received / rope.tokens).unflatten(1, (keys.shape[1], -1)).unbind(3)
        ahead = self.eviction.ahead(rope)
        ahead = torch.nn.functional.pad(ahead, (0, bands.shape[-1] - len(ahead)), value=1).to(bands.dtype)
        series = torch.einsum("bhgf,bhtf->bhgt", centre * ahead, bands.conj()).real
        series = series + torch.einsum("bhgf,bhtf->bhgt", size.real - centre.abs(), bands.abs())
        spread = series.std(-1, correction=0, keepdim=True).clamp_min(1e-6)
        return ((series - series.mean(-1, keepdim=True)) / spread).amax(2)


def to_bands(x: Float[Tensor, "*lead tokens dim"], rope: Rope) -> Complex[Tensor, "*lead tokens bands"]:
    """The pairs of channels that RoPE turns as complex numbers, then the channels that it does not turn."""
    pairs = rope.cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    real, imaginary = (turned[..., 0::2], turned[..., 1::2]) if rope.interleaved else turned.tensor_split(2, -1)
    return torch.cat([torch.complex(real, imaginary), torch.complex(rest, torch.zeros_like(rest))], -1)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
