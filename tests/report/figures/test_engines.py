"""Formats of engines in figures: marked by engine, over measured bits, and never taken for variants."""

from pathlib import Path

import pytest

from kvq.report.comparisons import measured_bits
from kvq.report.figures import drawing
from kvq.report.figures.loss import pareto_figure, runs_table
from kvq.report.labels import colour_of, engine_of, method_of
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Table
from kvq.results import Store
from tests.presets import METHODS, NAMES
from tests.report import sweeps

FORMATS = {
    "engine/vllm_mine": (0.02, 8.0),
    "engine/llamacpp_mine": (0.2, 4.5),
    "engine/llamacpp_mine/unrotated": (0.9, 4.5),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A method with a residual, which costs 0.7 bits, one that all others beat, and three formats of engines."""
    store = Store(tmp_path)
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    for bits, mean in (("2", 0.5), ("4", 0.2)):
        run = sweeps.put_run(store, "good", bits, sweeps.losses(mean, 0.001, int(bits)), full, float(bits))
        longer = run.model_copy(update={"metrics": run.metrics | {"effective_bits": float(bits) + 0.7}})
        store.put(longer, store.samples(run.key))
    sweeps.put_run(store, "bad", "8", sweeps.losses(0.95, 0.001, 9), full, 9.0)
    for seed, (name, (mean, bits)) in enumerate(FORMATS.items()):
        sweeps.put_run(store, name, "", sweeps.losses(mean, 0.001, 40 + seed), full, bits)
    return store


def table_of(store: Store) -> Table:
    (table,) = build_tables(store).tables
    return table


def test_the_frontier_is_over_the_bits_of_its_axis(store: Store) -> None:
    """llama.cpp's format has as much loss as the method at 4: more measured bits, fewer with the other's residual."""
    table = table_of(store)
    measured = runs_table(table, measured_bits, "bits_per_element")
    effective = runs_table(table)
    fronts = [
        {(run["method"], run["bits"]) for run in found[found["frontier"]].to_dict("records")}
        for found in (measured, effective)
    ]
    assert fronts == [
        {("good", "2"), ("good", "4"), ("engine/vllm_mine", "fixed")},
        {("good", "2"), ("engine/llamacpp_mine", "fixed"), ("engine/vllm_mine", "fixed")},
    ]
    assert measured.set_index(["method", "bits"])["bits_per_element"]["good", "4"] == 4.0
    assert effective.set_index(["method", "bits"])["effective_bits"]["good", "4"] == 4.7
    assert list(measured[measured["variant"]]["method"]) == ["engine/llamacpp_mine/unrotated"]


@pytest.mark.every_plugin
def test_engines_have_marks_of_their_own_and_the_legend_names_them(store: Store) -> None:
    made = pareto_figure(runs_table(table_of(store)), "title")
    (legend,) = made.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "bad",
        "good",
        "engine: llama.cpp",
        "engine: vLLM",
        "frontier",
    ]
    marks = {
        (line.get_color(), line.get_marker(), line.get_markerfacecolor() == "none"): list(line.get_xdata())
        for line in made.axes[0].lines
        if line.get_color() in {colour_of(name) for name in FORMATS} and line.get_marker() in drawing.MARKERS
    }
    llamacpp, vllm = colour_of("engine/llamacpp_mine"), colour_of("engine/vllm_mine")
    assert marks == {(vllm, "s", False): [8.0], (llamacpp, "o", False): [4.5], (llamacpp, "o", True): [4.5]}


@pytest.mark.every_plugin
def test_every_engine_is_known_and_has_one_colour_that_no_method_has() -> None:
    names = [name for name in NAMES if name.startswith("engine/")]
    assert len(names) > 40
    engines = {name: engine_of(name) for name in names}
    assert set(engines.values()) == {
        "llama.cpp", "ik_llama.cpp", "vLLM", "SGLang", "LMDeploy", "TensorRT-LLM", "MLX", "ExLlamaV2", "ExLlamaV3",
        "OpenVINO",
    }  # fmt: skip
    colours = {engine: {colour_of(name) for name in names if engines[name] == engine} for engine in engines.values()}
    assert all(len(found) == 1 for found in colours.values())
    own = set().union(*colours.values())
    assert len(own) == len(colours)
    assert not own & ({colour_of(name) for name in METHODS} | set(drawing.SERIES))
    assert [engine_of(name) for name in ("kivi", "oscar/cr_only", "engine", "engine/mine_4")] == [
        None,
        None,
        None,
        "mine",
    ]
    assert method_of("engine/mlx_4, residual 64 4") == method_of("engine/mlx_4/x") == "engine/mlx_4"
