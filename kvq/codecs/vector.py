"""Vector quantization: 8 channels share a codeword of a codebook for N(0, 1), found in tiles."""

from __future__ import annotations

import abc
import hashlib
import itertools
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from safetensors import safe_open
from torch import Size, Tensor, dtype

from kvq.codecs.levels import look_up, tiles
from kvq.codecs.quantizers import Gain, Parts, Quantizer, checked_choice
from kvq.errors import DataError, Unsupported, check_choice

DIM = 8
SIZE = 256
CODEBOOKS: dict[str, tuple[int, ...]] = {"finetuned": (1, 2), "finetuned_fp16": (1, 2), "kmeans": (1, 2), "e8p": (2,)}
"""Codebook -> the bits it has."""
FILE = Path(__file__).parent / "gaussian8.safetensors"
FILE_SHA256 = "b011a6b78596c03b23b2af582b45333d51d5824371ddc3a7eba0a68a57e28c00"
"""SHA-256 of the shipped file, checked when it is read: other codebooks need a change of this module."""
_TILE = 1024  # sub-vectors whose 256 scores exist at once: 1 MiB in fp32, which stays in a core's cache

Codes = list[UInt8[Tensor, "groups rows"]]


class Codebook(abc.ABC):
    """Maps `[groups, rows, 8]` to byte codes and back. Groups never mix: a group's codes depend on it alone."""

    @abc.abstractmethod
    def search(self, vectors: Float[Tensor, "groups rows 8"]) -> Codes:
        """Codes of the nearest codewords, one byte tensor per 8 bits."""

    @abc.abstractmethod
    def lookup(self, codes: list[Tensor]) -> Tensor:
        """Codewords `[..., 8]` of codes `[...]`."""

    @abc.abstractmethod
    def tables(self) -> tuple[Float[Tensor, "256 8"], Int[Tensor, "256 8"], Float[Tensor, "256 8"]]:
        """Look-up tables: entries by the first code byte; by the second, bits to flip in fp32 (the sign) and a shift.

        A codeword in fp32 is the entry with these bits flipped, plus the shift.
        """


