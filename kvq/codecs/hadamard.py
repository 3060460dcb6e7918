"""Hadamard matrices: ±1, with orthogonal rows. Sylvester's for powers of two, Paley's for orders 12, 20 and 28.

Head dims that are a power of two times one of these orders have one too, as a Kronecker product: 80 = 20 · 4,
96 = 12 · 8, 112 = 28 · 4.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from scipy import linalg
from torch import Tensor

_PALEY = {12: 11, 20: 19, 28: 13}
"""Order -> the prime q of its construction: I (q = 3 mod 4) of order q + 1, II (q = 1 mod 4) of order 2 (q + 1)."""


def has_order(order: int) -> bool:
    """Whether `matrix` has a Hadamard matrix of this order."""
    return order >= 1 and _factors(order) is not None


def _factors(order: int) -> tuple[int, int] | None:
    """The order as one of 1, 12, 20, 28 times a power of two."""
    return next(
        ((base, order // base) for base in (1, *_PALEY) if order % base == 0 and (order // base).bit_count() == 1), None
    )


def matrix(order: int) -> Float[Tensor, "order order"]:
    """A Hadamard matrix H with H Hᵀ = order · I, in double precision; symmetric where the order is a power of two.

    Raises:
        ValueError: an order without a matrix here; ask `has_order`.
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
