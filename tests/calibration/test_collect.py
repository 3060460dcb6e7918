"""States and gradients of calibration are those of plain autograd, and of the tokens asked for."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf, ledoit_wolf_shrinkage
from torch import Tensor

import kvq
from kvq.calibration.budget import MomentSums
from kvq.calibration.collect import LOGIT_CHUNK, collect_states, compute_loss, text_name
from kvq.calibration.files import Calibration, bind_tables
from kvq.calibration.fit import calibrate
from kvq.codecs import FisherTransform
from kvq.codecs.second_moments import ledoit_wolf as share_of
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.models.weights import weights_name
from tests.properties import examples
from tests.random_models import llama, random_llama, token_ids

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
    states = collect_states(loaded, windows, None, gradients=True, seed=0)
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
    found = compute_loss(loaded, tokens, lambda _index, key, value: (key, value), backward=False)
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert torch.is_grad_enabled()


def test_so_many_tokens_are_kept_the_same_in_every_layer_and_each_time() -> None:
    loaded, windows = random_llama(), token_ids(64, batch=3)
    whole = collect_states(loaded, windows, None, gradients=False, seed=0)
    some = collect_states(loaded, windows, 30, gradients=False, seed=0)
    again = collect_states(loaded, windows, 30, gradients=False, seed=0)
    other = collect_states(loaded, windows, 30, gradients=False, seed=1)
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
        collect_states(loaded, token_ids(16, batch=1), None, gradients=False, seed=0)


def drawn(heads: int, tokens: int, dim: int, seed: int, spread: float) -> torch.Tensor:
    """`[1, heads, tokens, dim]` in fp64: correlated channels of different sizes, tails as heavy as `spread` says."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, dim, generator=generator, dtype=torch.float64)
    x = x * (spread * torch.randn(1, 1, tokens, 1, generator=generator, dtype=torch.float64)).exp()
    return x @ torch.randn(dim, dim, generator=generator, dtype=torch.float64)


def summed(states: torch.Tensor, gradients: torch.Tensor, lengths: list[int]) -> MomentSums:
    sums = MomentSums()
    for x, g in zip(states.split(lengths, 2), gradients.split(lengths, 2), strict=True):
        sums.see(x, None, torch.arange(x.shape[2]))
        sums.see_gradient(g, None, torch.arange(x.shape[2]))
    return sums


def rows(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1).flatten(1)


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(
    heads=st.integers(1, 3),
    dim=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 1),
    mean=st.sampled_from([0.0, 1.0, -300.0]),
    spread=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_shares_are_those_of_scikit_learn(
    heads: int, dim: int, lengths: list[int], mean: float, spread: float, seed: int
) -> None:
    """States about their mean, gradients about 0, also where means are large and windows are empty."""
    x, g = drawn(heads, sum(lengths), dim, seed, spread) + mean, drawn(heads, sum(lengths), dim, seed + 1, spread)
    moments = summed(x, g, lengths).moments
    assert moments.fourth is not None
    assert moments.fisher_fourth is not None
    expected = ledoit_wolf_shrinkage(rows(x).numpy())
    assert share_of(moments.covariance, moments.fourth, moments.tokens) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    expected = ledoit_wolf_shrinkage(rows(g).numpy(), assume_centered=True)
    assert share_of(moments.fisher, moments.fisher_fourth, moments.tokens) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("together", [None, 1])
