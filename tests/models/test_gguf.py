"""GGUF files: their header, where they are looked for, and what is refused in one line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvq.config import compose, resolve
from kvq.config.limits import carried_gguf
from kvq.config.run import ModelConfig
from kvq.errors import DataError, KvqError
from kvq.models import load_model
from kvq.models.folder import folder_fingerprint, folder_writes_bos
from kvq.models.gguf import read_header

gguf = pytest.importorskip("gguf")


def _written(file: Path, architecture: str = "llama", bos: bool = True) -> Path:
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_context_length(64)
    writer.add_add_bos_token(bos)
    writer.add_token_list(["<s>", "a", "é"])
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _config(file: Path, **more: object) -> ModelConfig:
    return ModelConfig(name="mine", path=str(file), **more)  # type: ignore[arg-type]


def test_header_says_architecture_and_type_of_weights(tmp_path: Path) -> None:
    header = read_header(_written(tmp_path / "m.gguf"))
    assert (header.architecture, header.weights, header.writes_bos) == ("llama", "Q4_1", True)
    assert header.metadata["llama.context_length"] == 64
    assert header.metadata["tokenizer.ggml.tokens"] == 3


def test_fingerprint_is_that_of_the_file_alone(tmp_path: Path) -> None:
    file = _written(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert folder_fingerprint(_config(file)) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert folder_fingerprint(_config(tmp_path, gguf="m.gguf")) == folder_fingerprint(_config(file))
    assert folder_writes_bos(_config(_written(tmp_path / "n.gguf", bos=False))) is False


def test_a_path_to_a_file_is_a_folder_and_a_name() -> None:
    config = resolve(compose(["model=hf", "model.path=some/where/m.gguf"])).model
    assert (config.path, config.gguf, config.name) == ("./some/where", "m.gguf", "some/where/m.gguf")


@pytest.mark.parametrize("kept", [0, 3, 24, 60, -40])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    file = _written(tmp_path / "m.gguf")
    data = file.read_bytes()
    file.write_bytes(data[: kept if kept >= 0 else len(data) - 160])
    with pytest.raises(DataError, match=r"m\.gguf: (no GGUF file|truncated)") as refused:
        read_header(file)
    assert "\n" not in str(refused.value)


def test_another_file_than_the_one_meant_is_refused(tmp_path: Path) -> None:
    file = _written(tmp_path / "m.gguf")
    with pytest.raises(DataError, match="is not the file that model=mine means"):
        folder_fingerprint(_config(file, sha256="0" * 64))
    with pytest.raises(DataError, match="has weights in Q4_1, not F16"):
        folder_fingerprint(_config(file, weights="F16"))
    with pytest.raises(DataError, match=r"no file other\.gguf"):
        folder_fingerprint(_config(tmp_path, gguf="other.gguf"))


def test_architectures_that_transformers_cannot_read_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be loaded: ") as refused:
        load_model(_config(_written(tmp_path / "m.gguf", architecture="clip")), "cpu")
    assert "\n" not in str(refused.value)


def test_a_distribution_that_is_not_installed_names_make_real() -> None:
    with pytest.raises(DataError, match="make real"):
        carried_gguf("model.path", "distribution:no-such-package-of-weights")
    with pytest.raises(DataError, match="carries no GGUF file"):
        carried_gguf("model.path", "distribution:torch")


def test_settings_of_files_enter_no_key_but_the_type_of_weights(tmp_path: Path) -> None:
    from kvq.config.identity import canonical

    configs = [resolve(compose(["model=smollm2_135m"])) for _ in range(2)]
    configs[1].model.sha256 = None
    first, second = (canonical(config, "weights", "text") for config in configs)
    assert first == second
    assert first["model"]["weights"] == "Q4_1"


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(KvqError, match=r"model\.gguf"):
        ModelConfig(name="x", path=str(tmp_path), gguf="")
