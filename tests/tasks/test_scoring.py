"""Scoring in chunks is token-by-token decoding, and the canaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.cache import KVCache
from kvq.errors import DataError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.tasks.scoring import batches, cut_windows, forward_bounds, parallel_method, score, scoring_bounds
from tests.cache.states import nearest_bits
from tests.cache.test_assisted import built, layers_for
from tests.golden.methods import TRUNCATED
from tests.presets import LIBRARIES, NAMES, one_of_each
from tests.random_models import in_double_precision, llama, random_llama, token_ids


def chunked(loaded: LoadedModel, method: Method, tokens: Tensor, cuts: list[tuple[int, int]], start: int = 1) -> Tensor:
    """Log-probabilities of the targets from `start` on."""
    chunks = score(loaded, KVCache(loaded.model, method, dtype=loaded.cache_dtype), tokens, start, cuts)
    return torch.cat([torch.log_softmax(chunk.logits, -1) for chunk in chunks], 1)


@torch.no_grad()
def token_by_token(loaded: LoadedModel, method: Method, tokens: Tensor) -> Tensor:
    """The definition: decode one token at a time through the cache."""
    cache, rows = KVCache(loaded.model, method, dtype=loaded.cache_dtype), []
    for position in range(tokens.shape[1] - 1):
        output = loaded.model(input_ids=tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        rows.append(torch.log_softmax(output.logits, -1))
    return torch.cat(rows, 1)


@pytest.mark.parametrize("name", ["rtn", "q4_0", "turboquant"])
def test_nothing_kept_is_token_by_token_in_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is scored at once: every query reads its own token as it is stored."""
    loaded = in_double_precision(random_llama(), monkeypatch)
    method = build_method(name, bits=2, head_dim=32, overrides=["residual.policy=sliding", "residual.size=0"])
    tokens = token_ids(51)
    expected = token_by_token(loaded, method, tokens)
    for chunk in (None, 7, 50):
        got = chunked(loaded, method, tokens, scoring_bounds(method, 50, chunk))
        assert (got - expected).abs().max() < 1e-6, (name, chunk)
    at_once = parallel_method(method)
    assert at_once.residual == method.residual
    assert (chunked(loaded, at_once, tokens, [(0, 50)]) - expected).abs().max() < 1e-6


QUICK = ["identity", "zero", "kivi", "nsn", "nsnquant", "oscar", "gear", "kvquant/sink", "cq/kept_comma", "zipcache"]
QUICK += ["oscar/token_scope"]
# Of each form, without those that evict after a prompt, and truncation, which a last bit moves to another code.
OTHERS = {name for name in one_of_each(NAMES) if isinstance(name, str)} - {*LIBRARIES, *QUICK, "fp16", "snapkv"}
OTHERS -= {name for name in NAMES if name.startswith(("h2o/", "streamingllm/", "snapkv/"))} | {*TRUNCATED}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in sorted(OTHERS))])
def test_generation_is_token_by_token_in_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every method, with a residual of 6 tokens where it has one: blocks, pools, tiers and kept tokens move on."""
    loaded = in_double_precision(LoadedModel(llama(layers_for(name)), torch.device("cpu")), monkeypatch)
    method, tokens = built(name), token_ids(51)
    expected = token_by_token(loaded, method, tokens)
    for bounds in (scoring_bounds(method, 50), scoring_bounds(method, 50, 4), forward_bounds(loaded, method, 50)):
        got = chunked(loaded, method, tokens, bounds)
        assert got.shape == expected.shape == (1, 50, 61)
        assert (got - expected).abs().max() < 1e-6, bounds


@pytest.mark.parametrize(
    ("name", "side"),
    [
        # One side alone is the same for every codec: one with groups of tokens and one without say so.
        pytest.param(name, side, marks=[pytest.mark.long] * (side != "residual" and name not in ("kivi_had", "q4_0")))
        for side in ("residual", "residual.key", "residual.value")
        for name in ("identity", "kivi_had", "nsn", "nsnquant", "oscar/token_scope", "q4_0", "fp8")
    ],
)
def test_any_method_slides_exactly(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, in the codec's groups, or in blocks where a whole block shares statistics."""
    loaded = in_double_precision(random_llama(seed=2), monkeypatch)
    given = [f"{side}.policy=sliding", "residual.size=12"]
    method = build_method(name, bits=nearest_bits(name), head_dim=32, overrides=given)
    tokens = token_ids(46)
    expected = token_by_token(loaded, method, tokens)
    for chunk in (None, 5, 29):
        got = chunked(loaded, method, tokens, scoring_bounds(method, 45, chunk))
        assert (got - expected).abs().max() < 1e-6, chunk


