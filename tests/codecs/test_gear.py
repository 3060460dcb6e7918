"""GEAR: extremes are exact, the low-rank part finds what has low rank, and every byte is in the closed form."""

import pytest
import torch

import kvq
from kvq.codecs import Codec, SparseLowRank, UniformQuantizer
from kvq.codecs.low_rank import power_iteration
from kvq.errors import ConfigError

DIM, HEADS = 128, 2


def states(tokens, seed=0, dim=DIM):
    return torch.randn(1, HEADS, tokens, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chain(axis="per_channel", bits=2, **settings):
    return Codec({}, [], SparseLowRank(UniformQuantizer(bits, axis, 64), **settings))


@pytest.mark.parametrize(("tokens", "rank", "extremes"), [(64, 2, 2), (256, 4, 6)])
def test_bits(tokens, rank, extremes):
    method, x = kvq.build_method("gear", bits=2, head_dim=DIM), states(tokens).half()
    factors = 16 * rank * (tokens + DIM) / (tokens * DIM)
    key, value = (codec.encode(x).bits_per_element for codec in (method.key, method.value))
    assert key == pytest.approx(2 + 32 / 64 + 32 * extremes / tokens + factors)
    joint = 2 * round(0.01 * HEADS * DIM)
    assert value == pytest.approx(2 + 32 / 64 + 32 * joint / (HEADS * DIM) + factors)


@pytest.mark.parametrize("axis", ["per_channel", "per_token"])
def test_extremes_are_exact_and_out_of_the_ranges(axis):
    x = states(64)
    x[:, :, 7, 3], x[:, :, 9, 5] = 1000, -1000
    out = chain(axis, sparsity=0.04, rank=0, buffer_rank=0).decode(
        chain(axis, sparsity=0.04, rank=0, buffer_rank=0).encode(x)
    )
    assert torch.equal(out[:, :, 7, 3], x[:, :, 7, 3])
    assert torch.equal(out[:, :, 9, 5], x[:, :, 9, 5])
    x[:, :, 7, 3] = x[:, :, 9, 5] = out[:, :, 7, 3] = out[:, :, 9, 5] = 0
    assert float((out - x).abs().max()) < 2.5  # a third of a range of ±3, and means in the places of extremes


def test_power_iteration_finds_a_matrix_of_low_rank():
    left, right = states(96, 1)[0, :, :, :3], states(3, 2)[0]
    found = torch.bmm(*power_iteration(left @ right, 3, 3, 0))
    torch.testing.assert_close(found, left @ right, rtol=1e-9, atol=1e-9)


def test_the_parts_lower_the_error():
    x = states(128)
    x = x + 3 * torch.bmm(states(128, 5)[0, :, :, :2], states(2, 6)[0])[None]

    def error(**settings):
        codec = chain(**settings)
        return float((codec.decode(codec.encode(x)) - x).norm())

    plain = error(sparsity=0.0, rank=0)
    assert error(sparsity=0.0) < 0.98 * plain
    assert error(rank=0) < 0.98 * plain
    assert error() < error(rank=0)


def test_a_prefill_and_blocks_behind_it_are_stored_together():
    method, model = kvq.build_method("gear", bits=2, head_dim=DIM), states(256 + 64)
    whole, block = method.key.encode(model[:, :, :256]), method.key.encode(model[:, :, 256:])
    store = kvq.codecs.PackedStore(whole)
    store.append(block)
    got = method.key.decode(store.packed)
    assert torch.equal(got, torch.cat([method.key.decode(whole), method.key.decode(block)], 2))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"rank": -1}, "rank=-1"),
        ({"buffer": -1}, "buffer=-1"),
        ({"iterations": 0}, "iterations=0"),
    ],
)
def test_bad_settings_are_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        SparseLowRank(UniformQuantizer(2, "per_token"), **settings)
