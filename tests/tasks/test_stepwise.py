"""Evicting methods score token by token, or after a prompt; plans only as tokens come."""

import pytest
import torch

from kvq.config import PplConfig, Scoring, Windows
from kvq.config.tasks import Prefill
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.tasks.ppl import ppl_windows, run_ppl
from kvq.tasks.reader import Reader, check_prefill
from kvq.tasks.scoring import scoring_bounds
from tests.random_models import in_double_precision, random_llama, token_ids
from tests.tasks.test_scoring import token_by_token


def method(name, *overrides):
    window = ["eviction.window=4"] if name.startswith("snapkv") else []
    given = ["eviction.budget=12", "eviction.least=9", *window, *overrides]
    return build_method(name, bits=4, head_dim=32, overrides=given)


def ppl(context, **settings):
    return PplConfig(windows=Windows.disjoint, context=context, batch_size=1, **settings)


@pytest.mark.parametrize("name", ["h2o", "streamingllm"])
def test_generation_is_token_by_token(name, monkeypatch):
    loaded = in_double_precision(random_llama(), monkeypatch)
    tokens, task = token_ids(40), ppl(40)
    assert scoring_bounds(method(name), 3) == [(0, 1), (1, 2), (2, 3)]
    logs = token_by_token(loaded, method(name), tokens)
    expected = -logs[0].gather(-1, tokens[0, 1:, None]).sum()
    result = run_ppl(loaded, method(name), ppl_windows([tokens[0]], task), task)
    assert result.scores[0].nll == pytest.approx(float(expected), abs=1e-9)
    assert result.storage["effective_bits"] == 64 * 12 / 39
    full = run_ppl(loaded, method(name, "eviction.budget=64"), ppl_windows([tokens[0]], task), task)
    assert abs(full.nll - result.nll) > 1e-4


@pytest.mark.parametrize("name", ["snapkv", "h2o/prompt", "streamingllm/kivi"])
def test_behind_a_prompt(name):
    with pytest.raises(Unsupported, match="evicts tokens; needs tokens one by one"):
        scoring_bounds(method(name), 30)
    with pytest.raises(Unsupported, match=r"task\.prefill=chunked"):
        check_prefill(method(name), Prefill.chunked)
    loaded, tokens = random_llama(), token_ids(60)
    task = ppl(60, scoring=Scoring.continuation, prompt=41)
    result = run_ppl(loaded, method(name), ppl_windows([tokens[0]], task), task)
    assert result.scores[0].tokens == 19
    kept = 12 + 19 if "/kivi" not in name else None
    assert kept is None or result.storage["effective_bits"] == pytest.approx(32 * kept / 59)


@pytest.mark.every_plugin
def test_a_prompt_is_read_at_once_and_its_last_token_behind_it():
    reader = Reader(random_llama(), method("snapkv"), Prefill.whole)
    cache, logits = reader.begin(token_ids(40))
    assert (cache.get_seq_length(), cache.layers[0].key.tokens) == (40, 13)
    rows = reader.write(cache, logits, 5, lambda row: False)
    assert (len(rows[0]), cache.get_seq_length()) == (5, 44)


@pytest.mark.every_plugin
def test_chunked_reading_under_h2o_is_token_by_token():
    loaded, tokens = random_llama(), token_ids(30)
    cache, logits = Reader(loaded, method("h2o"), Prefill.chunked).begin(tokens)
    expected = token_by_token(loaded, method("h2o"), torch.cat([tokens, tokens[:, :1]], 1))[:, -1]
    torch.testing.assert_close(torch.log_softmax(logits, -1), expected)
    assert cache.layers[0].key.tokens == 12
