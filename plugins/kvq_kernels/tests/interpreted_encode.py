"""Run in a process of its own with TRITON_INTERPRET=1, before which triton must not be imported."""

import sys

import torch

import kvq
from kvq.codecs import (
    Codec,
    Hadamard,
    RandomizedHadamard,
    RandomRotation,
    TokenNorm,
    UniformQuantizer,
    VectorQuantizer,
    rope_table,
)
from kvq_kernels import encode_gpu
from kvq_kernels.dispatch import FusedCodec
from kvq_kernels.tests import encoded
from kvq_kernels.tests.test_encode import states


class OnGpu(FusedCodec):
    """Encodes by the Triton kernels whatever device states are on."""

    def encode_block(self, blocks, rope=None):
        assert encode_gpu.fits(self.chain, blocks)
        return encode_gpu.encode(self.chain, blocks)


def check(label, codec, x, block=None):
    mine, theirs = OnGpu(codec).encode(x, block), codec.encode(x, block)
    if block is None:
        print(label, *x.shape, f"{encoded.check(codec, x, mine, theirs):.0e}")
    encoded.same_layout(mine, theirs)
    return mine, theirs


def methods():
    for name, bits in (("kivi", 2), ("oscar", 4), ("quarot", 3), ("nsn", 2), ("nsn", 7), ("oscar", 2), ("quarot", 8)):
        for dtype in (torch.float32, torch.float16):
            method = kvq.build_method(name, bits=bits, head_dim=128)
            for codec in (method.key, method.value):
                x = states(1, 2, 256, 128, dtype=dtype)
                check(f"{name} {bits} {dtype}", codec, x[:, :, :128])
                many, _ = check("blocks", codec, x, 128)
                alone = [OnGpu(codec).encode(x[:, :, start : start + 128]).parts for start in (0, 128)]
                for part in many.parts:
                    assert torch.equal(many.parts[part], torch.cat([each[part] for each in alone], 2))


def exact():
    """Where nothing is summed, nothing differs."""
    method = kvq.build_method("kivi", bits=3, head_dim=96)
    for codec in (method.key, method.value):
        mine, theirs = check("kivi", codec, states(2, 2, 300, 96, dtype=torch.float16), 128)
        assert all(torch.equal(mine.parts[name], part) for name, part in theirs.parts.items())


def shapes():
    """Long groups, short blocks, groups that end short, states whose tokens lie apart, constant and zero tokens."""
    for name, dim, tokens in (
        ("nsn", 64, 300), ("nsn", 96, 1), ("oscar", 96, 77), ("quarot", 64, 5), ("kivi", 256, 20), ("nsn", 256, 130),
    ):  # fmt: skip
        method = kvq.build_method(name, bits=2, head_dim=dim)
        x = states(2, 1, tokens, dim, constant=tokens // 9, zero=tokens // 9)
        for codec in (method.key, method.value):
            check(name, codec, x)
            check(f"{name} apart", codec, x.transpose(1, 2).contiguous().transpose(1, 2))


def chains():
    for codec in (
        Codec({}, [], UniformQuantizer(4, "per_channel", 160, symmetric=True, gain="parallel")),
        Codec({"turn": RandomRotation()}, ["turn"], UniformQuantizer(3, "per_channel", 256, gain="l2")),
        Codec({"turn": RandomizedHadamard(3)}, ["turn"], UniformQuantizer(2, "per_channel", zero_point="integer")),
        Codec(
            {"norm": TokenNorm(rms=True), "turn": Hadamard()},
            ["norm", "turn"],
            UniformQuantizer(2, "per_token", 16, zero_point="integer", clip=0.9, gain="norm"),
        ),
    ):
        check("chain", codec, states(1, 2, 400, 64, constant=3, zero=2))


class SearchedOnGpu(FusedCodec):
    """Searches the codebook by the Triton kernel whatever device states are on."""

    def encode_block(self, blocks, rope=None):
        return Codec.encode_block(self, blocks, rope)

    def _quantize(self, y, dtype):
        return encode_gpu.search(self.quantizer, y)


def books():
    """The entry that the codec finds, but for one in ten thousand, then as near; of zeros; of a last part of a tile."""
    for bits in (1, 2):
        quantizer = VectorQuantizer(bits)
        y = torch.randn(1, 1, 401, 24, generator=torch.Generator().manual_seed(bits))
        y[..., :3, :], y[..., 3, ::2] = 0, -0.0
        parts, gain = encode_gpu.search(quantizer, y)
        encoded.check_nearest(quantizer, y, parts, gain)
        for name in ("nsnquant", "nsnquant/kmeans", "nsnquant/no_gain"):
            method = kvq.build_method(name, bits=bits, head_dim=64)
            for codec in (method.key, method.value):
                x = states(1, 2, 140, 64)
                rope = rope_table(140, 64) if codec.uses_rope else None
                mine, theirs = SearchedOnGpu(codec).encode(x, 64, rope), codec.encode(x, 64, rope)
                encoded.same_layout(mine, theirs)
                share = max(
                    float((mine.parts[part] != other).double().mean())
                    for part, other in theirs.parts.items()
                    if other.dtype is torch.uint8
                )
                assert share <= 1e-4
                print(name, bits, f"{share:.0e}")


if __name__ == "__main__":
    {"books": books, "methods": methods, "exact": exact, "shapes": shapes, "chains": chains}[sys.argv[1]]()
