"""Keys and values as one store: as two stores of the same codec, where it takes each head alone."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvq import KVCache, build_method
from kvq.cache.layer import KVCacheLayer
from kvq.cache.padded import JoinedLayer
from kvq.calibration.fit import calibrate_on_text
from kvq.codecs import Codec, StoredWithKeys, UndoRope, calibrated_parts, rope_table
from kvq.config.method import Residual
from kvq.errors import ConfigError, KvqError, Unsupported
from kvq.methods.kept_keys import make_side
from kvq.methods.method import Method
from kvq.tasks.measurement import storage_metrics
from tests.cache.states import states
from tests.cache.test_padded import padded, prompts, written
from tests.calibrated import fitted, random_states
from tests.properties import examples
from tests.random_models import llama, random_llama, token_ids

RESIDUALS = {
    "block": ["residual.size=6"],
    "whole": ["residual.size=6", "residual.prefill_block=whole"],
    "sliding": ["residual.policy=sliding", "residual.size=6"],
    "none": ["residual.policy=none", "residual.size=6"],
}


def both_ways(*overrides: str, sinks: int = 0) -> tuple[Method, Method]:
    """A method that stores keys and values of a token together, and one with two stores of the same codec."""
    method = build_method("turboquant", bits=3, head_dim=32, overrides=["residual.size=6", *overrides])
    apart = dataclasses.replace(method, value=method.key, sink_tokens=sinks)
    joined = dataclasses.replace(apart, value=StoredWithKeys())
    joined.check_joined()
    return joined, apart


def layers(*overrides: str, sinks: int = 0, window: int | None = None) -> list[KVCacheLayer]:
    method = both_ways(*overrides)[1]
    sides = [make_side(method.key, method.residual.key, f"layer 0 {name}", False, sinks) for name in "abc"]
    return [JoinedLayer(sides[0], window), KVCacheLayer(*sides[1:], window)]


def same(one: KVCacheLayer, other: KVCacheLayer) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for name in ("packed_bytes", "residual_bytes"):
        sizes = [sum(getattr(side, name) for side in (layer.key, layer.value)) for layer in (one, other)]
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("residual", RESIDUALS)
@settings(max_examples=examples(10))
@given(chunks=st.lists(st.integers(1, 14), min_size=1, max_size=4), sinks=st.sampled_from([0, 2]), steps=st.booleans())
def test_a_joined_layer_reads_what_two_sides_read(residual: str, chunks: list[int], sinks: int, steps: bool) -> None:
    """Also of a fork, and after a choice of sequences."""
    pair = layers(*RESIDUALS[residual], sinks=sinks)
    keys, values = (states(sum(chunks) + 5, batch=2, seed=seed) for seed in (1, 2))
    for start, end in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        read = [updated(layer, keys[:, :, start:end], values[:, :, start:end], steps) for layer in pair]
        assert all(map(torch.equal, *read))
        same(*pair)
    forks = [layer.fork() for layer in pair]
    for layer in pair:
        layer.batch_select_indices(torch.tensor([1, 0, 1]))
    order = torch.tensor([1, 0, 1])
    for group, own in ((pair, order), (forks, torch.tensor([0, 1]))):
        read = [updated(layer, keys[own, :, end:], values[own, :, end:], steps) for layer in group]
        assert all(map(torch.equal, *read))
        same(*group)


def updated(layer: KVCacheLayer, keys: Tensor, values: Tensor, steps: bool) -> tuple[Tensor, Tensor]:
    layer.token_by_token = steps
    layer.columns_for(keys.shape[2], keys.device, None)
    return layer.update(keys, values)


@settings(max_examples=examples(20))
@given(head=st.integers(0, 6), candidates=st.integers(1, 9), remove=st.integers(0, 9), before=st.integers(0, 14))
def test_a_recorded_update_is_taken_back(head: int, candidates: int, remove: int, before: int) -> None:
    remove = min(remove, candidates)
    pair = layers()
    keys, values = (states(before + head + candidates + 3, seed=seed) for seed in (1, 2))
    middle, end = before, before + head + candidates
    for layer in pair:
        if before:
            layer.update(keys[:, :, :middle], values[:, :, :middle])
        layer.record(True)
        layer.expect_candidates(candidates)
        layer.columns_for(head + candidates, keys.device, None)
    read = [layer.update(keys[:, :, middle:end], values[:, :, middle:end]) for layer in pair]
    assert all(map(torch.equal, *read))
    for layer in pair:
        layer.crop(-remove)
        layer.record(False)
    same(*pair)
    read = [layer.fork().update(keys[:, :, end:], values[:, :, end:]) for layer in pair]
    assert all(map(torch.equal, *read))


def test_what_a_window_hides_is_hidden() -> None:
    pair = layers(window=9)
    keys, values = (states(40, seed=seed) for seed in (1, 2))
    for start in range(0, 40, 5):
        read = [layer.update(keys[:, :, start : start + 5], values[:, :, start : start + 5]) for layer in pair]
        assert all(map(torch.equal, *read))
        same(*pair)
    assert pair[0].key.dropped


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [2, 4])  # of 4 heads
@pytest.mark.parametrize("overrides", RESIDUALS.values(), ids=RESIDUALS)
def test_a_model_writes_the_same_and_a_file_goes_on(overrides: list[str], kv_heads: int, tmp_path: Path) -> None:
    model = llama(layers=2, head_dim=32, kv_heads=kv_heads)
    joined, apart = both_ways(*overrides, sinks=1)
    caches = [KVCache(model, method) for method in (joined, apart)]
    ids = token_ids(40, batch=2)
    for start, end in ((0, 17), (17, 39), (39, 40)):
        logits = [model(input_ids=ids[:, start:end], past_key_values=cache).logits for cache in caches]
        assert torch.equal(*logits)
    assert caches[0].nbytes == caches[1].nbytes
    stored = [storage_metrics(cache, 2) for cache in caches]
    assert stored[0] == stored[1]
    settings = {**joined.settings, "value": {"_target_": "kvq.codecs.StoredWithKeys"}}
    named = dataclasses.replace(joined, settings=settings)
    first = KVCache(model, named)
    model(input_ids=ids, past_key_values=first)
    first.save(tmp_path / "one")
    loaded = KVCache.load(tmp_path / "one", model, named)
    more = token_ids(9, seed=4, batch=2)
    assert loaded.nbytes == first.nbytes
    assert torch.equal(*(model(input_ids=more, past_key_values=cache).logits for cache in (first, loaded)))


def test_a_padded_batch_is_as_its_sequences() -> None:
    loaded = random_llama()
    method = build_method("turboquant", bits=3, head_dim=128, overrides=["residual.size=6"])
    method = dataclasses.replace(method, value=StoredWithKeys())
    tokens, mask = padded(prompts())
    ids, _, _ = written(loaded, method, tokens, mask)
    for row, prompt in enumerate(prompts()):
        own, _, _ = written(loaded, method, prompt, torch.ones_like(prompt))
        assert torch.equal(ids[row], own[0])


def test_rope_is_undone_for_the_keys_alone() -> None:
    x, rope = random_states(4, 32, 20).double(), rope_table(20, 32)
    stage = UndoRope(before_values=True)
    found = stage.forward(x, rope=rope)[0]
    assert torch.equal(found, torch.cat([rope.rotate(x[:, :2], back=True), x[:, 2:]], 1))
    torch.testing.assert_close(stage.inverse(found, {}, rope=rope), x)


def test_the_codec_is_one_transform_of_both() -> None:
    """At 8 bits it is near the states; at fewer, its components are those of keys and values joined."""
    x, rope = random_states(4, 32, 256), rope_table(256, 32)
    for bits, most in ((8, 0.02), (2, 0.6)):
        method = build_method("waterfill_kv", bits=bits, head_dim=32)
        assert method.key is not None
        codec = fitted(method.key, x)
        packed = codec.encode(x, 32, rope)
        assert packed.nbytes <= x[0, :, :, 0].numel() * 32 * (bits + 8 / 128) / 8
        error = (codec.decode(packed, rope) - x).square().mean() / (x - x.mean(2, keepdim=True)).square().mean()
        assert float(error) < most


def calibrated(name: str, bits: float, model: Any) -> Method:
    method = build_method(name, bits=bits, head_dim=32)  # type: ignore[arg-type]
    return calibrate_on_text(model, method, "x" * 400, Letters(), samples=2, length=80)


class Letters:
    """A tokenizer whose text is noise."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return token_ids(len(text), seed=9)[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("bits", [0.75, 2.25])
