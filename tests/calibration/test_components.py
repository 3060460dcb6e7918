"""What a calibration decides by further passes over its text, against runs of the model through a cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq
from kvq.cache import KVCache
from kvq.calibration import files
from kvq.calibration.files import Calibration, bind
from kvq.calibration.fit import calibrate
from kvq.codecs import ScalarQuantizer
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.weights import weights_name
from tests.random_models import llama, token_ids

DIM = 32


def method_of(bits: Any, unshrunk: object, name: str = "waterfill/scalar") -> Method:
    words = [f"{side}.quantizer.unshrunk={unshrunk}" for side in ("key", "value")]
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
@pytest.mark.parametrize("bits", [0.75, 1.5])
def test_the_choice_is_that_of_held_out_windows(bits: float, seed: int, tmp_path: Path) -> None:
    """Both forms calibrated on three of four windows, and scored on the fourth; tables are of all windows."""
    loaded = LoadedModel(llama(head_dim=DIM, seed=seed).double(), torch.device("cpu"))
    windows = token_ids(48, seed=seed + 5, batch=9)
    seen = torch.tensor([0, 1, 2, 4, 5, 6, 8])
    losses = [
        loss_of(loaded, fitted(loaded, method_of(bits, unshrunk), windows[seen])[0], windows[[3, 7]])
        for unshrunk in ("false", "true")
    ]
    bound, found = fitted(loaded, method_of(bits, "chosen"), windows)
    files.write(tmp_path / "a.safetensors", found)
    assert files.read(tmp_path / "a.safetensors").tensors.keys() == found.tensors.keys()
    grown = losses[1] < losses[0]
    assert found.metrics({})["calibration_unshrunk"] == grown
    winner, tables = fitted(loaded, method_of(bits, str(grown).lower()), windows)
    assert "calibration_unshrunk" not in tables.metrics({})
    flags = {name for name in found.tensors if name.endswith(".unshrunk")}
    assert len(flags) == 4
    assert found.nbytes == tables.nbytes + 4
    assert all(torch.equal(found.tensors[name], table) for name, table in tables.tensors.items())
    x = torch.randn(1, 2, 20, DIM, generator=torch.Generator().manual_seed(0))
    one, other = (method.bound["value"][1] for method in (bound, winner))
    assert one is not None
    assert other is not None
    assert torch.equal(one.decode(one.encode(x)), other.decode(other.encode(x)))


def test_a_choice_needs_windows_and_widths() -> None:
    loaded = LoadedModel(llama(head_dim=DIM), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"samples=3: unshrunk=chosen holds out one of 4 windows"):
        fitted(loaded, method_of(1.5, "chosen"), token_ids(16, batch=3))
    with pytest.raises(ConfigError, match="unshrunk=chosen: with widths of their own"):
        ScalarQuantizer(2, unshrunk="chosen")
    with pytest.raises(ConfigError, match="unshrunk=maybe: true, false or chosen"):
        ScalarQuantizer(2, "pooled", unshrunk="maybe")  # type: ignore[arg-type]
