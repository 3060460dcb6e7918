"""`task=modality` end to end on made images and a random llava: its record, its figures, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from kvq.cli import main
from kvq.report.figures.every import stems
from kvq.results import Store
from kvq.tasks.multimodal import SIDES
from tests.media_models import PATCHES, picture, save_llava
from tests.report.diagnosed import drawn
from tests.sweeps import records, refused, samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("modality")
    save_llava(made / "model")
    rows = []
    for index in range(3):
        picture(index).save(made / f"{index}.png")
        rows.append({"image": f"{index}.png", "dataset": "made", "question": f"what is {index}?", "answer": ["a"]})
    (made / "torn.png").write_bytes(b"no picture")
    rows.insert(1, {**rows[0], "image": "torn.png"})
    (made / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def given(folder: Path, results: Path, *changes: str) -> list[str]:
    return [
        *("task=modality", "model=hf", f"model.path={folder / 'model'}", "model.dtype=float32", "method=fp16"),
        *(f"dataset.path={folder / 'items.jsonl'}", f"results_dir={results}", *changes),
    ]


def test_norms_of_images_and_text_are_kept_and_drawn(folder: Path, tmp_path: Path) -> None:
    assert main(given(folder, tmp_path)) == 0
    record = records(tmp_path)["fp16"]
    assert (record.metrics["items"], record.metrics["skipped_items"]) == (3, 1)
    assert record.metrics["image_tokens"] == 3 * PATCHES
    rows = samples(tmp_path, "fp16")
    assert [row["item"] for row in rows if row["kind"] == "skipped"] == ["1"]
    assert {row["item"] for row in rows if row["kind"] == "tokens"} == {"0"}
    found = [row for row in rows if row["kind"] == "modality"]
    assert len(found) == 3 * 2 * len(SIDES) * 3  # prompts, layers, sides; all tokens, text, images
    for name, metric in (("all", "key_cv"), ("image", "key_cv[modality=image]")):
        mine = [row["variation"] for row in found if (row["side"], row["modality"]) == ("key", name)]
        assert record.metrics[metric] == pytest.approx(sum(mine) / len(mine))
    assert record.metrics["value_max_over_median"] >= 1

    paths = drawn(Store(tmp_path), tmp_path / "figures")
    kinds, drawn_stems = stems(), {path.stem for path in paths if path.suffix == ".png"}
    assert {next(kind for kind in kinds if stem.startswith(kind)) for stem in drawn_stems} == {"modality-tokens"}
    numbers = pd.read_csv(
        next(path for path in paths if path.name.startswith("modality-tokens-") and path.suffix == ".csv")
    )
    boxes = {(row["layer"], row["side"]): row for row in rows if row["kind"] == "tokens"}
    assert len(numbers) == sum(count for row in boxes.values() for _, count in row["spans"])
    first = numbers[(numbers["layer"] == 1) & (numbers["side"] == "value")]
    assert first["median"].tolist() == pytest.approx(boxes[1, "value"]["norms"][2])
    assert (first["modality"] == "image").sum() == PATCHES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("method=rtn bits=2", "task=modality: looks at queries, keys and values before any method; method=fp16"),
        ("task.limit=0", "task.limit=0: at least 1"),
        ("task.layers=0", "task.layers=0: at least 1"),
        ("model.path=embedded:tiny", "its processor takes no images"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    refused(capsys, given(folder, tmp_path), change, says)
