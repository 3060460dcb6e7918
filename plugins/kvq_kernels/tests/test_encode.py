"""Encoding in one pass on a CPU against the codec's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache import KVCache
from kvq.codecs import Codec, Hadamard, TokenNorm, UniformQuantizer, VectorQuantizer, rope_table
from kvq.kernels import fuse_codec
from kvq_kernels import dispatch
from kvq_kernels.dispatch import FusedCodec
from kvq_kernels.tests import encoded
from tests.kernels.test_eager import UNIFORM, uniform
from tests.properties import examples
from tests.random_models import llama, token_ids

pytest.importorskip("numba")
from kvq_kernels import encode_cpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def states(*shape, dtype=torch.float32, seed=0, constant=0, zero=0):
    """Channels with offsets, tokens of different norms, some constant and some zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    x = x * torch.exp(torch.randn(*shape[:-1], 1, generator=generator) / 2)
    x[..., :constant, :] = 1.5
    x[..., constant : constant + zero, :] = 0
    return x.to(dtype)


def check(codec: Codec, x: torch.Tensor) -> float:
    """One block; the share of codes that differ."""
    mine = fuse_codec(codec)
    assert dispatch.encoder_for(mine.chain, x[:, None]) is not None
    return encoded.check(codec, x, mine.encode(x), codec.encode(x))


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["kivi", "nsn", "oscar", "quarot"])
def test_methods(name, bits, dtype):
    """Of random states at most one code in ten thousand is a neighbour."""
    method = kvq.build_method(name, bits=bits, head_dim=128)
    for seed, codec in enumerate((method.key, method.value)):
        for tokens in (128, 77):
            x = states(1, 2, tokens, 128, dtype=dtype, seed=seed)
            assert check(codec, x) <= 1e-4


@pytest.mark.parametrize("block", [32, "power_of_two"])
def test_a_rotation_of_blocks_of_channels(block):
    codec = Codec({"turn": Hadamard(block)}, ["turn"], UniformQuantizer(4, "per_token", 32))
    assert check(codec, states(1, 2, 77, 192, seed=3)) <= 1e-4


@pytest.mark.parametrize(
    "settings", [{"rounding": "up"}, {"reciprocal": True}, {"min_scale": 1e-6}, {"scale_dtype": "bfloat16"}]
)
def test_grids_of_engines_are_left_to_the_codec(settings):
    assert fuse_codec(Codec({}, [], UniformQuantizer(4, "per_token", 32, **settings))).chain is None


@pytest.mark.parametrize("name", ["kivi", "nsn", "oscar", "quarot"])
def test_blocks_are_on_their_own(name):
    """Many blocks and a short last one are what each is alone."""
    codec = kvq.build_method(name, bits=3, head_dim=128).key
    x = states(2, 3, 300, 128, dtype=torch.bfloat16)
    many = fuse_codec(codec).encode(x, 128)
    encoded.same_layout(many, codec.encode(x, 128))
    alone = [fuse_codec(codec).encode(x[:, :, start : start + 128]) for start in (0, 128, 256)]
    for name, part in many.parts.items():
        assert torch.equal(part, torch.cat([packed.parts[name] for packed in alone], 2))


def test_without_sums_nothing_differs():
    """kivi rotates and sums nothing: its parts are the same to the bit, a short last block included."""
    method = kvq.build_method("kivi", bits=3, head_dim=128)
    for codec in (method.key, method.value):
        x = states(2, 3, 300, 128, dtype=torch.bfloat16)
        mine, theirs = fuse_codec(codec).encode(x, 128), codec.encode(x, 128)
        assert len(theirs.runs) == 2
        assert all(torch.equal(mine.parts[name], part) for name, part in theirs.parts.items())


