"""What a calibration decides by further passes over its text, against runs of the model through a cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import kvq
from kvq.cache import KVCache
from kvq.calibration import components, files
from kvq.calibration.collect import collect
from kvq.calibration.files import Calibration, bind
from kvq.calibration.fit import calibrate
from kvq.codecs import ScalarQuantizer, rope_table
from kvq.codecs.calibrated_levels import lloyd_levels
from kvq.codecs.components import normal_levels
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.weights import weights_name
from tests.properties import examples
from tests.random_models import llama, token_ids

DIM = 32


def method_of(bits: Any, unshrunk: object, name: str = "waterfill/scalar") -> Method:
    sides = ("key",) if name == "waterfill_kv" else ("key", "value")
    words = [f"{side}.quantizer.unshrunk={unshrunk}" for side in sides]
    return kvq.build_method(name, bits=bits, head_dim=DIM, overrides=words)


def fitted(loaded: LoadedModel, method: Method, windows: Tensor) -> tuple[Method, Calibration]:
    settings = CalibrationConfig(samples=len(windows), length=windows.shape[1])
    found = calibrate(loaded, method, windows, settings)
    return bind(method, found, weights_name(loaded.model), found.head_dims), found


@torch.no_grad()
def loss_of(loaded: LoadedModel, method: Method, windows: Tensor) -> float:
    """Through a cache that quantizes all tokens of a window at once, but for those that the method keeps."""
    method = dataclasses.replace(method, residual=method.residual.at_once())
    total = 0.0
    for window in windows:
        logits = loaded.model(window[None], past_key_values=KVCache(loaded, method)).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("bits", "name"), [(0.75, "waterfill/scalar"), (1.5, "waterfill/scalar"), (1.5, "waterfill_kv")]
)
def test_the_choice_is_that_of_held_out_windows(bits: float, name: str, seed: int, tmp_path: Path) -> None:
    """Both forms calibrated on three of four windows, and scored on the fourth; tables are of all windows."""
    loaded = LoadedModel(llama(head_dim=DIM, seed=seed).double(), torch.device("cpu"))
    windows = token_ids(48, seed=seed + 5, batch=9)
    seen = torch.tensor([0, 1, 2, 4, 5, 6, 8])
    losses = [
        loss_of(loaded, fitted(loaded, method_of(bits, unshrunk, name), windows[seen])[0], windows[[3, 7]])
        for unshrunk in ("false", "true")
    ]
    bound, found = fitted(loaded, method_of(bits, "chosen", name), windows)
    files.write(tmp_path / "a.safetensors", found)
    assert files.read(tmp_path / "a.safetensors").tensors.keys() == found.tensors.keys()
    grown = losses[1] < losses[0]
    assert found.metrics({}, bound)["calibration_unshrunk"] == grown
    winner, tables = fitted(loaded, method_of(bits, str(grown).lower(), name), windows)
    assert "calibration_unshrunk" not in tables.metrics({}, winner)
    flags = {name for name in found.tensors if name.endswith(".unshrunk")}
    assert len(flags) == found.nbytes - tables.nbytes == (2 if bound.joins_sides else 4)
    assert all(torch.equal(found.tensors[name], table) for name, table in tables.tensors.items())
    x, rope = torch.randn(1, 4 if bound.joins_sides else 2, 20, DIM), rope_table(20, DIM)
    one, other = (method.bound["key"][1] for method in (bound, winner))
    assert one is not None
    assert other is not None
    assert torch.equal(*(codec.decode(codec.encode(x, rope=rope), rope) for codec in (one, other)))


def test_a_choice_needs_windows_and_widths() -> None:
    loaded = LoadedModel(llama(head_dim=DIM), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"samples=3: unshrunk=chosen holds out one of 4 windows"):
        fitted(loaded, method_of(1.5, "chosen"), token_ids(40, batch=3))
    with pytest.raises(ConfigError, match="unshrunk=chosen: with widths of their own"):
        ScalarQuantizer(2, unshrunk="chosen")
    with pytest.raises(ConfigError, match="unshrunk=maybe: true, false or chosen"):
        ScalarQuantizer(2, "pooled", unshrunk="maybe")  # type: ignore[arg-type]


def lloyd(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Lloyd's steps in loops, an empty cell keeps its level."""
    for _ in range(200):
        nearest = np.abs(values[:, None] - levels).argmin(1)
        moved = np.array([values[nearest == i].mean() if (nearest == i).any() else old for i, old in enumerate(levels)])
        done = np.abs(moved - levels).max() < 1e-6
        levels = moved
        if done:
            break
    return levels


