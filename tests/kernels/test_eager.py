"""Attention on packed codes in plain PyTorch against fp64 dequantize-then-attend."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
import kvq.kernels
from kvq.codecs import (
    Codec,
    Hadamard,
    InnerProductQuantizer,
    LowRankCorrection,
    PrefillCodec,
    ProductQuantizer,
    TokenNorm,
    UniformQuantizer,
    rope_table,
)
from kvq.errors import Unsupported
from kvq.kernels import PackedStates, build_linear_chain, eager, pieces, time_steps
from kvq.kernels.eager import STEPS, attend
from kvq.kernels.pieces import TILE
from tests.cache.states import nearest_bits
from tests.calibrated import build
from tests.kernels import oracle
from tests.presets import LIBRARIES, NAMES, one_of_each
from tests.properties import examples

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3}
REFUSED = {
    "zero": "codes of Zero",
    "fp8": "codes of Float8Quantizer",
    "nsnquant/channel_scale": "stage 'channel_scale'",
    "nsn/top_k_mixed": "codes of",
    "nsnquant/trellis": "codes of TrellisQuantizer",
    "nsnquant/important_tokens": "codes of TokenSplit",
    "kvquant_plus_plus/huffman": "HuffmanCodec stores lists",
    "kvtc/all_layers_deflate": "DeflateCodec stores lists",
    "kvtc/deflate": "DeflateCodec stores lists",
    "kvquant_plus_plus/outliers": "codes of CalibratedChannelSplit",
    "kvquant_plus_plus/delta_outliers": "codes of CalibratedChannelSplit",
    "kvquant_plus_plus/outliers_low_rank": "codes of CalibratedChannelSplit",
    "kvquant_plus_plus/pipeline_delta_low_rank": "codes of DeltaQuantizer",
    "kvquant_plus_plus/outliers_prod": "codes of CalibratedChannelSplit",
    "kvquant_plus_plus/pipeline_low_rank_huffman": "HuffmanCodec stores lists",
    "turboquant/outliers": "codes of ChannelSplit",
}
# With their presets.
FAMILIES = {
    "block_gtq": "codes of",
    "cq": "codes of keys before their rotary embedding",
    "gear": "codes of SparseLowRank",
    "kitty": "codes of ChannelSplit",
    "kvarn": "stage 'balance'",
    "kvquant": "(SparseCodec stores lists|codes of)",
    "nexusquant": "stage 'hadamard'",
    "nova_kv": "stage '(transform|rotation)'",
    "octopus": "codes of OctahedralQuantizer",
    "oscar_covariance": "stage 'rotation'",
    "rabitq": "codes of",
    "spectralquant": "stage 'rotation'",
    "squat": "codes of SubspaceQuantizer",
    "vecinfer": "(codes of|stage 'smooth')",
    "tcq": "codes of TrellisQuantizer",
    "polarquant": "codes of PolarQuantizer",
    "qjl": "codes of SketchQuantizer",
    "rotatekv": "stage '(heads|order)'",
    "spinquant": "stage 'rotation'",
    "zipcache": "codes of TokenSplit",
}
ENGINES = {
    "exllama2": "stage 'hadamard'",  # not orthonormal
    "onnxruntime": "stage 'scale'",
    "openvino_u4_by_channel": "codes of EngineUniformQuantizer",
    "openvino_u8_by_channel": "codes of UniformQuantizer",
    "sglang_nvfp4": "stage 'scale'",
    "tensorrt": "stage 'scale'",
    "vllm_fp8/calibrated": "stage 'scale'",
    "vllm_fp8/per_head": "stage 'scale'",
    "vllm_fp8/random_tokens": "stage 'scale'",
    "vllm_fp8_k_nvfp4_v": "stage 'scale'",
    "vllm_int4": "stage 'hadamard'",
    "vllm_nvfp4": "stage 'scale'",
    "vllm_octave": "codes of (LeadingChannels|RmsLevelsQuantizer)",
}
REFUSED |= {
    name: reason
    for name in NAMES
    for start, reason in ENGINES.items()
    if name.startswith(f"engine/{start}") and not name.endswith(("/uncalibrated", "_ds_mla"))  # no number per layer
}
REFUSED |= {
    f"kvquant_plus_plus/delta{kind}": "codes of DeltaQuantizer"
    for kind in ("", "_mse", "_prod", "_every", "_sequence", "_threshold", "_threshold_low")
}
REFUSED |= {
    f"kvquant_plus_plus/{name}": "codes of TokenSplit"
    for name in ("attention", "attention_mse", "pipeline", "pipeline_attention_low_rank", "pipeline_delta_attention")
}
REFUSED |= {"kvquant_plus_plus/tiers": "codes of TokenTiers", "waterfill_kv": "values that are stored with keys"}
REFUSED |= {"waterfill/kv_small": REFUSED["waterfill_kv"]}
REFUSED |= {name: FAMILIES[family] for name in NAMES if (family := name.partition("/")[0]) in FAMILIES}
NAMES = [name for name in NAMES if name not in LIBRARIES]  # other libraries' caches have no codecs


def query(heads, dim, batch=1, dtype=torch.float32, seed=9):
    return torch.randn(batch, heads, 1, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(keys, values, *, group=2, dtype=torch.float32, **settings):
    batch, heads, dim = keys.shape
    q = query(heads * group, dim, batch, dtype)
    found = attend(q, keys, values, dim**-0.5, **settings)
    assert found.dtype is dtype
    assert oracle.error(found, oracle.attend(q, keys, values, dim**-0.5, **settings)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", one_of_each(NAMES))
def test_every_method_or_its_reason(name):
    """Blocks, a short last one, full-precision tokens behind them; keys and values leave at different times."""
    dim = 128 if "octave" in name else 64  # its keys need channels beside the 64 with RoPE
    method = build(name, torch.randn(1, 2, 128, dim), nearest_bits(name))
    if name in REFUSED:
        with pytest.raises(Unsupported, match=f"cache.attention=packed: {REFUSED[name]}"):
            [build_linear_chain(codec) for codec in (method.key, method.value)]
        return
    rope = rope_table(200, 64)
    keys, values = (
        PackedStates(None, (), torch.randn(1, 2, 117, 64))
        if codec is None
        else oracle.states(codec, tokens, full, block=32, tail=9, rope=rope if codec.uses_rope else None)
        for codec, tokens, full in ((method.key, 96, 12), (method.value, 64, 44))
    )
    check(keys, values)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["oscar", "nsnquant", "quarot"])
def test_dtypes(name, dtype):
    method = kvq.build_method(name, bits=2, head_dim=128)
    rope = rope_table(200, 128) if method.key.uses_rope else None
    keys = oracle.states(method.key, 128, 17, dim=128, block=64, dtype=dtype, rope=rope)
    values = oracle.states(method.value, 128, 17, dim=128, block=64, dtype=dtype, seed=1)
    check(keys, values, dtype=dtype)


@pytest.mark.parametrize("name", ["nsn", "kivi", "oscar", "quarot", "nsnquant"])
def test_long_blocks_are_cut(name):
    """A prefill that is one block of more tokens than a piece has."""
    method = kvq.build_method(name, bits=2, head_dim=64)
    rope = rope_table(3 * TILE, 64) if method.key.uses_rope else None
    keys = oracle.states(method.key, 2 * TILE + 91, 5, heads=1, tail=31, rope=rope)
    values = oracle.states(method.value, TILE + 93, TILE + 34, heads=1, seed=1)
    check(keys, values)
    check(keys, values, first=TILE + 3)


@pytest.mark.parametrize("name", ["nsnquant", "oscar", "kivi", "waterfill/scalar"])
def test_watched_steps_give_the_same(name):
    """Watched attention opens every step and gives what it gives untimed, bit for bit."""
    method = build(name, torch.randn(1, 2, 256, 64))
    rope = rope_table(200, 64) if method.key.uses_rope else None
    keys, values = oracle.states(method.key, 128, 9, rope=rope), oracle.states(method.value, 96, 41, seed=1)
    seen = []

    @contextlib.contextmanager
    def step(name):
        seen.append(name)
        yield

    plain = attend(query(4, 64), keys, values, 0.125)
    with time_steps(step):
        found = kvq.kernels.attend(query(4, 64), keys, values, 0.125)
    assert torch.equal(found, plain)
    assert seen.count("attention") == seen.count("rotation") == seen.count("joining") == 1
    chain = build_linear_chain(method.key)
    assert set(seen) == {*STEPS, "attention"} - (set() if chain.shifts else {"shifts"}) - (
        {"norms"} if chain.joint else set()
    )


@settings(max_examples=examples(12))
@given(st.data())
def test_any_transform_of_all_heads(data):
    """Widths of each component; heads together, in groups, the last of which may be smaller, and apart, with rows of
    integers and not; the past in parts that no piece divides."""
    heads = data.draw(st.sampled_from([3, 4]))
    dim, batch = data.draw(st.sampled_from([8, 12])), data.draw(st.integers(1, 2))
    names = ["waterfill/scalar", "waterfill", "waterfill/unshrunk", "kvtc"]
    name = data.draw(st.sampled_from([name for name in names if name in NAMES]))
    together = data.draw(st.sampled_from([1, 2, 3, None])) if name != "kvtc" else None
    transforms = [f"{side}.stages.transform" for side in ("key", "value")]
    sides = [f"{path}.heads_together={together or 'null'}" for path in transforms]
    sides += [f"{path}.tables=width+2" for path in transforms if data.draw(st.booleans())]
    bits = data.draw(st.sampled_from([0.75, 1.25, 2.25, 5]))
    method = build(name, torch.randn(1, heads, 256, dim), bits, [] if name == "kvtc" else sides)
    total = data.draw(st.integers(1, 200))
    packed = data.draw(st.integers(0, total))
    tail = data.draw(st.integers(0, packed))
    pairs = data.draw(st.sampled_from([0, dim // 4, dim // 2]))
    rope = rope_table(total, dim)
    rope = dataclasses.replace(
        rope, cos=rope.cos[..., :pairs], sin=rope.sin[..., :pairs], interleaved=data.draw(st.booleans())
    )
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    size = {"heads": heads, "dim": dim, "batch": batch, "tail": tail, "dtype": dtype}
    block = data.draw(st.sampled_from([None, 5, 32]))
    keys = oracle.states(method.key, packed - tail, total - packed, block=block, rope=rope, **size)
    values = oracle.states(method.value, packed - tail, total - packed, block=block, seed=1, **size)
    first = data.draw(st.integers(0, total - 1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "JOINT_TILE", 37 * heads * dim)
        check(keys, values, group=data.draw(st.sampled_from([1, 4])), first=first, dtype=dtype)


@settings(max_examples=examples(8))
@given(
    together=st.sampled_from([None, 1, 3, 4]),
    paired=st.booleans(),
    bits=st.sampled_from([0.75, 2.25, 5]),
    heads=st.integers(1, 3),
    batch=st.integers(1, 2),
    total=st.integers(1, 120),
    data=st.data(),
)
def test_keys_and_values_in_the_same_components(together, paired, bits, heads, batch, total, data):
    """Of one store, keys are read of the first heads and values of the others, whatever is transformed together."""
    sides = [
        f"key.stages.transform.heads_together={together or 'null'}",
        *(["+key.stages.transform.with_values=true"] if paired else []),
    ]
    method = build("waterfill_kv", torch.randn(1, 2 * heads, 256, 8), bits, sides)
    packed = data.draw(st.integers(0, total))
    first = data.draw(st.integers(0, total - 1))
    both = oracle.states(method.key, packed, total - packed, heads=2 * heads, dim=8, batch=batch, block=32,
                         rope=rope_table(total, 8), dtype=torch.float64)  # fmt: skip
    keys, values = both.select_heads(slice(0, heads)), both.select_heads(slice(heads, 2 * heads))
    assert keys.shape == values.shape == (batch, heads, 8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "JOINT_TILE", 37 * 2 * heads * 8)
        check(keys, values, group=data.draw(st.sampled_from([1, 3])), first=first, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_long_past_behind_a_transform_of_all_heads(dtype):
    method = build("waterfill/scalar", torch.randn(1, 2, 256, 64), 2.25)
    keys = oracle.states(method.key, 2 * TILE + 91, 5, rope=rope_table(2 * TILE + 91, 64), block=32, dtype=dtype)
    values = oracle.states(method.value, 2 * TILE + 91, 5, block=32, seed=1, dtype=dtype)
    check(keys, values, dtype=dtype)
    check(keys, values, dtype=dtype, first=TILE + 3)


UNIFORM = st.fixed_dictionaries(
    {
        "bits": st.integers(1, 8),
        "axis": st.sampled_from(["per_channel", "per_token"]),
        "group_size": st.sampled_from([None, 3, 8, 20, 32, 128]),
        "kind": st.sampled_from(["float", "integer", "symmetric"]),
        "gain": st.sampled_from(["none", "unit", "parallel"]),
        "scope": st.sampled_from(["head", "token"]),
        "order": st.sampled_from([[], ["hadamard"], ["norm"], ["hadamard", "norm"], ["norm", "hadamard"]]),
    }
)


def uniform(bits, axis, group_size, kind, gain, scope, order):
    symmetric = kind == "symmetric"
    quantizer = UniformQuantizer(
        max(bits, 2) if symmetric else bits,
        axis,
        group_size,
        symmetric=symmetric,
        zero_point="float" if symmetric else kind,
        gain=gain,
    )
    stages = {"hadamard": Hadamard(), "norm": TokenNorm(scope)}
    return Codec({name: stages[name] for name in order}, order, quantizer)


@settings(max_examples=examples(60))
@given(st.data())
def test_any_uniform_chain(data):
    dim = data.draw(st.sampled_from([8, 64, 96, 128, 256]))
    heads, batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    total = data.draw(st.integers(1, 90))
    sides = []
    for seed in (0, 1):
        packed = data.draw(st.integers(0, total))
        tail = data.draw(st.integers(0, packed))
        sides.append(
            oracle.states(
                uniform(**data.draw(UNIFORM)),
                packed - tail,
                total - packed,
                heads=heads,
                dim=dim,
                batch=batch,
                block=data.draw(st.sampled_from([None, 5, 16, 32])),
                tail=tail,
                seed=seed,
                dtype=torch.float32,
            )
        )
    check(*sides, group=data.draw(st.sampled_from([1, 2, 3, 8])), first=data.draw(st.integers(0, total - 1)))


@settings(max_examples=examples(30))
@given(st.data())
def test_attention_without_decoded_tokens(data):
    """Low rank beside codes, tables of product codes and a query's sketch: any shapes, in pieces of a few tokens."""
    dim, heads, batch = (data.draw(st.sampled_from(sizes)) for sizes in ([8, 16, 32], [1, 2, 3], [1, 2]))
    total = data.draw(st.integers(1, 90))
    sides = []
    for seed in (0, 1):
        kind = data.draw(st.sampled_from(["low_rank", "product", "prod"]))
        stages = {"norm": TokenNorm("head"), "rotation": Hadamard()}
        if kind == "product":
            product = ProductQuantizer(data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(1, 9)), 2)
            codec = PrefillCodec({"rotation": Hadamard()}, ["rotation"], product)
        elif kind == "prod":
            sketch = data.draw(st.sampled_from(["gaussian", "orthogonal"]))
            codec = Codec(stages, list(stages), InnerProductQuantizer(data.draw(st.integers(2, 5)), sketch))
        else:
            base = uniform(**data.draw(UNIFORM))
            below = data.draw(st.sampled_from([None, 1, 9]))
            codec = Codec({}, [], LowRankCorrection(base, data.draw(st.integers(1, 9)), below=below))
        packed = data.draw(st.integers(0, total))
        tail = data.draw(st.integers(0, packed))
        size = {"heads": heads, "dim": dim, "batch": batch, "block": data.draw(st.sampled_from([None, 8, 32]))}
        sides.append(
            oracle.states(codec, packed - tail, total - packed, tail=tail, seed=seed, dtype=torch.float64, **size)
        )
    with pytest.MonkeyPatch.context() as patched:
        for module in (pieces, eager):
            patched.setattr(module, "TILE", 24)
        group, first = data.draw(st.sampled_from([1, 4])), data.draw(st.integers(0, total - 1))
        check(*sides, group=group, first=first, dtype=torch.float64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [0, 8, 32])
