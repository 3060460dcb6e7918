"""Sinks that are found by the state that enters a layer: what is found, what is read, what is stored."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq.cache import KVCache
from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.errors import ConfigError, KvqError, Unsupported
from kvq.methods.build import build_method
from kvq_zoo.detected import SinkDetection
from tests.random_models import llama, token_ids

SINK = 5
"""A token of the vocabulary whose state has one huge channel."""
AT = (0, 17, 40, 63, 70)
BLOCKS = ["residual.size=32", "residual.value.policy=block"]
NEWEST = 90


def model_with_sinks() -> Any:
    model = llama(layers=3)
    model.model.embed_tokens.weight[SINK] *= 0.1
    model.model.embed_tokens.weight[SINK, 7] = 60.0
    return model


def tokens(count: int = NEWEST) -> Tensor:
    ids = token_ids(count, seed=4)
    ids[ids == SINK] = SINK + 1
    ids[0, list(AT)] = SINK
    return ids


@torch.no_grad()
def fed(model: Any, cache: Any, cuts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """What each layer reads with the last token."""
    ids, read = tokens(cuts[-1]), {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "key"):
            keep_what_is_read(layer, index, read)
    for start, end in itertools.pairwise((0, *cuts)):
        model(input_ids=ids[:, start:end], past_key_values=cache)
    return [read[index] for index in sorted(read)]


def keep_what_is_read(layer: Any, index: int, read: dict[int, Any]) -> None:
    update = layer.update

    def kept(*args: Any, **kwargs: Any) -> Any:
        read[index] = update(*args, **kwargs)
        return read[index]

    layer.update = kept


def test_a_sink_has_one_channel_above_the_share() -> None:
    hidden = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    hidden[0, 3, 5] = 100.0
    hidden[1, 8, 2] = -9.0
    hidden[1, 1] = 0.0
    for share in (0.2, 0.5, 0.8, 0.99):
        found = SinkDetection(share).sinks(hidden)
        for batch, token in itertools.product(range(2), range(9)):
            squares = [float(entry) ** 2 for entry in hidden[batch, token]]
            assert bool(found[batch, token]) == (max(squares) > share * sum(squares))
    assert SinkDetection(0.99).sinks(hidden).nonzero().tolist() == [[0, 3]]
    assert torch.equal(SinkDetection(0.5).sinks(hidden * 1e-3), SinkDetection(0.5).sinks(hidden))


@pytest.mark.parametrize("name", ["kivi/kvsink", "rtn/kvsink"])
def test_sinks_are_read_as_they_are_and_move_no_range(name: str) -> None:
    """The first layer's codes are those of blocks in which a sink is the mean of the block's other tokens."""
    model, base = model_with_sinks(), name.partition("/")[0]
    plain = DynamicCache()
    with torch.no_grad():
        for part in tokens().split(NEWEST - 1, 1):
            model(input_ids=part, past_key_values=plain)
    cache = KVCache(model, build_method(name, bits=2, overrides=BLOCKS))
    read = fed(model, cache, (NEWEST - 1, NEWEST))[0]
    method = build_method(base, bits=2, overrides=BLOCKS)
    layer = plain.layers[0]
    for side, full, found in zip((method.key, method.value), (layer.keys, layer.values), read, strict=True):
        assert side is not None
        for start in (0, 32):
            block = full[:, :, start : start + 32].clone()
            sinks = [at - start for at in AT if start <= at < start + 32]
            others = [at for at in range(32) if at not in sinks]
            for head, channel in itertools.product(range(2), range(128)):
                mean = sum(float(block[0, head, at, channel]) for at in others) / len(others)
                block[0, head, sinks, channel] = mean
            wanted = side.decode(side.encode(block, 32))
            wanted[:, :, sinks] = full[:, :, start : start + 32][:, :, sinks]
            assert torch.allclose(found[:, :, start : start + 32], wanted, atol=1e-4)
            assert torch.equal(found[:, :, start : start + 32][:, :, sinks], wanted[:, :, sinks])
        assert torch.equal(found[:, :, 64:], full[:, :, 64:])


def test_rows_and_positions_count() -> None:
    """Five sinks, four of them in the 64 packed tokens: a row of 2 x 128 fp32 numbers and a position each, per side."""
    model, sizes = model_with_sinks(), {}
    for name in ("kivi/kvsink", "kivi"):
        cache = KVCache(model, build_method(name, bits=2, overrides=BLOCKS))
        fed(model, cache, (NEWEST,))
        sizes[name] = [(layer.key.packed_bytes, layer.value.packed_bytes) for layer in cache.layers]
    more = 4 * (2 * 128 * 4 + 4)
    assert sizes["kivi/kvsink"][0] == tuple(size + more for size in sizes["kivi"][0])


def test_it_does_not_matter_how_tokens_come() -> None:
    """Tokens in other chunks have the same form in the first layer, where states do not depend on what is read."""
    model, last = model_with_sinks(), []
    for cuts in ((NEWEST,), (1, 50, 51, NEWEST), tuple(range(1, NEWEST + 1))):
        cache = KVCache(model, build_method("kivi/kvsink", bits=2, overrides=BLOCKS))
        fed(model, cache, cuts)
        last.append([side._past() for side in (cache.layers[0].key, cache.layers[0].value)])
    for other in last[1:]:
        for found, wanted in zip(other, last[0], strict=True):
            assert torch.allclose(found, wanted, atol=1e-4)


@torch.no_grad()
def test_without_sinks_it_is_the_method_itself() -> None:
    model, logits = llama(layers=2), []
    for name in ("kivi", "kivi/kvsink"):
        method = build_method(
            name, bits=2, overrides=[*BLOCKS, *(["policies.sink_detection.share=0.99"] if "/" in name else [])]
        )
        cache = KVCache(model, method)
        model(input_ids=tokens()[:, :70], past_key_values=cache)
        logits.append((model(input_ids=tokens()[:, 70:71], past_key_values=cache).logits, cache.nbytes))
    assert torch.equal(logits[0][0], logits[1][0])
    assert logits[0][1] == logits[1][1]


def test_batches_and_forks_keep_their_own_sinks() -> None:
    model = model_with_sinks()
    cache = KVCache(model, build_method("kivi/kvsink", bits=2, overrides=BLOCKS))
    ids = torch.cat([tokens(), tokens().roll(1, 1)])
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    fork = cache.fork()
    fork.batch_select_indices(torch.tensor([1, 0]))
    side, swapped = cache.layers[0].key, fork.layers[0].key
    assert torch.equal(swapped._past(), side._past()[[1, 0]])
    assert side._at.T.tolist() == [[0, at] for at in AT[:4]] + [[1, at + 1] for at in AT[:3]]
    fork.reset()
    with torch.no_grad():
        model(input_ids=ids[:1], past_key_values=fork)
    assert torch.allclose(fork.layers[0].key._past(), side._past()[:1], atol=1e-5)


def test_states_must_be_seen() -> None:
    cache = KVCache(llama(), build_method("kivi/kvsink"))
    x = torch.zeros(1, 2, 4, 128)
    with pytest.raises(
        Unsupported, match=r"^layer 0 keys: method.policies.sink_detection needs the states that enter the layer"
    ):
        cache.layers[0].update(x, x)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["policies.sink_detection.share=0"],
            "method.policies.sink_detection of kivi/kvsink: share=0: above 0, below 1",
        ),
        (
            ["policies.sink_detection.share=1"],
            "method.policies.sink_detection of kivi/kvsink: share=1: above 0, below 1",
        ),
    ],
)
def test_what_cannot_be_is_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(KvqError, match=says) as caught:
        build_method("kivi/kvsink", overrides=overrides)
    assert "\n" not in str(caught.value)


def test_attention_on_codes_is_refused() -> None:
    with pytest.raises(Unsupported, match="sink_detection of kivi/kvsink finds tokens"):
        KVCache(llama(), build_method("kivi/kvsink"), attention="packed")


def test_the_key_has_it_where_something_is_quantized() -> None:
    def method(*overrides: str) -> dict[str, Any]:
        return canonical(resolve(compose(list(overrides))), "", "")["method"]

    assert method("method=kivi/kvsink")["sink_detection"]["share"] == 0.3
    assert "sink_detection" not in method("method=kivi")
    assert "sink_detection" not in method("method=kivi/kvsink", "method.key=null", "method.value=null")


def test_a_part_is_a_detection() -> None:
    with pytest.raises(ConfigError, match=r"expected a kvq.methods.policies.Policy"):
        build_method("kivi", overrides=["+policies.sink_detection={_target_: kvq.codecs.Hadamard}"])
