"""OSCAR (arXiv 2605.17757) against its definition in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvq.cache import KVCache
from kvq.calibration.collect import LayerStates, collect_states
from kvq.calibration.files import bind_tables
from kvq.calibration.fit import calibrate, weights_name
from kvq.codecs import Codec, Hadamard, LowRankCorrection, UniformQuantizer, fit_codec
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq_zoo.covariance import CovarianceRotation, RankClip, bit_reversed_ranks, covariance_rotation
from tests.calibrated import build, random_states
from tests.random_models import llama, token_ids


def sylvester(order: int) -> np.ndarray:
    """Entry (i, j) is -1 to the number of common bits of i and j."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)])


def rotation_of(moment: np.ndarray) -> np.ndarray:
    """U · H/√D · P word by word; of an eigenvector, its largest entry is positive."""
    dim = len(moment)
    values, vectors = np.linalg.eigh(moment)
    for column in range(dim):
        largest = max(range(dim), key=lambda row: abs(vectors[row, column]))
        if vectors[largest, column] < 0:
            vectors[:, column] = -vectors[:, column]
    order = sorted(range(dim), key=lambda index: -values[index])
    bits = dim.bit_length() - 1
    swap = np.zeros((dim, dim))
    for rank, index in enumerate(order):
        swap[index, int(f"{rank:0{bits}b}"[::-1], 2) if bits else 0] = 1
    return vectors @ sylvester(dim) / math.sqrt(dim) @ swap


def moment_of(rows: np.ndarray) -> np.ndarray:
    dim = rows.shape[1]
    return np.array([[sum(row[i] * row[j] for row in rows) / len(rows) for j in range(dim)] for i in range(dim)])


def clipped(row: np.ndarray, share: float) -> np.ndarray:
    limit = sorted(abs(entry) for entry in row)[int(share * len(row))]
    return np.array([min(max(entry, -limit), limit) for entry in row])


def stored(row: np.ndarray, bits: int, side: type) -> np.ndarray:
    """Codes trunc(x/s + z + 1/2), decoded with scale and zero as they are stored."""
    scale = (row.max() - row.min()) / (2**bits - 1)
    zero = -row.min() / scale
    return np.array([(min(int(entry / scale + zero + 0.5), 2**bits - 1) - float(side(zero))) * float(side(scale))
                     for entry in row])  # fmt: skip


@pytest.mark.parametrize("dim", [1, 2, 8, 64])
def test_bits_in_reverse(dim: int) -> None:
    bits = dim.bit_length() - 1
    assert bit_reversed_ranks(dim).tolist() == [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(dim)]


@pytest.mark.parametrize("dim", [4, 16, 32])
def test_the_rotation_is_that_of_its_definition(dim: int) -> None:
    rows = np.random.default_rng(dim).normal(size=(3 * dim, dim)) * np.arange(1, dim + 1)
    found = covariance_rotation(torch.from_numpy(moment_of(rows))[None])[0].numpy()
    assert np.abs(found - rotation_of(moment_of(rows))).max() < 1e-9
    assert np.abs(found @ found.T - np.eye(dim)).max() < 1e-12
    # In the eigenvectors' basis each rotated channel has the mean energy: that is what H is for.
    energy = np.diag(found.T @ moment_of(rows) @ found)
    assert energy.max() / energy.min() < 1.0 + 1e-9


@pytest.mark.parametrize(("share", "dim", "index"), [(0.96, 128, 122), (0.92, 128, 117), (1, 128, 127), (0.5, 8, 4)])
def test_the_clip_is_at_a_rank(share: float, dim: int, index: int) -> None:
    x = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(1))
    y, side = RankClip(share).forward(x)
    assert not side
    for row, out in zip(x.reshape(-1, dim).numpy(), y.reshape(-1, dim).numpy(), strict=True):
        assert np.abs(out).max() == sorted(np.abs(row))[index]
        assert (np.abs(out - row) > 0).sum() == dim - 1 - index
        assert np.array_equal(out, clipped(row, share) if share < 1 else row)


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match=f"^share={share}: above 0, at most 1$"):
        RankClip(share)


@pytest.mark.parametrize(
    ("preset", "bits", "side"),
    [("", 2, np.float16), ("/served", 2, np.float32), pytest.param("", 4, np.float16, marks=pytest.mark.long)],
)
def test_states_decode_as_defined(preset: str, bits: int, side: type) -> None:
    """Rotate by R per head, clip, quantize per token, rotate back, for keys (0.96) and values (0.92)."""
    x = random_states(2, 128, 24)
    method = build(f"oscar_covariance{preset}", x, bits)
    for codec, share in ((method.key, 0.96), (method.value, 0.92)):
        assert codec is not None
        decoded = codec.decode(codec.encode(x))
        table = dict(codec.stages)["rotation"].table("rotation", x).numpy().astype(np.float32)
        for head in range(2):
            expected = rotation_of(moment_of(x[0, head].numpy().astype(np.float64)[:24]))
            assert expected.shape == table[head].shape
            turned = x[0, head].numpy() @ table[head]
            for token in range(24):
                wanted = table[head] @ stored(clipped(turned[token], share), bits, side)
                found = decoded[0, head, token].numpy()
                # A state halfway between two codes may take either: the rotation is a sum in another order.
                assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(("preset", "bits"), [("", 2.25), ("/served", 2.5), ("/shared", 2.25)])
def test_measured_bits(preset: str, bits: float) -> None:
    x = random_states(2, 128, 64)
    method = build(f"oscar_covariance{preset}", x, 2)
    for codec in (method.key, method.value):
        assert codec is not None
        assert codec.encode(x).bits_per_element == bits


