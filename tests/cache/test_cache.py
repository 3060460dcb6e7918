"""KVCache in a model: what attention reads, what is counted, and what is refused."""

import itertools

import pytest
import torch
from transformers import DynamicCache

import kvq
from kvq.cache import KVCache
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from tests.cache.states import states
from tests.random_models import llama, token_ids


def method(name="nsn", bits=3, size=8, head_dim=128, overrides=()):
    return kvq.build_method(name, bits=bits, head_dim=head_dim, overrides=[f"residual.size={size}", *overrides])


@pytest.fixture(scope="module")
def model():
    return llama()


def logits(model, cache, tokens, bounds=(0, None), **settings):
    """Logits of the last chunk when `tokens` are fed between `bounds`."""
    bounds = [*bounds[:-1], tokens.shape[1] if bounds[-1] is None else bounds[-1]]
    out = None
    for start, end in itertools.pairwise(bounds):
        out = model(tokens[:, start:end], past_key_values=cache, **settings).logits
    return out


@pytest.mark.parametrize("name", ["fp16", "identity"])
@pytest.mark.parametrize("residual", ["block", "none"])
def test_identity_and_full_precision_are_transformers_own_cache(model, name, residual):
    tokens = token_ids(30)
    cache = KVCache(model, method(name, overrides=[f"residual={residual}"]))
    plain = DynamicCache(config=model.config)
    for bounds in ((0, 13), (13, 14), (14, 30)):
        piece = tokens[:, slice(*bounds)]
        assert torch.equal(logits(model, cache, piece), logits(model, plain, piece))


@pytest.mark.parametrize("name", ["nsn", "oscar", "oscar/token_scope", "kivi", "quarot", "rtn", "identity", "zero"])
@pytest.mark.parametrize("residual", ["block", "none"])
def test_packed_and_decoded_copies_give_the_same_logits(model, name, residual):
    """Bit for bit, at every step, whether the last block is just full or not."""
    tokens = token_ids(34, batch=2)
    chosen = method(name, overrides=[f"residual={residual}"])
    packed, kept = KVCache(model, chosen), KVCache(model, chosen, keep_decoded=True)
    for start, end in ((0, 15), (15, 16), (16, 17), (17, 24), (24, 33), (33, 34)):
        piece = tokens[:, start:end]
        assert torch.equal(logits(model, packed, piece), logits(model, kept, piece))
    assert packed.nbytes == kept.nbytes


@pytest.mark.parametrize("size", [4, 8])
def test_decoding_reads_exactly_the_naive_cache(model, size):
    """A transformers cache fed by hand with decode(encode(block)): the logits agree bit for bit."""
    tokens = token_ids(21)
    chosen = method("oscar", size=size)
    cache = KVCache(model, chosen)
    plain = DynamicCache(config=model.config)
    for start in range(21):
        piece = tokens[:, start : start + 1]
        assert torch.equal(logits(model, cache, piece), logits(model, plain, piece))
        if (start + 1) % size == 0:
            last = slice(start + 1 - size, start + 1)
            for layer in plain.layers:
                for codec, held in ((chosen.key, layer.keys), (chosen.value, layer.values)):
                    held[:, :, last] = codec.decode(codec.encode(held[:, :, last]))


@pytest.mark.parametrize("name", ["nsn", "oscar", "zero"])
def test_the_cache_is_read(model, name):
    tokens = token_ids(20)
    exact = logits(model, DynamicCache(config=model.config), tokens, (0, 17, None))
    read = logits(model, KVCache(model, method(name)), tokens, (0, 17, None))
    assert float((read - exact).abs().max()) > 1e-3


def test_either_sides_bits_change_the_logits(model):
    tokens = token_ids(20)
    outs = {b: logits(model, KVCache(model, method("oscar", b)), tokens, (0, 17, None)) for b in ("3", "k2v3", "k3v2")}
    for first, second in (("3", "k2v3"), ("3", "k3v2"), ("k2v3", "k3v2")):
        assert not torch.allclose(outs[first], outs[second], atol=1e-4)


