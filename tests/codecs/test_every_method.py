"""What holds for every method under conf/method, whatever the shape, the dtype and the bits."""

import contextlib
import functools
import importlib
import itertools
import pkgutil
import unittest.mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.codecs import (
    CalibratedChannelSplit,
    ChannelSplit,
    CodedBlocks,
    ComponentQuantizer,
    Float8Quantizer,
    LloydMaxQuantizer,
    LowRankCorrection,
    PackedStore,
    Passthrough,
    UniformQuantizer,
    plane_widths,
    rope_table,
)
from kvq.codecs.lloyd_max import InnerProductQuantizer
from kvq.codecs.packed import pack
from kvq.codecs.vector import VectorQuantizer
from kvq.errors import Unsupported
from tests.calibrated import build
from tests.plugins import of_plugins
from tests.presets import NAMES, preset
from tests.properties import examples, mostly_quick

METHODS = sorted(NAMES)
SIDES = ("key", "value")


def config(name):
    return preset(name, "bits=2")


def bits_range(name):
    return config(name).bits_range


@functools.cache
def builds(name, head_dim):
    """A split needs more channels than it has outliers."""
    try:
        return kvq.build_method(name, bits=min(3, (bits_range(name) or (3, 3))[1]), head_dim=head_dim) is not None
    except Unsupported:
        return False


def head_dim_of(name):
    """64, or 128 where 64 channels are too few to split."""
    return 64 if builds(name, 64) else 128


def stored_with_keys(name):
    """Values have no codec of their own: tests/cache/test_joined.py."""
    return (config(name).value or {}).get("_target_") == "kvq.codecs.StoredWithKeys"


