"""Run in a process of its own with TRITON_INTERPRET=1, before which triton must not be imported."""

import sys

import torch

import kvq
from kvq.codecs import Codec, Hadamard, TokenNorm, UniformQuantizer
from kvq.kernels import gpu
from tests.kernels import oracle

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


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
    {"methods": methods, "shapes": shapes, "layouts": layouts}[sys.argv[1]]()
