"""KVCache in a model: what attention reads, what is counted, and what is refused."""

import itertools

import pytest
import torch
from transformers import DynamicCache

import kvq
from kvq.cache import KVCache
from kvq.errors import ConfigError, DataError, Unsupported
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
