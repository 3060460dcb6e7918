"""Drawings: drawn once, and again where something changed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvq.report.figures import style
from kvq.report.figures.cost import memory_figure
from kvq.report.figures.drawing import MARKS, Drawing, Noted, write_drawings
from kvq.report.figures.error import places_figure, plane_figure
from kvq.report.figures.every import CHARTS
from kvq.report.figures.loss import pareto_figure
from kvq.report.labels import colour_of
from tests.presets import METHODS

TABLE = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [3.0, 1.0, 2.0]})


def line(table: pd.DataFrame, title: str) -> Figure:
    with style.style():
        made = style.figure(1, 2.0)
        axis = made.subplots()
        axis.plot(table["x"], table["y"])
        axis.set_title(title)
    return made


def doubled(table: pd.DataFrame) -> pd.DataFrame:
    return table * 2


def test_what_did_not_change_is_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    rendered = style._rendered
    monkeypatch.setattr(style, "_rendered", lambda made: drawn.append("one") or rendered(made))
    drawings = [Drawing("a", TABLE, line, ("one",)), Drawing("b", TABLE, line, ("two",)), Drawing("c", TABLE, None)]
    first = write_drawings(drawings, tmp_path)
    assert [path.name for path in first] == ["a.csv", "a.pdf", "a.png", "b.csv", "b.pdf", "b.png", "c.csv"]
    assert len(drawn) == 2
    before = {path: path.read_bytes() for path in first}
    assert write_drawings(drawings, tmp_path) == first
    assert len(drawn) == 2
    for changed in (
        replace(drawings[0], arguments=("another",)),
        replace(drawings[0], table=TABLE + 1),
        replace(drawings[0], derive=doubled),
    ):
        drawn.clear()
        write_drawings([changed, *drawings[1:]], tmp_path)
        assert len(drawn) == 1
    write_drawings(drawings, tmp_path)
    assert {path: path.read_bytes() for path in first} == before


@pytest.mark.parametrize("damage", ["file", "gone", "marks", "no marks", "odd marks"])
def test_a_damaged_file_or_record_of_files_is_drawn_again(tmp_path: Path, damage: str) -> None:
    drawing = Drawing("a", TABLE, line, ("one",))
    paths = write_drawings([drawing], tmp_path)
    before = [path.read_bytes() for path in paths]
    marks = tmp_path / MARKS
    if damage == "file":
        paths[1].write_bytes(b"%PDF")
    elif damage == "gone":
        paths[2].unlink()
    elif damage == "no marks":
        marks.unlink()
    else:
        content = {"a": {"mark": drawing.mark(), "files": []}, "b": 3} if damage == "odd marks" else "{"
        marks.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    assert write_drawings([drawing], tmp_path) == paths
    assert [path.read_bytes() for path in paths] == before


def test_a_dollar_sign_of_a_record_is_no_formula() -> None:
    files = style._rendered(line(TABLE, "a $x_{ b$"))  # as a formula it does not parse
    assert files["png"].startswith(b"\x89PNG")
    assert len(files["pdf"]) < 60_000


def test_families_share_a_colour_and_no_two_methods_look_alike() -> None:
    families = [f"family{index}" for index in range(12)]
    methods = ["nsn", "nsn/arm_a", "nsn/arm_b", "nsnquant", *families, "family3/x"]
    looks = style.lines_of(methods)
    assert list(looks) == sorted(methods)
    assert len({repr(look) for look in looks.values()}) == len(methods)
    assert len({looks[name].color for name in ("nsn", "nsn/arm_a", "nsn/arm_b")}) == 1
    assert looks["family3"][:2] == looks["family3/x"][:2]
    assert style.lines_of(["nsn"])["nsn"][:2] == looks["nsn"][:2] == style.lines_of(["kivi", "nsn"])["nsn"][:2]
    assert len(style.lines_of(f"many{index}" for index in range(100))) == 100


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
    made = pareto_figure(numbers, "title")
    (legend,) = made.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [
        "kivi",
        "low",
        *(f"m0{index}" for index in range(6)),
        "other methods",
        "variants and ablations",
        "frontier",
    ]
    assert [text.get_text() for text in made.axes[0].texts] == ["low 1"]
    coloured = {line.get_color() for line in made.axes[1].lines}
    assert {colour_of("kivi"), colour_of("low")} < coloured
    drawn = sum(len(line.get_xdata()) for line in made.axes[1].lines)
    assert drawn == 33  # those without a line are grey points


def test_a_method_has_one_colour_and_what_is_no_method_has_another() -> None:
    colours = {colour_of(method) for method in METHODS}
    assert len(colours) == len(METHODS) > 25
    assert not colours & set(style.SERIES)
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


def test_the_index_names_every_figure_under_its_kind(tmp_path: Path) -> None:
    noted = Noted([Drawing("pareto-x", TABLE, line, ("Loss | <b>",)), Drawing("zzz", TABLE, None)])
    write_drawings(noted, tmp_path)
    text = noted.write(tmp_path).read_text(encoding="utf-8")
    assert "Loss \\| &lt;b&gt; (`pareto-x`): [PNG](pareto-x.png), [PDF](pareto-x.pdf), [CSV](pareto-x.csv)" in text
    assert text.index("frontier") < text.index("## Others")
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
    made = plane_figure(table, "sink_error", "title")
    *panels, bar = made.axes
    assert [axis.get_title(loc="left") for axis in panels] == [f"m{index} 2 bits" for index in range(4)]
    assert [text.get_text() for text in panels[0].texts] == [".10", "1.00", ".60", "1.50"]
    assert len(panels[3].texts) == 3  # a cell that was not measured stays empty
    labels = [[text.get_text() for text in axis.get_xticklabels()] for axis in panels]
    assert labels == [["", ""], *[["1", "10"]] * 3]
    assert bar.get_ylabel() == "relative squared error per token"


@pytest.mark.parametrize("length", [30, 110, 300])
def test_long_names_leave_room_for_the_axes(length: int) -> None:
    """`filterwarnings = error`: matplotlib warns where it gives up."""
    name = "a variant " * 30
    table = pd.DataFrame(
        {"method": [name[:length], "kivi 2"], "side": "key", "rope": "after", "by": "layer", "place": 0.0}
        | {"rel_mse": [0.1, 0.2]}
    )
    made = places_figure(pd.concat([table, table.assign(side="value"), table.assign(by="position")]), "title")
    style.png_of(made)
    assert min(axes.get_position().width for axes in made.axes) > 0.15
    shown = [text.get_text() for text in made.legends[0].get_texts()]
    assert shown[1] == "kivi 2"
    assert (shown[0] == name[:length]) == (length == 30)
    assert shown[0].startswith(name[:13])


def test_a_method_that_breaks_a_figure_is_left_out_and_named(tmp_path: Path) -> None:
    def bars(table: pd.DataFrame) -> Figure:
        made = style.figure(1, 2.0)
        made.subplots().barh(table["method"], [float(value) for value in table["value"]])
        return made

    def bars_of_known(table: pd.DataFrame) -> Figure:
        if table["value"].isna().any():
            raise ValueError("unknown")
        return bars(table)

    table = pd.DataFrame({"method": ["a", "a", "b", "c"], "value": [1, {"a": 1}, 2, 3]})
    reasons: list[str] = []
    paths = write_drawings([Drawing("some", table, bars)], tmp_path, skipped=reasons)
    assert [path.name for path in paths] == ["some.csv", "some.pdf", "some.png"]
    assert list(pd.read_csv(paths[0])["method"]) == ["a", "b", "c"]
    assert reasons == ["figure some: a: 1 lines hold no number where the others do"]
    reasons.clear()
    lost = table.assign(value=[1, 2, None, 3])
    assert len(write_drawings([Drawing("lost", lost, bars_of_known)], tmp_path, skipped=reasons)) == 3
    assert [reason.partition(", ")[0] for reason in reasons] == ["figure lost: b: drawing: cannot be made of it"]
    reasons.clear()
    assert write_drawings([Drawing("none", table[1:2], bars)], tmp_path, skipped=reasons) == []
    assert len(reasons) == 1
    assert reasons[0].startswith("figure none: cannot be drawn, TypeError: ")


def test_control_characters_are_shown_as_such() -> None:
    """`filterwarnings = error`: matplotlib warns of a glyph that its font lacks."""
    with style.style():
        made = style.figure(1, 2.0)
        axis = made.subplots()
        axis.barh([0, 1], [1, 2], label="a\0b")
        axis.set_yticks([0, 1], ["\x07", "sound"])
        made.legend()
        made.suptitle("\u202ename\nsecond line")
    style.png_of(made)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["�", "sound"]
    assert made.legends[0].get_texts()[0].get_text() == "a�b"
    assert made._suptitle.get_text() == "�name\nsecond line"


def test_charts_name_what_is_there() -> None:
    for charts in CHARTS.values():
        for chart in charts.values():
            module, name = (chart.table or chart.figure).split(".")
            assert callable(chart.draw)
            assert callable(getattr(import_module(f"kvq.report.figures.{module}"), f"{name}_table"))
