"""`task=multimodal` end to end on made images and a random llava, on noise and a random Qwen3-Omni."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.io import wavfile
from transformers import AutoProcessor, Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerForConditionalGeneration

from kvq.cli import main
from kvq.config import DatasetConfig, Loader
from kvq.errors import DataError
from kvq.tasks.media import choice_score, decode_recording, instruction_score, ocrbench_score, read_items
from kvq.tasks.multimodal import prompt_of
from tests.media_models import picture, save_llava, save_omni
from tests.sweeps import records, refused, samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("multimodal")
    save_llava(made / "model")
    rows = []
    for index in range(6):
        picture(index).save(made / f"{index}.png")
        kind = "Scene Text-centric VQA" if index % 2 else "Regular Text Recognition"
        # A byte model answers with bytes: by chance some of these letters are contained.
        rows.append({"image": f"{index}.png", "question_type": kind, "dataset": "made", "question": f"what's {index}?"})
        rows[-1]["answer"] = [chr(letter) for letter in range(97, 110)]
    (made / "torn.png").write_bytes(b"no picture")
    rows += [{**rows[0], "image": "torn.png"}, {**rows[0], "answer": []}]
    write(made / "items.jsonl", rows)
    return made


def given(folder: Path, results: Path, *changes: str) -> list[str]:
    return [
        "task=multimodal",
        "model=hf",
        f"model.path={folder / 'model'}",
        "model.dtype=float32",
        f"dataset.path={folder / 'items.jsonl'}",
        "task.max_new_tokens=12",
        "task.resamples=50",
        "residual.size=8",
        f"results_dir={results}",
        *changes,
    ]


def test_answers_through_the_cache_and_what_was_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *given(folder, tmp_path), "method=identity,zero,rtn", "bits=2"]) == 0
    found = records(tmp_path)
    assert set(found) == {"fp16", "identity", "zero", "rtn 2"}
    texts = {name: {s["item"]: s["text"] for s in samples(tmp_path, name) if "skipped" not in s} for name in found}
    assert texts["identity"] == texts["fp16"]
    assert texts["zero"] != texts["fp16"]
    assert texts["rtn 2"] != texts["fp16"]
    assert len(set(texts["fp16"].values())) > 1  # the images are seen
    full = found["fp16"]
    assert full.metrics["items"] == 6
    assert full.metrics["skipped_items"] == 2
    assert full.metrics["image_tokens"] == 6 * 16
    assert full.metrics["text_tokens"] == sum(s["text_tokens"] for s in samples(tmp_path, "fp16") if "text_tokens" in s)
    assert {name for name in full.metrics if name.startswith("accuracy[")} == {
        "accuracy[kind=Scene Text-centric VQA]",
        "accuracy[kind=Regular Text Recognition]",
    }
    assert found["identity"].metrics["flips"] == 0
    assert found["rtn 2"].metrics["bits_per_element"] == 3  # 2 + 32/32
    skipped = {s["item"]: s["skipped"] for s in samples(tmp_path, "fp16") if "skipped" in s}
    assert skipped == {"6": "its image cannot be read", "7": "no answer"}
    assert "2 skipped items: 6: its image cannot be read; 7: no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("task.benchmark=ocrbnch", "task.benchmark=ocrbnch: one of ocrbench, mmau_pro. Did you mean 'ocrbench'?"),
        ("task.prefill=chunked", "an image is read in one forward"),
        ("task.batch_size=2", "task.batch_size=2: task=multimodal asks one item at a time"),
        ("task.noise_floor=true", "task.noise_floor=True"),
        ("task.limit=0", "task.limit=0: at least 1"),
        ("task.max_new_tokens=0", "task.max_new_tokens=0: at least 1"),
        ("model.path=embedded:tiny", "its processor takes no images"),
        ("dataset.path=nowhere.jsonl", "dataset.path=nowhere.jsonl: no such file"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    refused(capsys, [*given(folder, tmp_path), "method=rtn", "bits=2"], change, says)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    picture(0).save(tmp_path / "a.png")
    return tmp_path


def dataset(path: Path) -> DatasetConfig:
    return DatasetConfig(name="made", loader=Loader.items, path=str(path))


def write(path: Path, rows: list[dict[str, object]]) -> DatasetConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return dataset(path)


OCR: dict[str, object] = {
    "dataset": "IIIT5K",
    "question_type": "Regular Text Recognition",
    "question": "what is written?",
}


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
def test_ocrbench_asks_whether_an_answer_is_contained(source: str, answers: list[str], text: str, score: int) -> None:
    assert ocrbench_score(source, answers, text) == score


def test_ocrbench_items_and_what_cannot_be_asked(images: Path) -> None:
    rows = [
        {**OCR, "id": 7, "answer": ["centre", ""], "image": "a.png"},
        {**OCR, "answer": "centre", "image": "lost.png"},
        {**OCR, "answer": [], "image": "a.png"},
        {**OCR, "answer": [" "], "image": "a.png"},
        {**OCR, "question": " ", "answer": ["a"], "image": "a.png"},
        {**OCR, "answer": ["a"]},
    ]
    items, skipped = read_items(write(images / "ocr.jsonl", rows))
    assert read_items(write(images / "ocr.jsonl", rows), 1) == (items, {})  # what is behind the limit is not read
    (item,) = items
    assert (item.name, item.kind, item.source) == ("0/7", "Regular Text Recognition", "IIIT5K")
    assert item.answers == ("centre",)
    assert item.media == (("image", (images / "a.png").read_bytes()),)
    assert skipped == {
        "1": "lost.png: no such file",
        "2": "no answer",
        "3": "no answer",
        "4": "empty question",
        "5": "no image",
    }


def test_a_parquet_file_carries_its_images(images: Path) -> None:
    image = {"bytes": (images / "a.png").read_bytes(), "path": None}
    pd.DataFrame([{**OCR, "answer": ["centre"], "image": image}]).to_parquet(images / "ocr.parquet")
    (item,), skipped = read_items(dataset(images / "ocr.parquet"))
    assert (item.media, item.answers, skipped) == ((("image", image["bytes"]),), ("centre",), {})


def test_files_that_cannot_be_read_are_named(images: Path) -> None:
    for name, text, says in (
        ("none.jsonl", None, "no such file; .jsonl, .json and .parquet"),
        ("text.txt", "a", "one or more objects"),
        ("torn.jsonl", '{"a": ', "cannot be read"),
        ("empty.jsonl", "\n", "one or more objects"),
        ("list.jsonl", "[1]\n", "one or more objects"),
    ):
        if text is not None:
            (images / name).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=says) as caught:
            read_items(dataset(images / name))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"set dataset.path="):
        read_items(DatasetConfig(name="made", loader=Loader.items))


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with eyes and ears, and questions about sound, one about an image too."""
    made = save_omni(tmp_path_factory.mktemp("heard") / "model").parent
    noise = np.random.default_rng(0).integers(-9000, 9000, (4, 4000, 2), dtype=np.int16)
    rows: list[dict[str, object]] = []
    for index, letter in enumerate("abcd"):
        wavfile.write(made / f"{index}.wav", 8000, noise[index])
        rows.append({"audio_path": [f"{index}.wav"], "category": "sound", "question": f"what is {index}?"})
        rows[-1] |= {"choices": [*"efg", letter], "answer": letter}
    picture(0).save(made / "0.png")
    (made / "torn.wav").write_bytes((made / "0.wav").read_bytes()[:999])
    rows[1] |= {"image": "0.png", "audio_path": ["1.wav", "2.wav"]}
    rows[3] |= {"category": "instruction following", "answer": None, "task_identifier": "No Commas"}
    rows += [rows[0] | {"choices": None, "category": "open"}, rows[0] | {"audio_path": "torn.wav"}]
    write(made / "items.jsonl", [*rows, rows[0] | {"audio_path": None}])
    return made


