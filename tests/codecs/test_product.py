"""Product quantization: codebooks of a sequence's first tokens, their bytes, and the error of tokens behind them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq
from kvq.cache.side import CacheSide
from kvq.codecs import PackedStore, PrefillCodec, ProductQuantizer, RandomizedHadamard
from kvq.config.method import Policy, PrefillBlock, ResidualSide
from tests.properties import examples


def states(*shape, seed=501):
    """Never the seed of a rotation (0) or of k-means (4)."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain(**settings):
    return PrefillCodec({"rotation": RandomizedHadamard(0)}, ["rotation"], ProductQuantizer(**settings))


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_by_the_definition(data):
    """The nearest entry of each group's own codebook, number by number; bytes of codes and codebooks; each sequence."""
    channels, bits = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(1, 5))
    batch, heads, tokens = (data.draw(st.integers(1, high)) for high in (2, 2, 24))
    codec = chain(channels=channels, code_bits=bits, iterations=3)
    x, later = states(batch, heads, tokens, 16, seed=data.draw(st.integers(600, 700))), states(batch, heads, 5, 16)
    packed = codec.encode(x, 8)
    book = packed.parts["codebook"]
    assert book.shape == (batch, 1, 16 // channels * 2**bits, channels)
    lengths = [min(8, tokens - start) for start in range(0, tokens, 8)]
    codes = sum(codec.for_later_tokens(packed).encode(x[:, :, :length]).nbytes for length in lengths)
    assert packed.nbytes == codes + 2 * 16 * 2**bits * batch
    store = PackedStore(packed)
    own = codec.for_later_tokens(packed)
    store.append(own.encode(later))
    assert store.packed.nbytes == packed.nbytes + own.encode(later).nbytes
    out = codec.decode(store.packed)
    assert torch.equal(out[:, :, tokens:], own.decode(own.encode(later)))
    for sequence in range(batch):  # codebooks of a sequence are its own
        alone = codec.encode(x[sequence : sequence + 1], 8)
        assert torch.equal(alone.parts["codebook"], book[sequence : sequence + 1])
    matrix = RandomizedHadamard(0).matrix(16, torch.empty(0, dtype=torch.float64)).numpy()
    entries = book.double().numpy().reshape(batch, 16 // channels, 2**bits, channels)
    sequence, head, token = (data.draw(st.integers(0, high - 1)) for high in (batch, heads, tokens))
    turned = x[sequence, head, token].double().numpy() @ matrix
    for group in range(16 // channels):
        distances = [
            float(((turned[group * channels :][:channels] - entry) ** 2).sum()) for entry in entries[sequence, group]
        ]
        found = (out[sequence, head, token].double().numpy() @ matrix)[group * channels :][:channels]
        distance = float(((turned[group * channels :][:channels] - found) ** 2).sum())
        assert distance == pytest.approx(min(distances), abs=1e-4)


def side(codec, size=32, policy=Policy.block, keep_decoded=False):
    return CacheSide(codec, ResidualSide(policy, size, PrefillBlock.size), "layer 0 keys", keep_decoded)


@pytest.mark.parametrize("keep_decoded", [False, True])
@pytest.mark.parametrize("policy", [Policy.block, Policy.sliding])
@pytest.mark.parametrize("chunks", [[150], [32] * 4 + [22], [100, 50], [7] * 21 + [3]])
def test_chunked_scoring_is_exact(chunks, policy, keep_decoded):
    """Tokens fed together as if they came one by one: the codebooks are those of the first block, in any chunks."""
    codec, x = chain(channels=4, code_bits=4, iterations=3), states(1, 2, 150, 16)
    single, together = side(codec, policy=policy), side(codec, policy=policy, keep_decoded=keep_decoded)
    for token in x.split(1, 2):
        expected = single.append(token)
    for chunk in x.split(chunks, 2):
        together.append_in_steps(chunk)
    assert together.packed_tokens == single.packed_tokens > 0
    assert together.packed_bytes == single.packed_bytes
    assert torch.equal(together._past(), single._past())
    assert torch.equal(single._visible()[:, :, : single.packed_tokens], single._past())
    assert expected.shape == x.shape
    fork = together.fork()
    fork.append(x[:, :, :70])
    assert torch.equal(fork._past()[:, :, : together.packed_tokens], together._past())


def test_a_prompt_fits_the_codebooks_to_all_of_its_blocks():
    codec, x = chain(channels=4, code_bits=4), states(1, 2, 150, 16)
    held = side(codec)
    held.append(x)
    expected = codec.encode(x[:, :, :128], 32)
    assert torch.equal(held.packed[0].parts["codebook"], expected.parts["codebook"])
    assert torch.equal(held._past(), codec.decode(expected))


def test_bytes_belong_to_the_sequence():
    """64 KiB for a layer and side at 128 channels: 2 bits of codes, and 1 bit of 2048 tokens of two heads."""
    method = kvq.build_method(
        "kvquant_plus_plus/product",
        head_dim=128,
        overrides=[f"{side}.quantizer.{name}=1" for side in ("key", "value") for name in ("iterations", "rows")],
    )
    packed = method.key.encode(states(1, 2, 2048, 128), 128)
    assert packed.parts["codebook"].numel() * 2 == 64 * 1024
    assert packed.bits_per_element == 2 + 1
