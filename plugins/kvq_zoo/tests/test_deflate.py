"""DEFLATE around codecs: the same reconstruction, the bytes that zlib makes, and a cache that goes on as without it."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.codecs import (
    Codec,
    DeltaQuantizer,
    LloydMaxQuantizer,
    PackedStore,
    Passthrough,
    RandomizedHadamard,
    TokenNorm,
    UniformQuantizer,
    Zero,
    rope_table,
)
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.kernels import build_linear_chain
from kvq.methods.method import Method
from kvq.results.metrics import METRICS
from kvq.tasks.measurement import STORED, storage_metrics
from kvq.tasks.memory import layout
from kvq_zoo.deflate import DeflateCodec
from tests.cache.test_saved import filled, goes_on, method_of, same
from tests.calibrated import build
from tests.properties import examples

NAME, HEAD = "kvtc/deflate", 5
"""The preset; and the bytes of a block beside its stream: a flag, and the stream's length."""


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def zlibs(raw: bytes) -> int:
    """Bytes of RFC 1951 at zlib's usual level: without zlib's header of 2 bytes and checksum of 4."""
    return min(len(zlib.compress(raw)) - 6, len(raw))


def raw_of(parts: dict[str, torch.Tensor], sequence: int) -> bytes:
    return b"".join(parts[name][sequence].contiguous().numpy().tobytes() for name in sorted(parts))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bits", [0.5, 1, 4])
def test_bytes_are_those_of_zlib(side: str, bits: float) -> None:
    """Of what `kvtc` stores of each block of each sequence; the last block fills up the shorter stream."""
    x = states(2, 2, 100, 64) * torch.logspace(1, -1, 64)
    x[1] = x[1].round()
    coded, plain = (getattr(build(name, x, bits), side) for name in (NAME, "kvtc"))
    rope = rope_table(100, 64)
    for size in (100, 16):
        packed, before = coded.encode(x, size, rope), plain.encode(x, size, rope)
        sizes = []
        for sequence in range(2):
            pieces = [
                plain.encode(x[:, :, start : start + size], None, rope.narrow(start, min(size, 100 - start)))
                for start in range(0, 100, size)
            ]
            sizes.append([zlibs(raw_of(piece.parts, sequence)) + 1 for piece in pieces])
        assert packed.nbytes == 2 * max(map(sum, sizes)) + 4 * 2 * len(pieces)
        assert packed.parts["size"][:, 0, :-1, 0].tolist() == [own[:-1] for own in sizes]
        assert coded.uncoded_bytes(packed) == before.nbytes
        assert torch.equal(coded.decode(packed, rope), plain.decode(before, rope))


def test_equal_tokens_are_small_and_random_ones_are_stored_as_they_are() -> None:
    codec = DeflateCodec({}, [], Passthrough(), 16)
    even = torch.ones(1, 2, 16, 64).half()
    bits = torch.randint(-(2**15), 2**15, even.shape, generator=torch.Generator().manual_seed(0)).short()
    uneven = torch.where(bits.view(torch.half).isfinite(), bits, 0).view(torch.half)
    small, raw = codec.encode(even), codec.encode(uneven)
    assert small.parts["stream"][0, 0, 0, 0] == 1
    assert small.nbytes < 0.02 * even.nbytes
    assert raw.nbytes == even.nbytes + HEAD
    assert bytes(raw.parts["stream"].flatten().tolist()) == b"\0" + uneven.numpy().tobytes()
    assert torch.equal(codec.decode(raw), uneven)
    nothing = DeflateCodec({}, [], Zero(), 16).encode(even)
    assert nothing.nbytes == HEAD


QUANTIZERS = {
    "uniform": lambda: UniformQuantizer(3, "per_token", 5),
    "per_channel": lambda: UniformQuantizer(2, "per_channel", 16),
    "lloyd_max": lambda: LloydMaxQuantizer(2),
    "whole": Passthrough,
    "nothing": Zero,
}


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_decoded_bit_for_bit(data: Any) -> None:
    """Any quantizer, shape, dtype; tokens that are zero or equal; blocks with a short tail; appended and selected."""
    quantizer = QUANTIZERS[data.draw(st.sampled_from(sorted(QUANTIZERS)))]()
    stages: Any = {"norm": TokenNorm(), "rotation": RandomizedHadamard(7)}
    plain = Codec(stages, ["norm", "rotation"], quantizer)
    coded = DeflateCodec(stages, ["norm", "rotation"], quantizer, data.draw(st.sampled_from([2, 5, 16])))
    lead = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    shape = (*lead, data.draw(st.integers(1, 40)), data.draw(st.sampled_from([8, 16])))
    block = data.draw(st.sampled_from([None, 1, 3, 16, 32]))
    x = states(
        *shape, seed=data.draw(st.integers(0, 99)), dtype=data.draw(st.sampled_from([torch.float32, torch.half]))
    )
    x[:, :, ::5], x[:1, :, 1::4] = 0, 1
    packed, before = coded.encode(x, block), plain.encode(x, block)
    assert torch.equal(coded.decode(packed), plain.decode(before))
    assert packed.nbytes == sum(part.nbytes for part in packed.parts.values())
    planes = coded.planes(packed)
    assert planes.runs == before.runs
    assert all(torch.equal(planes.parts[name], part) for name, part in before.parts.items())
    assert coded.uncoded_bytes(packed) == before.nbytes
    store, same = PackedStore(packed), PackedStore(before)
    store.append(coded.encode(x.flip(2), block))
    same.append(plain.encode(x.flip(2), block))
    both = plain.decode(same.packed)  # of as many blocks at once: products of other sizes round otherwise
    assert torch.equal(coded.decode(store.packed), both)
    turned = torch.arange(shape[0]).flip(0)
    assert torch.equal(coded.decode(store.select(turned).packed), plain.decode(same.select(turned).packed))


