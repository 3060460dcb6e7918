"""Checkpoints are read whole or refused by name, and their own code runs only when it is asked for."""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq.config import ModelConfig, compose, resolve
from kvq.config.identity import canonical
from kvq.errors import DataError
from kvq.models.load import load_model, load_tokenizer, model_fingerprint
from tests.families import FAMILIES, family
from tests.random_models import save_random_model, token_ids

SOME = ["llama", "qwen2", "gemma3", "gpt2", "gpt_neox"]
Weights = dict[str, Tensor]


def saved(folder: Path, name: str, change: Callable[[Weights], Weights] = lambda weights: weights) -> ModelConfig:
    """A random model of a family in `folder`, its weights changed."""
    family(name).model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return ModelConfig("a", str(folder))


@pytest.mark.parametrize("name", [*FAMILIES, "mpt"])
def test_whole_checkpoints_load(tmp_path: Path, name: str) -> None:
    """Also where weights are tied, and so stand in the file once."""
    loaded = load_model(saved(tmp_path, name), "cpu")
    tokens = token_ids(20)
    torch.testing.assert_close(
        loaded.model(tokens, use_cache=False).logits, family(name).model(tokens, use_cache=False).logits
    )


@pytest.mark.parametrize(
    ("name", "every"),
    [*((name, 4) for name in SOME), *(pytest.param(name, 1, marks=pytest.mark.long) for name in SOME)],
)
def test_every_missing_weight_is_named(tmp_path: Path, name: str, every: int) -> None:
    config = saved(tmp_path, name)
    weights = load_file(tmp_path / "model.safetensors")
    for left_out in list(weights)[::every]:
        rest = {key: value for key, value in weights.items() if key != left_out}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        named = re.escape(left_out.replace("embed_out", "lm_head"))  # which transformers renames
        with pytest.raises(DataError, match=rf"not the weights of its config\.json: missing .*{named}"):
            load_model(config, "cpu")


@pytest.mark.parametrize("name", SOME)
def test_weights_that_are_not_read_are_named(tmp_path: Path, name: str) -> None:
    config = saved(tmp_path, name, lambda weights: weights | {"model.layers.7.odd.weight": torch.ones(2)})
    with pytest.raises(DataError, match=r"unexpected \S*layers\.7\.odd\.weight$"):
        load_model(config, "cpu")


@pytest.mark.parametrize("name", SOME)
def test_weights_of_another_shape_are_named(tmp_path: Path, name: str) -> None:
    chosen = ""

    def longer(weights: Weights) -> Weights:
        nonlocal chosen
        chosen = next(key for key in weights if key.endswith("weight") and "norm" in key.replace("ln_", "norm"))
        return weights | {chosen: torch.ones(len(weights[chosen]) + 1)}

    config = saved(tmp_path, name, longer)
    with pytest.raises(DataError, match=rf"mismatched {re.escape(chosen)} \(\[\d+\], not \[\d+\]\)$"):
        load_model(config, "cpu")


def test_tied_weights_may_stand_in_the_file_twice(tmp_path: Path) -> None:
    twice = saved(tmp_path, "gemma3", lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    load_model(twice, "cpu")


@pytest.mark.parametrize(
    ("name", "buffer", "shape"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", [16]),
        ("gpt2", "transformer.h.0.attn.bias", [1, 1, 8, 8]),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", []),
        ("gptj", "transformer.h.0.attn.bias", [1, 1, 8, 8]),
        ("gptj", "transformer.h.1.attn.masked_bias", [1]),
    ],
)
def test_buffers_of_old_checkpoints_are_no_weights(tmp_path: Path, name: str, buffer: str, shape: list[int]) -> None:
    load_model(saved(tmp_path, name, lambda weights: weights | {buffer: torch.ones(shape)}), "cpu")


@pytest.mark.parametrize(
    "bias", ["model.layers.0.self_attn.bias", "model.layers.0.self_attention.bias", "model.layers.1.mlp.bias"]
)
def test_a_bias_that_the_model_lacks_is_no_buffer(tmp_path: Path, bias: str) -> None:
    config = saved(tmp_path, "llama", lambda weights: weights | {bias: torch.ones(48)})
    with pytest.raises(DataError, match=rf"unexpected {re.escape(bias)}$"):
        load_model(config, "cpu")


class _Pickled:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._mark,)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    save_random_model(tmp_path / "model")
    config = ModelConfig("a", str(tmp_path / "model"))
    weights, mark = tmp_path / "model/model.safetensors", tmp_path / "ran"
    whole = weights.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 4096):
        weights.write_bytes(content)
        with pytest.raises(DataError, match=r"^model\.path=.*: cannot be loaded: [^\n]+$"):
            load_model(config, "cpu")
    weights.unlink()
    (tmp_path / "model/pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Pickled(mark)}))
    with pytest.raises(DataError, match=r"^model\.path=.*: cannot be loaded: [^\n]+$"):
        load_model(config, "cpu")
    assert not mark.exists()


def test_what_loads_but_does_not_run_is_one_line(tmp_path: Path) -> None:
    path = save_random_model(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"return_dict": False}), encoding="utf-8")
    with pytest.raises(DataError, match=r"^model\.path=.*: loads, but fails on a text: [^\n]+$"):
        load_model(ModelConfig("a", str(tmp_path)), "cpu")


def test_code_of_a_model_runs_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "ran"
    folder = save_random_model(tmp_path / ("model" * 40))  # the error of transformers begins with it, twice
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "odd_llama", "auto_map": {"AutoConfig": "odd.OddConfig"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "odd.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n\n"
        f"Path({str(mark)!r}).touch()\n\n\nclass OddConfig(LlamaConfig):\n    model_type = 'odd_llama'\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    given = ModelConfig("a", str(folder))
    for load in (load_model, load_tokenizer):
        with pytest.raises(DataError, match=r"brings code of its own; model\.trust_remote_code=true runs it$"):
            load(given)
    assert not mark.exists()
    trusted = ModelConfig("a", str(folder), trust_remote_code=True)
    # The class of the model itself is not part of the folder: what matters is that its code ran.
    with pytest.raises(DataError):
        load_model(trusted, "cpu")
    assert mark.exists()
    assert model_fingerprint(given) != model_fingerprint(trusted)


def test_trust_is_part_of_what_a_run_measures() -> None:
    plain, trusted = (resolve(compose([f"model.trust_remote_code={given}"])) for given in ("false", "true"))
    assert "trust_remote_code" not in canonical(plain, "m", "d")["model"]
    assert canonical(trusted, "m", "d")["model"]["trust_remote_code"] is True