def test_moments_are_those_of_queries_and_of_weighted_values() -> None:
    """Four query heads over two KV heads; the positions that `tokens` draws count, of queries as of keys."""
    model = llama(layers=2, head_dim=16)
    loaded, windows = LoadedModel(model, torch.device("cpu")), token_ids(20, seed=3, batch=2)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def keep(module: torch.nn.Module, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        if hidden.shape[1] != 20:  # a probe of the style of RoPE
            return
        query = module.q_proj(hidden).view(1, -1, 4, 16).transpose(1, 2)
        turned = torch.cat([-query[..., 8:], query[..., :8]], -1)
        seen[module.layer_idx].append((query * cos[:, None] + turned * sin[:, None])[0])

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    states = collect_states(loaded, windows, None, False, 0, queries=True)
    for hook in hooks:
        hook.remove()
    for index, layer in states.items():
        queries = torch.cat(seen[index], 1).numpy().astype(np.float64)
        for head in range(2):
            c = moment_of(np.concatenate([queries[2 * head], queries[2 * head + 1]]))
            assert np.abs(layer.moments("key")[head].numpy() - c).max() < 1e-5 * np.abs(c).max()
            keys, values = (part[head].numpy().astype(np.float64) for part in (layer.key, layer.value))
            weights = [sum(k[i] * c[i, j] * k[j] for i in range(16) for j in range(16)) for k in keys]
            mean = sum(weights) / len(weights)
            weighted = sum(w / mean * np.outer(v, v) for w, v in zip(weights, values, strict=True)) / len(values)
            found = layer.moments("value")[head].numpy()
            assert np.abs(found - weighted).max() < 1e-5 * np.abs(weighted).max()
    few = collect_states(loaded, windows, 10, False, 0, queries=True)
    assert few[0].key.shape[1] == 10
    assert few[0].queries.shape == (2, 16, 16)
    assert not torch.allclose(few[0].queries, states[0].queries)
    assert collect_states(loaded, windows, None, False, 0)[0].queries is None


def test_without_queries_there_are_no_moments() -> None:
    assert LayerStates(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)).moments("value") is None
    codec = Codec({"rotation": CovarianceRotation()}, ["rotation"], UniformQuantizer(2, "per_token"))
    with pytest.raises(ConfigError, match=r"^stage 'rotation': first in its codec, and fitted on a model's queries$"):
        fit_codec(codec, torch.zeros(1, 4, 8), None, None, 0)
    stages = {"hadamard": Hadamard(), "rotation": CovarianceRotation()}
    codec = Codec(stages, list(stages), UniformQuantizer(2, "per_token"))
    with pytest.raises(ConfigError, match=r"^stage 'rotation': first in its codec"):
        fit_codec(codec, torch.zeros(1, 4, 8), None, None, 0, torch.eye(8)[None])


def test_head_dims_that_are_no_power_of_two() -> None:
    """Ranks of reversed bits are a permutation, so R stays orthogonal where Paley has a Hadamard matrix."""
    assert bit_reversed_ranks(6).tolist() == [0, 3, 2, 5, 1, 4]  # 000 100 010 110 001 101
    rows = torch.randn(90, 80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = covariance_rotation((rows.mT @ rows)[None])[0]
    assert float((found @ found.mT - torch.eye(80, dtype=torch.float64)).abs().max()) < 1e-12
    with pytest.raises(Unsupported, match="head_dim=22: no Hadamard matrix of this order"):
        build_method("oscar_covariance", head_dim=22)


@pytest.mark.parametrize("preset", ["oscar_covariance", "oscar_covariance/shared"])
def test_a_calibrated_cache_keeps_sinks_and_window(preset: str) -> None:
    """64 first and 256 newest tokens as they are; one between them is rotated back to the subspace of its codes."""
    model = llama(layers=2, head_dim=32)
    loaded, windows = LoadedModel(model, torch.device("cpu")), token_ids(96, seed=2, batch=2)
    method = build_method(preset, bits=2, head_dim=32)
    found = calibrate(loaded, method, windows, CalibrationConfig(dataset="pydocs", samples=2, length=96))
    shapes = {name: tuple(table.shape) for name, table in found.tensors.items()}
    heads = 1 if preset.endswith("shared") else 2
    assert shapes == {f"{side}.{i}.rotation.rotation": (heads, 32, 32) for side in ("key", "value") for i in (0, 1)}
    cache = KVCache(model, bind_tables(method, found, weights_name(model), [32, 32]))
    x = torch.randn(1, 2, 400, 32, generator=torch.Generator().manual_seed(0))
    cache.layers[0].update(x, x)
    seen = cache.layers[0].update(x[:, :, :1], x[:, :, :1])[0][:, :, :400]
    same = (seen == x).all(-1).all(1)[0].nonzero().flatten().tolist()
    assert same == [*range(64), *range(400 - 256, 400)]


def test_moments_reach_a_codec_inside_a_correction() -> None:
    rows = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(101), dtype=torch.float64)
    moments, rotation = rows.mT @ rows, Codec({"r": CovarianceRotation()}, ["r"], UniformQuantizer(2, "per_token"))
    corrected = Codec({}, [], LowRankCorrection(rotation))
    expected = fit_codec(rotation, rows, None, None, 0, moments)["r.rotation"]
    assert torch.equal(fit_codec(corrected, rows, None, None, 0, moments)["quantizer.r.rotation"], expected)
    assert corrected.quantizer.wants_moments
    plain = Codec({}, [], LowRankCorrection(Codec({}, [], UniformQuantizer(2, "per_token"))))
    assert not plain.quantizer.wants_moments
