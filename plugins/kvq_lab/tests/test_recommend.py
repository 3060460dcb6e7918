"""Recommendations from constructed records whose right answer is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.errors import ConfigError, RecordError
from kvq.models.inputs import CacheShape, LayerKind
from kvq.results import Record, Store, run_key
from kvq.results.presets import method_overrides
from kvq.results.record import versions_of
from kvq_lab import advisor as recommend
from tests.report import sweeps

CONTEXT = ("model=tiny", "context=2048")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """On tiny KIVI at 4 bits and llama.cpp's q8_0 are equal but for noise and bytes; OScaR beats KIVI at 2 bits."""
    store = Store(tmp_path)
    full = put(store, "fp16", "", 0.0, 0.0, None)
    for name, bits, loss, noise in (
        ("kivi", "2", 0.2, 0.01),
        ("oscar", "2", 0.1, 0.01),
        ("kivi", "4", 0.01, 0.001),
        ("engine/llamacpp_q8_0", "", 0.0101, 0.001),
        ("engine/llamacpp_q4_0", "", 0.05, 0.001),
    ):
        put(store, name, bits, loss, noise, full)
    return store


def put(
    store: Store, name: str, bits: str, loss: float, noise: float, full: Record | None, model: str = "tiny"
) -> Record:
    """A run on record as a run of these settings would be."""
    config = resolve(compose([f"model={model}", *method_overrides(name, bits)]))
    settings = by_names(config)
    known = {
        "model": model,
        "config": settings,
        "key": run_key(settings),
        "versions": versions_of(settings, type(config.task)),
    }
    return sweeps.put_run(store, name, bits, sweeps.losses(loss, noise, len(name + bits)), full, 3.0, **known)


def answers(store: Store, *words: str) -> list[str]:
    question = recommend.parse_question([*CONTEXT, *words, f"results={store.root}"])
    found = recommend.Advisor(question).choices()
    return [f"{choice.row.record.method} {choice.row.record.bits}".strip() for choice in found]


def test_the_best_first_and_nothing_within_noise_of_a_cheaper_one(store: Store) -> None:
    found = answers(store)
    assert found[0] == "kivi 4"  # q8_0 costs more and is not better
    assert "engine/llamacpp_q8_0" not in found
    assert len(found) <= recommend.MOST


def test_bounds_of_loss_and_memory(store: Store) -> None:
    assert answers(store, "loss<=0.15")[0] == "oscar 2"
    assert answers(store, "loss=0.02") == ["kivi 4"]
    every = recommend.Advisor(recommend.parse_question([*CONTEXT, f"results={store.root}"])).choices()
    least = min(choice.bytes for choice in every)
    cheapest = [choice.row.record.method for choice in every if choice.bytes == least]
    assert [answer.partition(" ")[0] for answer in answers(store, f"memory={least / 2**20:.6f}MiB")] == cheapest
    assert answers(store, "memory=1KiB") == []
    assert answers(store, f"memory={least / 2**20:.6f}MiB", "batch=2") == []


def test_tables_are_counted_once_for_all_sequences(store: Store) -> None:
    """Waterfill at 1 bit, with tables of 4 MB, is the smallest of many sequences; one is smaller in another format."""
    full = next(run for run in store.scan()[0] if run.method == "fp16")
    run = put(store, "waterfill", "1", 0.15, 0.001, full)
    more = {"calibration_bytes": 4e6, "calibration_bits_32k": 0.5, "bits_per_element": 1.0}
    store.put(run.model_copy(update={"metrics": run.metrics | more}), store.samples(run.key))
    assert "waterfill 1" not in answers(store, "loss=0.18")
    assert answers(store, "loss=0.18", "batch=64")[0] == "waterfill 1"
    advisor = recommend.Advisor(recommend.parse_question(["model=tiny", "context=2048", f"results={store.root}"]))
    assert advisor.table_bytes(run.model_copy(update={"metrics": run.metrics | more})) == 4e6
    shape = CacheShape((LayerKind(2 * advisor.shape.count, 8, 64),), None)
    (kind,) = advisor.shape.layers
    grown = 4e6 * 2 * (8 * 64 / (kind.heads * kind.head_dim)) ** 2
    found = store.scan()[0]
    on_record = next(one for one in found if one.method == "waterfill")
    assert recommend.table_bytes_at(on_record, advisor.shape, shape) == pytest.approx(grown)


