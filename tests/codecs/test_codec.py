"""Chains: their order, their blocks, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codecs import (
    Codec,
    Hadamard,
    LloydMaxQuantizer,
    Passthrough,
    RandomRotation,
    ScalarQuantizer,
    TokenNorm,
    TrellisQuantizer,
    UniformQuantizer,
    trellis,
)
from kvq.codecs.packed import unpack_parts
from kvq.codecs.rotations import per_block
from kvq.codecs.trellis import Layout, read, write
from tests.cache.states import nearest_bits
from tests.calibrated import build
from tests.codecs.oracles import block


def rounded(bits=3, axis="per_channel", **settings):
    return UniformQuantizer(bits, axis, **settings)


def oscar(order=("hadamard", "norm"), **dropped):
    return Codec({"hadamard": Hadamard(), "norm": TokenNorm(), **dropped}, list(order), rounded(group_size=4))


@pytest.mark.parametrize("order", [["hadamard", "norm"], ["hadamard"]])
def test_null_stages_are_dropped_whether_named_in_the_order_or_not(order):
    x = block(2, 8, 16)
    dropped = oscar(order, norm=None).encode(x)
    alone = Codec({"hadamard": Hadamard()}, ["hadamard"], rounded(group_size=4)).encode(x)
    assert set(dropped.parts) == set(alone.parts)
    assert all(torch.equal(dropped.parts[name], alone.parts[name]) for name in alone.parts)


def test_the_order_is_the_order():
    """A joint norm and a per-channel quantizer on either side of a rotation are different codecs."""
    x = block(2, 8, 16)
    x[..., 0] += 5
    for order in (["a", "b"], ["b", "a"]):
        stages = {"a": RandomRotation(1), "b": RandomRotation(2)}
        seen = x
        for name in order:
            seen = stages[name].forward(seen)[0]
        codec = Codec(stages, order, rounded())
        plain = Codec({}, [], rounded())
        for name, part in plain.encode(seen).parts.items():
            assert torch.equal(codec.encode(x).parts[name], part)


def test_views_encode_like_copies():
    """What a model hands over is a transposed view."""
    x = block(3, 9, 16).transpose(1, 2).contiguous().transpose(1, 2)
    assert not x.is_contiguous()
    assert torch.equal(oscar().decode(oscar().encode(x)), oscar().decode(oscar().encode(x.contiguous())))


def test_encoding_touches_neither_its_input_nor_later_changes_of_it():
    x = block(2, 8, 16)
    before = x.clone()
    for codec in (oscar(), Codec({}, [], Passthrough()), Codec({}, [], rounded(8))):
        packed = codec.encode(x)
        assert torch.equal(x, before)
        out = codec.decode(packed)
        x.zero_()
        assert torch.equal(codec.decode(packed), out)
        out.zero_()
        assert bool(codec.decode(packed).any())
        x.copy_(before)


@given(tokens=st.integers(1, 50), blocks=st.integers(1, 4))
def test_long_texts_are_coded_in_pieces_of_whole_blocks_as_at_once(tokens, blocks):
    x, codec = block(2, tokens, 16), oscar()
    at_once = codec.encode(x, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvq.codecs.codec.ELEMENTS_AT_ONCE", blocks * x[:, :, :8].numel())
        in_pieces = codec.encode(x, 8)
        assert in_pieces.runs == at_once.runs
        assert all(torch.equal(in_pieces.parts[name], at_once.parts[name]) for name in at_once.parts)
        decoded = codec.decode(in_pieces)
    assert torch.equal(decoded, codec.decode(at_once))


# One of each way to turn rotated states into codes, token by token.
ROTATED = [
    *("turboquant/hadamard", "turboquant/prod_keys", "kvquant_plus_plus", "nsnquant", "oscar", "kivi_had", "quarot"),
    *("rotatekv", "polarquant/hadamard", "engine/llamacpp_q4_0", "engine/llamacpp_q4_1", "engine/exllama3_4"),
    *("engine/lmdeploy_42", "engine/vllm_turboquant_3bit_nc", "engine/vllm_int4_per_token_head"),
]
GENERATOR = torch.Generator().manual_seed(4)
FITTED = torch.randn(1, 2, 128, 128, generator=GENERATOR)
# Small whole numbers: one rotated coordinate in fifty is 0 but for rounding.
STATES = torch.randint(-3, 4, (1, 2, 64, 128), generator=GENERATOR).bfloat16()


@pytest.mark.parametrize("name", ROTATED)
def test_tokens_alone_are_as_tokens_together(name):
    method = build(name, FITTED, nearest_bits(name))
    codecs = [codec for codec in (method.key, method.value) if codec.token_group == 1 and not codec.uses_rope]
    for codec in codecs:
        whole = codec.decode(codec.encode(STATES))[:, :, :12]
        for size in (1, 2, 3):
            cut = [codec.decode(codec.encode(piece)) for piece in STATES[:, :, :12].split(size, 2)]
            assert torch.equal(torch.cat(cut, 2), whole), size


def test_a_product_of_few_rows_is_that_of_many():
    matrix = torch.linalg.qr(torch.randn(128, 128, generator=GENERATOR))[0]
    whole = per_block(FITTED, matrix)
    for rows in range(1, 12):
        assert torch.equal(per_block(FITTED[:, :, :rows], matrix), whole[:, :, :rows])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_tie_but_for_rounding_goes_up(bits):
    """Of 16-bit states only: a rounding of a sum is far below their precision, and far above that of fp32 states'."""
    quantizer = LloydMaxQuantizer(bits)
    levels = quantizer.levels(128, torch.float32)
    middles = (levels[1:] + levels[:-1]) / 2
    middles[len(middles) // 2] = 0
    x = torch.zeros(1, 128)
    x[0, : len(middles)] = middles
    for dtype, below, step in (
        (torch.bfloat16, 1e-7, 1),
        (torch.float16, 1e-7, 1),
        (torch.float32, 1e-7, 0),
        (torch.bfloat16, 1e-5, 0),
    ):
        codes = unpack_parts(quantizer.encode(x - below, dtype), bits, 1)[0, : len(middles)]
        assert codes.tolist() == [at + step for at in range(len(middles))], (dtype, below)


ROOT = Path(__file__).parents[2]
BOTH = (ScalarQuantizer, TrellisQuantizer)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(widths=st.lists(st.integers(0, 8), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_strings_hold_their_codes(widths: list[int], seed: int) -> None:
    layout = Layout(tuple(widths))
    codes = torch.randint(0, 256, (3, len(widths)), generator=torch.Generator().manual_seed(seed))
    codes = codes & torch.tensor([(1 << width) - 1 for width in widths])
    strings = write(codes, layout)
    assert strings.shape == (3, math.ceil(sum(widths) / 8))
    assert torch.equal(read(strings, layout, widths), codes.int())


@pytest.mark.parametrize("memory", [6, 8, pytest.param(10, marks=pytest.mark.long)])
def test_the_compiled_search_is_that_of_torch(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    most = min(memory, 8)
    widths = tuple(torch.randint(0, most + 1, (40,), generator=torch.Generator().manual_seed(1)).tolist())
    layout, x, weights = Layout(widths), normal(9, 40), normal(40, seed=2).abs()
    compiled = trellis.encode(x, weights, layout, memory)
    levels = trellis.decode(compiled, layout, memory, torch.float32)
    monkeypatch.setattr(trellis, "loops_for", lambda device: None)
    assert torch.equal(trellis.encode(x, weights, layout, memory), compiled)
    assert torch.equal(trellis.decode(compiled, layout, memory, torch.float32), levels)


def test_viterbi_finds_the_string_of_least_weighted_error() -> None:
    """Against all 2^9 strings, in fp64."""
    widths = (1, 3, 0, 2, 1, 2)
    layout, weights = Layout(widths), torch.tensor([4.0, 0.1, 7.0, 1.0, 3.0, 0.5])
    x = normal(20, 6)
    every = torch.tensor(list(itertools.product(*(range(2**width) for width in widths))))
    levels = trellis.decode(write(every, layout), layout, 6, torch.float64)
    costs = ((x.double()[:, None] - levels).square() * weights.double()).sum(-1)
    found = trellis.decode(trellis.encode(x, weights, layout, 6), layout, 6, torch.float64)
    own = ((x.double() - found).square() * weights.double()).sum(-1)
    torch.testing.assert_close(own, costs.amin(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("memory", "bits"),
    [(6, 1), (8, 2), (8, 3), (8, 6), *(pytest.param(*case, marks=pytest.mark.long) for case in ((10, 4), (12, 1)))],
)
def test_recorded_errors_are_those_of_fresh_draws(memory: int, bits: int) -> None:
    recorded = json.loads((ROOT / "results/bench/trellises.json").read_text())["trellises"]
    (row,) = [row for row in recorded if (row["memory"], row["bits"]) == (memory, bits)]
    assert trellis.mean_squared_errors(memory)[bits - 1] == pytest.approx(row["mse"], rel=1e-5)
    assert row["db"] == pytest.approx(10 * math.log10(row["mse"] * 4**bits), abs=2e-3)
    x, layout = normal(400, 256, seed=7), Layout((bits,) * 256)
    out = trellis.decode(trellis.encode(x, torch.ones(256), layout, memory), layout, memory, torch.float32)
    assert float((x - out).square().mean()) == pytest.approx(row["mse"], rel=0.03)


def test_more_states_and_trellises_at_all_are_worth_it() -> None:
    for bits in range(1, 7):
        assert (
            trellis.mean_squared_errors(12)[bits - 1]
            < trellis.mean_squared_errors(10)[bits - 1]
            < trellis.mean_squared_errors(8)[bits - 1]
        )
        assert trellis.mean_squared_errors(8)[bits - 1] < ScalarQuantizer(bits).errors[bits]
        assert trellis.mean_squared_errors(12)[bits - 1] > 4.0**-bits


def test_scalar_errors_are_those_of_max() -> None:
    """Max 1960, Table I: 2, 4, 8, 16 and 32 levels."""
    found = ScalarQuantizer(1).errors
    assert found[0] == 1
    assert found[1:6] == pytest.approx((0.3634, 0.1175, 0.03454, 0.009497, 0.002499), abs=2e-5)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bits", [1, 3, 5])
def test_equal_widths_in_any_chain(kind: type[ScalarQuantizer] | type[TrellisQuantizer], bits: int) -> None:
    stages = {"norm": TokenNorm(), "rotation": RandomRotation()}
    codec = Codec(stages, list(stages), kind(bits, deviation="unit_norm"))
    x = normal(2, 3, 50, 64)
    packed = codec.encode(x, 16)
    assert packed.parts["string"].shape == (2, 3, 50, 8 * bits)
    assert packed.bits_per_element == bits + 16 / 64
    error = float((codec.decode(packed) - x).square().mean() / x.square().mean())
    assert error == pytest.approx(kind(bits).errors[bits], rel=0.15)  # the first components have fewer states behind


@pytest.mark.parametrize("kind", BOTH)
def test_unshrunk_tokens_have_the_energy_of_what_they_stand_for(
    kind: type[ScalarQuantizer] | type[TrellisQuantizer],
) -> None:
    x = normal(1, 1, 400, 256)
    plain, grown = (Codec({}, [], kind(1, unshrunk=unshrunk)) for unshrunk in (False, True))
    energy = [float(codec.decode(codec.encode(x)).square().mean()) for codec in (plain, grown)]
    assert energy[0] == pytest.approx(1 - kind(1).errors[1], rel=0.01)
    assert energy[1] == pytest.approx(1, rel=0.01)
