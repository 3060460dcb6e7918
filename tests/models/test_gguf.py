"""GGUF files: where they are looked for, and what is refused in one line."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvq.config import compose, resolve
from kvq.config.limits import cache_folder
from kvq.config.run import ModelConfig
from kvq.errors import DataError
from kvq.models.folder import carried_gguf, folder_fingerprint
from kvq.models.load import load_model

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]


def _written(file: Path, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_context_length(64)
    writer.add_add_bos_token(True)
    writer.add_token_list(["<s>", "a", "é"])
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _config(file: Path, **more: object) -> ModelConfig:
    return ModelConfig(name="mine", path=str(file), **more)  # type: ignore[arg-type]


def test_fingerprint_is_that_of_the_file_alone(tmp_path: Path) -> None:
    file = _written(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert folder_fingerprint(_config(file)) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert folder_fingerprint(_config(tmp_path, gguf="m.gguf")) == folder_fingerprint(_config(file))


def test_a_path_to_a_file_is_a_folder_and_a_name() -> None:
    config = resolve(compose(["model=hf", "model.path=some/where/m.gguf"])).model
    assert (config.path, config.gguf, config.name) == ("./some/where", "m.gguf", "some/where/m.gguf")


def test_another_file_than_the_one_meant_is_refused(tmp_path: Path) -> None:
    file = _written(tmp_path / "m.gguf")
    with pytest.raises(DataError, match="is not the file that model=mine means"):
        folder_fingerprint(_config(file, sha256="0" * 64))
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


PIECES = [b"GGUF of three", b" pieces, the last", b" short"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path with a distribution `kvq-made-up` whose file lies in three others, the last first."""
    folder = tmp_path / "site"
    for name, content in [("kvq-made-up", b""), *((f"kvq-made-up-part{3 - at}", PIECES[at]) for at in (2, 0, 1))]:
        piece = (
            f"{name.replace('-', '_')}/m.gguf.part{PIECES.index(content):02}" if content else "kvq_made_up/terms.html"
        )
        requires = "".join(f"Requires-Dist: kvq-made-up-part{at}==1.0\n" for at in (1, 2, 3)) if not content else ""
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        for path, text in [
            (folder / piece, content),
            (info / "METADATA", f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{requires}".encode()),
            (info / "RECORD", f"{piece},sha256={digest},{len(content)}\n".encode()),
        ]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


GIVEN = "distribution:kvq-made-up"


def test_pieces_are_joined_once_in_the_users_cache(site: Path, tmp_path: Path) -> None:
    joined = carried_gguf("model.path", GIVEN)
    assert joined.read_bytes() == b"".join(PIECES)
    assert joined.name == "m.gguf"
    assert joined.is_relative_to(tmp_path / "cache" / "kvq")
    for piece in site.rglob("*.part0*"):
        piece.write_bytes(b"not read again")
    assert carried_gguf("model.path", GIVEN) == joined
    assert sorted(path.suffix for path in joined.parent.iterdir()) == [".gguf", ".lock"]


def test_a_missing_piece_is_named_and_nothing_joined(site: Path) -> None:
    (piece,) = site.rglob("*.part01")
    piece.unlink()
    with pytest.raises(DataError, match=r"^model\.path=\S+: cannot be joined in .*part01"):
        carried_gguf("model.path", GIVEN)
    assert not list(cache_folder().rglob("*.gguf"))
    piece.write_bytes(PIECES[1])
    assert carried_gguf("model.path", GIVEN).read_bytes() == b"".join(PIECES)


def test_a_distribution_of_a_piece_that_is_not_installed_is_named(site: Path) -> None:
    (site / "kvq_made_up_part2-1.0.dist-info" / "METADATA").unlink()
    (site / "kvq_made_up_part2-1.0.dist-info" / "RECORD").unlink()
    (site / "kvq_made_up_part2-1.0.dist-info").rmdir()
    with pytest.raises(DataError, match=r"the package kvq-made-up-part2 is not installed; `make real MODELS="):
        carried_gguf("model.path", GIVEN)


def test_a_cache_folder_that_cannot_be_written_is_one_line(site: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be joined in \S+cache/kvq/\w+: .*directory"):
        carried_gguf("model.path", GIVEN)


@pytest.mark.parametrize(
    ("models", "more", "installed", "line"),
    [
        (None, [], ["smollm2_135m"], ""),
        ("smollm2_135m,gemma3_270m", ["YES=1"], ["smollm2_135m", "gemma3_270m"], ""),
        ("gemma3_270m", [], [], "gemma3_270m is not installed: it comes under the Gemma Terms of Use"),
        ("no_model", [], [], "MODELS=no_model: one or more of gemma3_270m smollm2_135m"),
    ],
)
def test_make_real_asks_before_weights_under_terms(
    tmp_path: Path, models: str | None, more: list[str], installed: list[str], line: str
) -> None:
    """With a Python that writes its arguments, and no terminal."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    settings = [f"BIN={tmp_path}", *([f"MODELS={models}"] if models else []), *more]
    command = ["make", "--no-print-directory", "-o", ".venv/.ready", "real", *settings]
    found = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert [word for word in found.stdout.split() if word.startswith("requirements/")] == [
        f"requirements/{name}.txt" for name in installed
    ]
    assert (found.returncode == 0) == bool(installed)
    assert found.stdout.startswith(line)


def test_settings_of_files_enter_no_key_but_the_type_of_weights(tmp_path: Path) -> None:
    from kvq.config.identity import canonical

    configs = [resolve(compose(["model=smollm2_135m"])) for _ in range(2)]
    configs[1].model.sha256 = None
    first, second = (canonical(config, "weights", "text") for config in configs)
    assert first == second
    assert first["model"]["weights"] == "Q4_1"
