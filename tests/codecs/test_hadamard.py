"""Hadamard matrices of every order that models' head dims need."""

import pytest
import torch

import kvq
from kvq.codecs import Hadamard, RandomizedHadamard
from kvq.codecs.rotations import hadamard_matrix as matrix
from kvq.codecs.rotations import has_hadamard as has_order
from kvq.errors import Unsupported
from tests.cache.states import states

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


@pytest.mark.parametrize("dim", [80, 96, 112])
@pytest.mark.parametrize("stage", [Hadamard(), RandomizedHadamard(seed=3)])
def test_the_stage_turns_and_turns_back(dim, stage):
    x = states(9, dim=dim).double()
    stage.check(dim)
    y, side = stage.forward(x)
    assert side == {}
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(stage.inverse(y, side), x)
    assert not torch.allclose(y, x, atol=0.1)


@pytest.mark.parametrize("dim", [80, 96, 112])
@pytest.mark.parametrize("name", ["oscar", "quarot", "kivi_had"])
def test_methods_on_such_head_dims(dim, name):
    method = kvq.build_method(name, bits=4, head_dim=dim)
    x = states(64, dim=dim)
    out = method.key.decode(method.key.encode(x))
    assert float((out - x).norm() / x.norm()) < 0.12


def test_a_head_dim_without_one_is_named():
    with pytest.raises(Unsupported, match="head_dim=72: no Hadamard matrix of this order here"):
        Hadamard().check(72)
