"""transformers' own quantized cache in the place of kvq's: what it is, chunk by chunk, and what it is not asked for."""

import pytest
import torch
from transformers import QuantizedCache

import kvq
from kvq.cache import KVCache
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.layers import kv_layers_of
from kvq.models.load import LoadedModel
from kvq.tasks.scoring import scoring_bounds
from kvq_zoo.library_caches import _LAYERS, BITS, check_works, is_installed
from tests.cache.states import states
from tests.cache.test_generate import generate, greedy
from tests.random_models import in_double_precision, llama, random_llama, token_ids
from tests.tasks.test_scoring import chunked, token_by_token

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason=f"extra [{name}]")) for name in BITS
]
CASES = [
    pytest.param(name, bits, marks=pytest.mark.skipif(not is_installed(name), reason=f"extra [{name}]"))
    for name, known in BITS.items()
    for bits in known
]

MODEL = llama(head_dim=32)


def method(name, bits=4, size=6):
    return kvq.build_method(name, bits=bits, head_dim=32, overrides=[f"residual.size={size}"])


def fed(loaded, chosen, tokens):
    cache = KVCache(loaded.model, chosen)
    for start, end in scoring_bounds(chosen, tokens.shape[1]):
        loaded.hidden_states(tokens[:, start:end], cache)
    return cache


def layer(name, bits=4, size=6):
    return KVCache(MODEL, method(name, bits, size)).layers[0]


def pieces(x, size):
    """Cut where a layer flushes."""
    return [x[:, :, start:end] for start, end in scoring_bounds(method("quanto", size=size), x.shape[2])]


def differ(one, other):
    return not all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [1, 7, 16])
