"""Drawings: names of records in them, their files and index, and what cannot be drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvq.report.figures import drawing, every
from kvq.report.figures.cost import memory_figure
from kvq.report.figures.drawing import Drawing, Kind, panels, titled, write_drawings
from kvq.report.figures.error import planes_figure
from kvq.report.figures.loss import pareto_figure
from kvq.report.labels import colour_of
from kvq.results import Store
from tests.presets import METHODS
from tests.results import made

TABLE = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [3.0, 1.0, 2.0]})


def line(table: pd.DataFrame) -> Figure:
    made, axis = panels(1, 2.0)
    axis.plot(table["x"], table["y"])
    return made


def kind(stem: str, draw: Callable[..., Figure] | None = line) -> Kind:
    return Kind(stem, "", len, draw and titled(draw), "records", "", "")


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


def test_eight_methods_have_colours_and_the_frontier_is_named_however_many_there_are() -> None:
    best = pd.DataFrame(
        {
            "method": ["low", "kivi", "kivi/block"],
            "bits": ["1", "4", "4"],
            "effective_bits": [1.5, 4.0, 4.0],
            "delta_nll": [0.5, 0.9, 0.8],
            "frontier": [True, False, False],
            "variant": [False, False, True],
        }
    )
    rows = [
        {
            "method": f"m{index:02}",
            "bits": "4",
            "effective_bits": 4.0,
            "delta_nll": 0.001 * (index + 1),
            "frontier": False,
            "variant": False,
        }
        for index in range(30)
    ]
    numbers = pd.concat([pd.DataFrame(rows), best], ignore_index=True)
    numbers["kl_mean"], numbers["delta_nll_se"] = numbers["delta_nll"], 0.0001
    shown = pareto_figure(numbers, "title")
    (legend,) = shown.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [
        "kivi",
        "low",
        *(f"m0{index}" for index in range(6)),
        "other methods",
        "variants and ablations",
        "frontier",
    ]
    assert [text.get_text() for text in shown.axes[0].texts] == ["low 1"]
    coloured = {line.get_color() for line in shown.axes[1].lines}
    assert {colour_of("kivi"), colour_of("low")} < coloured
    drawn = sum(len(line.get_xdata()) for line in shown.axes[1].lines)
    assert drawn == 33  # those without a line are grey points


def test_a_method_has_one_colour_and_what_is_no_method_has_another() -> None:
    colours = {colour_of(method) for method in METHODS}
    assert len(colours) == len(METHODS) > 25
    assert not colours & set(drawing.SERIES)
    labels = ("kivi", "kivi 2", "kivi/block k4v2", "kivi − key.x", "kivi, residual 4 2")
    assert {colour_of(label) for label in labels} == {colour_of("kivi")}


def test_a_legend_names_what_is_drawn_alone() -> None:
    rows = [
        {"method": name, "tokens": length, "measured": measured, "fp16": 100, "total": 20, "residual": 0, "codes": 20}
        for name, measured in (("kivi 2", True), ("nsn 2", False))
        for length in (1024, 2048)
    ]
    table = pd.DataFrame(rows).assign(scales=0, norms=0, shift=0, other=0)
    made = memory_figure(table, "title")
    parts, methods = ([text.get_text() for text in axis.get_legend().get_texts()] for axis in made.axes)
    assert parts == ["codes"]
    assert methods[:2] == ["kivi 2", "nsn 2"]


def test_the_index_names_every_figure_under_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [kind("pareto"), kind("zzz", None)]
    monkeypatch.setattr(drawing, "KINDS", kinds)
    drawings = [Drawing("zzz", "", TABLE, kinds[1]), Drawing("pareto-x", "Loss | <b>", TABLE, kinds[0])]
    paths = write_drawings(drawings, tmp_path, [])
    assert [path.name for path in paths] == ["zzz.csv", "pareto-x.csv", "pareto-x.pdf", "pareto-x.png", "index.md"]
    before = [path.read_bytes() for path in paths]
    write_drawings(drawings, tmp_path, [])
    assert [path.read_bytes() for path in paths] == before
    text = paths[-1].read_text(encoding="utf-8")
    assert "Loss \\| &lt;b&gt; (`pareto-x`): [PNG](pareto-x.png), [PDF](pareto-x.pdf), [CSV](pareto-x.csv)" in text
    assert text.index("## pareto") < text.index("## zzz")
    for link in re.findall(r"\]\(([^)/]+)\)", text):
        assert (tmp_path / link).is_file()


def test_planes_have_a_panel_for_each_method_and_labels_below_the_lowest() -> None:
    cells = [(lowness, outliers) for lowness in (1, 10) for outliers in (0, 5)]
    table = pd.DataFrame(
        {"method": f"m{index} 2", "lowness": lowness, "outliers": outliers, "sink_error": 0.1 * (lowness + outliers)}
        for index in range(4)
        for lowness, outliers in cells
        if (index, lowness, outliers) != (3, 10, 5)
    )
    made = titled(planes_figure)(table, "title")
    *panels, bar = made.axes
    assert [axis.get_title(loc="left") for axis in panels] == [f"m{index} 2 bits" for index in range(4)]
    assert [text.get_text() for text in panels[0].texts] == [".10", "1.00", ".60", "1.50"]
    assert len(panels[3].texts) == 3  # a cell that was not measured stays empty
    labels = [[text.get_text() for text in axis.get_xticklabels()] for axis in panels]
    assert labels == [["", ""], *[["1", "10"]] * 3]
    assert bar.get_ylabel() == "relative squared error per token"


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
    assert len({one.stem for one in kinds}) == len(kinds) > 35
