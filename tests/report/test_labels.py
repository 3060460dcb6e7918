"""A run's label says whatever departs from the preset that it is called by, and no two methods are joined under one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.report.comparisons import effective_bits
from kvq.report.labels import (
    FEWEST,
    PREFERRED,
    is_variant,
    label,
    main_model,
    model_name,
    named,
    protocol,
)
from kvq.report.tables.build import build_tables
from kvq.report.wandb import entry_of
from kvq.results import Record, Store
from kvq.results.presets import departures_of, with_departures
from kvq.results.record import canonical
from tests.report import sweeps
from tests.results import made
from tests.results.test_keys import SETTINGS

COMMITTED = Path(__file__).parents[2] / "results"


def run(*overrides: str, **changes: Any) -> Record:
    """The record of a run as the command line with these overrides would make it, without its numbers."""
    config = resolve(compose(list(overrides)))
    names = {"task": config.task.name, "model": config.model.name, "dataset": config.dataset.name}
    return made.record(config.method.name, config.bits_label, settings=canonical(by_names(config)), **(names | changes))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("method=oscar", "oscar"),
        ("method=oscar bits=k4v2", "oscar"),
        ("method=oscar method.key.stages.hadamard=null", "oscar − key.hadamard"),
        (
            "method=oscar method.key.stages.hadamard=null method.value.stages.hadamard=null residual.size=64",
            "oscar − hadamard, residual 64",
        ),
        ("method=kivi +method.key.stages.hadamard._target_=kvq.codecs.Hadamard", "kivi + key.hadamard"),
        ("method=oscar residual.key.size=64", "oscar, key residual 64"),
        ("method=oscar residual=sliding residual.size=64", "oscar, residual sliding 64"),
        ("method=kivi method.key.quantizer.group_size=64", "kivi, key group size 64"),
        ("method=kivi bits=2 method.key.quantizer.bits=8", "kivi, key bits 8"),
        ("method=kivi ~method.key.quantizer.group_size", "kivi, key group size none"),
        ("method=kivi method.value=null", "kivi, value in full precision"),
        ("method=kivi method.sink_tokens=4", "kivi, sink tokens 4"),
        ("method=kivi method.bits_by_layer.key=[8,4,4,2]", "kivi, key bits by layer 8 4 4 2"),
        ("method=kivi method.bits_by_layer.key=[2,3,4,[4,2]]", "kivi, key bits by layer 2 3 4 4/2"),
        (
            "method=kivi method.full_precision_layers.key=[0,1,2,4] method.full_precision_layers.value=[0,1,2,4]",
            "kivi, full precision layers 0–2, 4",
        ),
        ("method=kivi method.full_precision_layers.key=[3]", "kivi, key full precision layers 3"),
        ("method=kivi bits=2 method.bits_by_layer.value=[4,4,4,4]", "kivi"),
        (
            "method=nsn bits=2 method.bits_by_layer.value=[2,4,4,3] method.bits_by_layer.key=[3,3,2,3]",
            "nsn, key bits by layer 3 3 2 3, value bits by layer 2 4 4 3",
        ),
        ("method=oscar method.key.order=[norm,hadamard]", "oscar, key order norm, hadamard"),
        ("method=kvquant method.calibration.dataset=pysource", "kvquant, calibrated on pysource"),
        ("method=ott method.token_policy=null", "ott − token policy"),
        ("method=kivi task=latency cache.attention=packed", "kivi, packed attention"),
        ("method=kivi task=ppl/nsn", "kivi"),
        ("method=kvquant_plus_plus/tiers", "kvquant_plus_plus/tiers"),
    ],
)
def test_what_departs_from_a_preset_is_said(overrides: str, text: str) -> None:
    assert label(run(*overrides.split())) == text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", []),
        ("cache.dtype=float16", []),
        ("cache.dtype=bfloat16", ["bfloat16 cache"]),
        ("cache.dtype=float32", ["32-bit cache"]),
        ("model=hf model.path=a/b model.dtype=float32 cache.dtype=float16 dataset=wikitext2", ["16-bit cache"]),
        ("model.dtype=float16 cache.dtype=float16", ["dtype float16"]),
        ("task=error", []),
        ("task.bos=true", ["begins with BOS"]),
        ("task.bos=false", []),
        ("model=llama_2_7b dataset=wikitext2", []),
        ("model=llama_2_7b dataset=wikitext2 task.bos=false", ["begins without BOS"]),
        ("task=latency model=llama_2_7b dataset=wikitext2", []),
        ("task=niah task.bos=true", ["begins with BOS"]),
    ],
)
def test_first_token_and_cache_are_said_where_they_are_not_the_models_own(overrides: str, words: list[str]) -> None:
    config = resolve(compose(overrides.split()))
    record = run(*overrides.split(), provenance=made.provenance(dtype=config.model.dtype.value))
    assert departures_of(record).protocol == words
    assert all(word in protocol(record) for word in words)


def test_committed_runs_are_their_presets() -> None:
    """Only experiments that say so override their methods, and labels tell; a preset that changes is noticed here."""
    records = [with_departures(record) for record in Store(COMMITTED).scan()[0]]
    assert len(records) >= 398
    other = {(record.method, label(record), record.provenance.command) for record in records}
    told = {(name, command) for name, shown, command in other if shown != name}
    assert told
    assert all(any(name in command for name in SETTINGS) for _, command in told)
    shown = {found for _, found, _ in other} - {record.method for record in records}
    words = ("residual", "group size", "eviction budget", "prefill in one block", "packed attention")
    words += (
        "sink tokens",
        "merge rotation",
        "+ key.undo_rope",
        "bits by layer",
        "calibrated on text",
        "calibrated on pydocs+text",
        "calibration samples",
        "calibration seed",
        "transform tables",
        "tables float16",
        "heads together",
        "− key.hadamard",
        "full precision layers",
    )
    assert {found for found in shown if not any(word in found for word in words)} == set()


def test_an_ablation_is_not_joined_with_the_method(tmp_path: Path) -> None:
    store = Store(tmp_path)
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 32.0)
    kinds = {"2": ["method.key.stages.hadamard=null"], "3": []}
    for bits, more in kinds.items():
        config = run("method=oscar", f"bits={bits}", *more).config
        settings = {**config, **{name: full.config[name] for name in ("task", "model", "dataset", "seed")}}
        record = made.record("oscar", bits, settings=settings)
        changes = {"key": record.key, "config": record.config}
        sweeps.put_run(store, "oscar", bits, sweeps.losses(1 / int(bits), 0.01, 1), full, 3.0, **changes)
    (table,) = build_tables(store).tables
    assert [(row.name, row.bits) for row in table.rows[1:]] == [("oscar", "3"), ("oscar − key.hadamard", "2")]
    assert [row.best for row in table.rows[1:]] == [False, False]  # nothing is left for oscar to beat
    assert not any("bits" in note and "falls" in note for note in table.notes)
    names = {entry_of(row.record)["name"].split(" · ")[0] for row in table.rows[1:]}
    assert names == {"oscar 3", "oscar − key.hadamard 2"}


@pytest.mark.every_plugin
def test_variants_are_no_methods() -> None:
    assert not is_variant(run("method=kvquant"))
    assert is_variant(run("method=kvquant/pysource"))
    assert is_variant(run("method=oscar", "residual.size=64"))
    assert not is_variant(run("method=cq/8c10b"))
    assert is_variant(run("method=cq/8c10b", "residual.size=64"))
    assert named(run("method=cq/8c10b")) == "cq/8c10b"
    assert not is_variant(run("method=engine/llamacpp_q4_0"))
    assert is_variant(run("method=engine/llamacpp_q4_0/unrotated"))
    assert is_variant(run("method=engine/llamacpp_q4_0", "residual.size=64"))


def test_protocols_are_told_by_what_differs() -> None:
    assert departures_of(run("method=kivi")).protocol == []
    assert departures_of(run("method=kivi", "task=ppl/nsn", "seed=3")).protocol == ["scoring parallel", "seed 3"]
    assert departures_of(run("task=ppl/nsn", "task.windows=disjoint", "task.context=512")).protocol == [
        "context 512",
        "scoring parallel",
        "windows disjoint",
    ]
    assert protocol(run("task=ppl")) == "sliding windows of 2048 every 512 tokens, scored as in generation"
    assert "dtype float64" in departures_of(run("model.dtype=float64")).protocol


def test_a_model_of_the_hub_is_its_last_part() -> None:
    assert model_name("meta-llama/Llama-3.1-8B") == model_name("/data/models/Llama-3.1-8B/") == "Llama-3.1-8B"
    record = run("method=kivi", model="/data/models/Llama-3.1-8B")
    assert "· Llama-3.1-8B ·" in entry_of(record)["name"]


def test_a_run_that_quantized_nothing_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    values = sweeps.losses(0.0, 0.0, 0)
    full = sweeps.put_run(store, "fp16", "", values, None, 32.0)
    sweeps.put_run(store, "kivi", "2", values, full, 32.0)
    stored = store.scan()[0]
    (kivi,) = [record for record in stored if record.method == "kivi"]
    store.put(kivi.model_copy(update={"metrics": {**kivi.metrics, "packed_bytes": 0.0}}), store.samples(kivi.key))
    (table,) = build_tables(store).tables
    assert [row.unquantized for row in table.rows] == [False, True]
    assert effective_bits(table.rows[1].record) == 32.0
    assert any(note.startswith("nothing quantized: no token of kivi 2 left") for note in table.notes)
    from kvq.report.tables.formats import markdown

    assert "| nothing quantized |" in markdown(table)


def runs_of(model: str, count: int, task: str = "ppl") -> list[Record]:
    return [made.record("kivi", "2", task=task, model=model, metrics={"nll": 1.0}) for _ in range(count)]


def test_the_first_preferred_model_with_enough_runs_else_the_one_with_most() -> None:
    first, second = PREFERRED
    assert main_model([]) is None
    assert main_model([*runs_of("a", 3), *runs_of("b", 2), *runs_of("b", 9, task="tni")]) == "a"
    assert main_model([*runs_of("a", 90), *runs_of(second, FEWEST)]) == second
    assert main_model([*runs_of(second, 90), *runs_of(first, FEWEST - 1)]) == second
    assert main_model([*runs_of(second, 90), *runs_of(first, FEWEST)]) == first
    assert main_model(runs_of("a", 2, task="tni")) == "a"
