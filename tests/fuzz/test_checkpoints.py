"""Checkpoints with random faults in their files and settings: an answer or one line, no traceback, no wait, no bomb."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.results import Store
from tests.fuzz.amounts import pieces
from tests.fuzz.odd_records import ODD, changed
from tests.fuzz.test_commands import fail_of, here, torn
from tests.sweeps import small_run

pytestmark = [pytest.mark.fuzz, pytest.mark.slow, pytest.mark.timeout(7200)]
DTYPES = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float16, torch.bfloat16]
DTYPES += [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [0, -1, 1, 3, 7, 10**4, 10**6, 10**9, 10**12, 2**31, 2**63, 2**70, 0.5, "3", None, [1], True]
QUANTIZED: list[Any] = [{}, [], "fp8", {"bits": 4}, {"quant_method": "none"}, {"quant_method": "gptq"}]
QUANTIZED += [{"quant_method": name} for name in ("fp8", "awq", "bitsandbytes", "compressed-tensors", "hqq", 5)]
PLACES = ["a.safetensors", "deep/a.safetensors", "../a.safetensors", "/etc/passwd", "", ".", "a" * 300, "\0", 5, None]
WEIGHTS = "model.safetensors"
Fault = Callable[[Path, random.Random], None]


def odd_weights(folder: Path, rng: random.Random) -> None:
    """Weights of another dtype or shape, without numbers, missing or too many, in either format."""
    weights = load_file(folder / WEIGHTS)
    for name in rng.sample(sorted(weights), rng.choice([1, 1, 2, len(weights)])):
        kind = rng.choice(["dtype", "dtype", "shape", "nan", "gone", "more", "empty"])
        if kind == "dtype":
            weights[name] = weights[name].to(rng.choice(DTYPES))
        elif kind == "shape":
            weights[name] = weights[name].float()[..., :-1].contiguous()
        elif kind == "nan":
            weights[name] = torch.full_like(weights[name], rng.choice([torch.nan, torch.inf, 0.0, 60000.0]))
        elif kind == "gone":
            del weights[name]
        elif kind == "more":
            tail = rng.choice(["bias", "attn.bias", "self_attn.bias", "masked_bias", "rotary_emb.inv_freq", "odd"])
            weights[f"{name.rpartition('.')[0]}.{tail}"] = torch.ones(rng.choice([(1,), (48,), (1, 1, 4, 4)]))
        else:
            weights[name] = torch.empty(0)
    if rng.random() < 0.3:
        (folder / WEIGHTS).unlink()
        torch.save(weights if rng.random() < 0.8 else [weights], folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def odd_settings(folder: Path, rng: random.Random) -> None:
    """One to three settings of `config.json` of another size, kind or meaning."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.7:
            config[rng.choice(sorted(config))] = rng.choice(SIZES if rng.random() < 0.7 else ODD)
        else:
            config |= rng.choice(
                [{"quantization_config": rng.choice(QUANTIZED)}, {"transformers_weights": rng.choice(PLACES)}]
            )
    path.write_text(json.dumps(config), encoding="utf-8")


def odd_words(folder: Path, rng: random.Random) -> None:
    """A tokenizer with ids, tokens or rules that do not fit, or without a file."""
    path = folder / rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    words = json.loads(path.read_text(encoding="utf-8"))
    kind = rng.choice(["ids", "added", "changed", "changed", "gone", "empty"])
    if kind == "ids" and "model" in words:
        words["model"]["vocab"] |= {rng.choice("abcdefgh 1234"): rng.choice([256, 10**6, 2**31])}
    elif kind == "added" and "model" in words:
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
        words["added_tokens"].append(
            flags | {"id": rng.choice([3, 256, 10**6]), "content": rng.choice(["is", " the ", ""])}
        )
    else:
        words = changed(words, rng)
    if kind == "gone":
        path.unlink()
    else:
        path.write_text("" if kind == "empty" else json.dumps(words), encoding="utf-8")


def odd_index(folder: Path, rng: random.Random) -> None:
    """An index in the place of the weights, which names files here, elsewhere or nowhere."""
    weights = load_file(folder / WEIGHTS)
    if rng.random() < 0.8:
        (folder / WEIGHTS).unlink()
    (folder / "deep").mkdir()
    for place in (folder / "a.safetensors", folder / "deep/a.safetensors"):
        save_file(weights, place, metadata={"format": "pt"})
    places = [rng.choice(PLACES[: rng.choice([1, 2, len(PLACES)])]) for _ in range(2)]
    index: Any = {"metadata": {}, "weight_map": {name: rng.choice(places) for name in weights}}
    index = index if rng.random() < 0.8 else changed(index, rng)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")


def odd_files(folder: Path, rng: random.Random) -> None:
    """A pipe, a folder or a link in the place of a file."""
    path = folder / rng.choice([*sorted(file.name for file in folder.iterdir()), "extra.bin", "delta.json", "a.json"])
    path.unlink(missing_ok=True)
    kind = rng.choice(["fifo", "folder", "nothing", "itself", "device"])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"nothing": "nowhere", "itself": path.name, "device": "/dev/zero"}[kind])


def odd_bytes(folder: Path, rng: random.Random) -> None:
    """Bytes cut short, turned, repeated or put in between; of weights also a header of another length."""
    path = rng.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    if path.name == WEIGHTS and rng.random() < 0.5:
        path.write_bytes(rng.choice([0, 10, 10**6, 10**8, 2**62, 2**64 - 1]).to_bytes(8, "little") + content[8:])
    else:
        path.write_bytes(torn(content, rng))


FAULTS: list[Fault] = [odd_weights, odd_settings, odd_words, odd_index, odd_files, odd_bytes]


@pytest.mark.parametrize(("seed", "count"), pieces(full=200, quick=12, most=50))
def test_checkpoints_with_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, count: int) -> None:
    rng = random.Random(f"checkpoints {seed}")
    base = [*small_run(tmp_path), "task.max_windows=1", "method=rtn", "bits=2", "threads=1"]
    kept = [word for word in base if not word.startswith("model.path=")]
    wrong: list[str | None] = []
    for number in range(count):
        odd, fault = tmp_path / f"odd{number}", FAULTS[number % len(FAULTS)]
        shutil.copytree(tmp_path / "model", odd)
        fault(odd, rng)
        results = tmp_path / "results" / str(number)
        words = [*kept, f"model.path={odd}", f"results_dir={results}"]
        found = here(words, capsys)
        wrong.append(None if found is None else f"{fault.__name__} {found}")
        assert not Store(results).scan()[1]
        shutil.rmtree(odd)
    fail_of(wrong)
