"""Drawings: names of records in them, their files and index, and what cannot be drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvq.config import plugins
from kvq.report.comparisons import measured_bits
from kvq.report.figures import drawing, every
from kvq.report.figures.drawing import Drawing, Kind, panels, titled, write_drawings
from kvq.report.figures.loss import runs_table
from kvq.report.labels import colour_of, engine_of, method_of
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Table
from kvq.results import Store
from tests.presets import METHODS, NAMES
from tests.report import sweeps
from tests.results import made

TABLE = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [3.0, 1.0, 2.0]})


def line(table: pd.DataFrame) -> Figure:
    made, axis = panels(1, 2.0)
    axis.plot(table["x"], table["y"])
    return made


def kind(stem: str, draw: Callable[..., Figure] = line) -> Kind:
    return Kind(stem, "", len, titled(draw), "records", "", "")


def test_families_share_a_colour_and_no_two_methods_look_alike() -> None:
    families = [f"family{index}" for index in range(12)]
    methods = ["nsn", "nsn/arm_a", "nsn/arm_b", "nsnquant", *families, "family3/x"]
    looks = drawing.lines_of(methods)
    assert list(looks) == sorted(methods)
    assert len({repr(look) for look in looks.values()}) == len(methods)
    assert len({looks[name].color for name in ("nsn", "nsn/arm_a", "nsn/arm_b")}) == 1
    assert looks["family3"][:2] == looks["family3/x"][:2]
    assert drawing.lines_of(["nsn"])["nsn"][:2] == looks["nsn"][:2] == drawing.lines_of(["kivi", "nsn"])["nsn"][:2]
    assert len(drawing.lines_of(f"many{index}" for index in range(100))) == 100


@pytest.mark.every_plugin
def test_a_method_has_one_colour_and_what_is_no_method_has_another() -> None:
    colours = {colour_of(method) for method in METHODS}
    assert len(colours) == len(METHODS) > 25
    assert not colours & set(drawing.SERIES)
    labels = ("kivi", "kivi 2", "kivi/block k4v2", "kivi − key.x", "kivi, residual 4 2")
    assert {colour_of(label) for label in labels} == {colour_of("kivi")}


def test_the_index_names_every_figure_under_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [kind("pareto"), kind("zzz")]
    monkeypatch.setattr(drawing, "KINDS", kinds)
    drawings = [Drawing("zzz", "", TABLE, kinds[1]), Drawing("pareto-x", "Loss | <b>", TABLE, kinds[0])]
    paths = write_drawings(drawings, tmp_path, [])
    assert [path.name for path in paths] == [
        *(f"{stem}.{end}" for stem in ("zzz", "pareto-x") for end in ("csv", "pdf", "png")),
        "index.md",
    ]
    before = [path.read_bytes() for path in paths]
    write_drawings(drawings, tmp_path, [])
    assert [path.read_bytes() for path in paths] == before
    text = paths[-1].read_text(encoding="utf-8")
    assert "Loss \\| &lt;b&gt; (`pareto-x`): [PNG](pareto-x.png), [PDF](pareto-x.pdf), [CSV](pareto-x.csv)" in text
    assert text.index("## pareto") < text.index("## zzz")
    for link in re.findall(r"\]\(([^)/]+)\)", text):
        assert (tmp_path / link).is_file()


def test_names_of_records_are_drawn_plainly_and_cut() -> None:
    """`filterwarnings = error`: matplotlib warns of a glyph that its font lacks, and raises for a torn formula."""

    def bars(table: pd.DataFrame) -> Figure:
        made, axis = panels(1, 2.0)
        axis.barh(table["method"], table["value"])
        return made

    table = pd.DataFrame({"method": ["a\0b", "a $x_{ b$", f"begin{'x' * 300}end"], "value": [1, 2, 3]})
    made = titled(bars)(table, "\u202ename of $x_{$\nsecond line")
    assert drawing.image_of(made).startswith(b"\x89PNG")
    assert len(drawing.image_of(made, "pdf")) < 60_000
    names = [text.get_text() for text in made.axes[0].get_yticklabels()]
    assert names[:2] == ["a�b", r"a \$x_{ b\$"]
    assert names[2] == f"begin{'x' * 55}"
    assert made.get_suptitle() == "�name of \\$x_{\\$\nsecond line"


def test_a_figure_that_cannot_be_drawn_is_named_and_the_rest_drawn(tmp_path: Path) -> None:
    def broken(table: pd.DataFrame) -> Figure:
        raise ValueError("unknown")

    skipped: list[str] = []
    drawings = [Drawing("some", "title", TABLE, kind("some", broken)), Drawing("other", "title", TABLE, kind("other"))]
    names = {path.name for path in write_drawings(drawings, tmp_path, skipped)}
    assert names == {"other.csv", "other.pdf", "other.png", "index.md"}
    assert skipped == ["figure some: cannot be made of it, ValueError: unknown"]


def test_a_figure_of_runs_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    task = {"name": "random_states", "states": "gaussian", "tokens": 8, "head_dim": 4, "against": "nsn"}
    settings = made.config("kivi", "2", task)
    record = made.record("kivi", "2", settings=settings, task="random_states", baseline_key="b" * 64)
    store.put(record, [{"key_mse": {"a": 1}}])
    skipped: list[str] = []
    assert not list(every.drawings(store.scan()[0], store, skipped=skipped))
    (line,) = skipped
    assert line.startswith("figure states-drawn: ")
    with pytest.raises(TypeError):
        list(every.drawings(store.scan()[0], store))


def test_every_kind_is_named_once() -> None:
    kinds = every.kinds()
    assert len({one.stem for one in kinds}) == len(kinds) > (30 if plugins.installed() else 20)


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
def test_every_engine_is_known_and_has_one_colour_that_no_method_has() -> None:
    names = [name for name in NAMES if name.startswith("engine/")]
    assert len(names) > 40
    engines = {name: engine_of(name) for name in names}
    assert set(engines.values()) == {
        "llama.cpp", "ik_llama.cpp", "vLLM", "SGLang", "LMDeploy", "TensorRT-LLM", "MLX", "ExLlamaV2", "ExLlamaV3",
        "OpenVINO", "ONNX Runtime",
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