@pytest.mark.parametrize(("key", "value"), [(16, 24), (40, 16), pytest.param(1, 8, marks=pytest.mark.long)])
def test_generation_is_exact_when_sides_flush_apart(key: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = in_double_precision(random_llama(seed=3, heads=6, kv_heads=3), monkeypatch)
    sizes = [f"residual.key.size={key}", f"residual.value.size={value}"]
    method = build_method("oscar", bits=2, head_dim=32, overrides=sizes)
    tokens = token_ids(101, batch=2)
    got = chunked(loaded, method, tokens, scoring_bounds(method, 100))
    assert (got - token_by_token(loaded, method, tokens)).abs().max() < 1e-6


def test_the_last_targets_alone_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = in_double_precision(random_llama(), monkeypatch)
    method = build_method("kivi", bits=2, head_dim=32, overrides=["residual.size=16"])
    tokens = token_ids(80)
    bounds = scoring_bounds(method, 79)
    # Another number of rows in a matrix product may round otherwise.
    last, whole = (chunked(loaded, method, tokens, bounds, start=start) for start in (50, 1))
    torch.testing.assert_close(last, whole[:, 49:], atol=1e-12, rtol=0)


def test_bounds_cut_at_every_flush_and_nowhere_else() -> None:
    method = build_method("kivi/block", bits=2, overrides=["residual.key.size=32", "residual.value.size=48"])
    assert scoring_bounds(method, 100) == [(0, 32), (32, 48), (48, 64), (64, 96), (96, 100)]
    assert scoring_bounds(method, 50, chunk=20) == [(0, 20), (20, 32), (32, 48), (48, 50)]
    assert scoring_bounds(build_method("fp16"), 300) == [(0, 128), (128, 256), (256, 300)]
    sliding = build_method("kivi", bits=2, overrides=["residual.size=96"])  # of the values; keys leave in blocks
    assert scoring_bounds(sliding, 200) == [(0, 96), (96, 128), (128, 192), (192, 200)]
    with pytest.raises(Unsupported, match="residual=none"):
        scoring_bounds(build_method("kivi", bits=2, overrides=["residual=none"]), 100)


def test_parallel_attends_to_nothing_but_decoded_states() -> None:
    """With keys and values decoded to zeros, every position sees only itself through the residual stream."""
    loaded, tokens = random_llama(), token_ids(60)
    zero = parallel_method(build_method("zero", head_dim=32))
    other = tokens.clone()
    other[:, :30] = token_ids(30, seed=9)
    first = chunked(loaded, zero, tokens, [(0, 60)])
    second = chunked(loaded, zero, other, [(0, 60)])
    assert torch.equal(first[:, 30:], second[:, 30:])
    assert not torch.equal(first[:, :29], second[:, :29])


@given(length=st.integers(2, 300), context=st.integers(2, 40), stride=st.integers(1, 40))
def test_sliding_scores_every_token_once(length: int, context: int, stride: int) -> None:
    stride = min(stride, context)
    if length < context:
        with pytest.raises(DataError, match=f"has {length} tokens"):
            cut_windows([torch.arange(length)], context, stride)
        return
    windows = cut_windows([torch.arange(length)], context, stride)
    scored = torch.cat([window.tokens[window.scored_from :] for window in windows]).tolist()
    last = (len(windows) - 1) * stride + context
    # A window starting where the last one ended cannot predict its own first token.
    skipped = set(range(context, last, context)) if stride == context else set()
    assert sorted(scored) == [token for token in range(1, last) if token not in skipped]
    assert len(set(scored)) == len(scored)
    assert length - last < stride


def test_disjoint_windows_score_all_but_their_first_token_and_stay_in_their_stream() -> None:
    windows = cut_windows([torch.arange(10), torch.arange(100, 109)], context=4)
    assert [window.tokens.tolist() for window in windows] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [100, 101, 102, 103],
        [104, 105, 106, 107],
    ]
    assert {window.targets for window in windows} == {3}
    assert len(cut_windows([torch.arange(10)], 4, limit=1)) == 1


def test_batches_keep_order_and_equal_targets() -> None:
    windows = cut_windows([torch.arange(50)], context=10, stride=5)
    groups = batches(windows, 4)
    assert [index for group in groups for index in group] == list(range(len(windows)))
    assert groups[0] == [0]
    assert all(len({windows[index].scored_from for index in group}) == 1 and len(group) <= 4 for group in groups)
