"""Tasks that measure time: the bookkeeping is exact, the times are only positive."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.cache import KVCache
from kvq.cache.packed import PreallocatedCache
from kvq.config import compose, full_precision, resolve
from kvq.config.identity import canonical
from kvq.errors import Unsupported
from kvq.kernels.eager import STEPS
from kvq.methods.build import build_method
from kvq.results import Store
from kvq.runs import run
from kvq.tasks import speed
from kvq.tasks.measurement import units_like
from kvq.tasks.speed import median_of, paired_ratios, rates_of
from kvq.tasks.steps import PerHeadCodec, without_norms
from tests.random_models import llama, save_random_model, token_ids
from tests.tasks.diagnosed import InThisProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def config(model: Path, folder: Path, *overrides: str):
    given = [f"model.path={model}", f"results_dir={folder}", "method=oscar", "bits=2", "threads=1", "device=cpu"]
    return resolve(compose([*given, "residual.size=32", *overrides]))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dense", "packed"])
def test_latency(model: Path, tmp_path: Path, attention: str) -> None:
    small = ["task.batches=[1,2]", "task.contexts=[40]", "task.new_tokens=3", "task.repeats=2", "task.warmup=0"]
    record = run(config(model, tmp_path, "task=latency", f"cache.attention={attention}", *small))
    assert record.status == "done"
    rows = Store(tmp_path).samples(record.key)
    assert len(rows) == 2 * 2 * 3  # batches, repeats, subjects
    assert {row["subject"] for row in rows} == {"method", "preallocated", "dynamic"}
    assert all(row["prefill_seconds"] > 0 and row["decode_seconds"] >= row["step_seconds_median"] > 0 for row in rows)
    held = {(row["batch"], row["subject"]): row["cache_bytes"] for row in rows}
    full = 2 * 2 * 43 * 128 * 4  # layers, sides, tokens, channels, bytes
    assert held[1, "preallocated"] == held[1, "dynamic"] == full == held[2, "dynamic"] / 2
    assert held[1, "method"] < full
    for name in ("prefill", "decode"):
        assert record.metrics[f"{name}_b1_t40"] > 0
        assert record.metrics[f"{name}_over_preallocated_b2_t40"] > 0
    assert ("attention" in record.config) == (attention == "packed")


@pytest.mark.long
@pytest.mark.slow
def test_decoding_by_steps(model: Path, tmp_path: Path) -> None:
    """Seconds of every step of attention on codes, and the method without its norms beside it, as pairs."""
    small = ["task.contexts=[96]", "task.new_tokens=3", "task.repeats=2", "task.warmup=0", "task.references=[dynamic]"]
    asked = ["task=latency", *small, "cache.attention=packed"]
    given = config(model, tmp_path, *asked, "task.decode_steps=true")
    record = run(given)
    assert record.status == "done", record.reason
    shares = {
        name.removeprefix("decode_share_").removesuffix("_b1_t96"): value
        for name, value in record.metrics.items()
        if name.startswith("decode_share_")
    }
    assert set(shares) == set(STEPS) - {"shifts"}  # OScaR has none
    assert all(0 < share < 1 for share in shares.values())
    assert record.metrics["decode_step_norms_b1_t96"] < record.metrics["decode_step_attention_b1_t96"]
    rows = Store(tmp_path).samples(record.key)
    assert [row["repeat"] for row in rows if row["subject"] == "watched_decode"] == [0, 1]
    watched = next(row for row in rows if row["subject"] == "watched_decode")
    whole = watched["steps"]["attention"]
    assert sum(watched["steps"].values()) - whole < whole < watched["step_seconds_mean"]
    pairs = [
        [row["step_seconds_median"] for row in rows if row["subject"] == name] for name in ("method", "without_norms")
    ]
    ratio = statistics.median(mine / plain for mine, plain in zip(*pairs, strict=True))
    assert record.metrics["decode_over_without_norms_b1_t96"] == pytest.approx(ratio)
    assert record.metrics["overhead_norms_b1_t96"] == pytest.approx(100 * (ratio - 1))
    assert record.config["task"]["decode_steps"] is True
    assert "decode_steps" not in canonical(config(model, tmp_path, *asked), "", "")["task"]
    assert "decode_steps" not in canonical(full_precision(given), "", "")["task"]


def test_a_method_without_its_norms() -> None:
    """Nothing else goes; a method that has none is not timed twice."""
    plain = without_norms(build_method("oscar", bits=2, head_dim=64))
    assert plain is not None
    assert plain.key is not None
    assert [name for name, _ in plain.key.stages] == ["hadamard"]
    assert without_norms(build_method("kivi", bits=2, head_dim=64)) is None


def test_steps_of_dense_attention_are_refused(model: Path, tmp_path: Path) -> None:
    record = run(config(model, tmp_path, "task=latency", "task.contexts=[40]", "task.decode_steps=true"))
    assert record.status == "unsupported"
    assert "task.decode_steps: the steps of attention on codes; use cache.attention=packed" in (record.reason or "")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cache.attention=packed"], "packed attention encodes in one pass"), (["method=snapkv/kivi"], "eviction")],
)
def test_steps_of_more_than_two_codecs_are_refused(model: Path, tmp_path: Path, words: list[str], said: str) -> None:
    record = run(config(model, tmp_path, "task=latency", "task.contexts=[40]", "task.prefill_steps=true", *words))
    assert record.status == "unsupported"
    assert said in (record.reason or "")


@pytest.mark.parametrize("name", ["nsn", "oscar", "nsnquant"])
def test_a_past_decodes_to_the_same_in_every_regime(name: str) -> None:
    codec = build_method(name, bits=2, head_dim=64).value
    packed = codec.encode(torch.randn(2, 3, 130, 64), 64)
    expected = codec.decode(packed)
    assert torch.equal(PerHeadCodec(codec).decode(packed), expected)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
def test_the_compiled_regime() -> None:
    """In a process of its own: torch.compile does not trace the checks of shapes that tests put around every call."""
    code = """
