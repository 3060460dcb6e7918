"""Taking tokens back: the state in which they never came, or refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache import CacheSide, KVCache
from kvq.cache.layer import KVCacheLayer
from kvq.config.method import Policy, PrefillBlock, ResidualSide
from kvq.errors import ConfigError, Unsupported
from kvq.methods.kept_keys import SinkSide
from tests.cache.states import states
from tests.random_models import llama, token_ids

CODECS = {
    name: getattr(kvq.build_method(name.partition(":")[0], bits=3, head_dim=32, overrides=overrides), side)
    for name, side, overrides in (
        ("kivi", "key", ["key.quantizer.group_size=4"]),
        ("nsn", "key", []),
        ("rtn", "value", []),
        ("fp16", "key", []),
    )
}
RESIDUALS = {
    "policy": st.sampled_from(list(Policy)),
    "size": st.integers(1, 7),
    "whole": st.booleans(),
    "sinks": st.sampled_from([0, 0, 3]),
    "keep": st.booleans(),
}
CHUNKS = st.lists(st.integers(1, 14), min_size=1, max_size=5)


def side(name, policy, size, whole, sinks, keep, label="layer 0 keys"):
    residual = ResidualSide(policy, size, PrefillBlock.whole if whole else PrefillBlock.size)
    codec = CODECS[name]
    if sinks and codec is not None:
        return SinkSide(codec, residual, label, keep, sinks)
    return CacheSide(codec, residual, label, keep)


def counts(one):
    return one.tokens, one.packed_tokens, one.residual_tokens, one.packed_bytes, one.residual_bytes


def check_same(one, other):
    """Byte for byte what is stored, and what is read now and after more tokens."""
    assert counts(one) == counts(other)
    for count in (1, 9, 1):
        more = states(count, seed=count).double()
        torch.testing.assert_close(one.append(more), other.append(more), atol=1e-9, rtol=0)
    assert counts(one) == counts(other)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=20)
@given(residual=st.fixed_dictionaries(RESIDUALS), chunks=CHUNKS, data=st.data())
def test_a_side_is_as_if_the_tokens_never_came(name, residual, chunks, data):
    """Refused exactly where tokens were encoded that would not have been, or the sinks are reached."""
    total = sum(chunks)
    remove = data.draw(st.integers(1, total))
    x = states(total).double()
    real, short = side(name, **residual), side(name, **residual)
    for start, end in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        real.append(x[:, :, start:end])
        if start < total - remove:
            short.append(x[:, :, start : min(end, total - remove)])
    possible = real.packed_tokens == short.packed_tokens and remove <= real.residual_tokens
    if possible:
        real.crop(remove)
        check_same(real, short)
    else:
        before = counts(real)
        with pytest.raises(Unsupported, match=f"^layer 0 keys: cannot remove {remove} tokens, [^\n]*$"):
            real.crop(remove)
        assert counts(real) == before


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=12)
@given(
    residual=st.fixed_dictionaries(RESIDUALS),
    values=st.fixed_dictionaries(RESIDUALS),
    chunks=CHUNKS,
    data=st.data(),
)
def test_a_recorded_update_is_undone_as_if_it_had_come_one_by_one(name, residual, values, chunks, data):
    """Whatever it encoded: tokens together up to the candidates, those one by one, and any number taken back."""
    total, last = sum(chunks), chunks[-1]
    x = states(total).double()
    candidates = data.draw(st.integers(0, last - 1))
    remove = data.draw(st.integers(0, last))
    real, short = (
        KVCacheLayer(side(name, **residual), side("rtn", **values, label="layer 0 values")) for _ in range(2)
    )
    for start, end in itertools.pairwise([0, *itertools.accumulate(chunks[:-1])]):
        for layer in (real, short):
            layer.update(x[:, :, start:end], x[:, :, start:end])
    real.record(True)
    real.expect_candidates(candidates)
    real.columns_for(last, torch.device("cpu"), None)
    real.update(x[:, :, total - last :], x[:, :, total - last :])
    real.crop(-remove)
    rest = x[:, :, total - last : total - remove]
    head, others = rest[:, :, : last - candidates], rest[:, :, last - candidates :]
    for piece in ([head] if head.shape[2] else []) + list(others.split(1, 2) if others.shape[2] else []):
        short.update(piece, piece)
    check_same(real.key, short.key)
    check_same(real.value, short.value)


def test_no_layer_changes_where_one_refuses():
    """The first layer is in full precision and could take them back."""
    model = llama(3)
    method = kvq.build_method("rtn", bits=3, head_dim=128, overrides=["residual.size=4"])
    cache = KVCache(model, method)
    full = (CacheSide(None, method.residual.key, f"layer 0 {one}") for one in ("keys", "values"))
    cache.layers[0] = KVCacheLayer(*full)
    model(token_ids(15), past_key_values=cache)
    with pytest.raises(Unsupported, match="layer 1 keys: cannot remove 5 tokens"):
        cache.crop(-5)
    assert {layer.get_seq_length() for layer in cache.layers} == {15}
    with pytest.raises(ConfigError, match=r"crop\(3\): give a negative number"):
        cache.crop(3)