def test_answers_about_recordings_are_those_of_the_models_own_generate(heard: Path, tmp_path: Path) -> None:
    words = ["method=identity,zero,rtn", "bits=2", "dataset=mmau_pro", "task.benchmark=mmau_pro"]
    assert main(["-m", *given(heard, tmp_path), *words]) == 0
    kept = {name: {s["item"]: s for s in samples(tmp_path, name)} for name in ("fp16", "identity", "zero", "rtn 2")}
    texts = {name: [s["text"] for s in rows.values() if "text" in s] for name, rows in kept.items()}
    assert texts["identity"] == texts["fp16"] != texts["rtn 2"] != texts["zero"]
    assert len(set(texts["fp16"])) == 4
    processor = AutoProcessor.from_pretrained(heard / "model")
    config = Qwen3OmniMoeConfig.from_pretrained(heard / "model").thinker_config
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(heard / "model", config=config)
    for item, text in zip(read_items(dataset(heard / "items.jsonl"))[0], texts["fp16"], strict=False):
        tokens, media = prompt_of(processor, item, torch.device("cpu"))
        media |= {"attention_mask": torch.ones_like(tokens)}
        own = model.generate(tokens, **media, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert text == processor.tokenizer.decode(own[0, tokens.shape[1] :], skip_special_tokens=True).strip()
    full, rows = records(tmp_path)["fp16"].metrics, kept["fp16"]
    assert (full["items"], full["image_tokens"], full["audio_tokens"]) == (4, 16, 5 * 7)  # half a second each
    skipped = [row["skipped"].partition(",")[0] for row in rows.values() if "skipped" in row]
    assert sorted(skipped) == ["an open answer", "its recording cannot be read as a wave file", "no recording"]
    assert full["accuracy[rule=instruction]"] == rows["3"]["score"] == ("," not in rows["3"]["text"])
    assert full["accuracy[rule=words]"] == full["accuracy[kind=sound]"]
    assert rows["0"]["score"] == choice_score("a", "efga", rows["0"]["text"])


def test_modal_norms_need_ears(heard: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*given(heard, tmp_path)[1:5], f"results_dir={tmp_path}", "task=modality", "method=fp16"]
    assert main(words) == 0
    metrics = records(tmp_path)["fp16"].metrics
    assert all(metrics[f"key_relative[modality={name}]"] > 0 for name in ("text", "image", "audio"))
    refused(capsys, words, f"model.path={folder / 'model'}", "model: its processor takes no recordings")


@pytest.mark.parametrize(("dtype", "scale"), [("f4", 1), ("i2", 2**15), ("i4", 2**31), ("u1", 2**7)])
def test_a_recording_is_one_channel_at_the_rate_asked_for(tmp_path: Path, dtype: str, scale: int) -> None:
    tone = np.sin(np.arange(8000) * 0.2) / 2
    made = np.stack([tone, 0 * tone], 1) * scale + (scale if dtype == "u1" else 0)
    wavfile.write(tmp_path / "a.wav", 8000, made.astype(dtype))
    found = decode_recording((tmp_path / "a.wav").read_bytes(), 16000)
    assert (found.dtype, found.shape) == (np.float32, (16000,))
    assert np.abs(found - np.sin(np.arange(16000) * 0.1) / 4)[100:-100].max() < (1e-2 if dtype == "u1" else 1e-3)


def test_scores_of_choices_and_instructions() -> None:
    """A choice has all its words and none of the others'; instructions are checked as released."""
    for text, score in {"It is a big dog.": 1, "a big dog or a cat": 0, "dog": 0, "": 0, "Big dog, no bird": 1}.items():
        assert choice_score("big dog", ("big dog", "big cat", "small dog"), text) == score
    for name, wanted, follows, fails in yaml.safe_load(
        Path(__file__).with_name("instructions.yaml").read_text("utf-8")
    ):
        scores = [instruction_score(name, wanted, "What is it?", text) for text in (follows, fails)]
        assert scores == [1, 0], name
    assert instruction_score("unknown", {}, "What is it?", "a") == 0