def test_one_side_alone(model):
    """`key=null`: keys in full precision; their bits say so, and count in the mean."""
    chosen = method("oscar", overrides=["key=null"])
    assert chosen.key is None
    cache = KVCache(model, chosen)
    logits(model, cache, token_ids(16))
    assert cache.side_bits("key") == 32
    assert cache.side_bits("value") == 3 + 1
    assert cache.bits_per_element == (32 + 4) / 2
    assert cache.effective_bits == (32 + 4) / 2


def test_keys_and_values_with_their_own_residuals(model):
    chosen = method("rtn", overrides=["residual.key.size=4", "residual.value.policy=none"])
    tokens = token_ids(11)
    cache = KVCache(model, chosen)
    logits(model, cache, tokens)
    key, value = cache.layers[0].key, cache.layers[0].value
    assert (key.packed_tokens, key.residual_tokens) == (8, 3)
    assert (value.packed_tokens, value.residual_tokens) == (11, 0)


@pytest.mark.parametrize("name", ["nsn", "oscar/token_scope", "rtn", "zero", "fp16"])
@pytest.mark.parametrize("keep", [False, True])
def test_bytes_are_those_of_the_stored_tensors(model, name, keep):
    """Blocks encoded by hand, and the rest in the model's dtype; a decoded copy is not storage."""
    chosen = method(name)
    cache = KVCache(model, chosen, keep_decoded=keep)
    assert (cache.nbytes, cache.bits_per_element, cache.effective_bits) == (0, 0, 0)
    packed = residual = 0
    for layer in range(2):
        k, v = (states(21, 2, 2, 128, seed=2 * layer + i).bfloat16() for i in range(2))
        cache._update(k, v, layer)
        for codec, x in ((chosen.key, k), (chosen.value, v)):
            done = 0 if codec is None else 21 if name == "nsn" else 16  # nsn takes the prefill as one block
            if codec is not None:
                packed += codec.encode(x[:, :, :done], None if name == "nsn" else 8).nbytes
            residual += x[:, :, done:].numel() * 2
    assert (cache.packed_bytes, cache.nbytes) == (packed, packed + residual)
    assert cache.effective_bits == 8 * (packed + residual) / (2 * 2 * 2 * 2 * 21 * 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_oscars_bits_at_4096_tokens(dtype):
    """Packed 3.0625; with 128 of the tokens in the residual, 3.47 (one block of 3968, so that 128 are left)."""
    model = llama(layers=1)
    for size, left in ((3968, 128), (128, 0)):
        cache = KVCache(model, method("oscar", 2, size=size))
        cache._update(states(4096, 1, 8, 128).to(dtype), states(4096, 1, 8, 128, seed=1).to(dtype), 0)
        assert cache.get_seq_length() == 4096
        assert cache.layers[0].key.residual_tokens == left
        assert cache.bits_per_element == 3.0625
        assert (cache.side_bits("key"), cache.side_bits("value")) == (3.125, 3.0)
        assert cache.effective_bits == ((4096 - left) * 3.0625 + left * 16) / 4096
        assert left == 0 or cache.effective_bits == pytest.approx(3.47, abs=0.005)


def test_reset_makes_a_new_cache(model):
    cache = KVCache(model, method())
    logits(model, cache, token_ids(20))
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    fresh = KVCache(model, method())
    tokens = token_ids(19, batch=3, seed=1)
    for bounds in ((0, 11), (11, 19)):
        piece = tokens[:, slice(*bounds)]
        assert torch.equal(logits(model, cache, piece), logits(model, fresh, piece))


def test_a_head_dim_without_a_hadamard_is_refused_at_once():
    odd = llama(layers=1, head_dim=72)
    with pytest.raises(Unsupported, match="head_dim=72"):
        KVCache(odd, method("oscar"))
    KVCache(odd, method("nsn"))


@pytest.mark.parametrize(("projection", "what"), [("k_proj", "keys"), ("v_proj", "values")])
def test_nan_names_the_layer_and_the_side(projection, what):
    broken = llama(layers=3)
    getattr(broken.model.layers[1].self_attn, projection).weight[5] = float("nan")
    cache = KVCache(broken, method())
    with pytest.raises(DataError, match=f"layer 1 {what}: NaN"):
        logits(broken, cache, token_ids(9))


def test_nan_weights_are_named_where_a_method_asks_how_keys_turn():
    broken = llama(layers=2)
    broken.model.layers[1].self_attn.k_proj.weight[5] = float("nan")
    with pytest.raises(DataError, match=r"its weights model\.layers\.1\.self_attn\.k_proj\.weight hold NaN"):
        KVCache(broken, method("nsnquant", 2))


def test_a_mask_that_says_who_attends_to_whom_is_refused(model):
    mask = torch.ones(4, 4).tril().bool()[None, None]
    with pytest.raises(Unsupported, match=r"attention_mask: of 4 dimensions, .* or leave it out"):
        model(token_ids(4), attention_mask=mask, past_key_values=KVCache(model, method()))


@pytest.mark.parametrize("mask", [[[0, 1, 0, 1], [1, 1, 1, 1]], [[1, 1, 1, 1], [1, 1, 1, 0]]])
def test_masks_that_hide_other_tokens_than_padding_on_the_left_are_refused(model, mask):
    mask = torch.tensor(mask)
    tokens = token_ids(4, batch=2)
    for attempt in (
        lambda: model(tokens, attention_mask=mask, past_key_values=KVCache(model, method())),
        lambda: model(tokens, mask, None, KVCache(model, method())),
        lambda: model.model(tokens, attention_mask=mask, past_key_values=KVCache(model, method())),
        lambda: model.generate(tokens, attention_mask=mask, past_key_values=KVCache(model, method()), max_new_tokens=1),
    ):
        with pytest.raises(
            Unsupported, match=r"attention_mask: hides tokens .* only padding on the left .*\(padding_side=left\)"
        ) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    model(tokens, attention_mask=mask)  # other caches pad as before
    model(tokens, attention_mask=torch.ones_like(mask), past_key_values=KVCache(model, method()))


def test_many_caches_leave_one_hook_on_the_model(model):
    before = None
    for _ in range(3):
        KVCache(model, method())
        count = sum(len(module._forward_pre_hooks) for module in model.modules())
        assert before in (None, count)
        before = count


def test_crop_within_the_residual(model):
    tokens = token_ids(30)
    cache, shorter = KVCache(model, method()), KVCache(model, method("nsn"))
    logits(model, cache, tokens, (0, 8, 14))
    logits(model, shorter, tokens, (0, 8, 11))
    cache.crop(-3)
    cache.crop(0)
    assert cache.get_seq_length() == 11
    assert cache.nbytes == shorter.nbytes
    for bounds in ((11, 20), (20, 30)):
        piece = tokens[:, slice(*bounds)]
        torch.testing.assert_close(logits(model, cache, piece), logits(model, shorter, piece), atol=1e-4, rtol=0)


def test_crop_into_a_block_is_refused_and_changes_nothing(model):
    cache = KVCache(model, method("rtn", overrides=["residual.value.size=4"]))
    tokens = token_ids(15)
    logits(model, cache, tokens)
    with pytest.raises(Unsupported, match="layer 0 values: cannot remove 5 tokens, only 3") as caught:
        cache.crop(-5)
    assert "\n" not in str(caught.value)
    for layer in cache.layers:
        assert (layer.key.tokens, layer.value.tokens) == (15, 15)
    with pytest.raises(ConfigError, match=r"crop\(3\): give a negative number"):
        cache.crop(3)


def test_quantized_prefill_reads_its_own_complete_blocks(model):
    tokens = token_ids(20)
    exact = logits(model, DynamicCache(config=model.config), tokens)
    assert torch.equal(logits(model, KVCache(model, method("oscar")), tokens), exact)
    read = logits(model, KVCache(model, method("oscar"), quantized_prefill=True), tokens)
    assert not torch.allclose(read, exact, atol=1e-3)


def test_gradients_on_do_not_matter(model):
    """A cache used outside no_grad stores plain tensors."""
    trained = llama().requires_grad_(True)
    cache = KVCache(trained, method())
    for bounds in ((0, 11), (11, 20)):
        logits(trained, cache, token_ids(20)[:, slice(*bounds)])
    with torch.no_grad():
        plain = KVCache(trained, method())
        logits(trained, plain, token_ids(20), (0, 11, 20))
    assert cache.nbytes == plain.nbytes


def test_the_method_is_kept(model):
    cache = KVCache(model, method())
    assert isinstance(cache.method, Method)
    assert cache.method.name == "nsn"
