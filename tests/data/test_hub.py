"""A hub that nobody answers: asked once, and no command waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from kvq.cli import main
from kvq.config import DatasetConfig, ModelConfig
from kvq.data import rows
from kvq.errors import DataError
from kvq.models.load import load_tokenizer


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
