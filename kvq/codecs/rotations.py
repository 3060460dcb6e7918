"""Rotations over channels: Hadamard matrices, with random signs or without, and random rotations.

Hadamard matrices are Sylvester's for powers of two and Paley's for orders 12, 20 and 28. Head dims that are a power of
two times one of these orders have one too, as a Kronecker product: 80 = 20 · 4, 96 = 12 · 8, 112 = 28 · 4.

Eigenvectors are made not to depend on the processor: a sign is free, and so is the basis of equal eigenvalues.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from scipy import linalg
from torch import Tensor

from kvq.codecs.quantizers import checked_choice
from kvq.codecs.stages import Side, Stage, Tokens
from kvq.errors import ConfigError, Unsupported

_FEWEST_ROWS = 8  # of a matrix product; MKL has other code for 1 to 3
_NEAR = 1 - 1e-9  # entries of a vector that are that large, relative to the largest, count as equal
_PALEY = {12: 11, 20: 19, 28: 13}
"""Order -> the prime q of its construction: I (q = 3 mod 4) of order q + 1, II (q = 1 mod 4) of order 2 (q + 1)."""
Draw = Literal["integer", "bernoulli", "flips"]
"""How a random sign is drawn from torch's generator: an integer below 2, or a Bernoulli variable (vLLM).

