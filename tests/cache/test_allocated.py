"""Memory that a cache keeps alive, against all tensors that live in the process."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import kvq
from kvq.cache import KVCache
from tests.cache.test_assisted import built, layers_for
from tests.random_models import llama, token_ids

GIVEN = ["fp16", "kivi", "nsnquant", "cq/kept_comma", "rtn:residual=sliding sink_tokens=10", "zipcache", "h2o", "ott"]


@pytest.fixture(scope="module")
def model():
    return llama(2)


@pytest.fixture(scope="module")
def before() -> list[Tensor]:
    """All tensors there were before; they stay alive, so that none takes their place, and are not looked at again."""
    gc.unfreeze()
    found = alive()
    gc.freeze()
    return found


def alive() -> list[Tensor]:
    """All tensors of the process that are not frozen."""
    gc.collect()
    return [held for held in gc.get_objects() if issubclass(type(held), Tensor)]


def storages(tensors: list[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@torch.no_grad()
def filled(model, given, keep_decoded):
    cache = KVCache(model, built(given), keep_decoded)
    tokens = token_ids(73)
    for start, end in ((0, 43), (43, 44), (44, 45), (45, 70), (70, 71), (71, 72), (72, 73)):
        model(tokens[:, start:end], past_key_values=cache)
    return cache


@pytest.mark.thin(3)
@pytest.mark.parametrize("keep_decoded", [False, True])
@pytest.mark.parametrize("given", GIVEN)
def test_it_is_all_that_the_cache_keeps_alive(given, keep_decoded, before):
    model = llama(layers_for(given))
    filled(model, given, keep_decoded)  # what is made once and shared
    others = [*before, *alive()]
    cache = filled(model, given, keep_decoded)
    known = storages(others)
    mine = {where: size for where, size in storages(alive()).items() if where not in known}
    assert cache.nbytes_allocated == sum(mine.values())
    assert cache.nbytes_allocated >= cache.nbytes


def test_room_in_reserve_and_a_shared_past(model):
    cache = KVCache(model, kvq.build_method("fp16", head_dim=128))
    model(token_ids(20), past_key_values=cache)
    assert cache.nbytes_allocated == cache.nbytes  # a prompt comes at once
    model(token_ids(1), past_key_values=cache)
    rows = 20 + 20 // 2 + 1
    assert cache.nbytes_allocated == cache.nbytes // 21 * rows
    fork = cache.fork()
    assert fork.nbytes_allocated == cache.nbytes_allocated


def test_a_recorded_update_counts_until_it_is_undone_or_kept(model):
    method, tokens = built("kivi"), token_ids(20)
    plain, recorded = KVCache(model, method), KVCache(model, method)
    recorded.activate_past_recording()
    for cache in (plain, recorded):
        model(tokens, past_key_values=cache, logits_to_keep=1)
        model(tokens[:, :1], past_key_values=cache, logits_to_keep=1)
    assert recorded.nbytes == plain.nbytes
    assert recorded.nbytes_allocated > plain.nbytes_allocated
    recorded.crop(0)
    assert recorded.nbytes_allocated == plain.nbytes_allocated