class PlainCodebook(Codebook):
    """256 codewords: 8 bits for 8 channels."""

    def __init__(self, entries: Float[Tensor, "256 8"]) -> None:
        self.entries = entries
        # A ninth channel of ones brings -|c|²/2 into the product.
        self._scoring = torch.cat([entries, entries.square().sum(-1, keepdim=True) / -2], -1).T.contiguous()

    def search(self, vectors: Float[Tensor, "groups rows 8"]) -> Codes:
        """`argmin |v - c|²` as `argmax v·c - |c|²/2`, without all scores at once."""
        out = torch.empty(vectors.shape[:2], dtype=torch.uint8, device=vectors.device)
        vectors = torch.nn.functional.pad(vectors, (0, 1), value=1)
        for tile in tiles(vectors.shape[0], vectors.shape[1], _TILE, vectors.device):
            piece = vectors[tile]
            scores = torch.bmm(piece, self._scoring.expand(piece.shape[0], -1, -1))
            out[tile] = scores.max(-1).indices
        return [out]

    def lookup(self, codes: list[Tensor]) -> Tensor:
        return look_up(self.entries, codes[0])

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries; flips and shifts are zeros, as there is no second byte."""
        return self.entries, torch.zeros(256, DIM, dtype=torch.int32), torch.zeros(256, DIM)


class SignedCodebook(Codebook):
    """256 non-negative codewords and one sign bit per channel: 16 bits for 8 channels.

    The nearest signed codeword has the signs of the vector, so only the 256 patterns are searched, for |v|.
    """

    def __init__(self, entries: Float[Tensor, "256 8"]) -> None:
        self._patterns = PlainCodebook(entries)
        self._weights = 2 ** torch.arange(DIM, dtype=entries.dtype, device=entries.device)
        self._signs = 1 - 2 * _bits(entries.device).to(entries.dtype)

    def search(self, vectors: Float[Tensor, "groups rows 8"]) -> Codes:
        """Index of the pattern, then the sign bits (1 = negative, channel i in bit i)."""
        signs = ((vectors < 0).to(vectors.dtype) @ self._weights).to(torch.uint8)
        return [*self._patterns.search(vectors.abs()), signs]

    def lookup(self, codes: list[Tensor]) -> Tensor:
        return self._patterns.lookup(codes[:1]).mul_(look_up(self._signs, codes[1]))

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._patterns.entries, _flips(self._signs), torch.zeros(256, DIM)


class E8PCodebook(Codebook):
    """E8P of QuIP# (arXiv 2402.04396, section 4.2): points of the lattice E8, shifted by ±1/4, as 16-bit codes.

    A codeword is s ⊙ a ± 1/4 with a one of 256 half-integer patterns (`e8p_patterns`, even sums first), and signs s
    whose number of minus signs has the parity that puts s ⊙ a into the lattice: 7 bits are free, the last follows.
    Byte 0 is the pattern, byte 1 holds the signs of channels 0-6 in bits 0-6 and the shift in bit 7 (1 = minus).
    """

    def __init__(self, patterns: Float[Tensor, "256 8"], scale: float = 1.03) -> None:
        self.patterns, self.scale = patterns, scale
        self._odd = patterns.sum(-1).long() % 2 == 1
        self._bias = patterns.square().sum(-1) / -2
        self._signs = 1 - 2 * _bits(patterns.device).to(patterns.dtype)
        self._weights = 2 ** torch.arange(DIM - 1, dtype=torch.long, device=patterns.device)

    def search(self, vectors: Float[Tensor, "groups rows 8"]) -> Codes:
        """Exact search: for each shift the best pattern, with the cost of the one sign that parity may force."""
        codes = [torch.empty(vectors.shape[:2], dtype=torch.uint8, device=vectors.device) for _ in range(2)]
        for tile in tiles(vectors.shape[0], vectors.shape[1], _TILE // DIM, vectors.device):
            x = vectors[tile] * self.scale
            plus, minus = (self._nearest(x - shift) for shift in (0.25, -0.25))
            nearer = minus[0] < plus[0]
            pattern, signs = (torch.where(nearer, minus[i], plus[i]) for i in (1, 2))
            codes[0][tile], codes[1][tile] = (part.view(x.shape[:2]) for part in (pattern, signs + 128 * nearer))
        return codes

    def _nearest(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Half the squared distance, pattern and sign bits (channels 0-6) of the nearest lattice point."""
        products = torch.bmm(vectors.abs(), self.patterns.T.expand(vectors.shape[0], -1, -1))
        scores, y = products.flatten(0, 1) + self._bias, vectors.flatten(0, 1)
        size, negative = y.abs(), y < 0
        other = self._odd != (negative.sum(-1, keepdim=True) % 2 == 1)
        # A pattern of the other parity must turn the sign that costs least.
        price = 2 * (size[:, None] * self.patterns).amin(-1)
        score, pattern = torch.where(other, scores - price, scores).max(-1)
        flip = torch.nn.functional.one_hot((size * self.patterns[pattern]).argmin(-1), DIM).bool()
        flip &= other.gather(1, pattern[:, None])
        return y.square().sum(-1) / 2 - score, pattern, ((negative ^ flip)[:, : DIM - 1].long() * self._weights).sum(-1)

    def lookup(self, codes: list[Tensor]) -> Tensor:
        pattern, signs = codes[0].long(), codes[1].long()
        out = self.patterns[pattern] * self._signs[signs & 127]
        last_is_negative = (self._signs[signs & 127].prod(-1) < 0) != self._odd[pattern]
        out[..., DIM - 1] *= 1 - 2 * last_is_negative.to(out.dtype)
        shift = self._signs[signs, DIM - 1, None] / 4
        return (out + shift) / self.scale

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """An odd pattern's last entry is negative, so that the parity of the signs alone flips it."""
        entries = self.patterns / self.scale
        entries[self._odd, DIM - 1] *= -1
        signs = self._signs[torch.arange(256) & 127].clone()
        signs[:, DIM - 1] = signs.prod(-1)
        return entries, _flips(signs), (self._signs[:, DIM - 1 :] / (4 * self.scale)).expand(-1, DIM).contiguous()


def e8p_patterns() -> Float[Tensor, "256 8"]:
    """All 227 non-negative half-integer vectors with norm² at most 10, and 29 of the 224 with norm² 12.

    Of the latter every 8th in lexicographic order, an even spread; QuIP# lists its own 29. Even sums come first.
    """
    halves = torch.tensor([p for p in itertools.product((0.5, 1.5, 2.5), repeat=DIM) if sum(v * v for v in p) <= 12])
    norm = halves.square().sum(-1)
    chosen = torch.cat([halves[norm <= 10], halves[norm == 12][::8], halves[norm == 12][4:5]])
    return chosen[(chosen.sum(-1) % 2).argsort(stable=True)]


