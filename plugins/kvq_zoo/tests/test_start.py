"""Full precision until a number of tokens: what is read and stored before and after it, however tokens come."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq.cache import KVCache
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq_zoo.start import Start
from tests.random_models import in_double_precision, llama, token_ids

START, TOKENS = 40, 90
MLX = ("engine/mlx_4/start", [f"policies.start.tokens={START}"])
KIVI = (
    "kivi",
    ["residual.size=32", f"+policies.start={{_target_: kvq_zoo.start.Start, tokens: {START}}}"],
)
BOTH = pytest.mark.parametrize(("name", "overrides"), [MLX, KIVI], ids=["mlx", "kivi"])


def method_of(name: str, overrides: list[str]) -> Any:
    return build_method(name, bits=2, overrides=overrides)


@torch.no_grad()
def logits_of(model: Any, cache: Any, cuts: tuple[int, ...]) -> Tensor:
    ids = token_ids(TOKENS)
    pieces = [ids[:, a:b] for a, b in itertools.pairwise((0, *cuts))]
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


ONE_BY_ONE = tuple(range(1, TOKENS + 1))


@BOTH
def test_nothing_is_lost_before_the_start(name: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The query that reaches the start reads full precision; the next one reads codes."""
    model = in_double_precision(LoadedModel(llama(), torch.device("cpu")), monkeypatch).model
    cache = KVCache(model, method_of(name, overrides))
    found, full = logits_of(model, cache, ONE_BY_ONE), logits_of(model, DynamicCache(), ONE_BY_ONE)
    error = (found - full).norm(dim=-1)[0] / full.norm(dim=-1)[0]
    assert float(error[:START].max()) < 1e-9
    assert float(error[START:].min()) > 1e-4


def test_all_tokens_are_packed_at_once() -> None:
    model = llama()
    cache = KVCache(model, method_of(*MLX))
    logits_of(model, cache, tuple(range(1, START)))
    assert {(side.packed_tokens, side.tokens) for layer in cache.layers for side in (layer.key, layer.value)} == {
        (0, START - 1)
    }
    model(token_ids(1), past_key_values=cache)
    assert {(side.packed_tokens, side.tokens) for layer in cache.layers for side in (layer.key, layer.value)} == {
        (START, START)
    }
    model(token_ids(8), past_key_values=cache)
    assert cache.layers[0].key.packed_tokens == START + 8
    assert cache.layers[0].key.bits_per_element == 4 + 32 / 64


def test_codes_are_those_of_the_method_without_it() -> None:
    """A token has a grid of its own, so the first layer's parts are equal; of a method with blocks, its blocks are."""
    for (name, overrides), plain in ((MLX, "engine/mlx_4"), (KIVI, "kivi")):
        model, found = llama(), []
        for one, given in ((name, overrides), (plain, overrides[:-1])):
            cache = KVCache(model, method_of(one, given))
            logits_of(model, cache, (7, 39, 41, 60, TOKENS))
            layer = cache.layers[0]
            found.append([layer.key.codec.decode(part) for part in layer.key.packed])
        started, at_first = (torch.cat(parts, 2) for parts in found)
        assert started.shape[2] >= 64
        assert torch.equal(started, at_first[:, :, : started.shape[2]])


@BOTH
def test_steps_in_one_forward_are_steps(name: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`token_by_token` reads, in one forward, what single tokens read."""
    model = in_double_precision(LoadedModel(llama(), torch.device("cpu")), monkeypatch).model
    slow = logits_of(model, KVCache(model, method_of(name, overrides)), ONE_BY_ONE)
    for cuts in ((TOKENS,), (12, START - 1, TOKENS), (START, TOKENS), (30, START + 1, 70, TOKENS)):
        cache = KVCache(model, method_of(name, overrides))
        cache.token_by_token = True
        fast = logits_of(model, cache, cuts)
        assert float((fast - slow).norm() / slow.norm()) < 1e-9, cuts


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens"):
        Start(0)
    with pytest.raises(Unsupported, match="sink_tokens"):
        build_method("engine/mlx_4/start", overrides=["sink_tokens=4"])
