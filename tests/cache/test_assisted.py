"""Prompt lookup and assisted decoding of `generate`: the greedy tokens, or refused before the first of them."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import LlamaForCausalLM

import kvq
from kvq.cache import KVCache
from kvq.errors import Unsupported
from kvq.methods.kept_keys import KeptKeys
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from tests.cache.states import nearest_bits
from tests.calibrated import bound, keeping, random_states
from tests.presets import NAMES, lacks_package
from tests.random_models import VOCABULARY, in_double_precision, llama

REFUSED = ["h2o", "snapkv", "streamingllm", "ott", "zipcache", "quanto", "hqq", "kvtc/all_layers"]
NEW, FEW = 10, 4
QUICK = ["kivi", "nsn", "cq/kept_comma", "kivi:residual=none", "rtn:residual=sliding sink_tokens=10"]


def layers_for(name: str) -> int:
    """Layers of the model: ott leaves the first two as they are."""
    return 3 if name.startswith("ott") else 2


@functools.cache
def built(given: str, layers: int | None = None) -> Method:
    """A method by its name and, behind a colon, overrides; with a small residual, for a model of so many layers."""
    name, _, more = given.partition(":")
    overrides = ["residual.size=6", *more.split()]
    method = kvq.build_method(name, bits=nearest_bits(name), head_dim=128, overrides=overrides)
    if method.needs_calibration:
        method = bound(method, random_states(2, 128), layers or layers_for(name))
    if (kept := method.policy("kept_keys")) is not None:
        method = keeping(method, KeptKeys((), kept.layers, (3, 17, 40)))
    return method


@pytest.fixture
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    return in_double_precision(LoadedModel(llama(layers_for(name)), torch.device("cpu")), monkeypatch).model


def prompt(seed: int) -> torch.Tensor:
    """Tokens in which some passages come back, so that there is something to look up."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(12, 36, (1,), generator=generator))
    passage = torch.randint(1, VOCABULARY, (1, length), generator=generator)
    start = int(torch.randint(0, length - 3, (1,), generator=generator))
    return torch.cat([passage, passage[:, start : start + int(torch.randint(2, 9, (1,), generator=generator))]], 1)


class Counted(KVCache):
    """A cache that remembers how many tokens each forward's `crop` takes back."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.removed = []

    def crop(self, tokens_to_remove):
        self.removed.append(-tokens_to_remove)
        super().crop(tokens_to_remove)


def generate(model, tokens, cache, new=NEW, **given):
    return model.generate(tokens, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0, **given)


def check_equal(model, method, tokens, new=NEW, **settings):
    """The crops of the assisted run, whose tokens and whose cache are the greedy ones."""
    greedy, assisted = KVCache(model, method, **settings), Counted(model, method, **settings)
    wanted = {"return_dict_in_generate": True, "output_logits": True, "new": new}
    expected = generate(model, tokens, greedy, **wanted)
    lookup = {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 2}
    found = generate(model, tokens, assisted, **wanted, **lookup)
    assert torch.equal(found.sequences, expected.sequences)
    # Tokens alone would pass where a wrong state is too small a difference to change the largest logit.
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(expected.logits), atol=1e-8, rtol=0)
    assert assisted.get_seq_length() == greedy.get_seq_length()
    assert assisted.nbytes == greedy.nbytes
    return assisted.removed


def check_refused(model, method, tokens):
    """One line, and nothing was computed."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    cache = KVCache(model, method)
    assert not cache.is_croppable
    with pytest.raises(Unsupported, match="prompt_lookup_num_tokens, assistant_model: method=") as caught:
        generate(model, tokens, cache, prompt_lookup_num_tokens=7)
    hook.remove()
    assert "\n" not in str(caught.value)
    assert not calls
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("given", QUICK)
def test_prompt_lookup_is_greedy(model, given):
    removed = check_equal(model, built(given), prompt(0))
    assert max(removed) > 0  # some candidates were wrong


def lasts(method: Method) -> bool:
    """What comes moves or changes tokens that are already held, or is encoded with the states of all layers."""
    policies = method.policy("token_policy"), method.policy("eviction"), method.policy("backend")
    return method.joins_layers or any(policies)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_back_is_refused_at_once(model, name):
    if lacks_package(name):
        pytest.skip(f"needs the extra [{name}]")
    check_refused(model, built(name), prompt(0))


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_every_preset_over_fifty_prompts(monkeypatch, name):
    """One layer, and four tokens where not ten: `test_prompt_lookup_is_greedy` has two layers."""
    if lacks_package(name):
        pytest.skip(f"needs the extra [{name}]")
    layers = layers_for(name) if name in REFUSED else 1
    model = in_double_precision(LoadedModel(llama(layers), torch.device("cpu")), monkeypatch).model
    method, removed = built(name, layers), []
    for seed in range(50):
        if lasts(method):
            check_refused(model, method, prompt(seed))
        else:  # every fifth one is long enough for the residual to move on by more than its size
            removed += check_equal(model, method, prompt(seed), NEW if seed % 5 == 0 else FEW)
    assert lasts(method) or max(removed) > 0
