"""A paper's numbers are drawn beside ours: published ones as printed, measured ones from the records of their cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.papers.figures import main
from kvq.report.figures.drawing import image_of
from kvq.report.figures.every import drawings
from kvq.results import Store
from tests.results import made


def record(store: Store, model: str, dataset: str, perplexity: float, *small: str) -> None:
    words = [f"dataset={dataset}", "task=ppl/nsnquant_table2", *small, "method=nsnquant", "bits=2", f"model={model}"]
    config = canonical(resolve(compose(words)), "f" * 64, "d" * 64)
    run = {"model": model, "dataset": dataset, "metrics": {"perplexity": perplexity}}
    store.put(made.record("nsnquant", "2", settings=config, **run))


def test_published_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record(store, "llama_3_1_8b", "wikitext2", 6.4)
    record(store, "tiny_hard", "pysource", 11.5, "task.context=512", "task.max_windows=8")
    (drawing,) = (one for one in drawings(store.scan()[0], store) if one.stem.startswith("published"))
    table = drawing.table.set_index(["model", "dataset", "method"]).sort_index()
    own = table[table["stand_in"] == ""]
    assert len(own) == 2 * 9  # texts and methods; "its own paper" has no numbers of this model
    assert own["published"].notna().all()
    # Printed in Table 2: CQ is better on the text that it is calibrated on, and worse on the other.
    wikitext, c4 = (own["published"]["LLaMA3.1-8B", text] for text in ("WikiText-2", "C4"))
    assert (wikitext["CQ-4c9b"], wikitext["NSNQuant-2b"]) == (6.28, 6.34)
    assert c4["CQ-4c9b"] > c4["NSNQuant-2b"]
    assert own["measured"].dropna().to_dict() == {("LLaMA3.1-8B", "WikiText-2", "NSNQuant-2b"): 6.4}
    small = table[table["stand_in"] == "tiny_hard"]
    assert small["measured"].to_dict() == {("tiny_hard", "pysource", "NSNQuant-2b"): 11.5}
    assert small["published"].isna().all()
    figure = drawing.figure()
    assert figure is not None
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["LLaMA3.1-8B, C4", "LLaMA3.1-8B, WikiText-2", "tiny_hard (stand-in), pysource"]
    said = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert said == ["published", "measured here"]
    assert image_of(figure)


def test_the_command_draws_it_with_all_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(Store(tmp_path), "llama_3_1_8b", "wikitext2", 6.4)
    assert main(["--results", str(tmp_path)]) == 0
    folder = tmp_path / "figures"
    assert {path.suffix for path in folder.glob("published-nsnquant-table2.*")} == {".png", ".pdf", ".csv"}
    assert "## published" in (folder / "index.md").read_text(encoding="utf-8")