1 is a plus; of `flips` (vLLM's Octave), an integer too, it is a minus.
"""


def has_hadamard(order: int) -> bool:
    """Whether `hadamard_matrix` has a Hadamard matrix of this order."""
    return order >= 1 and _factors(order) is not None


def _factors(order: int) -> tuple[int, int] | None:
    """The order as one of 1, 12, 20, 28 times a power of two."""
    return next(
        ((base, order // base) for base in (1, *_PALEY) if order % base == 0 and (order // base).bit_count() == 1), None
    )


def hadamard_matrix(order: int) -> Float[Tensor, "order order"]:
    """A Hadamard matrix H with H Hᵀ = order · I, in double precision; symmetric where the order is a power of two.

    Raises:
        ValueError: an order without a matrix here; ask `has_hadamard`.
    """
    factors = _factors(order) if order >= 1 else None
    if factors is None:
        raise ValueError(f"no Hadamard matrix of order {order} here")
    base, power = factors
    sylvester = torch.from_numpy(linalg.hadamard(power, dtype=np.float64))
    return sylvester if base == 1 else torch.kron(_paley(base), sylvester)


def _paley(order: int) -> Tensor:
    """Paley (1933): from the quadratic residues modulo a prime."""
    q = _PALEY[order]
    squares = {i * i % q for i in range(1, q)}
    character = [0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)]
    border = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    border[1:, 1:], border[0, 1:] = torch.from_numpy(linalg.circulant(character)), 1
    if q % 4 == 3:
        border[1:, 0] = -1  # skew-symmetric
        return border + torch.eye(q + 1, dtype=torch.float64)
    border[1:, 0] = 1  # symmetric
    one, other = torch.tensor([[[1, 1], [1, -1]], [[1, -1], [-1, -1]]], dtype=torch.float64)
    return torch.kron(border, one) + torch.kron(torch.eye(q + 1, dtype=torch.float64), other)


class Rotation(Stage):
    """An orthogonal matrix applied to the channels of every token."""

    orthogonal = True
    token_group = 1

    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        """The matrix for `head_dim` channels, on the device and in the dtype of `like`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return per_block(x, self.matrix(x.shape[-1], x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return per_block(y, self.matrix(y.shape[-1], y).mT)


def per_block(x: Tokens, matrix: Float[Tensor, "dim columns"]) -> Float[Tensor, "*lead tokens columns"]:
    """`x @ matrix`, one product per block, so that a block's bits do not depend on how many blocks are decoded.

    Nor do a token's bits depend on how many tokens the block has: products of few rows, whose sums BLAS adds up in
    another order, are filled up with zeros.
    """
    flat, tokens = x.reshape(-1, *x.shape[-2:]), x.shape[-2]
    if tokens < _FEWEST_ROWS:
        flat = torch.nn.functional.pad(flat, (0, 0, 0, _FEWEST_ROWS - tokens))
    products = torch.bmm(flat, matrix.expand(flat.shape[0], -1, -1))[:, :tokens]
    return products.reshape(*x.shape[:-1], matrix.shape[1])


def per_head(
    x: Float[Tensor, "*lead heads tokens dim"], matrices: Float[Tensor, "heads dim columns"]
) -> Float[Tensor, "*lead heads tokens columns"]:
    """`per_block` with a matrix for each head."""
    return torch.stack([per_block(x[..., head, :, :], one) for head, one in enumerate(matrices)], -3)


class Hadamard(Rotation):
    """`x H_n / sqrt(n)` (QuaRot, arXiv 2404.00456), in Sylvester's order where n is a power of two; orthonormal.

    Args:
        block: consecutive channels rotated together; None = the head dim; `power_of_two` = the largest that divides it.
        interleaved: the even and the odd ones of 2n consecutive channels are rotated apart (ExLlamaV2).
        normalized: divide by sqrt(n); else `x H_n`, undone by `y H_nᵀ / n`; stored scales are then larger by sqrt(n).
    """

    version: ClassVar[int] = 1

    def __init__(
        self, block: int | Literal["power_of_two"] | None = None, interleaved: bool = False, normalized: bool = True
    ) -> None:
        if isinstance(block, int) and block < 1:
            raise ConfigError(f"block={block}: at least 1, power_of_two, or null for the head dim")
        if interleaved and not isinstance(block, int):
            raise ConfigError("interleaved=true: with block=<a number>")
        self.block, self.interleaved, self.normalized = block, interleaved, normalized
        self.orthogonal = normalized

    def block_size(self, head_dim: int) -> int:
        """Channels that are rotated together."""
        if isinstance(self.block, str):
            return head_dim & -head_dim
        return head_dim if self.block is None else self.block

    def check(self, head_dim: int) -> None:
        size = self.block_size(head_dim)
        span = size * (1 + self.interleaved)
        if head_dim % span:
            raise Unsupported(f"head_dim={head_dim}: no multiple of {span}, the channels of a Hadamard block")
        if not has_hadamard(size):
            raise Unsupported(
                f"head_dim={head_dim}: no Hadamard matrix of {'this order' if size == head_dim else f'order {size}'} "
                "here; powers of two, and 12, 20 and 28 times one, have one"
            )

    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        self.check(head_dim)
        return _hadamard(
            head_dim, self.block_size(head_dim), self.interleaved, self.normalized, like.dtype, like.device
        )

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        x = super().inverse(y, side)
        return x if self.normalized else x / self.block_size(y.shape[-1])


class RandomizedHadamard(Hadamard):
    """A fixed random sign per channel, then `Hadamard` (RHT). `seed` is independent of data seeds.

    Args:
        seed: of the signs.
        draw: see `Draw`.
        block, interleaved, normalized: as `Hadamard`.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        seed: int = 0,
        block: int | Literal["power_of_two"] | None = None,
        interleaved: bool = False,
        normalized: bool = True,
        draw: Draw | str = "integer",
    ) -> None:
        super().__init__(block, interleaved, normalized)
        self.seed = seed
        self.draw: Draw = checked_choice(Draw, draw, "draw")

    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        return _signs(head_dim, self.seed, self.draw, like.dtype, like.device) * super().matrix(head_dim, like)


class RandomRotation(Rotation):
    """A Haar-distributed rotation (determinant +1) drawn from `seed`: QR of a Gaussian matrix with the sign fix."""

    version: ClassVar[int] = 1

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        return rotation(head_dim, self.seed, like.dtype, like.device)


@lru_cache(maxsize=64)
def _hadamard(
    dim: int, block: int, interleaved: bool, normalized: bool, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "dim dim"]:
    matrix = hadamard_matrix(block) / (block**0.5 if normalized else 1)
    if interleaved:
        matrix = torch.kron(matrix, torch.eye(2, dtype=matrix.dtype))
    matrix = torch.block_diag(*[matrix] * (dim // len(matrix)))
    return matrix.to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def _signs(dim: int, seed: int, draw: Draw, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "dim 1"]:
    generator = torch.Generator().manual_seed(seed)
    if draw == "bernoulli":
        ones = torch.bernoulli(torch.full((dim, 1), 0.5), generator=generator)
    else:
        ones = torch.randint(0, 2, (dim, 1), generator=generator)
        ones = 1 - ones if draw == "flips" else ones
    return (ones * 2 - 1).to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def rotation(dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "dim dim"]:
    """A Haar-distributed rotation with determinant +1."""
    generator = torch.Generator().manual_seed(seed)
    # `torch.nn.init.orthogonal_` gives the same matrix in row-major order, which moves the last bit of products.
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    q = q * torch.sign(torch.diagonal(r))
    if torch.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q.to(device=device, dtype=dtype)


def fix_signs(vectors: Float[Tensor, "*lead n count"]) -> Float[Tensor, "*lead n count"]:
    """Flip signs of columns so that the entry of largest magnitude, the first of equal ones, is positive."""
    size = vectors.abs()
    first = (size >= _NEAR * size.amax(-2, keepdim=True)).byte().argmax(-2, keepdim=True)
    return vectors * vectors.gather(-2, first).sign()


def eigenvectors(matrix: Float[Tensor, "*lead n n"]) -> tuple[Float[Tensor, "*lead n"], Float[Tensor, "*lead n n"]]:
    """Eigenvalues of symmetric matrices, ascending, and the eigenvectors as columns, with signs by `fix_signs`.

    Eigenvalues closer than rounding, n ε times the largest, count as equal. The basis of their common eigenspace is
    pivoted Gram-Schmidt on the unit vectors projected to it, so that a diagonal matrix has unit vectors.
    """
    if matrix.ndim > 2:
        values, vectors = zip(*map(eigenvectors, matrix), strict=True)
        return torch.stack(values), torch.stack(vectors)
    spectrum, basis = torch.linalg.eigh(matrix)
    near = len(matrix) * torch.finfo(matrix.dtype).eps * spectrum.abs().amax()
    ends = [*((spectrum.diff() > near).nonzero()[:, 0] + 1).tolist(), len(matrix)]
    for start, end in itertools.pairwise([0, *ends]):
        projection = basis[:, start:end] @ basis[:, start:end].mT
        for column in range(start, end) if end - start > 1 else ():
            left = projection.diagonal()
            pivot = int((left >= _NEAR * left.max()).byte().argmax())
            basis[:, column] = projection[:, pivot] / left[pivot].sqrt()
            projection = projection - torch.outer(basis[:, column], basis[:, column])
    return spectrum, fix_signs(basis)
