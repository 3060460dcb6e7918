"""Throughput and memory by batch, drawn as NSNQuant draws them (Figures 4 and 8), from records made by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd

from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.report.figures.cost import throughput_figure
from kvq.report.figures.drawing import image_of
from kvq.report.figures.every import drawings
from kvq.results import Store
from tests.results import made


def put_throughput(store: Store, residual: int, bits: str, machine: str = "one GPU") -> None:
    """A run of NSNQuant's figures 4 and 8: full precision fits 64 requests, the method 4 times as many."""
    words = ["method=nsnquant", f"bits={bits}", "task=throughput", "task.batches=[16,64,256]", "model=tiny"]
    asked = resolve(compose([*words, f"residual.size={residual}", "cache.attention=packed"]))
    settings = canonical(asked, "f" * 64, machine)
    rows = []
    for batch, subject in itertools.product((16, 64, 256), ("method", "dynamic")):
        place = {"batch": batch, "tokens": 161, "subject": subject, "repeat": 0}
        if (batch, subject) == (256, "dynamic"):
            rows.append(place | {"fits": False})
            continue
        gib = batch * (1.0 if subject == "dynamic" else (0.1 + residual / 1000) * int(bits))
        seconds = {"prefill_seconds": 1.0, "decode_seconds": 4.0 + batch / 64 + residual / 100}
        peaks = {"prefill_peak_bytes": int(gib * 2**29), "decode_peak_bytes": int(gib * 2**30)}
        rows.append(place | {"fits": True} | seconds | peaks)
    store.put(made.record("nsnquant", bits, settings=settings, task="throughput", metrics={"largest_batch": 256}), rows)


def test_throughput_is_drawn_as_nsnquant_draws_it(tmp_path: Path) -> None:
    """Memory left, throughput right, by batch: a line for each width and residual, full precision until it is full."""
    store = Store(tmp_path)
    for residual, bits in itertools.product((32, 64, 128), "12"):
        put_throughput(store, residual, bits)
    (drawing,) = drawings(store.scan()[0], store)
    figure = drawing.figure()
    assert figure is not None
    memory, rates = figure.axes
    assert (memory.get_ylabel(), rates.get_ylabel()) == ("peak memory above the weights (GiB)", "tokens per second")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    sizes = {32: "residual 32, packed attention", 64: "packed attention", 128: "residual 128, packed attention"}
    wanted = {f"nsnquant, {size} {bits}" for size in sizes.values() for bits in "12"}  # 64 is the preset's
    assert set(names) == wanted | {"full precision"}
    by_name = dict(zip(names, memory.lines, strict=True))
    assert by_name["full precision"].get_xdata().tolist() == [16, 64]
    assert by_name["full precision"].get_ydata().tolist() == [16, 64]
    small, large = (by_name[f"nsnquant, {sizes[size]} 2"].get_ydata() for size in (32, 128))
    assert all(a < b for a, b in zip(small, large, strict=True))
    crosses = [line for line in rates.lines if line.get_marker() == "x"]
    assert [line.get_xdata() for line in crosses] == [[256]]
    assert image_of(figure)


def test_times_of_two_machines_are_two_figures(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for machine in ("one GPU", "another GPU"):
        put_throughput(store, 64, "2", machine)
    found = list(drawings(store.scan()[0], store))
    assert len({drawing.stem for drawing in found}) == 2
    assert {drawing.title.partition(" on ")[2] for drawing in found} == {"one GPU", "another GPU"}


def test_one_batch_is_drawn_as_bars() -> None:
    lines = [
        ("kivi 2", 4, True, 80.0, 2**29),
        ("full precision", 4, True, 100.0, 2**30),
        ("nsn 2", 4, False, None, None),
    ]
    table = pd.DataFrame(lines, columns=["method", "batch", "fits", "tokens_per_second", "peak_bytes"])
    made = throughput_figure(table, "A title")
    memory, rates = made.axes
    assert [bar.get_width() for bar in memory.patches[:2]] == [1.0, 0.5]
    assert [bar.get_width() for bar in rates.patches[:2]] == [100.0, 80.0]
    assert [text.get_text() for text in memory.get_yticklabels()] == ["full precision", "kivi 2", "nsn 2"]
    assert memory.get_xlabel() == "peak memory above the weights (GiB), 4 requests at once"
    assert image_of(made)