# A backend has no codec (plugins/kvq_zoo/tests/test_library_caches.py holds its layers), and eviction has none.
CODED = [name for name in METHODS if config(name).key is not None and not stored_with_keys(name)]
QUANTIZING = [name for name in CODED if bits_range(name) is not None]
GROUPS = ["own", 5, 16, "null"]
NAMED = [module.name for module in pkgutil.iter_modules(kvq.codecs.__path__) if not module.name.endswith("_gpu")]
MODULES = [importlib.import_module(f"kvq.codecs.{name}") for name in NAMED]
MODULES += [module for held in of_plugins("PACKING") for module in held]
PACKING = [module for module in MODULES if getattr(module, "pack", None) is pack]
GROUPED = ("", "high.", "low.", "base.", "delta.")
CODES = tuple(f"{group}{part}" for group in GROUPED for part in ("codes.", "signs", "string"))
UNPACKED = (VectorQuantizer, Float8Quantizer, Passthrough, ComponentQuantizer, *sum(of_plugins("UNPACKED"), ()))
"""Quantizers that pack no codes."""
SIZED = set(sum(of_plugins("SIZED"), ()))
"""Quantizers whose groups have a size; null is none."""
IN_ALL = dict(item for found in of_plugins("IN_ALL") for item in found.items())
"""Quantizers of which the bits in all, not those of codes, have a closed form at 64 channels: whether they have it."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@functools.cache
def grouped(name):
    """Sides whose quantizer has groups of a size that can be set."""
    return [side for side in SIDES if "group_size" in (getattr(config(name), side) or {}).get("quantizer", {})]


def in_groups(name, group):
    """Overrides: groups of `group` tokens or channels (null: all) where the method has groups; "own": its own."""
    if group == "own" or (group == "null" and any(quantizer_of(name, side) in SIZED for side in grouped(name))):
        return []
    return [f"{side}.quantizer.group_size={group}" for side in grouped(name)]


def quantizer_of(name, side):
    return getattr(config(name), side)["quantizer"]["_target_"]


@contextlib.contextmanager
def codes_in_range():
    """Every code handed over to be packed is one that its bits can hold; yields how many there were."""
    seen = []

    def checked(codes, bits):
        assert int(codes.min()) >= 0
        assert int(codes.max()) < 2**bits
        seen.append(codes.numel())
        return pack(codes, bits)

    with contextlib.ExitStack() as stack:
        for module in PACKING:
            stack.enter_context(unittest.mock.patch.object(module, "pack", checked))
        yield seen


def states(shape, seed, dtype, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + torch.randn(*shape[:2], 1, shape[3], generator=generator)
    return (size * x).clamp(-65504, 65504).to(dtype)


def in_planes(codec, packed):
    """Indices as planes, also where they are stored in code words."""
    return codec.planes(packed) if isinstance(codec, CodedBlocks) else packed


@pytest.mark.thin(6)
@pytest.mark.parametrize("name", mostly_quick(CODED, ("cq/", "waterfill/mixed")))  # cq itself has 512 centroids to fit
@settings(max_examples=examples(6))
@given(data=st.data())
def test_decode_is_finite_and_of_the_right_kind(name, data):
    lowest, highest = bits_range(name) or (3, 3)
    bits = data.draw(st.sampled_from(sorted({lowest, min(3, highest), highest})), "bits")
    dim = data.draw(st.sampled_from([dim for dim in (8, 64, 128) if builds(name, dim)]), "head_dim")
    group = data.draw(st.sampled_from(GROUPS), "group")
    shape = (data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(1, 40)), dim)
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    block = data.draw(st.one_of(st.none(), st.integers(1, 16)), "block")
    # From subnormal in fp16 to its end, and tokens that are zero.
    size = data.draw(st.sampled_from([0.0, 1e-6, 1.0, 1e4]), "size")
    x = states(shape, data.draw(st.integers(0, 99)), dtype, size)
    x[:, :, ::5] = 0
    method = build(name, x.float(), bits, in_groups(name, group))
    for side in SIDES:
        codec = getattr(method, side)
        rope = rope_table(shape[2], dim)
        with codes_in_range() as packs:
            packed = codec.encode(x, block, rope)
        # Codewords have whole bytes, and every byte a codeword; 8-bit floats are casts.
        # Passthrough: RoPE's channels beside vLLM's latents. Components and coefficients have a string of bits.
        assert packs or name in ("identity", "zero") or isinstance(codec.quantizer, UNPACKED)
        out = codec.decode(packed, rope)
        assert (out.shape, out.dtype, packed.tokens) == (x.shape, x.dtype, shape[2])
        assert bool(torch.isfinite(out).all())
        assert packed.nbytes == sum(part.numel() * part.element_size() for part in packed.parts.values())
        assert packed.bits_per_element == 8 * packed.nbytes / x.numel()
        if name == "identity":
            assert torch.equal(out, x)
        if name == "zero" or size == 0.0:
            assert not bool(out.any())
        if isinstance(codec.quantizer, UniformQuantizer | LloydMaxQuantizer):
            starts = range(0, shape[2], block or shape[2])
            lengths = [min(block or shape[2], shape[2] - start) for start in starts]
            rows = sum(-(-length * width // 8) for length in lengths for width in plane_widths(codec.quantizer.bits))
            parts = in_planes(codec, packed).parts
            codes = sum(part.numel() for name, part in parts.items() if name.startswith("codes."))
            assert codes == rows * dim * shape[0] * shape[1]


@pytest.mark.thin(8)
@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("name", mostly_quick(CODED, ("waterfill/memory", "nsnquant/trellis")))
def test_a_block_is_on_its_own(name, size):
    """Bit for bit, which makes chunked scoring exact: encoded and decoded alone, among others, or appended to a store.

    The last block has one token. A fork keeps its own, and chosen sequences are theirs. Tables that are
    fitted to the first tokens are given.
    """
    dim = head_dim_of(name)
    x, rope = states((2, 2, 49, dim), 1, torch.float32), rope_table(49, dim)
    method = build(name, x, min(3, (bits_range(name) or (3, 3))[1]))
    for side in SIDES:
        codec = getattr(method, side)
        packed = codec.encode(x, size, rope)
        whole, later = codec.decode(packed, rope), codec.for_later_tokens(packed)
        store = PackedStore(codec.encode(x[:, :, :size], rope=rope.narrow(0, size)))
        fork, appended = store.fork(), codec.for_later_tokens(store.packed)
        for start in range(0, 49, size):
            length = min(size, 49 - start)
            piece, own = x[:, :, start : start + length], rope.narrow(start, length)
            assert torch.equal(later.decode(later.encode(piece, rope=own), own), whole[:, :, start : start + length])
            if start:
                store.append(appended.encode(piece, rope=own))
        if appended is codec:
            assert store.packed.nbytes == packed.nbytes or isinstance(codec, CodedBlocks)  # words fill bytes
            assert torch.equal(codec.decode(store.packed, rope), whole)
        assert fork.packed.tokens == size
        order = torch.tensor([1, 0, 1])
        assert torch.equal(codec.decode(store.select(order).packed, rope), codec.decode(store.packed, rope)[order])


@pytest.mark.thin(6)
@pytest.mark.parametrize("name", mostly_quick(CODED, ("waterfill/memory", "nsnquant/trellis")))
def test_constant_zero_and_huge_tokens_in_one_sequence_stay_finite(name):
    """Alone in a block, beside ordinary tokens, and with a whole sequence of each kind."""
    bits = (bits_range(name) or (3,))[0]
    dim = head_dim_of(name)
    rope = rope_table(24, dim)
    groups = ["own", 5] if grouped(name) else ["own"]
    for dtype, group in itertools.product(DTYPES, groups):
        method = build(name, states((1, 2, 64, dim), 3, torch.float32), bits, in_groups(name, group))
        x = states((1, 2, 24, dim), 3, torch.float32)
        x[:, :, 3:6], x[:, :, 6:9], x[:, :, 12:14], x[:, :, 15] = 2.5, 0, 1e4, -1e4
        x[:, :, 18:21] *= 1e4 / x[:, :, 18:21].abs().max()
        whole = torch.cat([x, torch.zeros_like(x), torch.full_like(x, 1e4)])  # each sequence is on its own
        for sequence in (whole, x[:, :, 12:13].expand_as(x)):
            for side, block in itertools.product(SIDES, (None, 8)):
                codec = getattr(method, side)
                out = codec.decode(codec.encode(sequence.to(dtype), block, rope), rope)
                assert bool(torch.isfinite(out).all()), (side, block, dtype, group)


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:])])
@pytest.mark.parametrize(
    ("name", "group"), [(name, group) for name in QUANTIZING for group in (["own", 5] if grouped(name) else ["own"])]
)
def test_the_error_falls_with_the_bits(name, group, dtype):
    x, rope = states((1, 2, 64, 64), 0, dtype), rope_table(64, 64)
    if name.endswith("/delta_threshold_low"):  # it stores tokens whole that differ more from those before
        x = x[:, :, :1] + 0.05 * (x - x[:, :, :1])
    lowest, highest = bits_range(name)
    # What a clip by rank takes away is the same at any bits.
    ranked = name.partition("/")[0] == "oscar_covariance"
    unclipped = [f"{side}.stages.clip.share=1" for side in SIDES] if ranked else []
    errors = []
    for bits in range(max(lowest, min(2, highest - 1)), min(4, highest) + 1):
        method = build(name, x, bits, [*in_groups(name, group), *unclipped])
        codecs = [getattr(method, side) for side in SIDES]
        both = [codec.decode(codec.encode(x, rope=rope), rope) for codec in codecs]
        errors.append([float((out.double() - x.double()).square().mean()) for out in both])
    for before, after in itertools.pairwise(errors):
        assert after[0] < before[0] / 2
        assert after[1] < before[1] / 2


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", [name for name in QUANTIZING if not name.startswith("engine/mlx")])  # one --kv-bits
def test_keys_and_values_get_their_own_bits(name):
    x, rope = states((1, 1, 32, 64), 0, torch.float32), rope_table(32, 64)

    def coded(codec):
        """Bits asked for, and bits of codes per channel (a split's outlier channels have one more)."""
        parts = in_planes(codec, codec.encode(x, rope=rope)).parts
        groups = ("0.", *(f"bits{width}." for width in range(1, 9)), "high.", "low.", "base.", "delta.")
        codes = [
            part for name, part in parts.items() if functools.reduce(str.removeprefix, groups, name).startswith(CODES)
        ]
        return getattr(codec.quantizer, "bits", None), 8 * sum(part.numel() for part in codes) / x.numel()

    lowest, highest = bits_range(name)
    high, low = (highest, lowest) if highest < 3 else (max(3, lowest + 1), max(2, lowest))
    method = build(name, x, f"k{high}v{low}")
    for codec, bits in ((method.key, high), (method.value, low)):
        if type(codec.quantizer) in IN_ALL:
            assert codec.quantizer.bits == bits
            assert IN_ALL[type(codec.quantizer)](bits, codec.encode(x, rope=rope).bits_per_element)
            continue
        split = codec.quantizer.base.quantizer if isinstance(codec.quantizer, LowRankCorrection) else codec.quantizer
        if isinstance(split, CalibratedChannelSplit):
            signs = isinstance(split.high.quantizer, InnerProductQuantizer)
            most = 8 if split.differences else 4 + signs  # of codes; delta_outliers has no cap
            assert coded(codec)[1] == (min(bits + 1, most) + 3 * max(bits - 1, 1)) / 4
            continue
        extra = split.outliers * (split.high.quantizer.bits - bits) / 64 if isinstance(split, ChannelSplit) else 0
        assert coded(codec) == (bits, bits + extra)
