from __future__ import annotations

import pytest
import torch

from kvq.config.diagnostics import TniConfig
from kvq.diagnostics import query_chunks
from kvq.errors import ConfigError, DataError
from kvq.models.load import LoadedModel
from kvq.tasks.measurement import LayerStates, capture, check_capture
from tests.random_models import llama, random_llama, token_ids
from tests.tasks.diagnosed import DiagnosedInputs


def layers_of(loaded: LoadedModel, tokens: torch.Tensor) -> list[LayerStates]:
    found: list[LayerStates] = []
    capture(loaded, tokens, found.append)
    return found


def test_states_are_those_that_a_cache_is_given() -> None:
    from transformers.cache_utils import DynamicCache

    loaded, tokens = random_llama(), token_ids(40)
    cache = DynamicCache()
    loaded.model(input_ids=tokens, past_key_values=cache)
    for layer, held in zip(layers_of(loaded, tokens[0]), cache.layers, strict=True):
        assert torch.equal(layer.key, held.keys)
        assert torch.equal(layer.value, held.values)
        assert layer.query.shape == (1, 4, 40, 32)


def test_attention_followed_is_that_of_the_model() -> None:
    loaded, tokens = random_llama(), token_ids(150)
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _module, given: outputs.append(given[0]))
        for layer in loaded.model.model.layers
    ]
    layers = layers_of(loaded, tokens[0])
    for hook in hooks:
        hook.remove()
    for layer, output in zip(layers, outputs[-2:], strict=True):  # finding the style of RoPE attends too
        value = layer.value.repeat_interleave(2, 1)
        weights = [
            layer.attention.log_weights(chunk, layer.key, first).exp() for first, chunk in query_chunks(layer.query)
        ]
        found = (torch.cat(weights, 2) @ value).transpose(1, 2).flatten(2)
        assert torch.allclose(found, output, atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    loaded, tokens = random_llama(), token_ids(20)
    before = loaded.model(input_ids=tokens).logits

    def fail(_layer: LayerStates) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        capture(loaded, tokens[0], fail)
    assert torch.equal(loaded.model(input_ids=tokens).logits, before)


def test_states_that_are_not_finite_name_their_layer() -> None:
    model = llama(head_dim=32)
    model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match="layer 1: NaN or infinite"):
        layers_of(LoadedModel(model, torch.device("cpu")), token_ids(8)[0])


def test_windows_longer_than_the_model_takes() -> None:
    from kvq import build_method

    with pytest.raises(ConfigError, match=r"task\.context=1024: model=random takes at most 512 tokens"):
        check_capture(DiagnosedInputs(TniConfig(context=1024)), build_method("fp16"))
