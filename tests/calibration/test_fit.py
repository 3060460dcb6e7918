"""The calibration step of a run: its file, its bytes, its place in the key, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import kvq
from kvq.calibration import files
from kvq.calibration import text as text_module
from kvq.calibration.files import file_of
from kvq.calibration.text import calibration_text, dataset_of, load_text
from kvq.cli import main
from kvq.config import compose, resolve
from kvq.config.method import CalibrationConfig
from kvq.data.rows import find_modules, is_in_split, load_corpus
from kvq.data.text import encode, load_tokens
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.inputs import Inputs
from kvq.models.load import load_model
from kvq.results import Store
from tests.random_models import llama, save_random_model
from tests.sweeps import inputs_of, records, small_run

WORDS = " ".join(f"the root of {root * root} is {root}," for root in range(300))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on a random model that calibrates on another text than it is tested on."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "roots.txt").write_text(WORDS, encoding="utf-8")
    return [
        *small_run(folder),
        "task.max_windows=2",
        f"method.calibration.path={folder / 'roots.txt'}",
        "method.calibration.dataset=wikitext2",
        "method.calibration.samples=3",
        "method.calibration.length=64",
    ]


def test_comments_and_docstrings_do_not_change_the_name_of_a_file() -> None:
    plain = "class A:\n    x = 1\n\n    def f(self):\n        return 2\n"
    worded = '"""A module."""\nclass A:  # a class\n    """What it is."""\n    x = 1\n    """One."""\n\n'
    worded += '    def f(self):\n        """Two."""\n        return 2\n'
    assert files.statements(worded) == files.statements(plain) != files.statements(plain.replace("2", "3"))


def calibrations(results: Path) -> list[Path]:
    return sorted((results / "calibration").glob("*.safetensors"))


@pytest.mark.parametrize(
    "name",
    ["kvquant", "spinquant", *(pytest.param(n, marks=pytest.mark.long) for n in ("rotatekv", "waterfill/scalar"))],
)
def test_the_same_bytes_again_and_reused(name: str, given: list[str], tmp_path: Path) -> None:
    extra = ["method.value.stages.rotation.steps=3"] if name == "spinquant" else []
    run = [*given, *extra, f"method={name}", "bits=2"]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        assert main([*run, f"results_dir={folder}"]) == 0
    (one,), (two,) = (calibrations(folder) for folder in folders)
    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()
    record = records(folders[0])[f"{name} 2"]
    found = files.read(one)
    assert record.metrics["calibration_bytes"] == found.nbytes > 0
    assert record.units["calibration_bytes"] == "bytes"
    elements = 8 * record.metrics["total_bytes"] / record.metrics["effective_bits"]
    assert record.metrics["calibration_bits"] == pytest.approx(8 * found.nbytes / elements)
    per_token = 2 * sum(heads * dim for heads, dim in zip(found.heads, found.head_dims, strict=True))
    assert record.metrics["calibration_bits_32k"] == pytest.approx(8 * found.nbytes / per_token / 32768)
    assert record.metrics["calibration_bits_1m"] == pytest.approx(8 * found.nbytes / per_token / 2**20)
    numbers = sum(table.numel() for name, table in found.tensors.items() if name.endswith("transform.inverse"))
    multiplications = record.metrics.get("decode_multiplications", 0)
    assert multiplications == pytest.approx(numbers / per_token)
    assert bool(multiplications) == name.startswith("waterfill")
    assert record.metrics["calibration_seconds"] == found.seconds
    assert json.loads(one.with_suffix(".json").read_text())["table_bytes"] == found.nbytes
    assert record.config["method"]["calibration"]["samples"] == 3
    stamp = one.stat().st_mtime_ns
    assert main([*run, "force=true", f"results_dir={folders[0]}"]) == 0
    assert one.stat().st_mtime_ns == stamp


def test_a_damaged_calibration_is_made_again(given: list[str], tmp_path: Path) -> None:
    small = [f"method.{side}.quantizer.{name}" for side in ("key", "value") for name in ("iterations=2", "code_bits=4")]
    run = [*given, "method=cq", *small, f"results_dir={tmp_path}"]
    assert main(run) == 0
    (one,) = calibrations(tmp_path)
    whole = one.read_bytes()
    one.write_bytes(whole[:100])
    assert main([*run, "force=true"]) == 0
    assert one.read_bytes() == whole


def test_what_decides_a_calibration_is_in_its_name_and_in_the_key(given: list[str]) -> None:
    def name(*changes: str) -> Path:
        return file_of(inputs_of([*given, "method=kvquant", "bits=2"], *changes))

    base = name()
    for same in ("residual.size=16", "task.context=90", "results_dir=results", "method.label=x"):
        assert name(same) == base
    for other in ("samples=2", "length=48", "tokens=100", "seed=1"):
        assert name(f"method.calibration.{other}") != base
    assert name("method.key.quantizer.qnorm=true") != base
    assert name("bits=3") != base
    fingerprints = {
        load_text(inputs_of([*given, "method=kvquant"], f"method.calibration.seed={i}")).fingerprint for i in (0, 1)
    }  # type: ignore[union-attr]
    assert len(fingerprints) == 2


def test_a_plan_starts_nothing(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "method=kvquant", "bits=2", "plan=true", f"results_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "pending      kvquant bits=2" in said
    assert "to be calibrated" in said
    assert not calibrations(tmp_path)


def test_binding_is_of_this_very_model(given: list[str], tmp_path: Path) -> None:
    assert main([*given, "method=kvquant", "bits=2", f"results_dir={tmp_path}"]) == 0
    (file,) = calibrations(tmp_path)
    method = kvq.build_method("kvquant", bits=2)
    model = load_model(resolve(compose(given)).model).model
    assert kvq.KVCache(model, kvq.bind_calibration(method, model, file)).get_seq_length() == 0
    with pytest.raises(Unsupported, match=r"method=kvquant: not calibrated; `python run.py method=kvquant .*bind"):
        kvq.KVCache(model, method)
    for other, says in (
        (llama(layers=2, head_dim=128, seed=3, heads=2, kv_heads=1, vocabulary=256), "of another model"),
        (llama(layers=3, head_dim=128, heads=2, kv_heads=1), "of a model with 2 layers, not 3"),
        (llama(layers=2, head_dim=64, heads=2, kv_heads=1), "of a model with head_dim=128, not 64"),
    ):
        with pytest.raises(Unsupported, match=f"^calibration of method=kvquant: {says}"):
            kvq.bind_calibration(method, other, file)
    with pytest.raises(Unsupported, match=r"calibration of method=kvquant: has no tables for value\.0\.rotation"):
        kvq.bind_calibration(kvq.build_method("spinquant", bits=2), model, file)
    with pytest.raises(Unsupported, match="method=kivi: calibrates nothing"):
        kvq.bind_calibration(kvq.build_method("kivi", bits=2), model, file)
    with pytest.raises(DataError, match="nowhere"):
        kvq.bind_calibration(method, model, tmp_path / "nowhere")


def test_calibration_text_is_apart_from_the_text_under_test() -> None:
    for kind in ("pydocs", "pysource"):
        calibration, test = (load_corpus(kind, split).documents for split in ("calibration", "test"))
        assert len(" ".join(calibration)) > 500_000
        assert not set(calibration) & set(test)
    assert dataset_of(CalibrationConfig("pydocs")).split == "calibration"
    assert dataset_of(CalibrationConfig("wikitext2")).split == "train"
    with pytest.raises(ConfigError, match=r"c4: it names files without a training side; give"):
        dataset_of(CalibrationConfig("c4"))
    with pytest.raises(ConfigError, match=r"method\.calibration\.split=test: never"):
        CalibrationConfig("pydocs", split="test")


def test_calibration_modules_are_training_modules() -> None:
    sources = {
        path.read_text(encoding="utf-8").strip() for name, path in find_modules().items() if is_in_split(name, "test")
    }
    assert not sources & set(load_corpus("pysource", "calibration").documents)


def test_too_little_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words " * 20, encoding="utf-8")
    tokenizer = resolve(compose([f"model.path={save_random_model(tmp_path / 'm')}"]))
    from kvq.models.load import load_tokenizer

    settings = CalibrationConfig("wikitext2", path=str(tmp_path / "short.txt"), samples=9, length=64)
    with pytest.raises(DataError, match=r"method\.calibration\.samples=9: the text of wikitext2 has 3 windows of 64"):
        calibration_text(settings, load_tokenizer(tokenizer.model))


def test_a_mixture_has_windows_of_each_text(given: list[str], tmp_path: Path) -> None:
    """Those that each text alone would give; what cannot be mixed is said."""
    (tmp_path / "own.txt").write_text(" ".join(f"{root} cubed is {root**3};" for root in range(300)), encoding="utf-8")
    run = [*given, "method=waterfill", "method.calibration.length=24", "method.calibration.samples=5"]

    def windows(dataset: str, samples: int, *more: str) -> torch.Tensor:
        own = [f"method.calibration.dataset={dataset}", f"method.calibration.samples={samples}", *more]
        text = load_text(inputs_of([*run, "method.calibration.path=null"], *own))
        assert text is not None
        return text.windows

    path = f"method.calibration.path={tmp_path / 'own.txt'}"
    found = windows("text+pydocs", 5, path)
    assert torch.equal(found, torch.cat([windows("text", 3, path), windows("pydocs", 2)]))
    for dataset, more, told in (
        ("pydocs+pydocs", [], "each text once"),
        ("pydocs+pysource+text", [path, "method.calibration.samples=2"], "samples=2"),
        ("pydocs+pysource", [path], "path is that of its part text"),
        ("pydocs+text", [], "path is that of its part text"),
        ("pydocs+pydoc", [], "pydoc"),
    ):
        with pytest.raises(ConfigError, match=told):
            windows(dataset, 5, *more)


def test_a_calibration_takes_the_first_documents_of_web_text(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`fineweb_edu` asks the hub for its training split, streamed; windows are those of a local copy of these rows."""
    asked, read = [], []

    def documents() -> Any:
        for number in range(2000):
            read.append(f"document {number} of the web.")
            yield {"text": read[-1], "url": "", "score": 3.1}

    def answer(*args: object, **settings: object) -> datasets.IterableDataset:
        asked.append((args, settings))
        return datasets.IterableDataset.from_generator(documents)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    Inputs._held.clear()
    run = [*given, "method=waterfill", "method.calibration.path=null", "method.calibration.dataset=fineweb_edu"]
    text = load_text(inputs_of(run))
    assert text is not None
    assert asked == [
        (("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"data_files": None, "split": "train", "streaming": True})
    ]
    assert 1000 <= len(read) <= 1001  # the library looks one ahead
    inputs = inputs_of(run)
    ids = torch.tensor(encode(inputs.tokenizer, "\n\n".join(read[:1000])))
    windows = ids[: len(ids) // 64 * 64].view(-1, 64)
    assert text.windows.shape == (3, 64)
    assert all(bool((windows == window).all(1).any()) for window in text.windows)
    assert (
        text.fingerprint == calibration_text(inputs.config.method.calibration, inputs.tokenizer, inputs.bos).fingerprint
    )
    Inputs._held.clear()


def test_a_text_is_tokenized_once_for_all_calibrations(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[tuple[object, ...]] = []

    def counted(*words: Any) -> Any:
        loads.append(words)
        return load_tokens(*words)

    monkeypatch.setattr(text_module, "load_tokens", counted)
    Inputs._held.clear()
    sizes = [[], ["method.calibration.samples=2"], ["method.calibration.seed=5"], ["method.calibration.length=48"], []]
    found = [load_text(inputs_of([*given, "method=kvquant"], *size)).fingerprint for size in sizes]  # type: ignore[union-attr]
    assert (len(loads), len(set(found)), found[0] == found[-1]) == (1, 4, True)
    Inputs._held.clear()
    again = load_text(inputs_of([*given, "method=kvquant"], *sizes[3]))
    assert again is not None
    assert again.fingerprint == found[3]


def test_tasks_that_read_no_model_say_so(given: list[str], tmp_path: Path) -> None:
    run = ["task=synthetic", "dataset=pydocs", "method=kvquant", "bits=2", "model=tiny", f"results_dir={tmp_path}"]
    assert main(run) == 1
    (record,) = [r for r in Store(tmp_path).scan()[0] if r.method == "kvquant"]
    assert record.status == "unsupported"
    assert "reads no model to calibrate method=kvquant on" in (record.reason or "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_too(given: list[str], tmp_path: Path) -> None:
    for folder in ("one", "two"):
        assert main([*given, "method=cq", "device=cuda", f"results_dir={tmp_path / folder}"]) == 0
    (one,), (two,) = (calibrations(tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
