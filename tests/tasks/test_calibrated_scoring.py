"""Calibrated methods and sink tokens: scoring in chunks is decoding token by token, in double precision."""

from __future__ import annotations

import pytest
import torch

from kvq.cache import KVCache
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.tasks.scoring import scoring_bounds
from tests.calibrated import bound, random_states
from tests.random_models import in_double_precision, random_llama, token_ids
from tests.tasks.test_scoring import chunked, token_by_token


def method_of(name: str, *overrides: str) -> Method:
    method = build_method(name, bits=2, head_dim=32, overrides=overrides)
    return bound(method, random_states(2, 32), 2)


@pytest.mark.parametrize(
    ("name", "residual"),
    [
        pytest.param(name, residual, marks=[pytest.mark.long] * (bool(residual) and name in ("nsnquant", "nsn")))
        for residual in (["residual.policy=sliding"], ["residual.value.policy=sliding"], [])
        for name in ("kivi", "nsnquant", "nsn", "kvquant")
    ],
)
@pytest.mark.parametrize("sinks", [5, *(pytest.param(sinks, marks=pytest.mark.long) for sinks in (1, 20))])
def test_sinks_stay_exactly(name: str, residual: list[str], sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = in_double_precision(random_llama(seed=2), monkeypatch)
    method = method_of(name, f"sink_tokens={sinks}", "residual.size=12", *residual)
    tokens = token_ids(42)
    expected = token_by_token(loaded, method, tokens)
    for chunk in (None, 5, 29):
        got = chunked(loaded, method, tokens, scoring_bounds(method, 41, chunk))
        assert (got - expected).abs().max() < 1e-9, chunk


@torch.no_grad()
def test_what_a_cache_with_sinks_holds() -> None:
    """The sinks as they came, the rest as without them; their bytes are those in full precision."""
    loaded, tokens = random_llama(), token_ids(44)
    method = build_method(
        "kivi",
        bits=2,
        head_dim=32,
        overrides=["sink_tokens=4", "residual.size=32", "value.quantizer.group_size=32", "residual.value.policy=block"],
    )
    plain, cache = (KVCache(loaded.model, m) for m in (build_method("fp16", head_dim=32), method))
    kept = {}
    for each in (plain, cache):
        loaded.model(input_ids=tokens[:, :40], past_key_values=each, use_cache=True)
        side = each.fork().layers[1].key
        kept[each] = side.append(torch.zeros(1, 2, 1, 32))
    assert torch.equal(kept[cache][:, :, :4], kept[plain][:, :, :4])
    assert not torch.equal(kept[cache][:, :, 4:36], kept[plain][:, :, 4:36])
    assert torch.equal(kept[cache][:, :, 36:40], kept[plain][:, :, 36:40])
    side = cache.layers[0].key
    assert (side.tokens, side.packed_tokens, side.residual_tokens) == (40, 32, 4)
    assert side.residual_bytes == 8 * 2 * 32 * 4
    assert side.bits_per_element == 3.0
    fork = cache.fork()
    loaded.model(input_ids=tokens[:, 40:], past_key_values=fork, use_cache=True)
    assert (fork.get_seq_length(), cache.layers[0].key.tokens) == (44, 40)
    cache.layers[0].key.select(torch.tensor([0, 0]))
    assert cache.layers[0].key.batch_size == 2
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