@pytest.mark.parametrize(("name", "bits"), CASES)
def test_a_chunk_up_to_a_flush_is_token_by_token_bit_for_bit(name, bits, size):
    """Given the same states. (A model's own differ in their last bit, which a tie between two codes makes visible.)"""
    x, bounds = states(50, batch=2), scoring_bounds(method(name, bits, size), 50)
    for chunk in (size, 3):
        one, many = layer(name, bits, size), layer(name, bits, size)
        one.token_by_token = many.token_by_token = True
        for start, end in scoring_bounds(method(name, bits, size), 50, chunk):
            got = many.update(x[:, :, start:end], -x[:, :, start:end])
            for at in range(start, end):
                expected = one.update(x[:, :, at : at + 1], -x[:, :, at : at + 1])
                # What the query at `at` sees of the chunk.
                assert not differ([part[:, :, : at + 1] for part in got], expected), (chunk, at)
        assert (many.key.tokens, many.key.packed_bytes) == (one.key.tokens, one.key.packed_bytes)
    assert len(bounds) == 1 + -(-49 // size)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_scoring_in_chunks_is_token_by_token_in_fp64(name, bits, monkeypatch):
    """hqq's groups change with the length, so its tokens are moved onto ties: it is held to the first two flushes."""
    loaded = in_double_precision(LoadedModel(llama(head_dim=64), torch.device("cpu")), monkeypatch)
    tokens = token_ids(60, batch=2)
    for size in (7, 16):
        chosen, end = method(name, bits, size), 59 if name == "quanto" else size + 1
        expected = token_by_token(loaded, chosen, tokens)
        for chunk in (None, 3):
            got = chunked(loaded, chosen, tokens, scoring_bounds(chosen, 59, chunk))
            assert (got - expected)[:, :end].abs().max() < 1e-9, (size, chunk)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_it_is_what_transformers_does(name, bits):
    theirs, again = (QuantizedCache(name, MODEL.config, nbits=bits, residual_length=6) for _ in range(2))
    ours, tokens = KVCache(MODEL, method(name, bits)), token_ids(30) % 60 + 1
    for piece in (tokens[:, :11], *tokens[:, 11:].split(1, 1)):
        out, expected = (MODEL(piece, past_key_values=cache).logits for cache in (ours, theirs))
        assert torch.equal(out, expected)
    assert ours.get_seq_length() == theirs.get_seq_length() == 30
    assert torch.equal(generate(MODEL, tokens, KVCache(MODEL, method(name, bits))), greedy(MODEL, tokens, again))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_is_the_same_alone_and_in_a_batch(name):
    x = states(40, batch=3)
    together, alone = layer(name), [layer(name) for _ in range(3)]
    for piece in pieces(x, 6):
        got = together.update(piece, piece)
        rows = [one.update(piece[i : i + 1], piece[i : i + 1]) for i, one in enumerate(alone)]
        assert not differ(got, [torch.cat(parts) for parts in zip(*rows, strict=True)])


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_bits_are_those_of_the_tensors_it_holds(name, bits):
    """Codes are packed (hqq's 3 bits: ten to a word of 32), scale and zero point have the dtype of the model."""
    for dtype, size in ((torch.float32, 32), (torch.float16, 16)):
        one, x = layer(name, bits), states(64).to(dtype)
        one.update(x, x)
        packed = 32 * 7 / 64 if (name, bits) == ("hqq", 3) else bits
        assert one.key.bits_per_element == one.value.bits_per_element == packed + 2 * size / 64
        assert one.key.residual_bytes == 0
        one.update(x[:, :, :4], x[:, :, :4])
        assert one.key.residual_bytes == 2 * 4 * 32 * size // 8
        assert (one.key.tokens, one.key.packed_tokens) == (68, 64)


@pytest.mark.parametrize("name", BACKENDS)
def test_forks_go_their_own_way(name):
    loaded, tokens, chosen = random_llama(), token_ids(27), method(name)
    base = fed(loaded, chosen, tokens[:, :17])
    fork = base.fork()
    assert fork.nbytes == base.nbytes
    single = fed(loaded, chosen, tokens[:, :17])
    for piece in token_ids(9, seed=5).split(1, 1):
        loaded.hidden_states(piece, fork)
    for piece in tokens[:, 17:].split(1, 1):
        assert torch.equal(loaded.hidden_states(piece, base), loaded.hidden_states(piece, single))


@pytest.mark.parametrize("name", BACKENDS)
def test_crop_takes_what_waits_and_no_more(name):
    x, cropped, short = states(24), layer(name, size=8), layer(name, size=8)
    for one, end in ((cropped, 21), (short, 19)):
        for piece in pieces(x[:, :, :end], 8):
            one.update(piece, piece)
    assert cropped.key.residual_tokens == 4
    with pytest.raises(ConfigError, match="negative"):
        cropped.crop(2)
    with pytest.raises(Unsupported, match="cannot remove 5 tokens, only 4"):
        cropped.crop(-5)
    cropped.crop(-2)
    assert cropped.get_seq_length() == 19
    for piece in x[:, :, 19:].split(1, 2):
        assert not differ(cropped.update(piece, piece), short.update(piece, piece))


@pytest.mark.parametrize("name", BACKENDS)
def test_batches_are_reordered_and_repeated(name):
    x, index = states(20, batch=3), torch.tensor([2, 2, 0])
    for change, rows in (
        (lambda one: one.reorder_cache(index), x[index]),
        (lambda one: one.batch_select_indices(index[:2]), x[index[:2]]),
        (lambda one: one.batch_repeat_interleave(2), x.repeat_interleave(2, 0)),
    ):
        changed, expected = layer(name), layer(name)
        for one, given in ((changed, x), (expected, rows)):
            for piece in pieces(given[:, :, :15], 6):
                one.update(piece, piece)
        change(changed)
        for side in ("key", "value"):
            for count in ("batch_size", "packed_bytes", "residual_bytes", "elements_per_token", "bits_per_element"):
                assert getattr(getattr(changed, side), count) == getattr(getattr(expected, side), count)
        for piece in rows[:, :, 15:].split(1, 2):
            assert not differ(changed.update(piece, piece), expected.update(piece, piece))
    changed.reset()
    assert (changed.get_seq_length(), changed.batch_size, changed.key.packed_bytes) == (0, -1, 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_it_cannot_do_is_said(name):
    loaded, tokens = random_llama(), token_ids(30)
    cache = KVCache(loaded.model, method(name))
    cache.token_by_token = True
    with pytest.raises(Unsupported, match="go past a flush"):
        loaded.hidden_states(tokens, cache)
    with pytest.raises(Unsupported, match=r"3 heads of head_dim=32 are no multiple of .*group_size=64"):
        fed(random_llama(heads=3, kv_heads=3), method(name), tokens)
    one = layer(name)
    with pytest.raises(DataError, match="layer 0 values: NaN"):
        one.update(torch.ones(1, 2, 1, 32), torch.full((1, 2, 1, 32), torch.nan))
    one.update(torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 32))
    with pytest.raises(DataError, match="batch of 2 after 1"):
        one.update(torch.ones(2, 2, 1, 32), torch.ones(2, 2, 1, 32))
    with pytest.raises(Unsupported, match="keys and values of the same bits"):
        kvq.build_method(name, bits="k4v2")
    with pytest.raises(Unsupported, match="policy=block"):
        kvq.build_method(name, bits=4, overrides=["residual.policy=sliding"])
    with pytest.raises(Unsupported, match=f"{name} does .* or {BITS[name][-1]} bits"):
        kvq.build_method(name, bits=3 if name == "quanto" else 5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_package_that_does_not_work_is_one_line(name, monkeypatch):
    def breaks(*_):
        raise RuntimeError("Ninja is required\nto load C++ extensions")

    check_works.cache_clear()
    monkeypatch.setattr(_LAYERS[name], "_dequantize", breaks)
    with pytest.raises(Unsupported, match=rf"method={name}: does not work .*Ninja is required to load C\+\+"):
        layer(name).update(states(1), states(1))


@pytest.mark.parametrize("name", BITS)
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr("kvq_zoo.library_caches.is_installed", lambda _: False)
    with pytest.raises(Unsupported, match=rf"method={name}: .*pip install -e '[.]\[{name}\]'"):
        method(name)


@pytest.mark.skipif(not is_installed("quanto"), reason="needs the extra [quanto]")
def test_layers_have_bits_of_their_own():
    method = kvq.build_method("quanto", overrides=["bits_by_layer.key=[2,4]", "bits_by_layer.value=[2,4]"])
    layers = method.layers(MODEL.config, kv_layers_of(MODEL.config))
    assert [layer.backend.bits for layer in layers] == [2, 4]
