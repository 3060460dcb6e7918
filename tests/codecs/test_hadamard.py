"""Hadamard matrices of every order that models' head dims need."""

import pytest
import torch

from kvq.codecs.rotations import hadamard_matrix as matrix
from kvq.codecs.rotations import has_hadamard as has_order

ORDERS = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_orthogonal_signs(order):
    h = matrix(order)
    assert has_order(order)
    assert bool((h.abs() == 1).all())
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


def test_powers_of_two_are_sylvesters():
    h = torch.tensor([[1.0, 1], [1, -1]]).double()
    assert torch.equal(matrix(8), torch.kron(h, torch.kron(h, h)))
    for order in (2, 16, 128):
        assert torch.equal(matrix(order), matrix(order).T)


@pytest.mark.parametrize("order", [-4, 0, 3, 6, 10, 36, 44, 60, 72, 100])
def test_other_orders_are_refused(order):
    assert not has_order(order)
    with pytest.raises(ValueError, match=f"order {order} here"):
        matrix(order)
