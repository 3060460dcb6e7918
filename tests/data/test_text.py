from __future__ import annotations

import gzip
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pandas
import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

import kvq.data.rows
from kvq.cli import main
from kvq.config import DatasetConfig, Loader, ModelConfig
from kvq.data import rows
from kvq.data.rows import load_corpus, read_joined_text
from kvq.data.text import load_tokens
from kvq.errors import ConfigError, DataError
from kvq.models.load import load_tokenizer
from tests.data.byte_tokenizer import byte_tokenizer

WHOLE = gzip.compress(json.dumps([{"text": "some words " * 100}]).encode())
ROWS = ["", " = Title = \n", "Naïve text of the first row.", "The second row, a little longer than that."]


def config(path: Path | None = None, loader: Loader = Loader.text, **settings) -> DatasetConfig:
    return DatasetConfig(name="made", loader=loader, path=None if path is None else str(path), **settings)


def write(path: Path, rows: list[str], field: str = "text") -> Path:
    """Write `rows` in the form that the suffix of `path` names."""
    records = [{"id": index, field: row} for index, row in enumerate(rows)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_text(lines)
        case ".json":
            path.write_text(json.dumps(records, indent=1))
        case ".json.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case ".parquet":
            pandas.DataFrame(records).to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz", "a.parquet"])
def test_every_local_form_is_the_same_text(tmp_path, name):
    data = load_tokens(config(write(tmp_path / name, ROWS)), byte_tokenizer(), context=10)
    text = "\n\n".join(ROWS)
    assert [bytes_of(stream) for stream in data.streams] == [text]
    assert data.text_bytes == len(text.encode()) == data.tokens
    assert data.fingerprint == hashlib.sha256(text.encode() + b"\0").hexdigest()


def bytes_of(stream: torch.Tensor) -> str:
    return byte_tokenizer().decode(stream.tolist())


def test_folder_of_text_is_read_in_the_order_of_names(tmp_path):
    for name, text in [("b.txt", "second"), ("a.txt", "first"), ("c.bin", "not text"), ("sub/d.txt", "third")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bytes_of(load_tokens(config(tmp_path), byte_tokenizer(), 3).streams[0]) == "first\n\nsecond\n\nthird"


def test_a_folder_that_holds_more_than_a_text_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.md").write_text("not text")
    assert kvq.data.rows.read_rows(config(tmp_path)) == tuple(ROWS)
    (tmp_path / "notes.md").write_text("not the text")
    with pytest.raises(DataError, match=r"the folder holds files of several kinds \(\.jsonl, \.md\); give one file"):
        kvq.data.rows.read_rows(config(tmp_path))
    assert kvq.data.rows.describe_source(config(tmp_path)) is None


def test_max_tokens_cuts_the_stream_and_the_bytes_but_not_the_fingerprint(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    whole, cut = (load_tokens(config(path, max_tokens=n), byte_tokenizer(), 10) for n in (None, 20))
    assert cut.tokens == 20
    assert cut.text_bytes == 20 or cut.text_bytes == 22  # a cut character decodes to a 3-byte replacement mark
    assert torch.equal(cut.streams[0], whole.streams[0][:20])
    assert cut.fingerprint == whole.fingerprint


def test_documents_are_distinct_crops_of_long_enough_rows(tmp_path):
    rows = [chr(ord("a") + index) * length for index, length in enumerate([5, 40, 32, 31, 100, 64])]
    path = write(tmp_path / "a.jsonl", rows)
    data = load_tokens(config(path, Loader.documents, documents=4), byte_tokenizer(), context=32)
    assert [len(stream) for stream in data.streams] == [32] * 4
    assert sorted(bytes_of(stream)[0] for stream in data.streams) == ["b", "c", "e", "f"]
    assert data.text_bytes == 4 * 32


def test_documents_depend_on_their_seed_alone(tmp_path):
    path = write(tmp_path / "a.jsonl", [f"{index:03d} " * 50 for index in range(40)])

    def texts(seed: int) -> list[str]:
        torch.manual_seed(torch.seed() % 1000)
        data = load_tokens(config(path, Loader.documents, documents=8, seed=seed), byte_tokenizer(), context=64)
        return [bytes_of(stream) for stream in data.streams]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


@given(length=st.integers(8, 60), seed=st.integers(0, 1000))
def test_a_crop_is_a_run_of_its_document(tmp_path_factory, length, seed):
    row = "".join(chr(ord("A") + index) for index in range(62))
    path = write(tmp_path_factory.mktemp("crop") / "a.jsonl", [row])
    data = load_tokens(config(path, Loader.documents, documents=1, seed=seed), byte_tokenizer(), context=length)
    assert bytes_of(data.streams[0]) in row


def test_max_tokens_cuts_documents_to_whole_ones(tmp_path):
    path = write(tmp_path / "a.jsonl", ["x" * 50] * 10)
    made = config(path, Loader.documents, documents=10, max_tokens=70)
    assert [len(stream) for stream in load_tokens(made, byte_tokenizer(), 32).streams] == [32, 32]


def test_embedded_text_is_the_held_out_documents():
    data = load_tokens(DatasetConfig(name="pydocs", loader=Loader.embedded, max_tokens=500), byte_tokenizer(), 100)
    assert data.tokens == 500
    documents = load_corpus("pydocs", "test").documents
    by_hash = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    assert "\n\n".join(by_hash).startswith(bytes_of(data.streams[0])[:400])


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (["", " \n"], {}, "the text is empty"),
        (["short"], {}, r"has 5 tokens, fewer than task\.context=64"),
        (["x" * 70], {"text_field": "texts"}, r"text_field=texts is not in .* Did you mean 'text'\?"),
        (["x" * 70], {"loader": Loader.documents, "documents": 2}, r"1 of 1 documents .* dataset\.documents=2"),
        (["x" * 70], {"max_tokens": 32}, r"max_tokens=32 is less than one window, task\.context=64"),
    ],
)
def test_unusable_text_is_one_line(tmp_path, rows, settings, message):
    with pytest.raises(DataError, match=message) as caught:
        load_tokens(config(write(tmp_path / "a.jsonl", rows), **settings), byte_tokenizer(), 64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, "gone.jsonl: no such file or folder"),
        ("a.csv", "text\n1\n", r"cannot read \.csv; it reads \.jsonl"),
        ("a.jsonl", '{"text": "whole"}\n\n{"text": "to', "cannot be read: line 3, column 10: Unterminated string"),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', "row 2 of .* is int, not text"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "text_field=text is not in row 2 of .*a.jsonl"),
        ("a.json", "[[1]]", "row 1 of .* is list"),
        ("a.json", '["a",\n"b"\n"c"]', "line 3 column 1"),
        ("a.txt", "text".encode("utf-16"), "no UTF-8 text, but UTF-16 or binary; save it as UTF-8"),
        ("a.md", "text".encode("utf-16-be"), "no UTF-8 text, but UTF-16 or binary; save it as UTF-8"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "no UTF-8 text, but UTF-16 or binary; save it as UTF-8"),
        ("a.parquet", "not parquet", "cannot be read"),
        ("cut.json.gz", WHOLE[:-20], "cut.json.gz: cannot be read: .*end-of-stream"),
        ("garbled.json.gz", WHOLE[:12] + b"\xff" * 80, "garbled.json.gz: cannot be read"),
        ("deep.jsonl", '{"text":' * 100_000, "deep.jsonl: cannot be read: .*recursion"),
        ("folder/a.bin", "?", "the folder holds no"),
    ],
)
def test_unreadable_path_is_one_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        load_tokens(config(file.parent if "/" in name else file), byte_tokenizer(), 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("a.txt", "A\r\ntext."), ("a.jsonl", '{"text": "A\\ntext."}\n')])
def test_a_byte_order_mark_is_no_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode("utf-8-sig"))
    assert read_joined_text(config(tmp_path / name)) == "A\ntext."


