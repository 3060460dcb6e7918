"""Vector quantization: 8 consecutive channels of a token share one codeword of a fixed codebook for N(0, 1)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor, dtype
from typing_extensions import override

from kvq.codecs.codebooks import CODEBOOKS, DIM, Codebook, codebook_for
from kvq.codecs.quantizers import Gain, Parts, Quantizer, choice
from kvq.errors import ConfigError, Unsupported, did_you_mean


class VectorQuantizer(Quantizer):
    """Nearest codeword (L2) for every 8 consecutive channels; expects values with a distribution close to N(0, 1).

    Args:
        bits: 1 (an 8-bit index per 8 channels) or 2 (an 8-bit index into non-negative codewords and 8 sign bits; E8P: a
            16-bit code).
        codebook: `finetuned` (tuned for the cosine, entries of 4 bits), `finetuned_fp16` (tuned, entries in fp16),
            `kmeans` (fp16), or `e8p` (2 bits only). One codebook serves every layer and model; it is not counted.
        gain: see `Gain`; NSNQuant's strategies 1-3 are `l2`, `norm` and `parallel`.

    Stores `codes.<i>` `[..., heads, tokens, head_dim / 8]`, one byte tensor per 8 bits of code.

    Raises:
        ConfigError: unknown codebook or gain.
        Unsupported: bits the codebook does not have.

    Source: NSNQuant (arXiv 2505.18231), sections 3.3 and 3.4.
    """

    version: ClassVar[int] = 1

    token_group = 1

    def __init__(self, bits: int, codebook: str = "finetuned", gain: Gain | str = Gain.parallel) -> None:
        if codebook not in CODEBOOKS:
            hint = did_you_mean(codebook, CODEBOOKS)
            raise ConfigError(f"codebook={codebook}: one of {', '.join(CODEBOOKS)}.{hint}")
        if bits not in CODEBOOKS[codebook]:
            allowed = " or ".join(map(str, CODEBOOKS[codebook]))
            raise Unsupported(f"bits={bits}: codebook {codebook} has {allowed} bits")
        self.bits, self.codebook = bits, codebook
        self.gain = choice(Gain, gain, "gain")

    @property
    @override
    def indices(self) -> dict[str, int]:
        return {"codes": 8 * self.bits}

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: head dims that are not a multiple of 8."""
        if head_dim % DIM:
            raise Unsupported(f"head_dim={head_dim}: vector codebooks take {DIM} channels at a time")

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Codebook.tables`; in fp32."""
        return codebook_for(self.codebook, self.bits, torch.float32, torch.device("cpu")).tables()

    def _book(self, like: Tensor, kind: dtype) -> Codebook:
        return codebook_for(self.codebook, self.bits, kind, like.device)

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: dtype) -> Parts:
        """One byte tensor per 8 bits of code."""
        self.check(x.shape[-1])
        vectors = x.reshape(-1, x.shape[-2] * (x.shape[-1] // DIM), DIM)
        codes = self._book(x, x.dtype).search(vectors)
        shape = (*x.shape[:-1], x.shape[-1] // DIM)
        return {f"codes.{i}": code.view(shape) for i, code in enumerate(codes)}

    @override
    def decode(self, parts: Parts, shape: Size, dtype: dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The codewords, without any gain."""
        codes = [part for name, part in sorted(parts.items()) if name.startswith("codes.")]
        return self._book(codes[0], dtype).lookup(codes).view(shape)
