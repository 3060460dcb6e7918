"""KVTC's basis of all layers: its tables and what a cache reads, against loops over fp64 numbers; forks and files."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq
from kvq import KVCache
from kvq.calibration.collect import collect_states
from kvq.calibration.files import Calibration, bind_tables
from kvq.calibration.fit import calibrate
from kvq.config.method import CalibrationConfig
from kvq.errors import DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.layers import head_dims_of
from kvq.models.load import LoadedModel
from kvq.models.weights import weights_name
from kvq.tasks.scoring import (
    holding_method,
    score_continuation,
    scoring_bounds,
)
from kvq_zoo.tests import kvtc_oracle as oracle
from tests.families import family
from tests.random_models import llama, token_ids

LAYERS, DIM, HEADS, SIZE = 3, 8, 2, 24
WIDE = LAYERS * HEADS * DIM
NAME, CODED = "kvtc/all_layers", "kvtc/all_layers_deflate"
BITS, SIZES = 1.5, (1, 16)


@functools.cache
def loaded() -> LoadedModel:
    return LoadedModel(llama(layers=LAYERS, head_dim=DIM).double(), torch.device("cpu"))


@functools.cache
def made(name: str = NAME, samples: int = 4, length: int = 64, *overrides: str) -> tuple[Method, Calibration]:
    """A method, calibrated on random tokens."""
    sizes = [f"{side}.quantizer.sizes=[{','.join(map(str, SIZES))}]" for side in ("key", "value")]
    method = kvq.build_method(name, BITS, DIM, [f"residual.size={SIZE}", *sizes, *overrides])
    settings = CalibrationConfig(samples=samples, length=length)
    found = calibrate(loaded(), method, token_ids(length, seed=2, batch=samples), settings)
    return bind_tables(method, found, weights_name(loaded().model), [DIM] * LAYERS), found


def rows_of(states: Any, side: str) -> np.ndarray:
    """`[tokens, layers x heads x channels]`, keys before RoPE."""
    own = []
    for layer in states.values():
        x = getattr(layer, side)
        own.append((layer.rope.rotate(x, back=True) if side == "key" else x).transpose(0, 1).flatten(1))
    return torch.cat(own, 1).numpy()


def groups_of(tables: dict[str, Tensor], side: str) -> list[oracle.Group]:
    names = (f"{side}.0.quantizer.{name}" for name in ("sizes", "kinds"))
    return list(zip(*(tables[name].tolist() for name in names), strict=True))


@pytest.mark.parametrize(("samples", "length"), [(4, 64), (2, 20)])
def test_one_basis_and_one_program_for_all_layers(samples: int, length: int) -> None:
    """Of 240 tokens with 48 channels, and of 32, which have no more than 31 components."""
    tables = made(NAME, samples, length)[1].tensors
    assert {name.split(".")[1] for name in tables} == {"0"}
    states = collect_states(loaded(), token_ids(length, seed=2, batch=samples), None, False, 0)
    seen = torch.arange(samples * length).view(samples, length)[:, 4:].flatten().numpy()
    for side in ("key", "value"):
        rows = rows_of(states, side)[seen]
        mean, basis = oracle.components(rows)
        groups, used = groups_of(tables, side), tables[f"{side}.0.components.basis"].shape[1]
        assert tables[f"{side}.0.components.mean"].shape == (1, WIDE)
        np.testing.assert_allclose(tables[f"{side}.0.components.mean"][0], mean, atol=1e-6)
        np.testing.assert_allclose(tables[f"{side}.0.components.basis"], basis[:, :used], atol=2e-5)
        z = ((rows - mean) @ basis)[:: max(1, len(rows) // 256), : min(len(rows), WIDE)]
        best = oracle.best(oracle.errors_of(z, SIZES), z.shape[1], SIZES, int(BITS * WIDE))
        while best and best[-1][1] == 0:
            best.pop()
        assert groups == best
        assert 0.6 * BITS * WIDE < sum(map(oracle.cost, groups)) <= BITS * WIDE


@torch.no_grad()
@pytest.mark.parametrize(("name", "packed"), [(NAME, 42), (CODED, 32)])
def test_what_layers_read_is_what_loops_make_of_all_layers(name: str, packed: int) -> None:
    """Of a prompt and tokens after it: each token of each layer from the states of all, within 1e-9."""
    method, found = made(name)
    cache, ids = KVCache(loaded(), method), token_ids(71)
    fed: list[list[Any]] = [[] for _ in range(LAYERS)]
    read: dict[int, Any] = {}
    for index, layer in enumerate(cache.kv_layers):
        _watch(layer, fed[index], read, index)
    for chunk in (ids[:, :50], *ids[:, 50:70].split(1, 1)):
        loaded().model(input_ids=chunk, past_key_values=cache)
    assert [layer.key.packed_tokens for layer in cache.kv_layers] == [packed] * LAYERS
    loaded().model(input_ids=ids[:, 70:], past_key_values=cache)
    for place, side in enumerate(("key", "value")):
        rope = cache.kv_layers[0].key._rotations.narrow(0, packed) if side == "key" else None

        def rows(parts: list[Tensor], rope: Any = rope) -> Tensor:
            own = [part[:, :, 4 : 4 + packed] for part in parts]
            turned = [part if rope is None else rope.rotate(part, back=True) for part in own]
            return torch.cat(turned, 1)[0].transpose(0, 1).flatten(1)

        given = rows([torch.cat([update[place] for update in own], 2) for own in fed]).numpy()
        mean, basis = (found.tensors[f"{side}.0.components.{table}"].double().numpy() for table in ("mean", "basis"))
        groups, z = groups_of(found.tensors, side), (given - mean) @ basis
        expected = np.stack([oracle.token(own.tolist(), groups) @ basis.T + mean[0] for own in z])
        np.testing.assert_allclose(rows([read[index][place] for index in range(LAYERS)]).numpy(), expected, atol=1e-9)
        assert np.abs(expected - given).max() > 0.1


def _watch(layer: Any, fed: list[Any], read: dict[int, Any], index: int) -> None:
    update = layer.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        fed.append(args[:2])
        read[index] = update(*args, **kwargs)
        return read[index]

    layer.update = watched


def test_multiplications_count_once() -> None:
    """Those of the basis over all elements of a token; of a layer's own bases, each layer's over its own."""
    method, found = made()
    expected = sum(found.tensors[f"{side}.0.components.basis"].numel() for side in ("key", "value")) / (2 * WIDE)
    assert found.metrics({}, method)["decode_multiplications"] == pytest.approx(expected)
    method, found = made("kvtc")
    bases = [table.numel() for name, table in found.tensors.items() if name.endswith(".basis")]
    assert len(bases) == 2 * LAYERS
    assert found.metrics({}, method)["decode_multiplications"] == pytest.approx(sum(bases) / (2 * WIDE))


def test_bytes_count_once() -> None:
    method, found = made()
    cache = KVCache(loaded(), method)
    with torch.no_grad():
        loaded().model(input_ids=token_ids(70), past_key_values=cache)
    each = 0
    for side in ("key", "value"):
        groups = groups_of(found.tensors, side)
        codes = sum(size * kind for size, kind in groups)
        each += -(-codes // 8) + 4 * sum(kind > 0 for _, kind in groups)
    assert cache.packed_bytes == 42 * each
    assert cache.bits_per_element == pytest.approx(8 * each / (2 * WIDE))
    assert cache.bits_per_element <= BITS + 1 / WIDE * 7
    assert cache.kv_layers[2].key.bits_per_element == cache.kv_layers[0].key.bits_per_element
    cache.reset()
    assert (cache.nbytes, cache.packed_bytes) == (0, 0)


@torch.no_grad()
@pytest.mark.parametrize("name", [NAME, CODED])
@pytest.mark.parametrize("policy", ["sliding", "block"])
def test_chunks_read_what_single_tokens_read(name: str, policy: str) -> None:
    method = made(name, 4, 64, f"residual.policy={policy}")[0]
    ids, found = token_ids(110, batch=2), []
    for bounds in (
        [(at, at + 1) for at in range(110)],
        scoring_bounds(method, 110),
        scoring_bounds(method, 110, 7),
    ):
        cache = KVCache(loaded(), method)
        cache.token_by_token = True
        assert max(end - start for start, end in bounds) <= SIZE
        parts = [loaded().model(input_ids=ids[:, a:b], past_key_values=cache).logits for a, b in bounds]
        found.append((torch.cat(parts, 1), cache.packed_bytes))
    for logits, packed in found[1:]:
        torch.testing.assert_close(logits, found[0][0], atol=1e-9, rtol=0)
        assert packed == found[0][1]
    plain = loaded().model(input_ids=ids).logits
    assert float((plain - found[0][0])[:, :SIZE].abs().max()) < 1e-9 < float((plain - found[0][0]).abs().max())


@torch.no_grad()
def test_a_prompt_is_read_in_full_precision_and_then_packed_in_every_layer() -> None:
    method = made()[0]
    cache, ids = KVCache(loaded(), method), token_ids(100)
    torch.testing.assert_close(
        loaded().model(input_ids=ids, past_key_values=cache).logits, loaded().model(input_ids=ids).logits
    )
    sides = [getattr(layer, side) for layer in cache.kv_layers for side in ("key", "value")]
    assert {(side.sink_tokens, side.packed_tokens, side.residual_tokens) for side in sides} == {(4, 72, SIZE)}
    empty = KVCache(loaded(), holding_method(method))
    rows = list(score_continuation(loaded(), empty, method.residual, ids, 60))
    assert rows[0].targets.shape == (1, 40)
    assert {layer.value.packed_tokens for layer in empty.kv_layers} == {55}


@torch.no_grad()
def test_tokens_in_full_precision_are_taken_back() -> None:
    cache, ids = KVCache(loaded(), made()[0]), token_ids(40)
    loaded().model(input_ids=ids[:, :20], past_key_values=cache)
    expected = loaded().model(input_ids=ids[:, 20:], past_key_values=cache.fork()).logits
    loaded().model(input_ids=ids[:, :6], past_key_values=cache)
    cache.crop(-6)
    assert torch.equal(loaded().model(input_ids=ids[:, 20:], past_key_values=cache).logits, expected)
    with pytest.raises(Unsupported, match="cannot remove 2 tokens"):
        cache.crop(-2)


@torch.no_grad()
def test_what_is_refused() -> None:
    method = made()[0]
    model, ids = loaded().model, token_ids(80)
    cache = KVCache(loaded(), method)
    cache.token_by_token = True
    with pytest.raises(Unsupported, match=f"layer 0 keys: all layers are encoded .*at most {SIZE} at once"):
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(Unsupported, match="packed"):
        KVCache(loaded(), method, attention="packed")
    for changed in (
        {"full_precision_layers": {"value": [0]}},
        {"residual": method.residual.for_parallel_scoring()},
    ):
        with pytest.raises(Unsupported, match="all layers"):
            KVCache(loaded(), dataclasses.replace(method, **changed))  # type: ignore[arg-type]
    fresh = KVCache(loaded(), method)
    with pytest.raises(Unsupported, match="encodes all layers together"):
        fresh.pad([1, 0])
    with pytest.raises(Unsupported, match="cannot take tokens back"):
        fresh.activate_past_recording()


def test_layers_with_different_rotations_are_refused_before_any_token() -> None:
    gemma = family("gemma3")
    head_dims = head_dims_of(gemma.text_config)
    method = kvq.build_method(NAME, 2, head_dims[0])
    found = calibrate(gemma, method, token_ids(32, batch=2), CalibrationConfig(samples=2, length=32))
    with pytest.raises(Unsupported, match="layer 0 keys and those of other layers have different rotary embeddings"):
        KVCache(gemma, bind_tables(method, found, weights_name(gemma.model), head_dims))


@torch.no_grad()
def test_values_that_are_not_finite_are_told_by_their_layer() -> None:
    cache = KVCache(loaded(), made()[0])
    loaded().model(input_ids=token_ids(26), past_key_values=cache)
    cache.kv_layers[1].value._full.view[0, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="layer 1 values: NaN"):
        loaded().model(input_ids=token_ids(3), past_key_values=cache)
