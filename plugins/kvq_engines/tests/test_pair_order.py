"""The order of channels in GGUF files, and the models in whose caches it counts."""

import pytest
import torch

from kvq.cache import KVCache
from kvq.methods.build import build_method
from kvq_engines.pair_order import INTERLEAVED_IN_GGUF, PairOrder, interleaved_in_gguf
from tests.random_models import llama, token_ids


def test_halves_are_interleaved_and_come_back():
    x = torch.arange(8.0).expand(2, 3, 8)
    y, side = PairOrder("interleaved").forward(x)
    assert y[0, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert side == {}
    assert torch.equal(PairOrder("interleaved").inverse(y, {}), x)
    assert torch.equal(PairOrder("gguf").forward(x)[0], x)
    assert torch.equal(PairOrder("halves").inverse(x, {}), x)


def test_the_matrix_is_the_permutation():
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    stage = PairOrder("interleaved")
    assert torch.equal(x @ stage.matrix(16, x), stage.forward(x)[0])


def test_rope_of_neighbours_is_that_of_halves_in_the_new_order():
    from kvq.codecs import Rope, rope_table

    halves = rope_table(7, 16)
    neighbours = Rope(halves.cos, halves.sin, interleaved=True)
    x = torch.randn(1, 2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stage = PairOrder("interleaved")
    torch.testing.assert_close(stage.forward(halves.rotate(x))[0], neighbours.rotate(stage.forward(x)[0]))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma2"])
def test_a_cache_decides_the_order_by_the_family(family):
    class Configuration:
        model_type = family

    method = build_method("engine/llamacpp_q4_0", head_dim=64).for_model(Configuration())
    order = next(stage.order for name, stage in method.key.stages if name == "pairs")
    assert order == ("interleaved" if family in INTERLEAVED_IN_GGUF else "halves")
    assert interleaved_in_gguf(Configuration()) == (family in ("llama", "mistral"))


def test_a_cache_of_llama_groups_neighbouring_pairs():
    model = llama()
    method = build_method("engine/llamacpp_q4_0/unrotated", head_dim=128)
    keys = {}
    for order in ("gguf", "interleaved", "halves"):
        chosen = build_method(
            "engine/llamacpp_q4_0/unrotated", head_dim=128, overrides=[f"key.stages.pairs.order={order}"]
        )
        cache = KVCache(model, chosen)
        with torch.no_grad():
            model(input_ids=token_ids(20), past_key_values=cache)
        keys[order] = cache.kv_layers[0].key.packed[0].parts["codes.0"]
    assert torch.equal(keys["gguf"], keys["interleaved"])
    assert not torch.equal(keys["gguf"], keys["halves"])
    assert method.for_model(model.config).value is not None
