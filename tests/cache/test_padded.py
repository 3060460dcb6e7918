"""Left-padded batches: each sequence is stored, read and continued as in a batch of its own, without its padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq
from kvq.cache import KVCache
from kvq.config import plugins
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from tests.families import family
from tests.models.test_families import METHODS, method
from tests.random_models import VOCABULARY, in_double_precision, token_ids

FAMILIES = ["llama", "qwen3", "gemma2", "gemma4", "gpt2", "gpt_neox", "falcon_alibi"]
"""Full attention, windows, shared layers, and positions that are rotated, embedded and distances."""
FULL = FAMILIES[:2]
LENGTHS = (9, 31, 22)
STEPS = 4
PADDING = 7
"""A token that no prompt has on its left by chance only; what it is must not matter."""


def prompts(chosen: str = "") -> list[Tensor]:
    """Of gear with no token twice: it keeps extremes by rank, and between equal keys the last bits of states decide."""
    text = token_ids(60)
    if chosen == "gear":
        text = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[None]
    return [text[:, start : start + length] for start, length in zip((0, 3, 11), LENGTHS, strict=True)]


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a left-padded batch."""
    most = max(row.shape[1] for row in rows)
    tokens = torch.full((len(rows), most), PADDING)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        tokens[index, most - row.shape[1] :], mask[index, most - row.shape[1] :] = row[0], 1
    return tokens, mask


def written(loaded: LoadedModel, one: Method, tokens: Tensor, mask: Tensor, **given: Any) -> tuple[Tensor, Tensor, Any]:
    """New tokens `[batch, steps]`, the logits before each, and the cache behind them."""
    cache = KVCache(loaded.model, one)
    given = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True} | given
    out = loaded.model.generate(tokens, attention_mask=mask, past_key_values=cache, output_logits=True, **given)
    return out.sequences[:, tokens.shape[1] :], torch.stack(out.logits, 1), cache


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_generate_writes_the_tokens_of_batch_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method that takes padding; the bytes of the cache are those of the caches alone."""
    loaded, done = in_double_precision(family(name), monkeypatch), []
    pools = ["ott"] if name in FULL else []  # they move tokens, which a window and distances forbid
    for chosen in METHODS + pools:
        try:
            one = method(chosen, *(["plan.exempt_layers=0"] if chosen == "ott" else []))
            layers = KVCache(loaded.model, one).kv_layers
        except Unsupported:  # its head dim
            continue
        if any(layer.no_padding_reason for layer in layers):
            continue
        rows = prompts(chosen)
        together, logits, cache = written(loaded, one, *padded(rows))
        alone = [written(loaded, one, row, torch.ones_like(row)) for row in rows]
        assert torch.equal(together, torch.cat([tokens for tokens, _, _ in alone])), chosen
        torch.testing.assert_close(logits, torch.cat([found for _, found, _ in alone]), atol=1e-5, rtol=0, msg=chosen)
        assert cache.nbytes == sum(own.nbytes for _, _, own in alone), chosen
        assert cache.packed_bytes == sum(own.packed_bytes for _, _, own in alone)
        assert cache.effective_bits == pytest.approx(
            sum(own.nbytes for _, _, own in alone) / sum(own.nbytes / own.effective_bits for _, _, own in alone)
        )
        done.append(chosen)
    assert len(done) > 8


REFUSED = {
    "h2o": "evicts",
    "streamingllm": "evicts",
    "snapkv": "evicts",
    "triattention": "evicts",
    "zipcache": "goes by attention",
}


@pytest.mark.every_plugin
def test_methods_that_choose_by_attention_or_evict_refuse_padding_by_name() -> None:
    loaded = family("llama")
    tokens, mask = padded(prompts())
    for chosen, why in REFUSED.items():
        one = kvq.build_method(chosen, head_dim=32, overrides=["residual.size=8"])
        reason = rf"attention_mask: padding: method={chosen} {why}.*; batch prompts of equal length, or run"
        with pytest.raises(Unsupported, match=reason) as caught:
            written(loaded, one, tokens, mask)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("qwen3_next", {}, "layers keep states of fixed size"),
        ("llama", {"attention": "packed"}, "method=kivi/block with attention=packed"),
    ],
)
def test_what_cannot_hold_sequences_apart_says_so(name: str, given: dict[str, Any], reason: str) -> None:
    loaded = family(name)
    tokens, mask = padded(prompts())
    with pytest.raises(Unsupported, match=rf"attention_mask: padding: {reason}") as caught:
        loaded.model(tokens, attention_mask=mask, past_key_values=KVCache(loaded.model, method("kivi/block"), **given))
    assert "\n" not in str(caught.value)


def test_padding_is_the_same_in_every_forward() -> None:
    loaded = family("llama")
    tokens, mask = padded(prompts())
    cache = KVCache(loaded.model, method("kivi"))
    loaded.model(tokens, attention_mask=mask, past_key_values=cache)
    for later in (None, torch.ones(3, 32), torch.cat([mask[[1, 0, 2]], mask[:, -1:]], 1)):
        with pytest.raises(Unsupported, match=r"attention_mask: padding of the cached tokens differs; give that of"):
            loaded.model(tokens[:, -1:], attention_mask=later, past_key_values=cache)
    for refused in (cache.activate_past_recording, lambda: cache.crop(-1), lambda: cache.save("cache.safetensors")):
        with pytest.raises(Unsupported, match="padded batch"):
            refused()
    cache.token_by_token = True
    many = torch.cat([mask, torch.ones(3, 30)], 1)
    with pytest.raises(Unsupported, match="padding, and 30 tokens at once that are to be read as one by one"):
        loaded.model(token_ids(30, batch=3), attention_mask=many, past_key_values=cache)
    cache.reset()
    assert (cache.nbytes, cache.get_seq_length(), cache.padding) == (0, 0, None)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_forks_and_beams_of_padded_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork goes its own way; beams of a padded batch are those of each sequence alone."""
    loaded = in_double_precision(family(name), monkeypatch)
    tokens, mask = padded(prompts())
    longer = torch.cat([mask, torch.ones(3, 1)], 1)
    for chosen in ("kivi", "nsnquant"):
        one = method(chosen)
        cache = KVCache(loaded.model, one)
        loaded.model(tokens, attention_mask=mask, past_key_values=cache)
        fork = cache.fork()
        given = {"attention_mask": longer, "position_ids": (longer.cumsum(1) - 1)[:, -1:].long()}
        loaded.model(tokens[:, :1], past_key_values=fork, **given)
        again = [loaded.model(tokens[:, -1:], past_key_values=each, **given).logits for each in (cache, cache.fork())]
        assert again[0].shape == again[1].shape
        assert fork.get_seq_length() == cache.get_seq_length() == tokens.shape[1] + 1
        beams = {"num_beams": 3, "output_logits": False}
        together = _beams(loaded, one, tokens, mask, beams)
        alone = [_beams(loaded, one, row, torch.ones_like(row), beams)[0] for row in prompts()]
        assert torch.equal(together, torch.stack(alone)), chosen


