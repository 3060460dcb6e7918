"""Every architecture: generation, both windows and scorings, canaries, and sliding residuals scored exactly."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.cache.rotary import styles_of
from kvq.config import PplConfig, Scoring, Windows
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.layers import head_dims_of
from kvq.tasks.ppl import ppl_windows, run_ppl
from kvq.tasks.scoring import ReferenceLogProbs, forward_bounds, parallel_method, scoring_bounds
from tests import presets
from tests.cache.states import nearest_bits, quantizes
from tests.families import FAMILIES, MORE, WINDOW, family
from tests.random_models import VOCABULARY, in_double_precision, token_ids
from tests.tasks.test_scoring import chunked, token_by_token

# Eviction and methods with a plan have their families in tests/cache, as do other libraries' caches.
METHODS = [name for name in presets.METHODS if name == "fp16" or (quantizes(name) and name not in ("ott", "zipcache"))]
HEAD_DIMS = {"gemma4": {32, 64}}


@functools.cache
def method(name: str, *overrides: str, size: int = 8) -> Method:
    """At 3 bits, or the nearest it can do, and with fewer sinks than there are tokens here."""
    sinks = ["sink_tokens=2"] if name in ("kitty", "kvarn") else []
    given = [f"residual.size={size}", *sinks, *overrides]
    return kvq.build_method(name, bits=nearest_bits(name), head_dim=32, overrides=given)


@pytest.mark.thin(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_generate_with_every_method(name: str) -> None:
    """The tokens of decoding by hand, past the window that some layers have."""
    loaded, done = family(name), 0
    tokens = token_ids(WINDOW + 5)
    for chosen in METHODS:
        try:
            cache, again = (KVCache(loaded.model, method(chosen)) for _ in range(2))
        except Unsupported:  # its head dim
            continue
        out = loaded.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
        )
        piece = tokens
        for step in range(3):
            piece = loaded.model(piece, past_key_values=again, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            assert torch.equal(piece[:, 0], out[:, WINDOW + 5 + step]), chosen
        assert cache.get_seq_length() == again.get_seq_length() == WINDOW + 7
        assert cache.layers[0].key.packed_tokens > 0 or chosen == "fp16"
        done += 1
    assert done > 8
    assert set(head_dims_of(loaded.text_config)) == HEAD_DIMS.get(name, {32})


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
@torch.no_grad()
def test_full_precision_and_identity_are_the_plain_forward(name: str) -> None:
    loaded = family(name)
    tokens = token_ids(70, batch=2)
    expected = torch.log_softmax(loaded.model(tokens, use_cache=False).logits, -1)[:, :-1]
    logs = []
    for chosen in ("fp16", "identity"):
        one = method(chosen)
        logs.append(chunked(loaded, one, tokens, scoring_bounds(method("identity"), 69)))
        torch.testing.assert_close(logs[-1], expected, atol=2e-4, rtol=0)
        at_once = chunked(loaded, parallel_method(one), tokens, [(0, 70)])
        torch.testing.assert_close(at_once, expected, atol=2e-4, rtol=0)
    assert torch.equal(*logs)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_canaries_in_both_windows_and_scorings(name: str) -> None:
    loaded = family(name)
    for cut, scoring in itertools.product((Windows.sliding, Windows.disjoint), (Scoring.generation, Scoring.parallel)):
        task = PplConfig(context=48, stride=24, windows=cut, scoring=scoring, batch_size=2)
        windows = ppl_windows([token_ids(120)[0]], task)
        reference = ReferenceLogProbs(windows, VOCABULARY, torch.float32)
        exact = run_ppl(loaded, method("fp16", size=128), windows, task, reference, fill=True)
        same = run_ppl(loaded, method("identity", size=128), windows, task, reference)
        wrecked = run_ppl(loaded, method("zero"), windows, task, reference)
        assert same.nll == exact.nll
        assert (same.metrics()["kl_mean"], same.metrics()["top1_agreement"]) == (0, 1)
        assert (same.storage["bits_per_element"], wrecked.storage["bits_per_element"]) == (32, 0)
        assert wrecked.metrics()["kl_mean"] > 0.05


NAMED = ("llama", "qwen3", "gemma2", "gpt_neox", "gptj")


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "chosen"), [*((name, "kivi") for name in [*FAMILIES, *MORE]), *((name, "oscar") for name in NAMED)]
)
def test_sliding_residuals_score_as_token_by_token(name: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and both sliding; chunks of any size; a length that nothing divides."""
    loaded = in_double_precision(family(name, seed=3), monkeypatch)
    tokens = token_ids(37)
    for side in ("residual", "residual.key", "residual.value") if name in NAMED else ("residual",):
        given = ["residual.size=8", f"{side}.policy=sliding", "key.quantizer.group_size=4"]
        one = kvq.build_method(chosen, bits=2, head_dim=32, overrides=given)
        # Bamba of transformers needs positions in every forward, also with transformers' own cache.
        singly = scoring_bounds(one, 36, 1)
        expected = token_by_token(loaded, one, tokens) if name in FAMILIES else chunked(loaded, one, tokens, singly)
        for bounds in (*(scoring_bounds(one, 36, chunk) for chunk in (None, 7, 37)), forward_bounds(loaded, one, 36)):
            got = chunked(loaded, one, tokens, bounds)
            assert (got - expected).abs().max() < 1e-9, (side, bounds)
        exact = chunked(loaded, kvq.build_method("fp16"), tokens, [(0, 36)])
        assert (exact - expected).abs().max() > 0.1  # that which is compared was quantized


@pytest.mark.parametrize("name", FAMILIES)
def test_undone_and_redone_rotary_embeddings(name: str) -> None:
    """At load every family passes the probe in fp32; pre-RoPE keys quantized in fp64 are those of the projections."""
    loaded = family(name)
    styles = styles_of(loaded.model)
    assert len(styles) == len(head_dims_of(loaded.text_config))
    turned = {style is not None for style, _ in styles}
    assert turned == {name not in ("gpt2", "falcon_alibi", "bloom")}
    assert len({group for _, group in styles}) == (2 if name in ("gemma3", "gemma3n", "gemma4") else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMED)
def test_rotary_embeddings_are_known_in_half_precision(name: str, dtype: torch.dtype) -> None:
    assert styles_of(family(name).model.to(dtype)) == styles_of(family(name).model)


def test_an_attention_without_masks_is_refused_where_it_needs_one() -> None:
    loaded = family("llama")
    for layer in loaded.model.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(Unsupported, match=r"attention flash_attention_2 takes no mask, .*residual=sliding"):
        chunked(loaded, method("kivi"), token_ids(30), [(0, 29)])


def test_a_bias_by_position_is_refused_where_tokens_move() -> None:
    loaded = family("mpt")
    tokens = token_ids(30)
    block = method("kivi/block")
    bounds = forward_bounds(loaded, block, 29)  # none is flushed within a forward
    assert bounds == scoring_bounds(block, 29)
    assert chunked(loaded, block, tokens, bounds).shape == (1, 29, VOCABULARY)
    with pytest.raises(Unsupported, match="MptAttention adds a position_bias, which no mask can follow"):
        chunked(loaded, method("kivi"), tokens, [(0, 29)])