class Grouped(Codec):
    """Tokens leave a sliding residual 16 at a time, as they do under DEFLATE."""

    token_group = 16


def plain_of(method: Method) -> Method:
    """The method without DEFLATE, tokens in the same groups."""
    bound = {
        side: [Grouped(dict(codec.stages), [name for name, _ in codec.stages], codec.quantizer) for codec in codecs]
        for side, codecs in method.bound.items()
    }
    return dataclasses.replace(method, bound=bound)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_reads_what_it_reads_without(batch: int) -> None:
    """Token by token, forked, reordered, cropped and after a file; records know the bits before."""
    model, method = method_of(NAME, "residual.size=32")
    cache, plain = filled(model, method, batch), filled(model, plain_of(method), batch)
    stored = storage_metrics(cache, batch)
    assert stored["uncoded_bits"] == pytest.approx(plain.bits_per_element)
    assert {"uncoded_bits"} <= METRICS.keys() & set(STORED)
    assert "uncoded_bits" not in storage_metrics(plain, batch)
    key: Any = cache.layers[0].key  # type: ignore[attr-defined]
    assert (key.sink_tokens, key.packed_tokens, key.residual_tokens) == (4, 112, 36)
    fork = cache.fork()
    for one, other in zip(goes_on(model, fork, batch), goes_on(model, plain.fork(), batch), strict=True):
        assert torch.equal(one, other)
    order = torch.arange(batch).flip(0)
    for one in (cache, plain):
        one.batch_select_indices(order)
        one.crop(-2)
    for one, other in zip(goes_on(model, cache, batch), goes_on(model, plain, batch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bits", [0.5, 2])
def test_a_file_goes_on_bit_for_bit(bits: float, tmp_path: Path) -> None:
    """Also at bits too few for a group, where a block of 16 tokens has the five bytes of no bytes."""
    model, method = method_of(NAME, "residual.size=32", f"key.quantizer.bits={bits}", f"value.quantizer.bits={bits}")
    cache = filled(model, method, 2)
    cache.save(tmp_path / "one")
    loaded = kvq.KVCache.load(tmp_path / "one", model, method)
    loaded.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    same(model, cache, loaded, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda parts: parts["stream"][0, 0, 1:9].fill_(255), "a stream of DEFLATE is damaged"),
        (lambda parts: parts["size"].fill_(3), "damaged|a stream of . bytes"),
        (lambda parts: parts["stream"][0, 0, 0].fill_(0), r"a stream of \d+ bytes where 2048 belong"),
    ],
)
def test_damaged_streams_are_told(change: Any, told: str) -> None:
    codec = DeflateCodec({}, [], Passthrough(), 16)
    packed = codec.encode(torch.arange(1024.0).div(64).floor().half().view(1, 1, 16, 64))
    change(packed.parts)
    with pytest.raises(DataError, match=told):
        codec.decode(packed)


def test_groups_of_tokens() -> None:
    """16 leave a sliding residual together; where tokens of a block share statistics, blocks leave."""
    method = kvq.build_method(NAME, 2, 64)
    assert method.key is not None
    assert method.residual.key.schedule(method.key.token_group) == (128, 16)
    assert DeflateCodec({}, [], UniformQuantizer(2, "per_channel", None), 16).token_group is None
    assert method.key.with_stages(method.key.stages).token_group == 16


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DeflateCodec({}, [], Zero(), 1), ConfigError, "tokens=1: at least 2"),
        (
            lambda: DeflateCodec(
                {}, [], DeltaQuantizer(Codec({}, [], LloydMaxQuantizer(4)), anchor_every=8, anchor_threshold=0.5)
            ),
            Unsupported,
            "the bytes of a DeltaQuantizer follow the values",
        ),
        (
            lambda: build_linear_chain(DeflateCodec({}, [], LloydMaxQuantizer(2))),
            Unsupported,
            "cache.attention=packed: DeflateCodec stores",
        ),
        (
            lambda: layout(DeflateCodec({}, [], LloydMaxQuantizer(2)), 64, 1, 64, torch.float16, 32),
            Unsupported,
            "its bytes follow the values",
        ),
        (
            lambda: kvq.build_method(NAME, 2, 64, ["residual.size=0"]),
            Unsupported,
            "residual.size=0 under sliding",
        ),
    ],
)
def test_what_it_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_rows_as_long_as_their_values_want_are_refused() -> None:
    """Lists of outliers are padded to the longest of a block."""
    method = build("kvquant", states(1, 2, 256, 32), 3)
    assert method.key is not None
    codec = DeflateCodec(dict(method.key.stages), [name for name, _ in method.key.stages], method.key.quantizer)
    with pytest.raises(Unsupported, match="the bytes of a NonUniformQuantizer follow the values"):
        codec.encode(10 * states(1, 2, 32, 32), None, rope_table(32, 32))