def test_unreachable_hub_points_to_a_local_copy(monkeypatch):
    def refuse(*args: object, **settings: object) -> None:
        raise ConnectionError("Couldn't reach it\nat all")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"cannot load some/text from the hub .*dataset\.path=") as caught:
        load_tokens(config(hub_id="some/text"), byte_tokenizer(), 8)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"dataset\.hub_id"):
        load_tokens(config(), byte_tokenizer(), 8)


def test_first_rows_of_the_hub_are_streamed_and_no_others_read(monkeypatch):
    asked, read = [], []

    def rows():
        for row in [*ROWS, *["too many"] * 50]:
            read.append(row)
            yield {"text": row, "id": len(read)}

    def answer(*args: object, **settings: object) -> datasets.IterableDataset:
        asked.append((args, settings))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert kvq.data.rows.read_rows(config(hub_id="a/b", hub_config="c", split="train", rows=4)) == tuple(ROWS)
    assert asked == [(("a/b", "c"), {"data_files": None, "split": "train", "streaming": True})]
    assert len(read) <= len(ROWS) + 1  # the library looks one ahead
    with pytest.raises(DataError, match=r"dataset\.text_field=words is not in a/b; its fields are: text, id"):
        kvq.data.rows.read_rows(config(hub_id="a/b", text_field="words", rows=2))