def test_an_engine_alone(store: Store) -> None:
    assert answers(store, "engine=llamacpp") == ["engine/llamacpp_q8_0", "engine/llamacpp_q4_0"]
    with pytest.raises(RecordError, match="no run of a format of mlx is on record; measure some: python run"):
        answers(store, "engine=mlx")


def test_a_pair_of_formats_has_the_line_of_both(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    full = next(run for run in store.scan()[0] if run.method == "fp16")
    put(store, "engine/llamacpp_q8_0+engine/llamacpp_q5_1", "", 0.001, 0.0001, full)
    put(store, "engine/llamacpp_q8_0+nsnquant", "", 0.0001, 0.00001, full)  # no engine's
    assert recommend.main([*CONTEXT, "engine=llamacpp", f"results={store.root}"]) == 0
    out = capsys.readouterr().out
    assert "llama-server -m M.gguf -fa on -ctk q8_0 -ctv q5_1" in out
    assert "nsnquant" not in out
    assert recommend.main([*CONTEXT, f"results={store.root}"]) == 0
    assert "method=engine/llamacpp_q8_0 method.values_of=nsnquant" in capsys.readouterr().out.replace("...", "")


def test_a_pair_takes_half_the_bytes_of_each_where_layers_have_windows() -> None:
    shape = CacheShape((LayerKind(3, 1, 256), LayerKind(15, 1, 256, window=512)), None)
    names = [f"engine/llamacpp_{one}" for one in ("q8_0", "q4_0", "q8_0+engine/llamacpp_q4_0")]
    keys, values, pair = (recommend.cache_bytes(shape, name, "", 8192) or 0.0 for name in names)
    assert 0 < pair == (keys + values) / 2
    assert recommend.held_elements(shape, 8192) * 2 == recommend.cache_bytes(shape, "fp16", "", 8192)


def test_what_it_rests_on(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend.main([*CONTEXT, "engine=llamacpp", f"results={store.root}"]) == 0
    out = capsys.readouterr().out
    assert "measured on this model, by preset" in out
    assert "-ctk q8_0 -ctv q8_0" in out
    assert recommend.main(["model=tiny_hard", "context=512", f"results={store.root}"]) == 0
    assert "another model of this family (tiny)" in capsys.readouterr().out
    assert recommend.main(["model=llama_3_1_8b", "context=8192", f"results={store.root}"]) == 0
    assert "measured on tiny only" in capsys.readouterr().out


def test_a_third_model_rests_on_both_real_ones(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """OScaR leads nsn at 2 bits on one of them and not on the other; TurboQuant is measured on one alone."""
    losses = {
        "smollm2_135m": {"oscar 2": 0.1, "nsn 2": 0.3, "turboquant 2": 0.4},
        "gemma3_270m": {"oscar 2": 0.3, "nsn 2": 0.1},
    }
    for model, found in losses.items():
        full = put(store, "fp16", "", 0.0, 0.0, None, model)
        for name, loss in found.items():
            put(store, *name.split(), loss, 0.01, full, model)
    assert recommend.main(["model=llama_3_1_8b", "context=8192", f"results={store.root}"]) == 0
    out = capsys.readouterr().out
    assert "measured on smollm2_135m only" in out
    assert re.search(r"on gemma3_270m it loses \+0\.30\d+, nsn 2 \+0\.\d+ in at most its bytes", out)
    assert "not measured on gemma3_270m" in out
    assert "kvq choose model=llama_3_1_8b" in out
    assert recommend.main(["model=gemma3_270m", "context=8192", f"results={store.root}"]) == 0
    assert "smollm2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=tiny"], "needs model=NAME and context=TOKENS"),
        (["context=5"], "needs model=NAME"),
        ([*CONTEXT, "engine=vlm"], "engine=vlm: one of"),
        ([*CONTEXT, "memory=much"], "memory=much: a size"),
        ([*CONTEXT, "loss=-1"], "loss=-1: a number"),
        ([*CONTEXT, "batch=0"], "batch=0: a whole number"),
        ([*CONTEXT, "speed=1"], "speed=1: model="),
    ],
)
def test_a_bad_question_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recommend.parse_question(words)


def test_a_model_that_takes_less(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend.main(["model=tiny", "context=99999999", f"results={store.root}"]) == 2
    assert "takes at most" in capsys.readouterr().err
    assert recommend.main(["model=nothing", "context=8", f"results={store.root}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
