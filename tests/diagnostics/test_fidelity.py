from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq import build_method
from kvq.codecs import Codec, Hadamard, Passthrough, TokenNorm, UniformQuantizer, rope_table
from kvq.diagnostics import (
    AttentionRule,
    arms,
    attention_errors,
    attention_received,
    before_rope,
    cosine,
    query_chunks,
    reconstruct,
    relative_mse,
    relative_mse_by_position,
)
from kvq.errors import Unsupported
from tests.calibrated import build, random_states


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    shared = query.shape[1] // key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), is_causal=True
    )


def test_relative_errors_of_hand_made_tokens() -> None:
    x = torch.tensor([[[[3.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]])
    x_hat = torch.tensor([[[[3.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 2.0]]]])
    assert relative_mse(x, x_hat).tolist() == [16 / 25, 3 / 2]
    assert cosine(x, x_hat).tolist() == pytest.approx([0.6, 0.5])  # a zero token has no direction
    assert relative_mse_by_position(x, x_hat, [(0, 1), (1, 2)]) == pytest.approx([18 / 26, 1.0])
    assert relative_mse(torch.zeros_like(x), torch.zeros_like(x)).tolist() == [0, 0]


def test_attention_is_that_of_torch() -> None:
    query, key, value = states(1, 4, 300, 8), states(1, 2, 300, 8, seed=1), states(1, 2, 300, 8, seed=2)
    attention = AttentionRule(8**-0.5)
    chunks = [attention.log_weights(chunk, key, first).exp() for first, chunk in query_chunks(query)]
    found = torch.cat(chunks, 2) @ value.repeat_interleave(2, 1)
    assert torch.allclose(found, plain_attention(query, key, value))


def test_window_and_cap_of_attention() -> None:
    query, key = states(1, 1, 6, 4), states(1, 1, 6, 4, seed=1)
    weights = AttentionRule(1.0, window=2).log_weights(query, key, 0).exp()[0, 0]
    assert bool((weights.triu(1) == 0).all())
    assert bool((weights.tril(-2) == 0).all())
    assert torch.allclose(weights.sum(-1), torch.ones(6, dtype=torch.float64))
    capped = AttentionRule(1.0, softcap=1e-9).log_weights(query, key, 0).exp()[0, 0]
    assert torch.allclose(capped[5], torch.full((6,), 1 / 6, dtype=torch.float64))


def test_errors_of_attention_against_the_formula() -> None:
    query, key, value = states(2, 4, 150, 8), states(2, 2, 150, 8, seed=1), states(2, 2, 150, 8, seed=2)
    key_hat, value_hat = key + 0.3 * states(2, 2, 150, 8, seed=3), value + 0.3 * states(2, 2, 150, 8, seed=4)
    attention = AttentionRule(8**-0.5)
    found = attention_errors(attention, query, key, value, [(key_hat, None), (None, value_hat), (key_hat, value_hat)])
    output = plain_attention(query, key, value)
    for error, pair in zip(found, ((key_hat, value), (key, value_hat), (key_hat, value_hat)), strict=True):
        other = plain_attention(query, *pair)
        expected = (other - output).square().sum((0, 2, 3)) / output.square().sum((0, 2, 3))
        assert torch.allclose(error.output, expected)
    weights = [attention.log_weights(query, each, 0) for each in (key, key_hat)]
    kl = torch.nn.functional.kl_div(weights[1], weights[0], reduction="none", log_target=True).nan_to_num(0)
    assert torch.allclose(found[0].weight_kl, kl.sum((0, 2, 3)) / 300)
    assert not found[1].weight_kl.any()  # values leave the weights alone


def test_a_key_shift_that_all_tokens_share_costs_nothing() -> None:
    query, key, value = states(1, 2, 40, 8), states(1, 2, 40, 8, seed=1), states(1, 2, 40, 8, seed=2)
    (error,) = attention_errors(AttentionRule(1.0), query, key, value, [(key + 5, None)])
    assert float(error.output.max()) < 1e-20
    assert float(error.weight_kl.max()) < 1e-12


def test_attention_received_by_a_sink() -> None:
    query, key = torch.ones(1, 2, 140, 4), torch.zeros(1, 1, 140, 4)
    key[:, :, 0] = 100.0
    received = attention_received(AttentionRule(1.0), query, key)
    assert torch.allclose(received[:, 0], torch.ones(2, dtype=torch.float64))
    assert float(received[:, 1:].max()) < 1e-6
    even = attention_received(AttentionRule(1.0), query, torch.zeros(1, 1, 140, 4))
    assert float(even[0, 138]) == pytest.approx(1 / 140)  # one later query, which sees 140 tokens


def test_arms_are_prefixes_or_subsets() -> None:
    codec = build_method("oscar", 2, 32).key
    assert codec is not None
    assert [(arm.name, arm.complete) for arm in arms(codec)] == [
        ("none", False),
        ("hadamard", False),
        ("hadamard+norm", True),
    ]
    assert [arm.name for arm in arms(codec, subsets=True)] == ["none", "hadamard", "norm", "hadamard+norm"]
    many = Codec({str(i): Hadamard() for i in range(7)}, [str(i) for i in range(7)], Passthrough())
    with pytest.raises(Unsupported, match="7 stages; at most 6"):
        arms(many, subsets=True)


def test_subsets_are_the_ablations_of_oscar() -> None:
    codec = build_method("oscar", 2, 32).key
    assert codec is not None
    x = states(1, 2, 64, 32)
    found = {arm.name: reconstruct(arm.codec, x, 32, None) for arm in arms(codec, subsets=True)}
    for arm, preset in (("hadamard", "oscar/cr_only"), ("norm", "oscar/ots_only"), ("hadamard+norm", "oscar")):
        other = build_method(preset, 2, 32).key
        assert other is not None
        assert torch.equal(found[arm], reconstruct(other, x, 32, None))


def test_arms_store_lists_of_outliers_as_their_codec_does() -> None:
    """Blocks that keep different numbers of entries apart, a short one among them, decode in every arm."""
    x = random_states(2, 64, 72)
    codec = build("kvquant", x, 2).key
    assert codec is not None
    for arm in arms(codec):
        whole, blocks = (arm.codec.encode(x, block, rope_table(72, 64)) for block in (None, 32))
        assert whole.parts["outlier.value"].shape == blocks.parts["outlier.value"].shape
        assert torch.equal(
            arm.codec.decode(whole, rope_table(72, 64)), reconstruct(arm.codec, x, 32, rope_table(72, 64))
        )


def test_keys_before_rope_are_quantized_unturned() -> None:
    quantizer = UniformQuantizer(2, "per_channel", 32)
    codec = Codec({}, [], quantizer)
    rope, x = rope_table(64, 16), states(1, 2, 64, 16)
    other = before_rope(codec)
    assert other is not None
    blocks = rope.blocks(64, 1)
    bare = blocks.rotate(x[:, None], back=True)[:, 0]
    expected = blocks.rotate(codec.decode(codec.encode(bare))[:, None])[:, 0]
    assert torch.allclose(reconstruct(other, x, None, rope), expected)
    assert before_rope(other) is None


@given(st.integers(2, 40), st.integers(0, 100))
def test_exact_states_have_no_error(tokens: int, seed: int) -> None:
    x = states(1, 2, tokens, 8, seed=seed)
    exact = Codec({"norm": TokenNorm("head")}, ["norm"], Passthrough())
    x_hat = reconstruct(exact, x, 16, None)
    assert float(relative_mse(x, x_hat).max()) < 1e-6  # the norm is stored in fp16
    assert float(cosine(x, x_hat).min()) == pytest.approx(1)
