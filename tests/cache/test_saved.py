"""Caches on disk: what is loaded goes on bit for bit as what was saved, for every method."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq import KVCache, build_method
from kvq.errors import DataError, Unsupported
from kvq.methods.method import Method
from tests.cache.states import nearest_bits
from tests.calibrated import bound, keeping, random_states
from tests.golden.methods import METHODS, fitting, missing
from tests.presets import LIBRARIES, one_of_each
from tests.random_models import llama, token_ids

LAYERS, HEADS = 3, 2
PROMPT, CHUNK = 150, 110
"""A block of 128 tokens has left full precision where a file is written, and the next one leaves behind it."""
OWN = sorted(set(METHODS) - set(LIBRARIES))


@functools.cache
def model_of(dim: int) -> Any:
    return llama(layers=LAYERS, head_dim=dim, kv_heads=HEADS)


@functools.cache
def method_of(name: str, *overrides: str) -> tuple[Any, Method]:
    """A model, and a method that fits it; the tables of a calibrated one are of random states."""
    given = [*(setting.removeprefix("method.") for setting in fitting(name)), *overrides]
    bits = nearest_bits(name)
    if not build_method(name, bits=bits, overrides=given).needs_calibration:
        method = build_method(name, bits=bits, overrides=given)
        if method.policy("kept_keys") is not None:
            method = kept(method)
        return model_of(128), method
    method = build_method(name, bits=bits, head_dim=32, overrides=given)
    method = method if method.policy("kept_keys") is None else kept(method)
    return model_of(32), bound(method, random_states(HEADS, 32, 1024), LAYERS)


def kept(method: Method) -> Method:
    return keeping(method, dataclasses.replace(method.policy("kept_keys"), ids=(3, 7)))


@torch.no_grad()
def filled(model: Any, method: Method, batch: int = 1, **settings: Any) -> KVCache:
    """A cache that has read a prompt and two single tokens."""
    cache = KVCache(model, method, **settings)
    ids = token_ids(PROMPT + 2, batch=batch)
    for chunk in (ids[:, :PROMPT], ids[:, PROMPT:-1], ids[:, -1:]):
        model(input_ids=chunk, past_key_values=cache)
    return cache


@torch.no_grad()
def goes_on(model: Any, cache: KVCache, batch: int = 1) -> list[Tensor]:
    """Logits of a chunk and of single tokens behind it."""
    ids = token_ids(CHUNK + 2, seed=3, batch=batch)
    chunks = (ids[:, :CHUNK], ids[:, CHUNK:-1], ids[:, -1:])
    return [model(input_ids=chunk, past_key_values=cache).logits for chunk in chunks]


def same(model: Any, first: KVCache, second: KVCache, batch: int = 1) -> None:
    """Both hold the same bytes and go on with the same logits."""
    assert first.get_seq_length() == second.get_seq_length() == PROMPT + 2
    assert (first.nbytes, first.packed_bytes) == (second.nbytes, second.packed_bytes)
    assert first.effective_bits == second.effective_bits
    assert first.recompression == second.recompression
    for one, other in zip(goes_on(model, first, batch), goes_on(model, second, batch), strict=True):
        assert torch.equal(one, other)
    assert (first.nbytes, first.recompression) == (second.nbytes, second.recompression)


@pytest.mark.thin(12)
@pytest.mark.parametrize("name", one_of_each(OWN))
def test_loaded_forked_and_decoded_caches_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """A fork, whatever another one has written; and a cache that keeps decoded copies, in as many bytes."""
    model, method = method_of(name)
    cache = filled(model, method)
    cache.save(tmp_path / "one")
    loaded = KVCache.load(tmp_path / "one", model, method)
    loaded.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    goes_on(model, cache.fork())
    same(model, cache.fork(), loaded)
    same(model, cache, filled(model, method, keep_decoded=True))
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_caches_of_transformers_are_refused(name: str, tmp_path: Path) -> None:
    if missing(name):
        pytest.skip(f"needs {name}")
    model, method = method_of(name)
    with pytest.raises(Unsupported, match=rf"^method={name}: the state of transformers' own caches has no form"):
        filled(model, method).save(tmp_path / "one")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("kivi", ["sink_tokens=5"]),
        ("kvquant", ["sink_tokens=3"]),
        ("rtn", ["residual.policy=sliding", "residual.size=32", "sink_tokens=2"]),
        ("nsn", ["residual.policy=none"]),
        ("nsn", ["residual.size=0", "residual.policy=block"]),
    ],
)
def test_residuals_and_sinks(name: str, overrides: list[str], tmp_path: Path) -> None:
    model, method = method_of(name, *overrides)
    cache = filled(model, method, batch=2)
    cache.save(tmp_path / "one")
    same(model, cache, KVCache.load(tmp_path / "one", model, method), batch=2)


@pytest.mark.parametrize("name", ["kvquant_plus_plus/huffman", "kvtc/deflate", "kvtc/all_layers", "kvtc"])
def test_more_tokens_than_the_model_has_positions(name: str, tmp_path: Path) -> None:
    _, method = method_of(name)
    dim = 32 if method.needs_calibration else 128
    model = llama(layers=LAYERS, head_dim=dim, kv_heads=HEADS, positions=96)
    cache = filled(model, method)
    cache.save(tmp_path / "one")
    same(model, cache, KVCache.load(tmp_path / "one", model, method))


@pytest.mark.parametrize("settings", [{"keep_decoded": True}, {"attention": "packed"}])
def test_settings_of_a_cache_are_given_anew(settings: dict[str, Any], tmp_path: Path) -> None:
    model, method = llama(layers=LAYERS, head_dim=64, kv_heads=HEADS), build_method("kivi", bits=2, head_dim=64)
    cache = filled(model, method, **settings)
    cache.save(tmp_path / "one")
    loaded = KVCache.load(tmp_path / "one", model, method, **settings)
    same(model, cache, loaded)


@pytest.mark.parametrize("name", ["kivi", "h2o", "zipcache", "identity"])
def test_half_precision_states(name: str, tmp_path: Path) -> None:
    """Of a model in bfloat16, and of a cache in float16 under a model in float32."""
    model, method = method_of(name)
    half = llama(layers=LAYERS, head_dim=128, kv_heads=HEADS).to(torch.bfloat16)
    for one, dtype in ((half, None), (model, torch.float16)):
        cache = filled(one, method, dtype=dtype)
        cache.save(tmp_path / "one")
        loaded = KVCache.load(tmp_path / "one", one, method)
        assert loaded.dtype is dtype
        same(one, cache, loaded)


def test_a_fork_is_saved_alone_and_an_empty_cache_is_empty(tmp_path: Path) -> None:
    model, method = method_of("nsn")
    cache = filled(model, method)
    fork = cache.fork()
    goes_on(model, fork)  # rows that both share, and rows of the fork's own
    cache.save(tmp_path / "one")
    same(model, cache, KVCache.load(tmp_path / "one", model, method))
    KVCache(model, method).save(tmp_path / "none")
    empty = KVCache.load(tmp_path / "none", model, method)
    assert (empty.get_seq_length(), empty.nbytes, empty.is_initialized) == (0, 0, False)
    assert torch.equal(goes_on(model, empty)[0], goes_on(model, KVCache(model, method))[0])


def test_what_differs_is_named(tmp_path: Path) -> None:
    model, method = method_of("nsn")
    path = tmp_path / "one"
    filled(model, method).save(path)
    other = llama(layers=LAYERS, head_dim=128, kv_heads=HEADS, seed=1)
    for given, asked, differs in (
        (model, build_method("nsn", bits=2), r"method\.key\.quantizer\.bits=3, here it is 2"),
        (model, build_method("kivi", bits=3), r"method\.key\."),
        (model, build_method("fp16"), r"method\.key=.*, here it is null"),
        (model, build_method("nsn", bits=3, overrides=["residual.size=64"]), r"residual\.key\.size=128, here it is 64"),
        (model, build_method("nsn", bits=3, overrides=["sink_tokens=4"]), r"sink_tokens=null, here it is 4"),
        (other, method, r"model\.weights=\w+, here it is \w+"),
        (llama(layers=2, head_dim=128, kv_heads=HEADS), method, r"model\.head_dims="),
        (
            llama(layers=LAYERS, head_dim=128, kv_heads=HEADS).half(),
            method,
            r"model\.dtype=float32, here it is float16",
        ),
    ):
        with pytest.raises(DataError, match=differs) as raised:
            KVCache.load(path, given, asked)
        assert "\n" not in str(raised.value)


def test_other_tables_are_refused(tmp_path: Path) -> None:
    model, method = method_of("kvquant")
    filled(model, method).save(tmp_path / "one")
    plain = build_method("kvquant", bits=nearest_bits("kvquant"), head_dim=32)
    other = bound(plain, random_states(HEADS, 32, 1024, seed=6), LAYERS)
    with pytest.raises(DataError, match=r"method\.tables=\w+, here it is \w+"):
        KVCache.load(tmp_path / "one", model, other)
    with pytest.raises(Unsupported, match="not calibrated"):
        KVCache.load(tmp_path / "one", model, plain)


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = method_of("nsn")
    filled(model, method).save(tmp_path / "one")
    from kvq.results import record

    raised = {**record.declared_versions(), "TokenNorm": record.declared_versions()["TokenNorm"] + 1}
    monkeypatch.setattr(record, "declared_versions", lambda: raised)
    with pytest.raises(DataError, match=r"versions\.TokenNorm=1, here it is 2"):
        KVCache.load(tmp_path / "one", model, method)


def test_a_method_put_together_by_hand_has_no_name(tmp_path: Path) -> None:
    built = build_method("nsn")
    by_hand = Method("mine", built.key, built.value, built.residual, built.bits)
    with pytest.raises(Unsupported, match="method=mine: put together by hand"):
        KVCache(model_of(128), by_hand).save(tmp_path / "one")
