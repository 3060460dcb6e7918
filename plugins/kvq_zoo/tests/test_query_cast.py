"""Queries in e4m3: attention against a model whose rotary embedding gives it rounded queries."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from kvq.cache import KVCache
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq_zoo.tests.engine_oracles import nearest
from tests.random_models import in_double_precision, llama, token_ids

NAME, TOKENS = "engine/vllm_fp8/fp8_queries", 12
ONE_BY_ONE = tuple(range(1, TOKENS + 1))


def large_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of whose queries some are beyond 448."""
    model = in_double_precision(LoadedModel(llama(head_dim=16), torch.device("cpu")), monkeypatch).model
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(100)
        layer.self_attn.k_proj.weight.div_(100)
    return model


@torch.no_grad()
def logits_of(model: Any, name: str, cuts: tuple[int, ...], *overrides: str) -> Tensor:
    cache, ids = KVCache(model, build_method(name, overrides=list(overrides))), token_ids(TOKENS)
    pieces = [ids[:, a:b] for a, b in itertools.pairwise((0, *cuts))]
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


def with_rounded_queries(monkeypatch: pytest.MonkeyPatch, seen: list[Tensor]) -> None:
    """Queries leave the rotary embedding as the oracle's numbers, one by one."""
    rotate = modeling_llama.apply_rotary_pos_emb

    def rounded(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        query, key = rotate(query, key, *args, **kwargs)
        seen.append(query)
        numbers = [nearest("e4m3", x)[1] for x in query.flatten().tolist()]
        return torch.from_numpy(np.array(numbers)).view(query.shape), key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rounded)


@pytest.mark.parametrize("cuts", [(TOKENS,), ONE_BY_ONE, (5, 6, TOKENS)], ids=["at once", "one by one", "in parts"])
def test_attention_reads_the_oracles_queries(cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = large_model(monkeypatch), list[Tensor]()
    found, plain = logits_of(model, NAME, cuts), logits_of(model, "engine/vllm_fp8", cuts)
    with_rounded_queries(monkeypatch, seen)
    wanted = logits_of(model, "engine/vllm_fp8", cuts)
    assert max(float(query.abs().max()) for query in seen) > 448
    assert float((found - wanted).norm() / wanted.norm()) < 1e-9
    assert float((found - plain).norm() / plain.norm()) > 1e-4


def test_layers_in_full_precision_keep_their_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model = large_model(monkeypatch)
    kept = [f"full_precision_layers.{side}=[0,1]" for side in ("key", "value")]
    assert torch.equal(logits_of(model, NAME, (TOKENS,), *kept), logits_of(model, "fp16", (TOKENS,)))


def test_a_fork_and_a_cache_without_its_last_tokens_cast_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = large_model(monkeypatch), token_ids(TOKENS)
    wanted = logits_of(model, NAME, ONE_BY_ONE)[:, -1:]
    cache = KVCache(model, build_method(NAME))
    model(ids[:, :-1], past_key_values=cache)
    found = model(ids[:, -1:], past_key_values=cache.fork()).logits
    assert float((found - wanted).norm() / wanted.norm()) < 1e-9


def test_what_reads_codes_or_chooses_tokens_is_refused() -> None:
    with pytest.raises(Unsupported, match="casts queries"):
        build_method(NAME, overrides=["eviction={_target_: kvq_zoo.eviction.StreamingLLM}"])
    for needed in ("packed_attention", "codecs_alone"):
        with pytest.raises(Unsupported, match="casts queries"):
            build_method(NAME).check_needs("a task", needed)
