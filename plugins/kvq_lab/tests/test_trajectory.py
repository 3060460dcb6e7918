"""Greedy texts beside full precision's: against transformers' own, step by step, and the figure's estimate."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from kvq.cache import KVCache
from kvq.config import compose, resolve
from kvq.errors import ConfigError, DataError
from kvq.models.inputs import Inputs
from kvq.results import Record, Store
from kvq.results.files import Journal
from kvq.runs import Prepared, run
from kvq_lab.figures import survival_figure, survival_table
from kvq_lab.trajectory import Draws, TrajectoryConfig, cut_passages, drift, first_difference, measure

GIVEN = (
    "model=tiny task=trajectory task.prompts=3 task.context=96 task.new_tokens=12 residual.size=16 threads=1".split()
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("trajectory")
    words = (["method=fp16"], ["method=identity"], ["method=rtn", "bits=2"])
    runs = [run(resolve(compose([*GIVEN, *more, f"results_dir={folder}"]))) for more in words]
    return Store(folder), {record.method: record for record in runs}


def inputs_of(*more: str) -> Inputs:
    return Inputs(resolve(compose([*GIVEN, *more])))


def test_full_precision_writes_what_transformers_writes(made: tuple[Store, dict[str, Record]]) -> None:
    store, records = made
    inputs = inputs_of("method=fp16", "cache.dtype=float32")
    loaded = inputs.model
    texts = [row["tokens"] for row in store.samples(records["fp16"].key)]
    for prompt, text in zip(cut_passages(inputs), texts, strict=True):
        tokens = torch.tensor([prompt])
        whole = loaded.model.generate(
            tokens, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(tokens)
        )
        assert text == whole[0, len(prompt) :].tolist()
    assert records["fp16"].metrics["noise_batch_left"] == 0
    assert not {"left", "kl_mean"} & records["fp16"].metrics.keys()


def test_identity_changes_nothing(made: tuple[Store, dict[str, Record]]) -> None:
    _, records = made
    found = records["identity"].metrics
    assert (found["left"], found["same_share"], found["kept_tokens"], found["kl_max"]) == (0, 1, 12, 0)


@torch.no_grad()
def test_each_step_is_judged_on_full_precisions_text(made: tuple[Store, dict[str, Record]]) -> None:
    """Against one token per forward, with probabilities in fp64."""
    store, records = made
    prepared = Prepared(resolve(compose([*GIVEN, "method=rtn", "bits=2"])))
    loaded, method = prepared.inputs.model, prepared.method
    full = [row["tokens"] for row in store.samples(records["fp16"].key)]
    for prompt, text, row in zip(cut_passages(prepared.inputs), full, store.samples(records["rtn"].key), strict=True):
        logits = []
        for cache in (KVCache(loaded, method), None):
            past = cache
            if past is not None:
                loaded.model(input_ids=torch.tensor([prompt[:-1]]), past_key_values=past)
            steps = [*prompt[-1:], *text[:-1]]
            if past is None:
                out = loaded.model(input_ids=torch.tensor([[*prompt, *text[:-1]]]), use_cache=False).logits[0]
                logits.append(out[len(prompt) - 1 :].double().log_softmax(-1))
                continue
            past.token_by_token = True
            out = [loaded.model(input_ids=torch.tensor([[step]]), past_key_values=past).logits[0, -1] for step in steps]
            logits.append(torch.stack(out).double().log_softmax(-1))
        found, right = logits
        assert row["same"] == (found.argmax(-1) == torch.tensor(text)).tolist()
        distances = (right.exp() * (right - found)).sum(-1)
        assert row["kl"] == pytest.approx(distances.tolist(), abs=2e-3, rel=2e-2)  # full precision here is fp32
        assert row["first"] == first_difference(row["tokens"], text)


def test_the_record_says_what_its_samples_say(made: tuple[Store, dict[str, Record]]) -> None:
    store, records = made
    rows, found = store.samples(records["rtn"].key), records["rtn"].metrics
    assert found["left"] == sum(row["first"] is not None for row in rows) / 3
    kept = [len(row["same"]) if row["first"] is None else row["first"] for row in rows]
    assert found["kept_tokens"] == pytest.approx(sum(kept) / 3)
    assert found["kl_mean"] == pytest.approx(sum(map(sum, (row["kl"] for row in rows))) / 36)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_killed_run_goes_on_where_it_was(made: tuple[Store, dict[str, Record]], tmp_path: Path) -> None:
    store, records = made
    prepared = Prepared(resolve(compose([*GIVEN, "method=fp16"])))
    rows = store.samples(records["fp16"].key)
    journal = Journal(tmp_path / "journal.jsonl", "same")
    journal.add([{**rows[0], "tokens": [7, 7], "storage": {}}])
    found = measure(prepared.inputs, prepared.method, None, Journal(tmp_path / "journal.jsonl", "same"))
    assert [row["tokens"] for row in found.samples] == [[7, 7], rows[1]["tokens"], rows[2]["tokens"]]


def test_survival_is_kaplan_and_meiers(made: tuple[Store, dict[str, Record]], tmp_path: Path) -> None:
    store, records = made
    rows = [
        {"item": f"passage {n}", "tokens": [], "first": first, "same": [True] * length, "kl": [0.5] * length}
        for n, (first, length) in enumerate([(1, 4), (3, 4), (None, 2), (None, 4)])
    ]
    table = survival_table([Store(tmp_path).put(records["rtn"], rows)], Store(tmp_path))
    assert table["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert table["share"].tolist() == pytest.approx([1, 1, 0.75, 0.75, 0.375])
    assert ((table["low"] <= table["share"]) & (table["share"] <= table["high"])).all()
    assert (
        len(survival_figure(pd.concat([table, survival_table([store.get(records["rtn"].key)], store)]), "title").axes)
        == 2
    )


def test_bad_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"task\.prompts=1: at least 2"):
        resolve(compose([*GIVEN, "task.prompts=1"]))
    with pytest.raises(DataError, match=r"task\.prompts=100000: the text has \d+ passages of 96 tokens"):
        cut_passages(inputs_of("task.prompts=100000"))
    with pytest.raises(ConfigError, match=r"task\.new_tokens=100000: after 96 tokens; model=tiny takes at most"):
        _ = Prepared(resolve(compose([*GIVEN, "task.new_tokens=100000"]))).method


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("drift")
    given = "model=tiny task=drift task.prompts=3 task.context=96 task.new_tokens=16 task.parts=4 residual.size=16"
    words = {
        "full": ["method=fp16"],
        "identity": ["method=identity"],
        "rtn": ["method=rtn", "bits=2"],
        "read": ["method=rtn", "bits=2", "task.free=false"],
        "other": ["method=fp16", "task.draw=1"],
    }
    runs = {
        name: run(resolve(compose([*given.split(), "threads=1", *more, f"results_dir={folder}"])))
        for name, more in words.items()
    }
    return Store(folder), runs


def test_sampled_texts_share_their_numbers(sampled: tuple[Store, dict[str, Record]]) -> None:
    store, runs = sampled
    written = {name: store.samples(record.key) for name, record in runs.items() if name != "read"}
    texts = {name: [row["tokens"] for row in rows] for name, rows in written.items()}
    assert texts["identity"] == texts["full"]
    assert texts["other"] != texts["full"]
    assert runs["identity"].metrics["same_share"] == 1
    assert "drift" not in runs["identity"].metrics  # no distance, no slope
    assert runs["full"].metrics["noise_batch_left"] == 0


def test_draws_have_the_models_distribution() -> None:
    task = TrajectoryConfig(temperature=2.0, draw=3)
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(4000, 3)
    found = torch.bincount(Draws(task, 0).choose(logits, 0), minlength=3) / 4000
    assert torch.allclose(found, torch.softmax(torch.tensor([0.0, 0.5, 1.0]), 0).to(found), atol=0.03)
    pick = Draws(task, 0).pick()
    assert [int(pick(logits[:1])) for _ in range(50)] == Draws(task, 0).choose(logits[:50], 0).tolist()


def test_drift_is_the_slope_of_logarithms(sampled: tuple[Store, dict[str, Record]]) -> None:
    rows = [{"kl": [0.01 * (step + 1) ** 0.5 for step in range(64)]} for _ in range(2)]
    found = drift(rows, 64)
    assert found["drift"] == pytest.approx(0.5)
    assert found["drift_se"] == pytest.approx(0, abs=1e-9)
    assert found["kl_mean[part=64]"] == pytest.approx(0.08)
    assert list(drift([{"kl": [0.1, 0.2, 0.3]}, {"kl": [0.1, 0.2]}], 8))[:2] == [
        "kl_mean[part=1]",
        "kl_mean_se[part=1]",
    ]
    metrics = sampled[1]["rtn"].metrics
    assert {"drift", "drift_se", *(f"kl_mean[part={end}]" for end in (4, 8, 12, 16))} <= metrics.keys()


def test_texts_that_are_only_read(sampled: tuple[Store, dict[str, Record]]) -> None:
    """A method leaves where it would choose another token; the full precision of both is one run."""
    store, runs = sampled
    read, free = runs["read"], runs["rtn"]
    assert read.key != free.key
    assert read.baseline_key == free.baseline_key == runs["full"].key
    assert read.metrics.keys() == free.metrics.keys() - {"ended"}
    for mine, other in zip(store.samples(read.key), store.samples(free.key), strict=True):
        assert (mine["kl"], mine["same"], mine["first"]) == (other["kl"], other["same"], other["first"])
        assert "tokens" not in mine
    assert {name for name in read.metrics if read.metrics[name] != free.metrics[name]} <= {
        "cached_tokens",
        "effective_bits",
        "packed_bytes",
        "total_bytes",
    }
