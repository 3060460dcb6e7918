"""Eigenvectors that do not depend on the processor: a sign is free, and so is the basis of equal eigenvalues."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

_NEAR = 1 - 1e-9
"""Entries of a vector that are that large, relative to the largest, count as equal."""


def signed(vectors: Float[Tensor, "*lead n count"]) -> Float[Tensor, "*lead n count"]:
    """Columns with their entry of largest magnitude positive; of equal ones, the first."""
    size = vectors.abs()
    first = (size >= _NEAR * size.amax(-2, keepdim=True)).byte().argmax(-2, keepdim=True)
    return vectors * vectors.gather(-2, first).sign()


def eigenvectors(
    matrix: Float[Tensor, "*lead n n"],
) -> tuple[Float[Tensor, "*lead n"], Float[Tensor, "*lead n n"]]:
    """Eigenvalues of symmetric matrices, ascending, and the eigenvectors as columns, `signed`.

    Eigenvalues that rounding does not tell apart, n ε times the largest, share a space. Its basis is what Gram-Schmidt
    with pivots makes of the unit vectors' projections to it, so a diagonal matrix has unit vectors.
    """
    if matrix.ndim > 2:
        values, vectors = zip(*map(eigenvectors, matrix), strict=True)
        return torch.stack(values), torch.stack(vectors)
    spectrum, basis = torch.linalg.eigh(matrix)
    near = len(matrix) * torch.finfo(matrix.dtype).eps * spectrum.abs().amax()
    ends = [*((spectrum.diff() > near).nonzero()[:, 0] + 1).tolist(), len(matrix)]
    for start, end in itertools.pairwise([0, *ends]):
        if end - start > 1:
            basis[:, start:end] = _basis(basis[:, start:end])
    return spectrum, signed(basis)


def _basis(vectors: Float[Tensor, "n count"]) -> Float[Tensor, "n count"]:
    """An orthonormal basis of the space that orthonormal vectors span, which depends on the space alone."""
    projection, found = vectors @ vectors.mT, []
    for _ in range(vectors.shape[1]):
        left = projection.diagonal()
        pivot = int((left >= _NEAR * left.max()).byte().argmax())
        found.append(projection[:, pivot] / left[pivot].sqrt())
        projection = projection - torch.outer(found[-1], found[-1])
    return torch.stack(found, 1)
