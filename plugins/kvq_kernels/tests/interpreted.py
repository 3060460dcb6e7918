"""Run in a process of its own with TRITON_INTERPRET=1, before which triton must not be imported."""

import random
import sys

import torch

import kvq
from kvq.codecs import Codec, Hadamard, TokenNorm, UniformQuantizer, rope_table
from kvq.codecs.stages import ChannelShift
from kvq_kernels import gpu
from tests.kernels import oracle

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
TABLES = (
    *(("q4_0", 4), ("turboquant", 2), ("turboquant", 4), ("turboquant", 5), ("nsnquant", 1), ("nsnquant", 2)),
    *(("nsnquant/kmeans", 2), ("nsnquant/e8p", 2), ("nsnquant/post_rope", 2), ("nsnquant/no_dq", 1)),
)


def check(label, keys, values, *, group=2, dtype=torch.float32, **settings):
    batch, heads, dim = keys.shape
    q = torch.randn(batch, heads * group, 1, dim, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = gpu.attend(q, keys, values, dim**-0.5, **settings)
    settings.pop("per_split", None)
    error = oracle.error(found, oracle.attend(q, keys, values, dim**-0.5, **settings))
    assert found.dtype is dtype
    assert error < TOLERANCE[dtype], f"{label}: {error}"
    print(label, f"{error:.1e}")


def methods():
    for name, bits in (("kivi", 2), ("oscar", 4), ("quarot", 3), ("nsn", 2), ("nsn", 7), ("oscar/token_scope", 8)):
        for dtype in TOLERANCE:
            method = kvq.build_method(name, bits=bits, head_dim=64)
            keys = oracle.states(method.key, 128, 21, block=64, dtype=dtype)
            values = oracle.states(method.value, 128, 21, block=32, dtype=dtype, seed=1)
            check(f"{name} {bits} {dtype}", keys, values, dtype=dtype, per_split=64)


def tables():
    """Codes that index a table, behind shifts; blocks of 64 and a last one that ends within a byte and a tile."""
    for name, bits in TABLES:
        for dtype in TOLERANCE:
            method = kvq.build_method(name, bits=bits, head_dim=64)
            keys = tabled(method.key, 171, tokens=128, tail=13, full=30, dtype=dtype)
            values = tabled(method.value, 171, tokens=64, tail=37, full=70, dtype=dtype, seed=1)
            check(f"{name} {bits} {dtype}", keys, values, dtype=dtype, per_split=64)


def tabled(codec, total, *, dim=64, block=64, **settings):
    rope = rope_table(total, dim) if codec.uses_rope else None
    return oracle.states(codec, dim=dim, block=block, rope=rope, **settings)


def shifted():
    """Shifts in front of rotations and of no norm, a first token within a block, two sequences, other head dims."""
    for dim, group, batch, bits in ((96, 3, 2, 2), (128, 1, 1, 1)):
        method = kvq.build_method("nsnquant", bits=bits, head_dim=dim)
        sides = [
            tabled(codec, 170, tokens=tokens, tail=9, full=161 - tokens, dim=dim, batch=batch, seed=tokens)
            for codec, tokens in ((method.key, 128), (method.value, 128))
        ]
        for first in (0, 70, 165):
            check(f"{dim} channels, from {first}", *sides, group=group, first=first, softcap=5.0 if first else None)
    grid = UniformQuantizer(3, "per_token", 32)
    front = Codec({"shift": ChannelShift(), "turn": Hadamard(), "norm": TokenNorm()}, ["shift", "turn", "norm"], grid)
    back = Codec({"norm": TokenNorm(), "turn": Hadamard(), "shift": ChannelShift()}, ["norm", "turn", "shift"], grid)
    for label, codecs in (("front, back", (front, back)), ("back, front", (back, front))):
        keys, values = (oracle.states(codec, 96, 5, block=32, tail=20, seed=i) for i, codec in enumerate(codecs))
        check(f"shifts in {label}", keys, values, per_split=32)
    short = oracle.states(front, 80, 5, block=40)
    assert gpu.unfit_reason(short) == "blocks of 40 tokens with a shift each are no multiple of 32"


def drawn():
    """Random sizes: blocks, tails and residuals of any length, queries per head, sequences, a first token anywhere."""
    draw, read = random.Random(3), 0
    for _ in range(16):
        name, bits = draw.choice(TABLES)
        dim, heads, batch, total = (
            draw.choice([32, 64, 96]),
            draw.randint(1, 2),
            draw.randint(1, 2),
            draw.randint(2, 150),
        )
        method = kvq.build_method(name, bits=bits, head_dim=dim)
        sides = []
        for seed, codec in enumerate((method.key, method.value)):
            packed = draw.randint(1, total)
            tail, block = draw.randint(0, packed - 1), draw.choice([None, 8, 32, 64])
            size = {"heads": heads, "batch": batch, "tokens": packed - tail, "full": total - packed, "tail": tail}
            sides.append(tabled(codec, total, dim=dim, block=block, seed=seed, **size))
        group, first = draw.choice([1, 2, 5]), draw.randint(0, total - 1)
        if not any(map(gpu.unfit_reason, sides)):
            read += 1
            check(f"{name} {bits}: {total} tokens", *sides, group=group, first=first, per_split=draw.choice([32, 64]))
    assert read >= 8


def shapes():
    method = kvq.build_method("oscar", bits=2, head_dim=96)
    for total, packed, dim, group, batch in (
        (1, 1, 96, 1, 1),
        (37, 37, 96, 3, 2),
        (70, 64, 96, 8, 1),
        (65, 33, 96, 1, 1),
    ):
        sizes = {"heads": 2, "dim": dim, "batch": batch}
        keys = oracle.states(method.key, packed, total - packed, **sizes)
        values = oracle.states(method.value, packed, total - packed, seed=1, **sizes)
        check(f"{total} tokens, {packed} packed", keys, values, group=group, per_split=32)


def layouts():
    """A prefill as one block, then blocks; keys and values that leave at different times; windows and caps."""
    nsn = kvq.build_method("nsn", bits=2, head_dim=64)
    keys, values = (oracle.states(codec, 77, 9, tail=64, seed=i) for i, codec in enumerate((nsn.key, nsn.value)))
    check("runs", keys, values, first=80, softcap=3.0, per_split=32)
    kivi = kvq.build_method("kivi", bits=2, head_dim=64)
    keys, values = (
        oracle.states(kivi.key, 128, 5, block=64),
        oracle.states(kivi.value, 96, 30, block=32, tail=7, seed=1),
    )
    check("boundaries", keys, values)
    # Of what only one side has packed no more than its blocks are decoded.
    blocks, skipped = gpu._blocks_from(keys.packed[0], 100)
    assert (blocks.tokens, skipped) == (64, 64)
    assert torch.equal(keys.codec.decode(blocks), keys.codec.decode(keys.packed[0])[:, :, 64:])
    check("window", keys, values, first=131)
    signed = Codec({}, [], UniformQuantizer(4, "per_channel", 32, symmetric=True, gain="parallel"))
    whole = Codec(
        {"norm": TokenNorm("token"), "turn": Hadamard(), "again": TokenNorm()},
        ["norm", "turn", "again"],
        UniformQuantizer(2, "per_token", 20, zero_point="integer"),
    )
    check("symmetric, two norms", oracle.states(signed, 64, 3, block=32), oracle.states(whole, 64, 3, block=32, seed=1))


if __name__ == "__main__":
    parts = (methods, tables, shifted, drawn, shapes, layouts)
    {part.__name__: part for part in parts}[sys.argv[1]]()
