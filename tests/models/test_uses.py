"""What a cache is used for besides one text: each use equals plain transformers under `identity`, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq
from kvq.cache import KVCache
from kvq.errors import Unsupported
from kvq.models.load import LoadedModel, base_of
from tests.families import family
from tests.random_models import in_double_precision, token_ids

FAMILIES = ["llama", "gpt2", "bloom", "gemma2", "gemma3n", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1"]
STATES = {
    "crop": "a layer keeps a state of fixed size",
    "assisted": "assisted generation is not supported with stateful models",  # by transformers itself
}
REFUSED = {"qwen3_next": STATES, "falcon_h1": STATES}
"""Uses that are refused, and why, by family."""
STEPS = 6


def identity(loaded: LoadedModel) -> KVCache:
    given = ["residual.size=8", "residual.policy=block"]
    return KVCache(loaded.model, kvq.build_method("identity", bits=3, head_dim=32, overrides=given))


def generated(loaded: LoadedModel, tokens: Tensor, **given: Any) -> Tensor:
    settings = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, **given}
    found: Tensor = loaded.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return found


def turns(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """A second question behind the first answer, on the cache that holds both."""
    cache, first = identity(loaded), generated(loaded, token_ids(29))
    assert torch.equal(generated(loaded, token_ids(29), past_key_values=cache), first)
    more = torch.cat([first, token_ids(40)[:, 33:]], 1)
    return generated(loaded, more, past_key_values=cache), generated(loaded, more)


def beams(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    given = {"num_beams": 3, "num_return_sequences": 2}
    tokens = token_ids(29, batch=2)
    return generated(loaded, tokens, past_key_values=identity(loaded), **given), generated(loaded, tokens, **given)


def crop(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """Tokens taken back, and others in their place."""
    tokens, others = token_ids(36), token_ids(39, batch=2)[1:, 33:]
    cache = identity(loaded)
    loaded.hidden_states(tokens, cache)
    cache.crop(-3)
    return loaded.hidden_states(others, cache), _plain(loaded, torch.cat([tokens[:, :-3], others], 1))[:, -6:]


def reorder(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    tokens, order = token_ids(36, batch=3), torch.tensor([2, 0, 0])
    cache = identity(loaded)
    loaded.hidden_states(tokens[:, :35], cache)
    cache.reorder_cache(order)
    return loaded.hidden_states(tokens[order, 35:], cache), _plain(loaded, tokens[order])[:, -1:]


def assisted(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """Candidates of another model, some of them wrong. Its own cache is transformers', which takes no other for it."""
    tokens, draft = token_ids(29), copy.deepcopy(loaded.model)
    torch.manual_seed(1)
    for weight in draft.parameters():
        weight.add_(0.02 * torch.randn_like(weight))
    return generated(loaded, tokens, past_key_values=identity(loaded), assistant_model=draft), generated(loaded, tokens)


def _plain(loaded: LoadedModel, tokens: Tensor) -> Tensor:
    found: Tensor = base_of(loaded.model)(input_ids=tokens, use_cache=False).last_hidden_state
    return found


USES: dict[str, Callable[[LoadedModel], tuple[Tensor, Tensor]]] = {
    use.__name__: use for use in (turns, beams, crop, reorder, assisted)
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_use_equals_plain_transformers_or_is_refused(name: str, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = in_double_precision(family(name), monkeypatch)
    reason = REFUSED.get(name, {}).get(use)
    if reason is not None:
        with pytest.raises((Unsupported, ValueError), match=reason) as caught:
            USES[use](loaded)
        assert "\n" not in str(caught.value)
        return
    found, expected = USES[use](loaded)
    if found.dtype is torch.long:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