def test_streamed_rows_are_those_of_a_local_copy(tmp_path):
    """By the library's own reader of files, which needs no network."""
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"dataset.rows=3: dataset=.* is read by items"):
        config(loader=Loader.items, rows=3)
    streamed = kvq.data.rows.read_rows(config(hub_id="json", data_files=str(path), split="train", rows=3))
    assert streamed == kvq.data.rows.read_rows(config(path, rows=3)) == tuple(ROWS[:3])
    with pytest.raises(ConfigError, match=r"dataset\.rows=3: dataset=made is embedded"):
        config(loader=Loader.embedded, rows=3)


def test_wikitext2_test_split(shared_data):
    data = load_tokens(config(shared_data / "wikitext-2-raw" / "test.jsonl"), byte_tokenizer(), 2048)
    assert len(kvq.data.rows.read_rows(config(shared_data / "wikitext-2-raw" / "test.jsonl"))) == 4358
    assert bytes_of(data.streams[0][:40]).startswith("\n\n = Robert Boulter = \n\n\n\n\n")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[socket.socket]:
    """An address where connections are taken and never answered, as behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        rows.go_offline_if_silent.cache_clear()
        server.settimeout(0.2)
        yield server
    rows.go_offline_if_silent.cache_clear()


def asked(server: socket.socket) -> int:
    """Connections that were made."""
    count = 0
    while True:
        try:
            server.accept()[0].close()
        except TimeoutError:
            return count
        count += 1


def test_a_plan_of_hub_models_is_one_question_and_clear_lines(
    nobody: socket.socket, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "model=llama_2_7b,mistral_7b_v0_3,tiny", "dataset=wikitext2,c4", "method=kivi", "bits=2,3"]
    begin = time.monotonic()
    main([*words, "plan=true", f"results_dir={tmp_path}"])
    assert time.monotonic() - begin < 30  # composing, on a busy machine; the hub's libraries would take ten minutes
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if line.startswith("unknown")]
    assert len(lines) == len(set(lines)) == 18
    assert (
        sum("model.path=meta-llama/Llama-2-7b-hf: cannot be loaded: We couldn't connect" in line for line in lines) == 6
    )
    assert sum("dataset=wikitext2: cannot load Salesforce/wikitext" in line for line in lines) == 3
    assert "plan: 18 unknown" in said
    assert asked(nobody) == 1


def test_what_is_not_there_is_one_line(nobody: socket.socket) -> None:
    assert load_tokenizer(ModelConfig(name="tiny", path="embedded:tiny")) is not None
    assert asked(nobody) == 0
    with pytest.raises(DataError, match=r"path=a/b: cannot be loaded: .*connect"):
        load_tokenizer(ModelConfig(name="m", path="a/b"))
    with pytest.raises(DataError, match=r"dataset=d: cannot load a/b from the hub \(.*\); dataset.path= takes"):
        rows.read_rows(DatasetConfig(name="d", hub_id="a/b"))