def test_levels_are_those_of_the_components_of_kept_states() -> None:
    """Against states that were kept, centred and multiplied by the transform; first tokens do not count."""
    loaded = LoadedModel(llama(head_dim=DIM).double(), torch.device("cpu"))
    windows = token_ids(24, batch=3)
    _, found = fitted(loaded, kvq.build_method("waterfill/scalar_fitted", bits="2.25", head_dim=DIM), windows)
    _, plain = fitted(loaded, kvq.build_method("waterfill/scalar", bits="2.25", head_dim=DIM), windows)
    assert all(torch.equal(found.tensors[name], table) for name, table in plain.tensors.items())
    added = found.tensors.keys() - plain.tensors.keys()
    assert added == {f"{side}.{layer}.quantizer.levels" for side in ("key", "value") for layer in range(2)}
    assert found.nbytes == plain.nbytes + sum(found.tensors[name].nbytes for name in added)
    kept = collect(loaded, windows, None, False, 0)
    chosen = torch.arange(72).view(3, 24)[:, 1:].flatten()
    for name in added:
        side, layer, *_ = name.split(".")
        own = {what: found.tensors[f"{side}.{layer}.{what}"] for what in ("quantizer.widths", "transform.order")}
        own |= {what: found.tensors[f"{side}.{layer}.transform.{what}"].double() for what in ("mean", "forward")}
        states = kept[int(layer)]
        x = getattr(states, side)
        if side == "key":
            assert states.rope is not None
            x = states.rope.rotate(x, back=True)
        z = (x[:, chosen].transpose(0, 1).flatten(1) - own["mean"]) @ own["forward"][0][
            :, own["transform.order"][0].long()
        ]
        widths = own["quantizer.widths"][: z.shape[1]]
        expected = []
        for width in sorted(set(widths.tolist())):
            values = z[:, widths == width].flatten().float().double().numpy()
            start = normal_levels(width).numpy()
            levels = lloyd(values, start)
            errors = [np.abs(values[:, None] - book).min(1) ** 2 for book in (levels, start)]
            assert errors[0].mean() <= errors[1].mean()
            expected.append(levels)
        np.testing.assert_allclose(found.tensors[name].numpy(), np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_more_values_than_fit_are_drawn_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(llama(head_dim=DIM), torch.device("cpu"))
    windows, method = token_ids(40, batch=2), kvq.build_method("waterfill/scalar_fitted", bits="2.25", head_dim=DIM)
    sizes: list[int] = []

    def counted(values: Tensor, *given: Any) -> Tensor:
        sizes.append(len(values))
        return lloyd_levels(values, *given)

    monkeypatch.setattr(components, "lloyd_levels", counted)
    monkeypatch.setattr(components, "SAMPLE", 100)

    def levels(seed: int) -> list[Tensor]:
        settings = CalibrationConfig(samples=2, length=40, seed=seed)
        tensors = calibrate(loaded, method, windows, settings).tensors
        return [table for name, table in tensors.items() if name.endswith(".levels")]

    one, again, other = (levels(seed) for seed in (0, 0, 1))
    assert max(sizes) == 100
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(one, other, strict=True))


@hypothesis.settings(max_examples=examples(30), deadline=None)
@hypothesis.given(widths=st.lists(st.integers(0, 8), min_size=2, max_size=24).filter(any), seed=st.integers(0, 99))
def test_components_are_rounded_to_the_nearest_of_their_levels(widths: list[int], seed: int) -> None:
    """In fp64 and in fp32, against the table of each width; widths without bits decode to 0."""
    widths = widths[: len(widths) // 2 * 2]
    hypothesis.assume(any(widths))
    generator = torch.Generator().manual_seed(seed)
    quantizer = ScalarQuantizer(2, "pooled", fitted=True)
    tables = quantizer.shared_out(torch.ones(len(widths)), torch.tensor(widths, dtype=torch.uint8))
    tables["levels"] = torch.randn(len(tables["levels"]), generator=generator)
    rows, books = tables["levels"].double(), {}
    for width in sorted({width for width in widths if width}):
        books[width], rows = rows[: 2**width].sort().values, rows[2**width :]
    tables["levels"] = torch.cat([book.float() for book in books.values()])
    assert not len(rows)
    bound = quantizer.bound(tables, 2, len(widths) // 2)
    assert isinstance(bound, ScalarQuantizer)
    x = torch.randn(1, 2, 7, len(widths) // 2, generator=generator, dtype=torch.float64)
    flat = x.transpose(1, 2).flatten(2)
    expected = torch.zeros_like(flat)
    for place, width in enumerate(widths):
        if width:
            far = (flat[..., place, None] - books[width]).abs()
            expected[..., place] = books[width][far.argmin(-1)]
    parts = bound.encode(x, x.dtype)
    assert parts["string"].shape[-1] == -(-sum(widths) // 8)
    for dtype in (torch.float64, torch.float32):
        found = bound.decode(parts, x.shape, dtype).transpose(1, 2).flatten(2)
        torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6, atol=0)


def test_levels_are_not_fitted_to_equal_widths() -> None:
    with pytest.raises(ConfigError, match="fitted=true: with widths of their own"):
        ScalarQuantizer(2, fitted=True)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(33, "calibration.samples=1, length=33: 32 tokens for transforms of 64 channels; at least"), (129, None)],
)
def test_few_tokens_for_the_channels_of_a_transform(tokens: int, said: str | None) -> None:
    """Refused below one token per channel, which are of two heads of 32; below four there is a warning."""
    loaded, windows = LoadedModel(llama(head_dim=DIM), torch.device("cpu")), token_ids(tokens)
    if said is not None:
        with pytest.raises(DataError, match=said):
            fitted(loaded, method_of(2, "false"), windows)
    else:
        with pytest.warns(UserWarning, match="128 tokens for transforms of 64 channels; with fewer than 4 times"):
            fitted(loaded, method_of(2, "false"), windows)


@pytest.mark.parametrize(("name", "channels"), [("waterfill", 64), ("waterfill_kv", 128)])
def test_components_without_variance_get_no_bits(name: str, channels: int) -> None:
    """Keys before RoPE and values are linear in 48 hidden channels; a budget of 8 bits is spent on those alone."""
    loaded = LoadedModel(llama(layers=1, head_dim=DIM), torch.device("cpu"))
    _, found = fitted(loaded, kvq.build_method(name, bits=8, head_dim=DIM), token_ids(600))
    every = [own.tolist() for table, own in found.tensors.items() if table.endswith("quantizer.widths")]
    assert every
    assert all([widths.count(width) for width in (0, 8)] == [channels - 48, 48] for widths in every)
