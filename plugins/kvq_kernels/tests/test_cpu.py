"""The compiled CPU loops against fp64 dequantize-then-attend."""

import dataclasses
import os
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.codecs import ChannelShift, Codec, DoubleQuant, TokenNorm, UniformQuantizer, rope_table
from kvq.codecs.quantizers import Axis
from kvq.codecs.stages import Scope
from kvq.errors import Unsupported
from kvq.kernels.linear_chain import build_linear_chain
from kvq.kernels.pieces import decode_shift, iter_runs
from tests.kernels import oracle
from tests.kernels.test_eager import UNIFORM, query, uniform

pytest.importorskip("numba")
from kvq.kernels import eager
from kvq_kernels import cpu, cpu_stored
from tests.properties import examples

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3}


def check(keys, values, *, group=2, dtype=torch.float32, **settings):
    batch, heads, dim = keys.shape
    q = query(heads * group, dim, batch, dtype)
    found = cpu.attend(q, keys, values, dim**-0.5, **settings)
    assert found.dtype is dtype
    assert oracle.error(found, oracle.attend(q, keys, values, dim**-0.5, **settings)) < TOLERANCE[dtype]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own():
    assert cpu.pool(2).submit(int).result() == 0
    child = os.fork()
    if not child:
        os._exit(cpu.pool(2).submit(lambda: 7).result(30))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


QUICK = [
    ("kivi", 3, 64, torch.float16),
    *((name, bits, dim, torch.float32) for name, bits, dim in (("nsn", 2, 64), ("oscar", 3, 128), ("quarot", 8, 64))),
]
"""Two planes along both axes for 16-bit queries; one, two and a whole byte for fp32 ones. Each compiles for seconds."""
METHODS = [*(("kivi", bits) for bits in (1, 3, 4)), ("nsn", 2), ("nsn", 7), ("oscar", 2), ("oscar", 3), ("quarot", 8)]
MORE = [(name, bits, 128, dtype) for name, bits in METHODS for dtype in TOLERANCE]


@pytest.mark.parametrize(
    ("name", "bits", "dim", "dtype"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE if case not in QUICK)],
)
def test_methods(name, bits, dim, dtype):
    method = kvq.build_method(name, bits=bits, head_dim=dim)
    keys = oracle.states(method.key, 256, 30, dim=dim, block=128, tail=13, dtype=dtype)
    values = oracle.states(method.value, 224, 75, dim=dim, block=32, seed=1, dtype=dtype)
    check(keys, values, dtype=dtype)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=examples(10))
@given(st.data())
def test_any_uniform_chain(data):
    """What the loops do not have is refused, in a line; everything else is right."""
    dim, bits = data.draw(st.sampled_from([96, 256])), data.draw(st.sampled_from([2, 3]))
    heads, batch, total = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(2, 200))
    dtype, sides = data.draw(st.sampled_from(list(TOLERANCE))), []
    for seed in (0, 1):
        packed = data.draw(st.integers(1, total))
        tail = data.draw(st.integers(0, packed - 1))
        block = data.draw(st.sampled_from([None, 5, 16, 32, 64]))
        codec = uniform(**data.draw(UNIFORM) | {"bits": bits})
        size = {"heads": heads, "dim": dim, "batch": batch, "block": block, "dtype": dtype}
        sides.append(oracle.states(codec, packed - tail, total - packed, tail=tail, seed=seed, **size))
    group, first = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.integers(0, total - 1))
    if any(map(cpu.unfit_reason, sides)):
        with pytest.raises(Unsupported):
            check(*sides, group=group, first=first, dtype=dtype)
    else:
        check(*sides, group=group, first=first, dtype=dtype)


def test_threads_agree(monkeypatch):
    method = kvq.build_method("oscar", bits=3, head_dim=128)
    keys, values = (oracle.states(codec, 96, 7, dim=128, block=32, batch=3) for codec in (method.key, method.value))
    q = query(4, 128, 3)
    outs = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outs.append(cpu.attend(q, keys, values, 0.125))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.long)])
def test_extreme_statistics(dim):
    """fp16 subnormals, negative zero points and a group of equal values."""
    method = kvq.build_method("kivi", bits=2, head_dim=dim)
    x = torch.randn(1, 1, 64, dim) * 1e-6
    x[..., :8] = -3.5
    x[..., 8:16] *= 1e6
    states = oracle.states(method.key, 32, 0, heads=1, dim=dim)
    keys, values = (type(states)(codec, (codec.encode(x, 32),), None) for codec in (method.key, method.value))
    check(keys, values)


TABLES = [
    ("q4_0", 4),
    *(("turboquant", bits) for bits in (1, 2, 3, 4)),
    *((name, bits) for name in ("nsnquant", "nsnquant/kmeans") for bits in (1, 2)),
    ("nsnquant/e8p", 2),
    ("nsnquant/post_rope", 2),
    ("nsnquant/no_dq", 1),
]
COMPILED = [("q4_0", 4), ("turboquant", 3), ("nsnquant", 1), ("nsnquant/no_dq", 1)]
"""Levels with a sign and without, codebooks and shifts: the quick half compiles loops for these, at 64 channels."""


def tabled(codec, dim, block, total, **settings):
    return oracle.states(
        codec, dim=dim, block=block, rope=rope_table(total, dim) if codec.uses_rope else None, **settings
    )