def _flips(signs: Float[Tensor, "256 8"]) -> Int[Tensor, "256 8"]:
    """The sign bit of fp32 where a sign is negative."""
    return torch.where(signs < 0, torch.iinfo(torch.int32).min, 0).to(torch.int32)


def _bits(device: torch.device) -> Tensor:
    """`[256, 8]`: bit i of each byte."""
    return (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1


@lru_cache(maxsize=1)
def load_codebooks() -> dict[str, Float[Tensor, "256 8"]]:
    """The shipped codebooks in fp32, by name and bits (`"kmeans_2b"`)."""
    if not FILE.is_file() or hashlib.sha256(FILE.read_bytes()).hexdigest() != FILE_SHA256:
        raise DataError(f"codebooks: {FILE.name} is missing or damaged; reinstall kvq, or run `make codebooks`")
    with safe_open(str(FILE), "pt") as file:
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a mapping
    names = [f"{name}_{bits}b" for name, kinds in CODEBOOKS.items() if name != "e8p" for bits in kinds]
    # Kept in fp16, or as integers times one fp16 step.
    return {name: tensors[name] * tensors.get(f"{name}.step", 1) for name in names}


@lru_cache(maxsize=64)
def codebook_for(name: str, bits: int, dtype: torch.dtype, device: torch.device) -> Codebook:
    """A codebook in the dtype and on the device of the data."""
    if name == "e8p":
        return E8PCodebook(e8p_patterns().to(device, dtype))
    kind = PlainCodebook if bits == 1 else SignedCodebook
    return kind(load_codebooks()[f"{name}_{bits}b"].to(device, dtype))


class VectorQuantizer(Quantizer):
    """Nearest codeword (L2) for every 8 consecutive channels; expects values with a distribution close to N(0, 1).

    Args:
        bits: 1 (an 8-bit index per 8 channels) or 2 (an 8-bit index into non-negative codewords and 8 signs; E8P).
        codebook: `finetuned` (tuned for the cosine, entries of 4 bits), `finetuned_fp16` (tuned, entries in fp16),
            `kmeans` (fp16), or `e8p` (2 bits only). One codebook serves every layer and model; it is not counted.
        gain: see `Gain`; NSNQuant's strategies 1-3 are `l2`, `norm` and `parallel`.

    Stores `codes.<i>` `[..., heads, tokens, head_dim / 8]`, one byte tensor per 8 bits of code.

    Source: NSNQuant (arXiv 2505.18231), sections 3.3 and 3.4.
    """

    version: ClassVar[int] = 1
    token_group = 1
    attended_as = "states"

    def __init__(self, bits: int, codebook: str = "finetuned", gain: Gain | str = "parallel") -> None:
        check_choice("codebook", codebook, CODEBOOKS)
        if bits not in CODEBOOKS[codebook]:
            allowed = " or ".join(map(str, CODEBOOKS[codebook]))
            raise Unsupported(f"bits={bits}: codebook {codebook} has {allowed} bits")
        self.bits, self.codebook = bits, codebook
        self.gain: Gain = checked_choice(Gain, gain, "gain")

    @property
    def index_bits(self) -> dict[str, int]:
        """Bits of a stored index, by the name of its part; an index stands for 8 channels."""
        return {"codes": 8 * self.bits}

    def check(self, head_dim: int) -> None:
        if head_dim % DIM:
            raise Unsupported(f"head_dim={head_dim}: vector codebooks take {DIM} channels at a time")

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Codebook.tables`; in fp32."""
        return codebook_for(self.codebook, self.bits, torch.float32, torch.device("cpu")).tables()

    def _book(self, like: Tensor, kind: dtype) -> Codebook:
        return codebook_for(self.codebook, self.bits, kind, like.device)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: dtype) -> Parts:
        self.check(x.shape[-1])
        vectors = x.reshape(-1, x.shape[-2] * (x.shape[-1] // DIM), DIM)
        codes = self._book(x, x.dtype).search(vectors)
        shape = (*x.shape[:-1], x.shape[-1] // DIM)
        return {f"codes.{i}": code.view(shape) for i, code in enumerate(codes)}

    def decode(self, parts: Parts, shape: Size, dtype: dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        codes = [part for name, part in sorted(parts.items()) if name.startswith("codes.")]
        return self._book(codes[0], dtype).lookup(codes).view(shape)
