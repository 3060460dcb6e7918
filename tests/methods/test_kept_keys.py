"""Keys of chosen tokens that stay as they came, in chosen layers, whatever becomes of the others."""

from __future__ import annotations

import pytest
import torch

from kvq import bind_kept_keys
from kvq.cache import KVCache
from kvq.config import compose, resolve
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.kept_keys import KeptKeys, KeptSide
from kvq.methods.method import Method
from kvq.models.load import load_tokenizer
from tests import calibrated
from tests.calibrated import bound, random_states
from tests.random_models import random_llama, token_ids

IDS = (3, 17, 40, 41, 42)


def keeping(name: str, *overrides: str, layers: tuple[int, ...] = (0,)) -> Method:
    method = build_method(name, bits=2, head_dim=32, overrides=["residual.size=16", *overrides])
    method = bound(method, random_states(2, 32), 2) if method.needs_calibration else method
    return calibrated.keeping(method, KeptKeys((), layers, IDS))


@torch.no_grad()
@pytest.mark.parametrize("keep_decoded", [False, True])
def test_what_the_cache_holds(keep_decoded):
    loaded, tokens = random_llama(), token_ids(60, batch=2)
    cache = KVCache(loaded.model, keeping("kivi", "residual.policy=block"), keep_decoded)
    plain = KVCache(loaded.model, build_method("fp16", head_dim=32))
    for each in (cache, plain):
        loaded.model(input_ids=tokens, past_key_values=each, use_cache=True)
    first, second = cache.layers[0].key, cache.layers[1].key
    assert isinstance(first, KeptSide)
    assert not isinstance(second, KeptSide)
    assert first.packed_tokens == 48
    chosen = torch.isin(tokens, torch.tensor(IDS))[:, :48]
    count = int(chosen.sum())
    assert 0 < count < chosen.numel()
    exact = plain.layers[0].key._full.view[:, :, :48].transpose(1, 2)
    for side in (first, first.fork()):
        read = side._past().transpose(1, 2)
        assert torch.equal(read[chosen], exact[chosen])
        assert not torch.isclose(read[~chosen], exact[~chosen]).all(-1).any()
    assert first.packed_bytes - second.packed_bytes == count * (2 * 32 * 4 + 4)

    fork = cache.fork()
    fork.layers[0].key.select(torch.tensor([1, 1, 0]))
    assert torch.equal(fork.layers[0].key._past(), first._past()[[1, 1, 0]])
    loaded.model(input_ids=tokens[:, :20], past_key_values=cache, use_cache=True)
    assert first.packed_tokens == 80
    cache.reset()
    assert (cache.nbytes, first.tokens) == (0, 0)
    loaded.model(input_ids=tokens[:1, :20], past_key_values=cache, use_cache=True)
    cache.crop(-3)
    loaded.model(input_ids=tokens[:1, :5], past_key_values=cache, use_cache=True)
    assert first.tokens == 22


@torch.no_grad()
def test_without_ids_it_refuses():
    loaded = random_llama()
    cache = KVCache(loaded.model, keeping("kivi"))
    with pytest.raises(Unsupported, match=r"layer 0 keys: method.kept_keys chooses tokens by input_ids"):
        loaded.model(inputs_embeds=torch.randn(1, 4, 128), past_key_values=cache, use_cache=True)
    with pytest.raises(ConfigError, match="bind_kept_keys"):
        KVCache(loaded.model, calibrated.keeping(keeping("kivi"), KeptKeys((",",), (0,))))
    with pytest.raises(Unsupported, match="kept_keys of kivi keeps"):
        KVCache(loaded.model, keeping("kivi"), attention="packed")


def test_texts_become_tokens():
    tokenizer = load_tokenizer(resolve(compose(["model=tiny"])).model)
    method = bind_kept_keys(build_method("cq/kept_punctuation"), tokenizer)
    kept = method.policy("kept_keys")
    strings = {tokenizer.decode([number]) for number in kept.ids}
    assert {string.strip() for string in strings} == set(kept.texts)
    assert ({",", " ,"} <= strings, len(kept.ids)) == (True, 61)
    plain = build_method("kivi")
    assert bind_kept_keys(plain, tokenizer) is plain
    method = build_method("kivi", overrides=["kept_keys.texts=[zebra crossing]"])
    with pytest.raises(ConfigError, match=r"'zebra crossing' is [0-9]+ tokens of this model; one each"):
        bind_kept_keys(method, tokenizer)


@torch.no_grad()
def test_what_a_cache_with_sinks_holds() -> None:
    """The sinks as they came, the rest as without them; their bytes are those in full precision."""
    loaded, tokens = random_llama(), token_ids(44)
    method = build_method(
        "kivi",
        bits=2,
        head_dim=32,
        overrides=["sink_tokens=4", "residual.size=32", "value.quantizer.group_size=32", "residual.value.policy=block"],
    )
    plain, cache = (KVCache(loaded.model, m) for m in (build_method("fp16", head_dim=32), method))
    kept = {}
    for each in (plain, cache):
        loaded.model(input_ids=tokens[:, :40], past_key_values=each, use_cache=True)
        side = each.fork().layers[1].key
        kept[each] = side.append(torch.zeros(1, 2, 1, 32))
    assert torch.equal(kept[cache][:, :, :4], kept[plain][:, :, :4])
    assert not torch.equal(kept[cache][:, :, 4:36], kept[plain][:, :, 4:36])
    assert torch.equal(kept[cache][:, :, 36:40], kept[plain][:, :, 36:40])
    side = cache.layers[0].key
    assert (side.tokens, side.packed_tokens, side.residual_tokens) == (40, 32, 4)
    assert side.residual_bytes == 8 * 2 * 32 * 4
    assert side.bits_per_element == 3.0
    fork = cache.fork()
    loaded.model(input_ids=tokens[:, 40:], past_key_values=fork, use_cache=True)
    assert (fork.get_seq_length(), cache.layers[0].key.tokens) == (44, 40)
    cache.layers[0].key.select(torch.tensor([0, 0]))
    assert cache.layers[0].key.batch_size == 2
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