def _beams(loaded: LoadedModel, one: Method, tokens: Tensor, mask: Tensor, given: dict[str, Any]) -> Tensor:
    settings = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, **given}
    out = loaded.model.generate(tokens, attention_mask=mask, past_key_values=KVCache(loaded.model, one), **settings)
    return out[:, tokens.shape[1] :]


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        pytest.param("llama", METHODS[::2], id="llama-half"),
        pytest.param("qwen3_next", METHODS[1::2], id="qwen3_next-half", marks=pytest.mark.every_plugin),
        *(
            pytest.param(name, METHODS, id=name, marks=pytest.mark.long)
            for name in ("llama", "qwen3_next", "gemma2", "zamba2")
        ),
    ],
)
def test_caches_that_were_filled_apart_go_on_together(
    name: str, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method that takes padding, in the form that it has: tokens, logits and bytes of each cache alone."""
    loaded, done = in_double_precision(family(name), monkeypatch), 0
    for chosen in methods:
        try:
            one = method(chosen)
            caches = [KVCache(loaded.model, one) for _ in prompts()]
        except Unsupported:  # its head dim
            continue
        if caches[0].no_split_reason:
            continue
        for cache, row in zip(caches, prompts(), strict=True):
            loaded.hidden_states(row, cache)
        together, tokens = KVCache.together(caches), token_ids(STEPS, batch=3, seed=7)
        assert together.nbytes == sum(cache.nbytes for cache in caches), chosen
        for column in tokens.split(1, 1):
            found = loaded.hidden_states(column, together)
            alone = [loaded.hidden_states(column[row : row + 1], cache) for row, cache in enumerate(caches)]
            torch.testing.assert_close(found, torch.cat(alone), atol=1e-6, rtol=0, msg=chosen)
        assert together.nbytes == sum(cache.nbytes for cache in caches), chosen
        assert together.fork().sequence(1).nbytes == caches[1].nbytes
        done += 1
    assert done > (8 if plugins.installed() else 5)
    with pytest.raises(Unsupported, match=r"^KVCache\.together: a padded batch; go on with each by itself$"):
        KVCache.together([together])
