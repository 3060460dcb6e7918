"""Items of multi-modal benchmarks from local files, what is refused by name, and the official scores."""

import json

import pandas as pd
import pytest

from kvq.config import DatasetConfig, Loader
from kvq.data.multimodal import ocrbench_score, read_items
from kvq.errors import DataError
from tests.media_models import picture


@pytest.fixture
def folder(tmp_path):
    picture(0).save(tmp_path / "a.png")
    return tmp_path


def dataset(path):
    return DatasetConfig(name="made", loader=Loader.items, path=str(path))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return dataset(path)


OCR = {"dataset": "IIIT5K", "question_type": "Regular Text Recognition", "question": "what is written?"}


@pytest.mark.parametrize(
    ("source", "answers", "text", "score"),
    [
        ("IIIT5K", ["CENTRE"], "The word is Centre.", 1),
        ("IIIT5K", ["center", "centre"], "CENTRE", 1),
        ("IIIT5K", ["centre"], "cent re", 0),
        ("FUNSD", ["10 May\n1995 "], "it says 10 may 1995", 1),
        ("HME100k", ["x ^ 2 + 1"], "x^2+1=0", 1),
        ("HME100k", ["X"], "x", 0),
        ("HME100k", ["a\nb"], "ab", 1),
        ("IIIT5K", ["no"], "nothing", 1),  # containment, as released
    ],
)
def test_ocrbench_asks_whether_an_answer_is_contained(source, answers, text, score):
    assert ocrbench_score(source, answers, text) == score


def test_ocrbench_items_and_what_cannot_be_asked(folder):
    rows = [
        {**OCR, "id": 7, "answer": ["centre", ""], "image": "a.png"},
        {**OCR, "answer": "centre", "image": "lost.png"},
        {**OCR, "answer": [], "image": "a.png"},
        {**OCR, "answer": [" "], "image": "a.png"},
        {**OCR, "question": " ", "answer": ["a"], "image": "a.png"},
        {**OCR, "answer": ["a"]},
    ]
    items, skipped = read_items(write(folder / "ocr.jsonl", rows))
    (item,) = items
    assert (item.name, item.kind, item.source) == ("0/7", "Regular Text Recognition", "IIIT5K")
    assert item.answers == ("centre",)
    assert item.media == (folder / "a.png").read_bytes()
    assert skipped == {
        "1": "lost.png: no such file",
        "2": "no answer",
        "3": "no answer",
        "4": "empty question",
        "5": "no image",
    }


def test_a_parquet_file_carries_its_images(folder):
    image = {"bytes": (folder / "a.png").read_bytes(), "path": None}
    pd.DataFrame([{**OCR, "answer": ["centre"], "image": image}]).to_parquet(folder / "ocr.parquet")
    (item,), skipped = read_items(dataset(folder / "ocr.parquet"))
    assert (item.media, item.answers, skipped) == (image["bytes"], ("centre",), {})


def test_files_that_cannot_be_read_are_named(folder):
    for name, text, says in (
        ("none.jsonl", None, "no such file; .jsonl, .json and .parquet"),
        ("text.txt", "a", "cannot be read"),
        ("torn.jsonl", '{"a": ', "cannot be read"),
        ("empty.jsonl", "\n", "one or more objects"),
        ("list.jsonl", "[1]\n", "one or more objects"),
    ):
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=says) as caught:
            read_items(dataset(folder / name))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"set dataset.path="):
        read_items(DatasetConfig(name="made", loader=Loader.items))
