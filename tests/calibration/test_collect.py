"""States and gradients of calibration are those of plain autograd, and of the tokens asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvq.calibration.collect import LOGIT_CHUNK, collect, loss
from kvq.errors import DataError
from tests.random_models import random_llama, token_ids

LENGTH = LOGIT_CHUNK + 40  # logits in two pieces


def naive(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Outputs of the key and value projections (keys before RoPE) and the gradients of the summed loss at them."""
    seen: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(_module, _inputs, output: Tensor) -> None:
            output.retain_grad()
            seen[name] = output

        return hook

    hooks = [
        getattr(layer.self_attn, f"{side[0]}_proj").register_forward_hook(keep(f"{side} {index}"))
        for index, layer in enumerate(model.model.layers)
        for side in ("key", "value")
    ]
    inputs = model.get_input_embeddings()(tokens[None]).detach().requires_grad_()
    logits = model(inputs_embeds=inputs).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], tokens[1:], reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    heads = {name: out.detach()[0].unflatten(-1, (-1, 32)).transpose(0, 1) for name, out in seen.items()}
    gradients = {f"{n} gradient": o.grad[0].unflatten(-1, (-1, 32)).transpose(0, 1) for n, o in seen.items()}  # type: ignore[union-attr]
    return heads | gradients


def test_gradients_are_those_of_autograd_before_rope() -> None:
    loaded = random_llama()
    loaded.model.double()
    windows = token_ids(LENGTH, batch=2)
    states = collect(loaded, windows, None, gradients=True, seed=0)
    assert sorted(states) == [0, 1]
    for sample, window in enumerate(windows):
        expected = naive(loaded.model, window)
        part = slice(sample * LENGTH, (sample + 1) * LENGTH)
        for index, layer in states.items():
            assert layer.rope is not None
            rope = layer.rope.narrow(0, layer.rope.tokens)
            found = {
                "key": rope.rotate(layer.key, back=True),
                "key gradient": rope.rotate(layer.gradients["key"], back=True),
                "value": layer.value,
                "value gradient": layer.gradients["value"],
            }
            for name, tensor in found.items():
                side, _, rest = name.partition(" ")
                want = expected[f"{side} {index} {rest}".strip()]
                assert torch.allclose(tensor[:, part], want, rtol=1e-5, atol=1e-7 * float(want.abs().max())), name
                assert want.abs().max() > 0


def test_the_loss_is_that_of_the_model() -> None:
    loaded, tokens = random_llama(), token_ids(60)[0]
    expected = torch.nn.functional.cross_entropy(loaded.model(tokens[None]).logits[0, :-1], tokens[1:], reduction="sum")
    found = loss(loaded, tokens, lambda _index, key, value: (key, value), backward=False)
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert torch.is_grad_enabled()


def test_so_many_tokens_are_kept_the_same_in_every_layer_and_each_time() -> None:
    loaded, windows = random_llama(), token_ids(64, batch=3)
    whole = collect(loaded, windows, None, gradients=False, seed=0)
    some = collect(loaded, windows, 30, gradients=False, seed=0)
    again = collect(loaded, windows, 30, gradients=False, seed=0)
    other = collect(loaded, windows, 30, gradients=False, seed=1)
    for index, layer in some.items():
        assert layer.key.shape == (2, 30, 32)
        assert not layer.gradients
        assert torch.equal(layer.key, again[index].key)
        assert not torch.equal(layer.key, other[index].key)
    kept = [(whole[1].key[0] == row).all(-1).nonzero()[0, 0] for row in some[1].key[0]]
    assert torch.equal(some[0].value, whole[0].value[:, torch.stack(kept)])
    assert some[0].rope is not None
    assert torch.equal(some[0].rope.cos, whole[0].rope.cos[:, torch.stack(kept)])  # type: ignore[union-attr]


def test_states_that_are_not_numbers_are_refused_by_layer() -> None:
    loaded = random_llama()
    loaded.model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(DataError, match="layer 1: NaN or infinite values"):
        collect(loaded, token_ids(16, batch=1), None, gradients=False, seed=0)
