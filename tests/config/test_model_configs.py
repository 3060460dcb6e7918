"""Every model that the papers' results name has a config, or a reason why not."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from kvq.config import ModelConfig, compose, conf_dir, resolve
from kvq.config.choices import choices_in

CONFIGS = {
    "DeepSeek-R1-Distill-Llama-8B": "deepseek_r1_distill_llama_8b",
    "GPT-J-6B": "gpt_j_6b",
    "Gemma-4-E4B": "gemma_4_e4b",
    "LLaMA2-13B": "llama_2_13b",
    "LLaMA2-13B-Chat": "llama_2_13b_chat",
    "LLaMA2-7B": "llama_2_7b",
    "LLaMA2-7B-Chat": "llama_2_7b_chat",
    "LLaMA3-8B": "llama_3_8b",
    "LLaMA3-8B-Instruct": "llama_3_8b_instruct",
    "LLaMA3.1-8B": "llama_3_1_8b",
    "LLaMA3.1-8B-Instruct": "llama_3_1_8b_instruct",
    "LLaVA-v1.6-vicuna-7B": "llava_v1_6_vicuna_7b",
    "Llama-3.1-8B": "llama_3_1_8b",
    "Mistral-7B-Instruct-v0.3": "mistral_7b_v0_3_instruct",
    "Mistral-7B-v0.1": "mistral_7b_v0_1",
    "Mistral-7B-v0.3": "mistral_7b_v0_3",
    "Pythia-6.9B": "pythia_6_9b",
    "Qwen2-7B": "qwen2_7b",
    "Qwen2.5-14B": "qwen2_5_14b",
    "Qwen3-8B": "qwen3_8b",
    "Qwen3-Omni-30B-A3B": "qwen3_omni_30b_a3b",
    "Qwen3-VL-4B": "qwen3_vl_4b",
    "Qwen3-VL-8B": "qwen3_vl_8b",
    "Qwen3.5-9B": "qwen3_5_9b",
    "TinyLlama-1.1B-Chat": "tinyllama_1_1b_chat",
    "distilgpt2": "distilgpt2",
    "gpt2-medium": "gpt2_medium",
}
"""The papers' spelling of a model -> conf/model."""
WITHOUT_NUMBERS = {
    "llama_3_1_70b": {"OScaR's review"},
    "qwen2_5_1_5b": {"nsn"},
    "qwen2_5_3b": {"nsn"},
    "qwen2_5_7b": {"nsn"},
}
"""Models that a source names without a result -> the sources."""
GAPS = {
    "8 models": "a correlation over nsn's eight models, each of which is named on its own",
    "Llama-3.1-8B + Qwen2-7B + Qwen2.5-14B pooled": "three models, each of which is named on its own",
}
OWN = {"gemma3_270m", "hf", "smollm2_135m", "tiny", "tiny_hard", "tiny_outliers", "tiny_sinks"}
PAPERS = {"nsn": "nsn", "nsnquant": "NSNQuant", "oscar": "OScaR", "kvquant-plus-plus": "kvquant-plus-plus"}
CHOICES = [choice for choice in choices_in(conf_dir()) if choice.group == "model"]
MODELS = {choice.name: choice for choice in CHOICES if choice.name not in OWN}


@pytest.fixture(scope="module")
def uses(shared_data: Path) -> dict[str, set[str]]:
    """The papers that have results of each model."""
    file = shared_data.parent / "reference" / "paper_results.csv"
    if not file.is_file():
        pytest.skip(f"needs the papers' results; {file.parent.name}/{file.name} not found beside the real data sets")
    found: dict[str, set[str]] = {}
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["model"]:  # some results, such as a ratio of bytes, are of no model
                found.setdefault(row["model"], set()).add(row["paper"])
    return found


def test_every_model_of_the_papers_has_a_config_or_a_reason(uses: dict[str, set[str]]) -> None:
    assert set(uses) == set(CONFIGS) | set(GAPS)
    assert not set(CONFIGS) & set(GAPS)


def test_a_config_names_the_papers_that_use_it(uses: dict[str, set[str]]) -> None:
    expected: dict[str, set[str]] = {}
    for spelling, name in CONFIGS.items():
        expected.setdefault(name, set()).update(PAPERS[paper] for paper in uses[spelling])
    expected |= WITHOUT_NUMBERS
    found = {}
    for name, choice in MODELS.items():
        match = re.search(r"\((.*?)\)(?=[.:])", choice.about.replace("(GPT-NeoX)", ""))
        assert match, name
        found[name] = set(match[1].split(", "))
    assert found == expected


def test_every_config_is_of_some_paper() -> None:
    assert set(MODELS) == set(CONFIGS.values()) | set(WITHOUT_NUMBERS)


@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_it_is(name: str) -> None:
    given = MODELS[name].read()
    assert list(given) == ["name", "path", "revision", "dtype", "context", "bos"]
    # These families write no begin-of-text token.
    assert given["bos"] is not name.startswith(("distilgpt2", "gpt", "pythia", "qwen"))
    assert given["name"] == name
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", name)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", given["path"])
    assert given["dtype"] in ("bfloat16", "float16", "float32")
    assert 1024 <= given["context"] <= 262144
    assert given["context"] % 1024 == 0
    assert given["revision"] is None
    assert 0 < len(MODELS[name].about) <= 138
    # Its size, as its hub id gives it.
    size = re.search(r"\d+(\.\d+)?b", given["path"].lower())
    assert size is None or size[0] in MODELS[name].about.lower()
    model = resolve(compose([f"model={name}", "task.context=1024", "task.stride=512"])).model
    assert isinstance(model, ModelConfig)
    assert (model.name, model.path, model.context) == (name, given["path"], given["context"])


def test_no_two_configs_are_the_same_model() -> None:
    paths = [choice.read()["path"].lower() for choice in MODELS.values()]
    assert len(set(paths)) == len(paths) == 30
