"""Perplexity against the plain forward, and its comparisons with full precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.cli import main
from kvq.config import PplConfig, Scoring, Windows
from kvq.errors import DataError
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq.results import Store
from kvq.results.files import Journal
from kvq.tasks.ppl import ppl_windows, run_ppl
from kvq.tasks.scoring import ReferenceLogProbs, ScoredChunk, Window, score
from tests.random_models import random_llama, token_ids

TASK = PplConfig(context=64, stride=16, max_windows=6)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_llama()


@pytest.fixture(scope="module")
def stream() -> Tensor:
    return token_ids(400)[0]


@torch.no_grad()
def plain_losses(loaded: LoadedModel, window: Window) -> Tensor:
    """Losses of a window's scored tokens by transformers alone, in nats."""
    logits = loaded.model(input_ids=window.tokens[None], use_cache=False).logits[0, :-1]
    each = torch.nn.functional.cross_entropy(logits.double(), window.tokens[1:], reduction="none")
    return each[window.scored_from - 1 :]


def plain_nll(loaded: LoadedModel, windows: list[Window]) -> float:
    return float(torch.cat([plain_losses(loaded, window) for window in windows]).mean())


@pytest.mark.parametrize("scoring", [Scoring.generation, Scoring.parallel])
@pytest.mark.parametrize("cut", Windows)
def test_full_precision_is_a_plain_forward(loaded: LoadedModel, stream: Tensor, cut: Windows, scoring: Scoring) -> None:
    task = dataclasses.replace(TASK, windows=cut, scoring=scoring)
    windows = ppl_windows([stream], task)
    metrics = run_ppl(loaded, build_method("fp16"), windows, task).metrics()
    expected = plain_nll(loaded, windows)
    assert metrics["nll"] == pytest.approx(expected, abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert metrics["scored_tokens"] == (63 + 5 * 16 if cut is Windows.sliding else 6 * 63)
    assert metrics["bits_per_element"] == metrics["effective_bits"] == 32


def test_recomputed_reference_is_the_kept_one(loaded: LoadedModel, stream: Tensor) -> None:
    windows = ppl_windows([stream], TASK)
    method, full = (build_method(one, bits=2, head_dim=32, overrides=["residual.size=128"]) for one in ("kivi", "fp16"))
    method = dataclasses.replace(method, residual=build_method("kivi", overrides=["residual.size=16"]).residual)
    results = []
    for budget in (2**30, 0):
        reference = ReferenceLogProbs(windows, 61, torch.float32, budget)
        assert reference.kept == (budget > 0)
        run_ppl(loaded, full, windows, TASK, reference, fill=True)
        results.append(run_ppl(loaded, method, windows, TASK, reference).metrics())
    for name in ("kl_mean", "kl_p99", "nll"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-3), name
    assert results[0]["kl_mean"] > 1e-3
    assert results[0]["top1_agreement"] == results[1]["top1_agreement"] < 1


def test_kl_and_agreement_are_those_of_the_definition(loaded: LoadedModel, stream: Tensor) -> None:
    task = dataclasses.replace(TASK, scoring=Scoring.parallel, max_windows=2)
    windows = ppl_windows([stream], task)
    reference = ReferenceLogProbs(windows, 61, torch.float32)
    run_ppl(loaded, build_method("fp16"), windows, task, reference, fill=True)
    metrics = run_ppl(loaded, build_method("zero"), windows, task, reference).metrics()
    shared, same, kl = ReferenceLogProbs(windows, 61, torch.float32), [], []
    run_ppl(loaded, build_method("zero"), windows, task, shared, fill=True)
    for index, window in enumerate(windows):
        p = reference.read([index], 0, window.targets).double()
        q = shared.read([index], 0, window.targets).double()
        kl.append((p.exp() * (p - q)).sum(-1).flatten())
        same.append((p.argmax(-1) == q.argmax(-1)).flatten())
    assert metrics["kl_mean"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-5)
    assert metrics["kl_p99"] == pytest.approx(float(torch.quantile(torch.cat(kl), 0.99)), rel=1e-5)
    assert metrics["top1_agreement"] == pytest.approx(float(torch.cat(same).double().mean()))


@pytest.mark.parametrize("name", ["kivi", "nsn", "oscar"])
def test_batches_and_kept_decoded_states_change_nothing(loaded: LoadedModel, stream: Tensor, name: str) -> None:
    windows = ppl_windows([stream], TASK)
    method = build_method(name, bits=3, head_dim=32, overrides=["residual.size=16"])
    packed = run_ppl(loaded, method, windows, TASK, keep_decoded=False)
    decoded = run_ppl(loaded, method, windows, TASK, keep_decoded=True)
    assert packed.samples() == decoded.samples()
    batched = run_ppl(loaded, method, windows, dataclasses.replace(TASK, batch_size=3))
    assert batched.storage["bits_per_element"] == packed.storage["bits_per_element"]
    assert batched.nll == pytest.approx(packed.nll, abs=0.02)


def test_an_interrupted_run_goes_on_at_the_window_it_had_reached(
    loaded: LoadedModel, stream: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = dataclasses.replace(TASK, batch_size=2)
    windows = ppl_windows([stream], task)
    reference = ReferenceLogProbs(windows, 61, torch.float32)
    run_ppl(loaded, build_method("fp16"), windows, task, reference, fill=True)
    method = build_method("kivi", bits=2, head_dim=32, overrides=["residual.size=16"])
    expected = run_ppl(loaded, method, windows, task, reference)
    seen: list[int] = []

    def stop_at(most: int) -> Callable[..., Iterator[ScoredChunk]]:
        def counting(*given: Any) -> Iterator[ScoredChunk]:
            if given[1].method.name == "fp16":
                return score(*given)
            if len(seen) == most:
                raise KeyboardInterrupt
            seen.append(given[2].shape[0])
            return score(*given)

        return counting

    path = tmp_path / "journal.jsonl"
    monkeypatch.setattr("kvq.tasks.scoring.score", stop_at(2))
    with pytest.raises(KeyboardInterrupt):
        run_ppl(loaded, method, windows, task, reference, journal=Journal(path, "code"))
    monkeypatch.setattr("kvq.tasks.scoring.score", stop_at(99))
    found = run_ppl(loaded, method, windows, task, reference, journal=Journal(path, "code"))
    assert sum(seen) == 6  # windows: none twice
    assert found.metrics() == expected.metrics()
    assert found.samples() == expected.samples()


@torch.no_grad()
@pytest.mark.parametrize("stretch", [1, 10, 64, 1000])
@pytest.mark.parametrize("cut", Windows)
def test_losses_by_position_are_those_of_the_targets_there(
    loaded: LoadedModel, stream: Tensor, cut: Windows, stretch: int
) -> None:
    task = dataclasses.replace(TASK, windows=cut, stretch=stretch)
    windows = ppl_windows([stream], task)
    metrics = run_ppl(loaded, build_method("fp16"), windows, task).metrics()
    losses: dict[int, list[float]] = {}
    for window in windows:
        for place, loss in enumerate(plain_losses(loaded, window).tolist(), window.scored_from):
            losses.setdefault(place // stretch * stretch, []).append(loss)
    found = {name: value for name, value in metrics.items() if name.startswith("nll[")}
    expected = {f"nll[position={first}]": sum(each) / len(each) for first, each in losses.items()}
    assert found == pytest.approx(expected, abs=1e-5)


def test_text_shorter_than_a_window(stream: Tensor) -> None:
    with pytest.raises(DataError, match=r"has 50 tokens, fewer than one window: task\.context=64"):
        ppl_windows([stream[:50]], TASK)


# Windows measured, and how many standard errors decoding to zeros then costs at least.
FEW, MANY = (12, 7), (384, 50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("windows", "scoring", "measured"),
    [
        ("sliding", "generation", FEW),
        pytest.param("disjoint", "parallel", FEW, marks=pytest.mark.long),
        *(
            pytest.param(windows, scoring, MANY, marks=pytest.mark.long)
            for windows in ("sliding", "disjoint")
            for scoring in ("generation", "parallel")
        ),
    ],
    ids=str,
)
def test_identity_changes_nothing_and_zero_wrecks_the_score(
    tmp_path: Path, windows: str, scoring: str, measured: tuple[int, int]
) -> None:
    number, errors = measured
    protocol = [f"task.windows={windows}", f"task.scoring={scoring}", "residual.size=8", "task.batch_size=16"]
    sizes = ["task.context=256", "task.stride=128", f"task.max_windows={number}", "dataset.max_tokens=131072"]
    assert main(["-m", "method=identity,zero", *protocol, *sizes, f"results_dir={tmp_path}"]) == 0
    found = {record.method: record.metrics for record in Store(tmp_path).scan()[0]}
    # Full precision runs in chunks of 128 tokens and identity in chunks of 8: the same up to rounding.
    assert found["identity"]["delta_nll"] == pytest.approx(0, abs=1e-5)
    assert found["identity"]["kl_mean"] < 1e-6
    assert found["identity"]["top1_agreement"] > 0.9999
    assert found["zero"]["delta_nll"] > errors * found["zero"]["delta_nll_se"] > 0
    assert found["zero"]["bits_per_element"] == 0
