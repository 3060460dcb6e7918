"""The training of the embedded model: its loss is transformers', its runs can be interrupted and lengthened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "kvq" / "models" / "tiny"


@pytest.fixture(autouse=True)
def _experiments(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments" / "models")


@pytest.fixture
def recipe():
    from tiny_model.recipe import Recipe, Stage

    first = Stage(4096, (128,), (1.0,), retrieval=0.25, copies=0.5, pieces=(1,))
    middle = Stage(None, (128, 256), (0.5, 0.5), retrieval=0.25, copies=0.2, pieces=(1,))
    last = Stage(4096, (256,), (1.0,), retrieval=0.25, pieces=(1,), rate=0.0)
    return Recipe(
        tokens=14_336,
        precision="fp32",
        hidden=32,
        intermediate=32,
        layers=1,
        step_tokens=1024,
        part_tokens=256,
        warmup_steps=2,
        stages=(first, middle, last),
    )


@pytest.fixture
def data(tmp_path):
    from tiny_model.corpus import TrainingData

    folder = tmp_path / "0123456789abcdef"
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    rng = np.random.default_rng(0)
    for kind, size in (("pydocs", 20_000), ("pysource", 30_000)):
        np.save(folder / f"{kind}.npy", rng.integers(1, 4096, size).astype(np.uint16))
    return TrainingData.open(tmp_path, folder.name)


@pytest.mark.parametrize("length", [40, 600])
def test_losses_are_those_of_transformers(recipe, length):
    from tiny_model.network import build_model, token_losses

    model = build_model(replace(recipe, hidden=64, layers=2), 256)
    tokens = torch.randint(0, 256, (2, length + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens[:, :-1], use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        assert torch.allclose(token_losses(model, "fp32", compiled=False)(tokens), expected, atol=1e-5)
        rounded = token_losses(model, "bf16", compiled=False)(tokens)
    assert 0 < (rounded - expected).abs().max() < 0.05


def test_a_longer_run_begins_as_a_shorter_one(recipe):
    longer = replace(recipe, tokens=2 * recipe.tokens)
    assert recipe.ends() == [4096, 10_240, 14_336]
    assert longer.ends() == [4096, 24_576, 28_672]
    for tokens in range(0, recipe.ends()[1], 512):
        step = tokens // 1024
        assert recipe.stage(tokens) == longer.stage(tokens)
        assert recipe.rate(step, tokens) == longer.rate(step, tokens)
        assert recipe.length(step, tokens) == longer.length(step, tokens)
    assert [recipe.rate(99, tokens) for tokens in (10_240, 12_288, 14_336)] == [1, 0.5, 0]


def test_text_is_read_once_before_it_is_read_again(recipe, data):
    from tiny_model.corpus import Sampler

    length = 256
    stage = replace(recipe.stages[1], retrieval=0.0, prose=1.0)
    sampler, again = Sampler(data, recipe), Sampler(data, recipe)
    parts, rows = recipe.parts(length)
    sequences = (20_000 - 1) // length - 1
    drawn, read = [], 0
    for step in range(sequences // (parts * rows)):
        for part in range(parts):
            batch = sampler.part(step, part, stage, length, read)
            assert np.array_equal(batch.tokens, again.part(step, part, stage, length, read).tokens)
            drawn += [row[:-1].tobytes() for row in batch.tokens]
        read += parts * rows
    assert len(set(drawn)) == len(drawn) == read


def test_answers_weigh_more_than_the_text_around_them(recipe, data):
    from tiny_model.corpus import Sampler

    stage = replace(recipe.stages[2], retrieval=1.0, answer_weight=7.0)
    batch = Sampler(data, recipe).part(0, 0, stage, 256, 0)
    assert batch.text_rows == 0
    pairs = zip(batch.tokens, batch.weights, strict=True)
    answered = [data.tokenizer.decode(row[1:][weights == 7]) for row, weights in pairs]
    assert all(char.isdigit() or char in " ." for char in "".join(answered))
    assert all(any(char.isdigit() for char in text) for text in answered)


@pytest.mark.long
def test_an_interrupted_run_and_one_of_another_number_of_workers_give_the_same_weights(recipe, data, tmp_path):
    from tiny_model import training

    whole = training.train(recipe, data, tmp_path, workers=1, resume=False, compiled=False)
    state = training.final_state(tmp_path)
    assert state.tokens == recipe.tokens
    assert sum(length * number for length, number in state.read.items()) == recipe.tokens
    # Stopped within the middle stage: no step of these 8192 tokens sees the last one.
    stopped = replace(recipe, tokens=8192, stages=(*recipe.stages[:2], replace(recipe.stages[2], tokens=1)))
    training.train(stopped, data, tmp_path, workers=2, resume=False, compiled=False)
    resumed = training.train(recipe, data, tmp_path, workers=2, resume=True, compiled=False)
    for (name, weight), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        # Where a gradient is next to nothing, the order of a sum decides its sign and with it a whole step.
        assert torch.isclose(weight, other, atol=2e-3).float().mean() > 0.999, name
