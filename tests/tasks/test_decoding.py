"""How an answer's next token is chosen: the generation settings that are followed, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from kvq.config import compose, resolve
from kvq.config.tasks import Prefill
from kvq.errors import ConfigError
from kvq.methods.build import method_of
from kvq.models.inputs import Inputs
from kvq.tasks.lm_eval_model import FOLLOWED, PROCESSORS, CacheLM, decoder, processors_of
from kvq.tasks.reader import Reader

ACTING: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.6, "min_p": 0.2}


def new_model() -> CacheLM:
    inputs = Inputs(resolve(compose(["model=tiny", "method=fp16"])))
    reader = Reader(inputs.model, method_of(inputs.config, *inputs.head_dims), Prefill.chunked)
    return CacheLM(reader, inputs.tokenizer, max_length=inputs.longest_context)


@pytest.fixture(scope="module")
def model() -> CacheLM:
    return new_model()


def answers(model: CacheLM, count: int = 1, **given: Any) -> list[str]:
    text = "The colour of the sky is blue. The colour of the sun is"
    given = {"max_gen_toks": 8, "until": [], "do_sample": False, **given}
    return model.generate_until([Instance("generate_until", {}, (text, given), 0, ("t", 0, 1)) for _ in range(count)])


@pytest.mark.parametrize("name", PROCESSORS)
def test_scores_are_those_of_transformers(model: CacheLM, name: str) -> None:
    """Of each setting that is followed, step by step on what transformers' own generation writes."""
    ends, prompt = model._until_end, torch.arange(40)[None]
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, name: ACTING[name]}
    theirs = model.model.generate(
        prompt,
        generation_config=GenerationConfig(max_new_tokens=6, eos_token_id=ends, pad_token_id=0, **settings),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    change, changed = processors_of(settings), False
    for logits, scores in zip(theirs.logits, theirs.scores, strict=True):
        ours = change(torch.LongTensor([[]]), logits.double())
        torch.testing.assert_close(ours.float(), scores.float(), rtol=1e-4, atol=1e-4)
        changed |= not torch.equal(logits, scores)
    assert changed
    assert ACTING.keys() == PROCESSORS.keys() < {*FOLLOWED}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({key: value}, rf"{key}=.*: cannot be followed; what can is do_sample, until") for key, value in {
            "num_beams": 4, "num_return_sequences": 2, "use_cache": False, "guidance_scale": 2.0, "max_length": 9,
            "stop_strings": ["a"], "penalty_alpha": 0.5, "forced_eos_token_id": 3, "return_dict_in_generate": True,
        }.items()),
        ({"temprature": 2.0}, r"temprature=2.0: cannot be followed; .* Did you mean 'temperature'\?"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: at least 1"),
        ({"do_sample": True}, "do_sample=true: needs a temperature above 0"),
        ({"do_sample": True, "temperature": -1}, "needs a temperature above 0"),
        ({"do_sample": True, "temperature": 1, "top_p": 2.0}, "generation_kwargs: .*top_p"),
        ({"do_sample": True, "temperature": "hot"}, "generation_kwargs: could not convert string to float"),
    ],
)  # fmt: skip
def test_what_generation_cannot_follow_is_refused(model: CacheLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answers(model, **given)


def test_what_asks_for_nothing_else_is_taken(model: CacheLM) -> None:
    plain = answers(model)
    same = {"num_beams": 1, "use_cache": True, "top_p": None, "early_stopping": False}
    assert answers(model, **same) == plain


def test_repeats_are_as_many_draws(model: CacheLM) -> None:
    sampled = {"do_sample": True, "temperature": 1.0}
    drawn = answers(model, 6, **sampled)
    assert len(set(drawn)) > 3
    assert drawn == answers(model, 6, **sampled)
    assert drawn[:2] == answers(new_model(), 2, **sampled)
    assert len(set(answers(model, 3))) == 1


def test_sampling_draws_from_the_nucleus_at_its_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    sampler = decoder(settings, seed=3)
    drawn = torch.cat([sampler(logits) for _ in range(4000)])
    scaled = torch.softmax(logits.double() / 0.7, -1)[0]
    kept = torch.where(scaled.cumsum(0) - scaled < 0.9, scaled, 0)  # they are in descending order
    expected = kept / kept.sum()
    counts = torch.bincount(drawn, minlength=5) / 4000
    assert (counts[expected == 0] == 0).all()
    assert (counts - expected).abs().max() < 0.03
    again = decoder(settings, seed=3)
    assert torch.cat([again(logits) for _ in range(20)]).tolist() == drawn[:20].tolist()
    assert int(decoder({"do_sample": True, "top_k": 1})(logits)) == 0
