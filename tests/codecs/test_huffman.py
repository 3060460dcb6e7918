"""Huffman coding of indices: the same reconstruction, real bytes, and the figures of the sphere's codebook."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.codecs import (
    ChannelSplit,
    Codec,
    HuffmanCodec,
    LloydMaxQuantizer,
    PackedStore,
    RandomizedHadamard,
    TokenNorm,
    UniformQuantizer,
    VectorQuantizer,
)
from kvq.codecs.lloyd_max import optimal_levels
from kvq.codecs.variable_length import entropy
from kvq.results.metrics import METRICS
from kvq.tasks.measurement import STORED, storage_metrics
from tests.codecs.oracles import cell_probabilities, merged
from tests.properties import examples
from tests.random_models import llama, token_ids


def states(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chains(quantizer):
    """The chain with planes, and with code words."""
    stages = {"norm": TokenNorm(), "rotation": RandomizedHadamard(7)}
    return (kind(stages, ["norm", "rotation"], quantizer) for kind in (Codec, HuffmanCodec))


def words_of(weights):
    """Bits of the code words of Huffman's algorithm in all, one merge at a time."""
    heap = [weight for weight in weights if weight]
    if len(heap) == 1:
        return heap[0]  # a word of one bit
    return merged(heap)


def test_figures_of_the_paper():
    """4 bits, 128 channels: entropy 3.77, Huffman 3.82 (the paper, by samples: 3.816); by density and by coding."""
    probability = cell_probabilities(optimal_levels(4, 128), 128)
    shannon, huffman = float(-(probability * np.log2(probability)).sum()), words_of(list(probability))
    codec = tuple(chains(LloydMaxQuantizer(4)))[1]
    packed = codec.encode(states(1, 8, 1024, 128), 128)
    rate = codec.rate(packed)
    indices, stored = rate.indices, packed.bits_per_element
    print(f"density: {shannon:.3f} and {huffman:.3f} bits; coded: {rate.entropy / indices:.3f} and ", end="")
    print(f"{rate.coded / indices:.3f}; with lengths {stored - 16 / 128:.3f}; saved {1 - rate.coded / indices / 4:.1%}")
    assert (shannon, huffman) == pytest.approx((3.77, 3.815), abs=0.005)
    assert rate.entropy / indices == pytest.approx(shannon, abs=0.003)
    assert rate.coded / indices == pytest.approx(huffman, abs=0.003)
    assert 0.04 < 1 - rate.coded / indices / 4 < 0.05
    assert 0.04 < 1 - (stored - 16 / 128) / 4 < 0.05  # with everything else that is stored for it


def test_stored_bytes_by_hand():
    """Two blocks of different entropies: code words, their lengths, and two numbers for each block."""
    x = states(1, 2, 64, 16)
    x[:, :, 32:, 1:] *= 1e-3
    codec = tuple(chains(UniformQuantizer(3, "per_token")))[1]
    codec.stages = []
    packed = codec.encode(x, 32)
    expected = 0
    for start in (0, 32):
        counts = [0] * 8
        for head in range(2):
            for token in range(start, start + 32):
                row = x[0, head, token].double()
                step = (row.max() - row.min()) / 7
                for value in row:
                    counts[round(float((value - row.min()) / step))] += 1
        expected += math.ceil(words_of(counts) / 8) + 8 + 2 * 4
    statistics = sum(packed.parts[name].numel() * 2 for name in ("scale", "zero_point"))
    assert packed.nbytes == expected + statistics
    assert packed.bits_per_element == 8 * packed.nbytes / x.numel()


QUANTIZERS = {
    "uniform": lambda bits: UniformQuantizer(bits, "per_channel", 5),
    "lloyd_max": LloydMaxQuantizer,
    "split": lambda bits: ChannelSplit(
        3, Codec({}, [], LloydMaxQuantizer(min(bits + 1, 8))), Codec({}, [], UniformQuantizer(bits, "per_token"))
    ),
    "vector": lambda bits: VectorQuantizer(1),
}


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_decoded_bit_for_bit(data):
    """Any quantizer, shape, dtype; tokens that are zero or equal; blocks with a short tail; appended and selected."""
    kind = data.draw(st.sampled_from(sorted(QUANTIZERS)))
    plain, coded = chains(QUANTIZERS[kind](data.draw(st.integers(1, 8))))
    lead = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    shape = (*lead, data.draw(st.integers(1, 40)), data.draw(st.sampled_from([8, 16])))
    block = data.draw(st.sampled_from([None, 1, 3, 16]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    x = states(*shape, seed=data.draw(st.integers(0, 99)), dtype=dtype)
    x[:, :, ::5], x[:1, :, 1::4] = 0, 1
    packed, expected = coded.encode(x, block), plain.decode(plain.encode(x, block))
    assert torch.equal(coded.decode(packed), expected)
    planes = coded.planes(packed)
    assert planes.runs == plain.encode(x, block).runs
    for name, part in plain.encode(x, block).parts.items():
        assert torch.equal(planes.parts[name], part)
    store = PackedStore(packed)
    store.append(coded.encode(x.flip(2), block))
    both = torch.cat([expected, plain.decode(plain.encode(x.flip(2), block))], 2)
    assert torch.equal(coded.decode(store.packed), both)
    turned = torch.arange(shape[0]).flip(0)
    assert torch.equal(coded.decode(store.select(turned).packed), both[turned])
    rate = coded.rate(store.packed)
    assert rate.entropy - 1e-6 <= rate.coded <= sum(coded.quantizer.index_bits.values()) * rate.indices
    assert rate.coded < rate.entropy + rate.indices + 1e-6


def test_a_record_has_the_entropy_beside_the_code_words():
    """A cache reads the same states as without code words, in fewer bits."""
    model, ids = llama(layers=2, head_dim=64), token_ids(200)
    found = {}
    for name in ("turboquant/hadamard", "kvquant_plus_plus/huffman"):
        cache = kvq.KVCache(model, kvq.build_method(name, 4, 64, ["residual.size=64"]))
        with torch.no_grad():
            logits = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(100, 1)]
        found[name] = (torch.cat(logits, 1), storage_metrics(cache, 1))
    (plain, before), (coded, after) = found.values()
    assert torch.equal(plain, coded)
    assert not {"index_bits", "index_entropy"} & before.keys()
    assert 3.6 < after["index_entropy"] <= after["index_bits"] < 4
    assert after["index_bits"] < after["bits_per_element"] - 16 / 64 < 4 < before["bits_per_element"]
    assert {"index_bits", "index_entropy"} <= METRICS.keys() & set(STORED)


@pytest.mark.parametrize(("counts", "bits"), [([1], 0.0), ([5, 5], 1.0), ([1, 1, 2, 0], 1.5)])
def test_entropy(counts, bits):
    assert entropy(np.array(counts)) == bits


def test_codes_take_no_place_in_a_single_token_store():
    """Tokens that leave a sliding residual one by one would each have a code: the blocks of the residual have."""
    method = kvq.build_method("kvquant_plus_plus/huffman", 4, overrides=["residual.policy=sliding", "residual.size=32"])
    assert method.residual.key.schedule(method.key.token_group) == (32, 32)