@pytest.mark.parametrize(
    ("name", "bits"), [case if case in COMPILED else pytest.param(*case, marks=pytest.mark.long) for case in TABLES]
)
def test_levels_and_codebooks(name, bits):
    """Codes that index a table, behind the shifts of NSNQuant; blocks of 64 and a last one that ends within a byte."""
    method = kvq.build_method(name, bits=bits, head_dim=64)
    keys = tabled(method.key, 64, 64, 269, tokens=256, full=30, tail=13)
    values = tabled(method.value, 64, 32, 299, tokens=224, full=75, seed=1)
    for group in (1, 3, 4):
        check(keys, values, group=group)


@pytest.mark.parametrize(
    ("pairs", "interleaved", "dtype"),
    [(32, False, torch.bfloat16), (8, True, torch.bfloat16), (0, False, torch.float32)],
)
def test_angles_that_turn_a_shift(pairs, interleaved, dtype):
    """As a cache keeps them, in the model's dtype; pairs of either kind, and channels that are not turned.

    Against PyTorch: rotations in bf16 are not quite undone, and dense attention sees what is left.
    """
    method = kvq.build_method("nsnquant", bits=1, head_dim=64)
    rope = rope_table(269, 64)
    cos, sin = (part[..., :pairs].to(dtype) for part in (rope.cos, rope.sin))
    rope = dataclasses.replace(rope, cos=cos, sin=sin, interleaved=interleaved)
    keys = oracle.states(method.key, 256, 30, block=64, tail=13, rope=rope, batch=2)
    values, q = oracle.states(method.value, 224, 75, block=32, seed=1, batch=2), query(6, 64, 2)
    found, expected = (kind.attend(q, keys, values, 0.125) for kind in (cpu, eager))
    assert oracle.error(found, expected.double()) < TOLERANCE[torch.float32]


@settings(max_examples=examples(12))
@given(st.data())
def test_norms_and_shifts_of_some_heads(data):
    """Codes of one plane or several, groups in whole bytes or not, along either axis, norms of heads or of tokens."""
    axes, sizes = st.sampled_from(get_args(Axis)), st.sampled_from([None, 1, 6, 8, 32])
    norm, shift = (
        DoubleQuant(data.draw(st.integers(2, 9)), data.draw(axes), data.draw(sizes), s) for s in (False, True)
    )
    scope = data.draw(st.sampled_from(get_args(Scope)))
    stages = {"first": TokenNorm(scope, double_quant=norm), "shift": ChannelShift("mean", shift), "last": TokenNorm()}
    codec = Codec(stages, list(stages), UniformQuantizer(2, "per_token", None))
    block = data.draw(st.sampled_from([5, 16, 64]))
    states = oracle.states(codec, 64, 0, heads=3, dim=32, batch=2, block=block, tail=7)
    chain = build_linear_chain(codec)
    found = cpu_stored.norms_and_shifts(chain, cpu_stored.list_stored(states), cpu_stored.Heads(1, 1, 2), 32)
    ((factors, vectors),) = found.shifts
    for index, (start, run, blocks) in enumerate(iter_runs(states)):
        here = slice(start, start + run.tokens * run.count)
        shift = chain.shifts[0]
        offsets = decode_shift(shift, blocks, 32, torch.float32)[..., 0, :]
        expected, whole = (
            chain.norm_factors(blocks, names, run.tokens, torch.float32).transpose(1, 2).flatten(2)
            for names in (shift.norms, None)
        )
        assert torch.equal(torch.from_numpy(found.norms[:, here]), whole[1, 1:])
        assert torch.equal(torch.from_numpy(factors[:, here]), expected[1, -len(factors) :])
        assert torch.equal(torch.from_numpy(vectors[index]), offsets[1, :, 1:].transpose(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "dims"),
    [
        pytest.param(COMPILED, [64], id="compiled"),
        pytest.param(TABLES, [32, 64, 96], id="all", marks=pytest.mark.long),
    ],
)
@settings(max_examples=examples(10))
@given(data=st.data())
def test_any_levels_and_codebooks(tables, dims, data):
    """Random sizes: parts of vectors, of pages and of bytes; a first token inside of the codes; two sequences."""
    name, bits = data.draw(st.sampled_from(tables))
    dim = data.draw(st.sampled_from(dims))
    method = kvq.build_method(name, bits=bits, head_dim=dim)
    heads, batch, total = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(2, 200))
    sides = []
    for seed, codec in enumerate((method.key, method.value)):
        packed = data.draw(st.integers(1, total))
        tail = data.draw(st.integers(0, packed - 1))
        block = data.draw(st.sampled_from([None, 5, 16, 64]))
        size = {"heads": heads, "batch": batch, "tokens": packed - tail, "full": total - packed, "tail": tail}
        sides.append(tabled(codec, dim, block, total, seed=seed, **size))
    group, first = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.integers(0, total - 1))
    if any(map(cpu.unfit_reason, sides)):
        with pytest.raises(Unsupported):
            check(*sides, group=group, first=first)
    else:
        check(*sides, group=group, first=first)


@pytest.mark.parametrize(
    ("name", "bits", "reason"),
    [
        ("engine/llamacpp_iq4_nl", 4, "LevelsQuantizer has"),
        ("turboquant", 5, "LloydMaxQuantizer of 5 bits has"),
        ("engine/vllm_turboquant_4bit_nc", 4, "NormalQuantizer with tokens scaled to norm 1 has"),
    ],
)
def test_unfit(name, bits, reason):
    method = kvq.build_method(name, bits=bits, head_dim=64)
    states = oracle.states(method.key, 64, 0)
    with pytest.raises(Unsupported, match=f"cache.attention=packed: {reason} no loops"):
        check(states, states)
