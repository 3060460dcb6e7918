"""Tables of the codecs that share bits over components, from a model's states on a text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvq
from kvq.calibration.files import Calibration, bind
from kvq.calibration.fit import calibrate
from kvq.config.method import CalibrationConfig
from kvq.errors import DataError
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.weights import weights_name
from tests.random_models import llama, token_ids

DIM = 32


def fitted(loaded: LoadedModel, method: Method, windows: Tensor) -> tuple[Method, Calibration]:
    settings = CalibrationConfig(samples=len(windows), length=windows.shape[1])
    found = calibrate(loaded, method, windows, settings)
    return bind(method, found, weights_name(loaded.model), found.head_dims), found


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