def test_calibration_shares_bits_over_keys_with_values(bits: float) -> None:
    """The mean width is that asked for, of twice as many components, and strings have as many bits."""
    model = llama(layers=2, head_dim=32)
    method = calibrated("waterfill_kv", bits, model)
    widths = [calibrated_parts(codec)["quantizer"].tables["widths"] for codec in method.bound["key"] if codec]
    total = torch.cat(widths)
    assert set(method.bound) == {"key"}
    assert len(total) == 2 * 2 * 2 * 32
    assert int(total.sum()) == round(bits * len(total))
    cache = KVCache(model, method)
    model(input_ids=token_ids(33), past_key_values=cache)
    assert cache.packed_bytes == 32 * sum(-(-int(own.sum()) // 8) for own in widths)
    assert storage_metrics(cache, 1)["value_bits"] == storage_metrics(cache, 1)["key_bits"] == cache.bits_per_element


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("waterfill_kv", ["key.stages.undo_rope.before_values=false"]),
        ("waterfill_kv", ["value=null"]),
        ("waterfill", ["+key.stages.undo_rope.before_values=true"]),
    ],
)
def test_rope_is_undone_before_values_where_there_are_values(name: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"undo_rope.before_values=(True|False): true where values are stored"):
        build_method(name, bits=2, head_dim=32, overrides=overrides)


@pytest.mark.parametrize("name", ["kvtc", "kvquant/dense"])
def test_tables_of_keys_alone_are_refused(name: str) -> None:
    method = build_method(name, bits=2, head_dim=32)
    method = dataclasses.replace(method, value=StoredWithKeys(), residual=Residual(*[method.residual.key] * 2))
    with pytest.raises(ConfigError, match=r"tables are of keys alone|before_values"):
        method.check_joined()


def test_packed_attention_and_a_codec_of_values_alone_are_refused() -> None:
    model, (joined, _) = llama(layers=1, head_dim=32), both_ways()
    with pytest.raises(Unsupported, match=r"value of .* is stored with the keys"):
        KVCache(model, joined, attention="packed")
    values: Codec = StoredWithKeys()
    with pytest.raises(KvqError, match="values are stored with the keys"):
        values.encode(states(4))
