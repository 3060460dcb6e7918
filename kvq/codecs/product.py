"""Groups of channels that share an index: coupled quantization (CQ), and product quantization fitted to a sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Integer
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.codec import Codec
from kvq.codecs.codec import States as BatchStates
from kvq.codecs.levels import codebooks, nearest
from kvq.codecs.packed import MAX_BITS, ByToken, Packed, Queries, pack_parts, unpack_parts
from kvq.codecs.quantizers import Parts, Quantizer, to_stored
from kvq.codecs.stages import Rope, Stage
from kvq.errors import ConfigError, Unsupported, at_least, check_choice, check_seed

Centroids = Float[Tensor, "heads groups count channels"]
Codes = Integer[Tensor, "*lead heads tokens groups"]
_BOOK = "codebook"  # the part that holds codebooks


class GroupedIndices(Quantizer):
    """`channels` contiguous channels share one `code_bits`-bit index into centroids."""

    token_group = 1

    def __init__(self, channels: int, code_bits: int, iterations: int) -> None:
        at_least("channels", channels, 1)
        at_least("code_bits", code_bits, 1)
        if code_bits > MAX_BITS:
            raise Unsupported(f"code_bits={code_bits}: an index of coupled channels has 1 to {MAX_BITS} bits")
        at_least("iterations", iterations, 1)
        self.channels, self.code_bits, self.iterations = channels, code_bits, iterations

    def check(self, head_dim: int) -> None:
        if head_dim % self.channels:
            raise Unsupported(f"head_dim={head_dim}: {self.channels} channels are coupled at a time")

    def grouped(self, x: Tensor) -> Float[Tensor, "*lead heads groups tokens channels"]:
        """Split the channels of `[..., heads, tokens, dim]` into groups of `channels`."""
        return x.unflatten(-1, (-1, self.channels)).transpose(-3, -2)

    def indices_of(self, x: Float[Tensor, "*lead heads tokens dim"], centroids: Centroids) -> Codes:
        """Index of the nearest centroid of every group of channels; centroids of one head are those of all."""
        points, sets = self.grouped(x), centroids.expand(x.shape[-3], -1, -1, -1).flatten(0, 1)
        lead = points.shape[:-4]
        blocks = points.reshape(-1, sets.shape[0], *points.shape[-2:])
        # One search per block, so that its indices do not depend on how many blocks are encoded together.
        codes = torch.stack([nearest(block, sets) for block in blocks])
        return codes.view(*lead, *points.shape[-4:-1]).transpose(-2, -1).contiguous()

    def centroids_of(self, codes: Codes, centroids: Centroids) -> Float[Tensor, "*lead heads tokens dim"]:
        """The centroids of indices."""
        heads, groups, count, _ = centroids.shape
        sets = torch.arange(heads * groups, device=codes.device).view(heads, 1, -1)
        values = centroids.flatten(0, 2).index_select(0, (codes.long() + sets * count).flatten())
        return values.view(*codes.shape[:-1], -1)


class CoupledQuantizer(Calibrated, GroupedIndices):
    """`channels` contiguous channels of a head share one `code_bits`-bit index: 4 and 9 give 2.25 bits, 8 and 10 1.25.

    Args:
        channels: channels that are coupled.
        code_bits: bits of an index, 1-16.
        iterations: Lloyd's iterations, at most.
        weighted: by squared gradients of the loss; else each token counts alike.
        centroids: dtype of the tables; float8_e5m2: with the largest magnitude of a set as a scale (NOVA-KV).

    Stores `codes.<plane>` `[..., heads, tokens, head_dim / channels]`. The centroids, one set for each layer, head and
    group of channels, are tables of the calibration.

    Source: CQ (arXiv 2405.03917): k-means weighted by the sum of squared gradients of a group; nearest by plain L2.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        channels: int,
        code_bits: int,
        iterations: int = 25,
        weighted: bool = True,
        centroids: Literal["float16", "float8_e5m2"] = "float16",
    ) -> None:
        super().__init__(channels, code_bits, iterations)
        check_choice("centroids", centroids, ("float16", "float8_e5m2"))
        self.wants_gradients, self.centroids = weighted, centroids

    def check(self, head_dim: int) -> None:
        GroupedIndices.check(self, head_dim)
        super().check(head_dim)

    @property
    def index_bits(self) -> dict[str, int]:
        return {"codes": self.code_bits}

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`centroids` `[heads, groups, 2^code_bits, channels]`; of float8 also `scale`, `[heads, groups, 1, 1]`."""
        points = self.grouped(x.float()).flatten(0, 1).contiguous()
        weights = torch.ones_like(points) if gradients is None else self.grouped(gradients.float()).flatten(0, 1)
        mass = weights.square().sum(-1)
        centroids = codebooks(points, mass, 2**self.code_bits, self.iterations, seed)
        centroids = centroids.unflatten(0, (x.shape[0], -1))
        if self.centroids == "float16":
            return {"centroids": to_stored(centroids, torch.float16)}
        largest = centroids.abs().amax((-2, -1), keepdim=True).clamp_min(1e-12)
        scale = largest / torch.finfo(torch.float8_e5m2).max
        return {"centroids": (centroids / scale).to(torch.float8_e5m2), "scale": scale}

    def _centroids(self, like: Tensor) -> Tensor:
        table = self.table("centroids", like)
        return table if self.centroids == "float16" else table * self.table("scale", like)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        return pack_parts(self.indices_of(x, self._centroids(x)), self.code_bits)

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        codes = unpack_parts(parts, self.code_bits, shape[-2])
        like = torch.empty(shape[-3], 0, shape[-1], dtype=dtype, device=codes.device)
        return self.centroids_of(codes, self._centroids(like))


class ProductQuantizer(GroupedIndices):
    """`channels` contiguous channels share one `code_bits`-bit index: 4 and 8 give 2 bits, codebooks not counted.

    Each of the head_dim / channels groups has a codebook of 2^code_bits entries, shared by the heads of a layer. It is
    fitted by k-means to the tokens with which a sequence begins (`PrefillCodec`).

    Args:
        channels: channels of a sub-vector.
        code_bits: bits of an index, 1-16.
        iterations: Lloyd's iterations, at most.
        rows: vectors that a codebook is fitted to, at most, evenly spaced over tokens and heads.
        seed: of k-means++, independent of data seeds and of the seed of a rotation.

    Stores `codes.<plane>` `[..., heads, tokens, head_dim / channels]`, which attention reads by tables of a query.

    Source: KVQuant++, section 3.5; Jégou, Douze and Schmid 2011.
    """

    version: ClassVar[int] = 1
    attended_as = "states"

    def __init__(
        self, channels: int = 4, code_bits: int = 8, iterations: int = 10, rows: int = 4096, seed: int = 4
    ) -> None:
        super().__init__(channels, code_bits, iterations)
        at_least("rows", rows, 1)
        check_seed("seed", seed)
        self.rows, self.seed = rows, seed
        self._book: Float[Tensor, "batch groups count channels"] | None = None

    def fit(self, x: Float[Tensor, "batch heads tokens dim"]) -> Float[Tensor, "batch 1 entries channels"]:
        """Fit codebooks to each sequence of the batch alone; returns their centroids in fp16, group after group."""
        books = []
        for sequence in x:
            points = self.grouped(sequence.float()).transpose(0, 1).flatten(1, 2)
            count = points.shape[1]
            kept = torch.arange(min(count, self.rows), device=x.device) * count // min(count, self.rows)
            points = points[:, kept].contiguous()
            weights = torch.ones_like(points[..., 0])
            books.append(codebooks(points, weights, 2**self.code_bits, self.iterations, self.seed).flatten(0, 1)[None])
        return to_stored(torch.stack(books), torch.float16)

    def _books(self, parts: Parts, dtype: torch.dtype) -> Float[Tensor, "batch groups count channels"]:
        """Codebooks of each sequence: those stored with the parts, else the bound ones."""
        book = self._book if _BOOK not in parts else parts[_BOOK][:, 0, 0].unflatten(1, (-1, 2**self.code_bits))
        if book is None:
            raise Unsupported("ProductQuantizer: its codebooks belong to a sequence; use kvq.codecs.PrefillCodec")
        return book.to(dtype)

    def encode(self, x: Float[Tensor, "batch blocks heads tokens dim"], dtype: torch.dtype) -> Parts:
        books = self._books({}, x.dtype)
        codes = torch.stack([self.indices_of(sequence, book[None]) for sequence, book in zip(x, books, strict=True)])
        return pack_parts(codes, self.code_bits)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "batch blocks heads tokens dim"]:
        codes, books = unpack_parts(parts, self.code_bits, shape[-2]), self._books(parts, dtype)
        return torch.stack([self.centroids_of(row, book[None]) for row, book in zip(codes, books, strict=True)])

    def score(self, parts: Parts, query: Queries, tokens: int) -> ByToken:
        """By a table of every entry's product with the queries' sub-vector, and one look-up for each index."""
        sub_vectors = query[:, 0].unflatten(-1, (-1, self.channels))
        table = torch.einsum("bhgmc,bmkc->bhmkg", sub_vectors, self._books(parts, query.dtype))
        batch, heads, groups, count, _ = table.shape
        first = torch.arange(0, batch * heads * groups * count, count, dtype=torch.int32, device=query.device)
        codes = unpack_parts(parts, self.code_bits, tokens) + first.view(batch, 1, heads, 1, groups)
        sums = torch.nn.functional.embedding_bag(codes.flatten(0, -2), table.flatten(0, 3), mode="sum")
        return sums.unflatten(0, codes.shape[:-1]).mT

    def mix(self, parts: Parts, weights: ByToken, dim: int) -> Float[Tensor, "batch heads group dim"]:
        """By the sums of the weights of every entry, which then multiply the codebooks once."""
        tokens = weights.shape[-1]
        codes = unpack_parts(parts, self.code_bits, tokens).permute(0, 2, 4, 1, 3).flatten(-2).long()[:, :, :, None]
        spread = weights.permute(0, 2, 3, 1, 4).flatten(-2)[:, :, None].expand(-1, -1, codes.shape[2], -1, -1)
        sums = spread.new_zeros(*spread.shape[:-1], 2**self.code_bits).scatter_add_(-1, codes.expand_as(spread), spread)
        return torch.einsum("bhmgk,bmkc->bhgmc", sums, self._books(parts, weights.dtype)).flatten(-2)


class PrefillCodec(Codec):
    """A codec around a `ProductQuantizer`, whose codebooks are fitted to the tokens that are encoded first.

    They are stored with the first blocks as `codebook` (fp16 `[batch, 1, entries, channels]`) and count in the bits of
    the sequence; `for_later_tokens` encodes later tokens by them. The first are all tokens of a prompt that leave full
    precision together; where tokens come one by one, those of the first block.

    Source: KVQuant++, section 3.5.
    """

    version: ClassVar[int] = 1
    stores_lists = True
    fits_first_tokens = True

    def __init__(self, stages: Mapping[str, Stage | None], order: Sequence[str], quantizer: Quantizer) -> None:
        super().__init__(stages, order, quantizer)
        if not isinstance(quantizer, ProductQuantizer):
            raise ConfigError(f"PrefillCodec: quantizer={type(quantizer).__name__}: a kvq.codecs.ProductQuantizer")
        self._product = quantizer
        for name, stage in self.stages:
            if stage.token_group != 1:
                raise Unsupported(
                    f"PrefillCodec: stage '{name}' ({type(stage).__name__}) computes over several tokens of a block; "
                    "codebooks are fitted behind stages that treat each token on its own"
                )

    @property
    def token_group(self) -> int | None:
        """None: the first block has the codebooks."""
        return None

    def _with_codebook(self, book: Float[Tensor, "batch 1 entries channels"]) -> Codec:
        """A plain `Codec` that encodes and decodes with `book`, the codebooks of `ProductQuantizer.fit`."""
        quantizer = copy.copy(self._product)
        quantizer._book = book[:, 0].unflatten(1, (-1, 2**quantizer.code_bits))
        return Codec(dict(self.stages), [name for name, _ in self.stages], quantizer)

    def for_later_tokens(self, stored: Packed | None) -> Codec:
        return self if stored is None else self._with_codebook(stored.parts[_BOOK])

    def encode(self, x: BatchStates, block: int | None = None, rope: Rope | None = None) -> Packed:
        self._check_rope(rope, x.shape[2])
        book = self._product.fit(self.apply_stages(x, rope))
        packed = self._with_codebook(book).encode(x, block, rope)
        return replace(packed, parts=packed.parts | {_BOOK: book})
