"""The training of the sink: what its loss asks for, runs that go on, and weights that load as they were trained."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "kvq" / "models"


@pytest.fixture(autouse=True)
def _experiments(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments" / "models")


@pytest.fixture
def recipe():
    from tiny_model.recipe import Stage
    from tiny_model.sinks import SinkRecipe

    stages = (
        Stage(None, (64, 128), (0.5, 0.5), retrieval=0.0),
        Stage(1024, (128,), (1.0,), retrieval=0.0, rate=0.0),
    )
    return SinkRecipe(
        tokens=3072,
        precision="fp32",
        hidden=32,
        intermediate=32,
        layers=2,
        step_tokens=256,
        part_tokens=128,
        warmup_steps=2,
        rank=4,
        heads=4,
        stages=stages,
    )


@pytest.fixture
def base(recipe):
    from tiny_model.network import build_model

    model = build_model(recipe, 4096).eval()
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)  # also the row of padding, the token in front
    return model


@pytest.fixture
def data(tmp_path, monkeypatch):
    from tiny_model import sinks_training
    from tiny_model.corpus import TrainingData

    rng = np.random.default_rng(0)
    folder = tmp_path / "0123456789abcdef"
    AutoTokenizer.from_pretrained(MODELS / "tiny").save_pretrained(folder)
    for kind, size in (("pydocs", 8000), ("pysource", 8000)):
        np.save(folder / f"{kind}.npy", rng.integers(1, 4096, size).astype(np.uint16))
    watched = torch.from_numpy(rng.integers(1, 4096, 256))
    monkeypatch.setattr(sinks_training, "WATCHED", (2, 128))
    monkeypatch.setattr(sinks_training, "held_out_tokens", lambda tokenizer, kind: watched)
    return TrainingData.open(tmp_path, folder.name)


def train(recipe, data, base, folder, resume=False):
    from tiny_model.sinks_training import train_sinks

    return train_sinks(recipe, data, base, folder, resume, compiled=False)


def test_before_training_it_is_the_model_that_it_changes(recipe, base):
    from tiny_model.sinks import adapt, losses

    model = copy.deepcopy(base)
    trained = adapt(model, recipe)
    tokens = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens).logits, base(tokens).logits)
    with torch.no_grad():
        divergence, sink, _ = losses(model, base, recipe, tokens, torch.ones(2, 39), 0)
    assert 0 < float(divergence) < 0.1  # the token in front alone
    assert float(sink) > 0.3 * np.log(12) / 2  # no sink yet: ratios are about 1
    matrices = {name.split(".parametrizations")[0] for name in trained if name.endswith(".left")}
    assert len(matrices) == 7 * recipe.layers


def test_ratios_and_shares_are_those_of_eager_attention(recipe, base):
    from tiny_model.network import token_logits
    from tiny_model.sinks import norm_ratios, sink_masses

    tokens = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    attended: list = []
    with torch.no_grad():
        token_logits(base, tokens, torch.float32, attended)
        base.set_attn_implementation("eager")
        found = base(tokens, output_attentions=True, use_cache=True)
    shares = torch.stack([weights[:, :, 1:, 0].mean((0, 2)) for weights in found.attentions])
    torch.testing.assert_close(sink_masses(attended, queries=40), shares, rtol=1e-4, atol=1e-6)
    for ratios, layer in zip(norm_ratios(attended), found.past_key_values.layers, strict=True):
        norms = torch.stack((layer.keys, layer.values)).norm(dim=-1)
        expected = (norms[..., 0] / norms[..., 1:].median(-1).values).log().mean(1).exp()
        torch.testing.assert_close(ratios, expected)


def test_a_run_that_was_stopped_goes_on(recipe, data, base, tmp_path):
    """Stopped in the first stage, whose steps do not depend on where the run ends."""
    whole = train(recipe, data, base, tmp_path)
    stopped = replace(recipe, tokens=1024, stages=(recipe.stages[0], replace(recipe.stages[1], tokens=1)))
    train(stopped, data, base, tmp_path)
    resumed = train(recipe, data, base, tmp_path, resume=True)
    assert resumed.state.tokens == whole.state.tokens == recipe.tokens
    for name, weight in whole.trained.items():
        torch.testing.assert_close(weight, resumed.trained[name], msg=name)


def test_what_was_trained_is_what_is_loaded(recipe, data, base, tmp_path):
    """To the rounding of factors and sums to fp16."""
    from tiny_model.network import token_logits
    from tiny_model.sinks import changes

    from kvq.config import ModelConfig
    from kvq.models import load_model
    from kvq.models.weights import save_delta

    whole, part = tmp_path / "base", tmp_path / "part"
    part.mkdir()
    for parameter in base.parameters():
        parameter.data = parameter.half().float()
    run = train(recipe, data, base, tmp_path)
    copy.deepcopy(base).half().save_pretrained(whole)
    AutoTokenizer.from_pretrained(MODELS / "tiny").save_pretrained(whole)
    save_delta(changes(run.trained), whole, part)
    (part / "delta.json").write_text(json.dumps({"base": str(whole)}))
    loaded = load_model(ModelConfig("a", str(part)), "cpu").model
    tokens = torch.randint(1, 4096, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens[0, 0] = 0
    with torch.no_grad():
        models = (run.model, run.base, loaded)
        wanted, unchanged, found = (token_logits(model, tokens, torch.float32) for model in models)
    assert (wanted - unchanged).abs().max() > 20 * (wanted - found).abs().max()


def test_the_card_is_that_of_the_recipe_in_the_repository():
    from tiny_model.sinks import SinkRecipe

    card = json.loads((MODELS / "tiny_sinks" / "card.json").read_text())
    assert card["recipe"] == json.loads(json.dumps(asdict(SinkRecipe())))
    assert sum(int(length) * number for length, number in card["sequences"].items()) >= card["recipe"]["tokens"]