def coded(codec: Codec, x: torch.Tensor, block: int) -> tuple:
    """Of two ways to encode: the fused codec's parts and the codec's own."""
    rope = rope_table(x.shape[2], x.shape[3]) if codec.uses_rope else None
    return fuse_codec(codec).encode(x, block, rope), codec.encode(x, block, rope), rope


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "bits"), [("nsnquant", 1), ("nsnquant", 2), ("nsnquant/kmeans", 2), ("nsnquant/no_gain", 2)]
)
def test_codebooks(name, bits, dtype):
    """The entry that the codec finds, but for one in ten thousand: then as near to the vector, up to rounding."""
    method = kvq.build_method(name, bits=bits, head_dim=64)
    for seed, codec in enumerate((method.key, method.value)):
        x = states(2, 2, 300, 64, dtype=dtype, seed=seed)
        mine, theirs, rope = coded(codec, x, 64)
        encoded.same_layout(mine, theirs)
        for part, other in ((mine.parts[name], part) for name, part in theirs.parts.items()):
            if part.dtype is torch.uint8:
                assert float((part != other).double().mean()) <= 1e-4
            else:
                torch.testing.assert_close(part.double(), other.double(), rtol=2e-3, atol=2.0**-24)
        errors = [
            (codec.decode(packed, rope).double() - x.double()).square().sum((-1, -2)) for packed in (mine, theirs)
        ]
        torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("bits", [1, 2])
def test_the_search_finds_the_nearest_entry(bits):
    """In fp64 no entry is nearer, of many vectors and of zeros, of an odd number of them; the gain is the formula's."""
    quantizer = VectorQuantizer(bits)
    y = torch.randn(1, 1, 401, 24, generator=torch.Generator().manual_seed(bits))
    y[..., :3, :], y[..., 3, ::2] = 0, -0.0
    encoded.check_nearest(quantizer, y, *encode_cpu.search(quantizer, y))


@pytest.mark.long
@settings(max_examples=examples(60))
@given(st.data())
def test_any_uniform_chain(data):
    dim = data.draw(st.sampled_from([8, 64, 96, 128, 256]))
    heads, batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 70))
    codec = uniform(**data.draw(UNIFORM) | {"scope": "head"})
    x = states(
        batch, heads, tokens, dim,
        dtype=data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 9)),
        constant=data.draw(st.integers(0, 3)), zero=data.draw(st.integers(0, 3)),
    )  # fmt: skip
    check(codec, x)


def test_what_it_has_not_is_the_codecs_own():
    x = states(1, 2, 64, 64)
    chains = [
        kvq.build_method("turboquant", bits=2, head_dim=64).key,
        kvq.build_method("oscar/token_scope", bits=2, head_dim=64).key,
        Codec({"a": Hadamard(), "b": TokenNorm(), "c": Hadamard()}, ["a", "b", "c"], UniformQuantizer(2, "per_token")),
        Codec({}, [], UniformQuantizer(12, "per_channel", 32)),
    ]
    for codec in chains:
        mine, theirs = fuse_codec(codec).encode(x), codec.encode(x)
        assert all(torch.equal(mine.parts[name], part) for name, part in theirs.parts.items())
    plain = kvq.build_method("oscar", bits=2, head_dim=64).key
    mine, theirs = fuse_codec(plain).encode(x.double()), plain.encode(x.double())
    assert all(torch.equal(mine.parts[name], part) for name, part in theirs.parts.items())


@pytest.mark.parametrize(("name", "bits"), [("nsn", 3), ("nsnquant", 2)])
def test_threads_agree(name, bits, monkeypatch):
    codec, x, outs = kvq.build_method(name, bits=bits, head_dim=64).key, states(2, 3, 4096, 64), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outs.append(coded(codec, x, 64)[0].parts)
    assert all(torch.equal(part, outs[1][name]) for name, part in outs[0].items())


@pytest.mark.parametrize("residual", ["block", "sliding"])
def test_a_packed_cache_encodes_in_one_pass(residual):
    """What a cache holds is what a dense one holds; scores never come from it (`cache.attention=packed`)."""
    model, tokens = llama(), token_ids(90, batch=2)
    method = kvq.build_method("kivi", bits=2, overrides=["residual.size=16", f"residual.policy={residual}"])
    held = []
    for way in ("dense", "packed"):
        cache = KVCache(model, method, attention=way)
        model(tokens[:, :70], past_key_values=cache)
        for i in range(70, 90):
            model(tokens[:, i : i + 1], past_key_values=cache)
        side = cache.layers[0].key
        assert isinstance(side.codec, FusedCodec) == (way == "packed")
        held.append(side._store.packed)
    for mine, theirs in zip(*held, strict=True):
        assert all(torch.equal(mine.parts[name], part) for name, part in theirs.parts.items())