def test_the_transform_is_that_of_shrunk_matrices(together: int | None) -> None:
    """Eigenvalues of S F, both from scikit-learn; each group of heads has its blocks of them."""
    x, g = drawn(3, 60, 4, 0, 0.3) + 2, drawn(3, 60, 4, 1, 0.3)
    moments = summed(x, g, [25, 35]).moments
    found = FisherTransform("full", together, ridge="ledoit_wolf", mixing="ledoit_wolf").fit_joint(moments)["spectrum"]
    covariance, _ = ledoit_wolf(rows(x).numpy())
    fisher, _ = ledoit_wolf(rows(g).numpy(), assume_centered=True)
    blocks = torch.arange(12).split(12 if together is None else 4)
    wanted = [
        torch.linalg.eigvals(torch.from_numpy(covariance[own][:, own] @ fisher[own][:, own])).real for own in blocks
    ]
    torch.testing.assert_close(found[0].double(), torch.cat(wanted).sort(descending=True).values, rtol=1e-5, atol=1e-9)
    plain = FisherTransform("full", together).fit_joint(moments)["spectrum"]
    assert not torch.allclose(found, plain, rtol=1e-2)


def test_other_words_are_refused() -> None:
    for given in ({"ridge": "oas"}, {"mixing": "oas"}):
        with pytest.raises(ConfigError, match=r"=oas: .*, or ledoit_wolf"):
            FisherTransform(**given)  # type: ignore[arg-type]


DIM = 32


def fitted(loaded: LoadedModel, method: Method, windows: Tensor) -> tuple[Method, Calibration]:
    settings = CalibrationConfig(samples=len(windows), length=windows.shape[1])
    found = calibrate(loaded, method, windows, settings)
    return bind_tables(method, found, weights_name(loaded.model), found.head_dims), found


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(33, "calibration.samples=1, length=33: 32 tokens for transforms of 64 channels; at least"), (129, None)],
)
def test_few_tokens_for_the_channels_of_a_transform(tokens: int, said: str | None) -> None:
    """Refused below one token per channel, which are of two heads of 32; below four there is a warning."""
    loaded, windows = LoadedModel(llama(head_dim=DIM), torch.device("cpu")), token_ids(tokens)
    if said is not None:
        with pytest.raises(DataError, match=said):
            fitted(loaded, kvq.build_method("waterfill/scalar", bits=2, head_dim=DIM), windows)
    else:
        with pytest.warns(UserWarning, match="128 tokens for transforms of 64 channels; with fewer than 4 times"):
            fitted(loaded, kvq.build_method("waterfill/scalar", bits=2, head_dim=DIM), windows)


@pytest.mark.parametrize(("name", "few", "some"), [("cq/4c9b", 500, 600), ("cq/8c10b", 1000, 1100)])
def test_tables_of_more_numbers_than_states(name: str, few: int, some: int) -> None:
    """Codebooks of 512 and of 1,024 entries for each channel: refused, then warned of."""
    loaded = LoadedModel(llama(layers=1, head_dim=DIM), torch.device("cpu"))
    method = kvq.build_method(name, head_dim=DIM)
    with pytest.raises(DataError, match="of states; more tokens are needed"):
        fitted(loaded, method, token_ids(few))
    with pytest.warns(UserWarning, match="of states; with fewer than 4 times as many"):
        fitted(loaded, method, token_ids(some))


@pytest.mark.parametrize(("name", "channels"), [("waterfill", 64), ("waterfill_kv", 128)])
def test_components_without_variance_get_no_bits(name: str, channels: int) -> None:
    """Keys before RoPE and values are linear in 48 hidden channels; a budget of 8 bits is spent on those alone."""
    loaded = LoadedModel(llama(layers=1, head_dim=DIM), torch.device("cpu"))
    _, found = fitted(loaded, kvq.build_method(name, bits=8, head_dim=DIM), token_ids(600))
    every = [own.tolist() for table, own in found.tensors.items() if table.endswith("quantizer.widths")]
    assert every
    assert all([widths.count(width) for width in (0, 8)] == [channels - 48, 48] for widths in every)


def test_states_are_kept_of_one_model_alone() -> None:
    """Also where another has equal first entries of all weights, which name it."""
    one, other = (LoadedModel(llama(), torch.device("cpu")) for _ in range(2))
    names = [text_name(loaded, token_ids(4), CalibrationConfig()) for loaded in (one, one, other)]
    assert names[0] == names[1] != names[2]