import torch
from kvq.methods.build import build_method
from kvq.tasks.steps import CompiledCodec
codec = build_method("nsn", bits=3, head_dim=64).key
compiled = CompiledCodec(codec)
for tokens in (128, 192):
    packed = codec.encode(torch.randn(1, 2, tokens, 64), 64)
    torch.testing.assert_close(compiled.decode(packed), codec.decode(packed), atol=1e-5, rtol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_largest_batches_that_fit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with room for 2 requests in full precision and for 4 quantized ones; 8 are not tried by what failed."""
    tried = []

    def timed(loaded: object, cache: object, prompt: torch.Tensor, new_tokens: int) -> dict[str, float]:
        batch, quantized = len(prompt), isinstance(cache, KVCache)
        tried.append((batch, quantized))
        if batch > (4 if quantized else 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"prefill_seconds": 1.0, "decode_seconds": 3.0 if quantized else 1.0, "cache_bytes": batch}

    monkeypatch.setattr(speed, "timed", timed)
    monkeypatch.setattr(speed, "ProcessPoolExecutor", InThisProcess)
    small = ["task.batches=[16,8,4,2,1]", "task.prompt=4", "task.new_tokens=6", "task.repeats=2", "task.warmup=0"]
    record = run(config(model, tmp_path, "task=throughput", "task.references=[dynamic]", *small))
    found = record.metrics
    assert (found["largest_batch"], found["largest_batch_over_dynamic"]) == (4, 2)
    assert found["tokens_per_second_b4"] == 4 * 6 / 4
    assert found["over_dynamic_b2"] == 0.5
    assert found["over_dynamic_largest"] == pytest.approx((4 * 6 / 4) / (2 * 6 / 2))
    assert "over_dynamic_b4" not in found
    assert "tokens_per_second_b8" not in found
    assert [record.units[name] for name in ("largest_batch", "over_dynamic_largest")] == ["requests", "x"]
    baseline = {(batch, quantized) for batch, quantized in tried if batch == 16}
    assert not baseline
    assert tried.count((8, True)) == 2  # once for full precision's own run, once for the method's
    assert tried.count((4, False)) == 2
    rows = Store(tmp_path).samples(record.key)
    assert {(row["batch"], row["subject"]) for row in rows if not row["fits"]} == {(4, "dynamic"), (8, "method")}


def test_what_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"task.batches=1: does not fit the memory of the device"):
        rates_of([{"batch": 1, "tokens": 4, "subject": "method", "repeat": 0, "fits": False}], 6)


def test_medians_and_ratios_are_of_pairs() -> None:
    rows = [
        {"subject": subject, "repeat": repeat, "seconds": seconds}
        for subject, times in (("method", (1.0, 6.0, 2.0)), ("dynamic", (2.0, 3.0, 8.0)))
        for repeat, seconds in enumerate(times)
    ]
    assert median_of(rows, "method", lambda row: row["seconds"]) == 2.0
    assert paired_ratios(rows, lambda row: row["seconds"]) == {"dynamic": 0.5}


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_the_preallocated_cache_is_full_precision(way: str) -> None:
    model, tokens = llama(), token_ids(30, batch=2)
    model.set_attn_implementation(way)
    expected = model(tokens, use_cache=False).logits[:, 20:]
    cache = PreallocatedCache(model, 30)
    model(tokens[:, :20], past_key_values=cache)
    found = torch.cat([model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(20, 30)], 1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_the_mean_step_has_the_flush_that_the_median_lacks() -> None:
    """64 tokens of which one flushes a residual (NSNQuant, Table 21); ratios are of medians and of means."""
    from kvq.tasks.speed import UNITS, _time_metrics

    def row(subject: str, repeat: int, flush: float) -> dict[str, Any]:
        steps = [0.25] * 63 + [flush]
        middle, whole = statistics.median(steps), sum(steps)
        return {"subject": subject, "repeat": repeat, "step_seconds_median": middle, "decode_seconds": whole}

    rows = [row("method", 0, 8.25), row("method", 1, 24.25), row("dynamic", 0, 0.25), row("dynamic", 1, 0.25)]
    metrics = _time_metrics(
        "decode", "b1_t8", rows, "method", lambda r: r["step_seconds_median"], lambda r: r["decode_seconds"] / 64
    )
    assert metrics == {
        "decode_b1_t8": 0.25,
        "decode_mean_b1_t8": 0.25 + (8 + 24) / 2 / 64,
        "decode_over_dynamic_b1_t8": 1.0,
        "decode_mean_over_dynamic_b1_t8": 2.0,
    }
    assert list(units_like(metrics, UNITS).values()) == ["s", "s", "x", "x"]