def test_partial_and_interleaved_rotary_embeddings(pairs, interleaved):
    method = kvq.build_method("nsnquant", bits=2, head_dim=64)
    rope = rope_table(200, 64)
    rope = dataclasses.replace(rope, cos=rope.cos[..., :pairs], sin=rope.sin[..., :pairs], interleaved=interleaved)
    keys = oracle.states(method.key, 128, 3, block=64, rope=rope)
    check(keys, oracle.states(method.value, 128, 3, block=64, seed=1))


PLUS = "kvquant_plus_plus"


@pytest.mark.parametrize("name", ["oscar", "waterfill/scalar", PLUS, f"{PLUS}/low_rank", f"{PLUS}/product"])
def test_memory_is_that_of_a_piece(name):
    """Largest tensor made, however long the past."""
    method = build(name, torch.randn(1, 1, 256, 64), nearest_bits(name))
    largest = []
    for tokens in (2 * TILE, 6 * TILE):
        rope = rope_table(tokens, 64)
        keys, values = (
            oracle.states(codec, tokens, 0, heads=1, block=128, rope=rope if codec.uses_rope else None)
            for codec in (method.key, method.value)
        )
        with torch.autograd.graph.save_on_cpu(), torch.profiler.profile(profile_memory=True) as profile:
            attend(query(2, 64), keys, values, 0.125)
        largest.append(max(event.cpu_memory_usage for event in profile.events()))
    assert largest[0] == largest[1]
