"""`model.generate` with every method, forks, and whatever reorders or repeats a batch."""

import functools

import pytest
import torch

import kvq
from kvq.cache import KVCache
from tests.cache.states import nearest_bits, quantizes
from tests.calibrated import bound, random_states
from tests.presets import METHODS as EVERY
from tests.presets import lacks_package
from tests.random_models import llama, token_ids

METHODS = [pytest.param(one, marks=pytest.mark.skipif(lacks_package(one), reason=f"extra [{one}]")) for one in EVERY]


@pytest.fixture(scope="module")
def model():
    return llama()


@functools.cache
def method(name="nsn", size=6):
    built = kvq.build_method(name, bits=nearest_bits(name), head_dim=128, overrides=[f"residual.size={size}"])
    config = llama().config
    states = random_states(config.num_key_value_heads, 128)
    return bound(built, states, config.num_hidden_layers) if built.needs_calibration else built


def generate(model, tokens, cache, count=9, **given):
    return model.generate(tokens, past_key_values=cache, max_new_tokens=count, do_sample=False, pad_token_id=0, **given)


def greedy(model, tokens, cache, count=9):
    """One token at a time, by hand."""
    out, piece = tokens, tokens
    for _ in range(count):
        piece = model(piece, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        out = torch.cat([out, piece], 1)
    return out


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", METHODS)
def test_generate(model, name):
    tokens = token_ids(10, batch=2)
    cache = KVCache(model, method(name))
    out = generate(model, tokens, cache)
    assert out.shape == (2, 19)
    assert cache.get_seq_length() == 18
    assert torch.equal(out, greedy(model, tokens, KVCache(model, method(name))))
    # gear's factors of 6 tokens are larger than they; the others keep more first tokens than there are.
    if quantizes(name) and name not in "identity gear kitty kvarn nova_kv oscar_covariance rotatekv".split():
        # turboquant_plus leaves the values of the outer layers, here all, in full precision.
        assert cache.side_bits("key") < 16


def test_a_fork_is_an_independent_run(model):
    """Two continuations of one context, in turns: each as if it were alone; the packed context is shared."""
    context, one, two = token_ids(20), token_ids(14, seed=1), token_ids(14, seed=2)

    def filled():
        cache = KVCache(model, method("oscar"))
        model(context, past_key_values=cache)
        return cache

    base = filled()
    fork = base.fork()
    for side, other in zip(base._sides(), fork._sides(), strict=True):
        for held, shared in zip(side._store.packed, other._store.packed, strict=True):
            for name, part in held.parts.items():
                assert part.data_ptr() == shared.parts[name].data_ptr()
    assert fork.nbytes == base.nbytes
    alone = filled(), filled()
    for start, end in ((0, 1), (1, 5), (5, 14)):
        for cache, single, tokens in ((base, alone[0], one), (fork, alone[1], two)):
            out, expected = (model(tokens[:, start:end], past_key_values=c).logits for c in (cache, single))
            assert torch.equal(out, expected)
    assert base.nbytes == alone[0].nbytes


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        *((name, False) for name in ("oscar", "nsn", "fp16", "kivi", "nsnquant")),
        ("kivi", True),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in ("oscar", "nsn", "fp16", "nsnquant")),
    ],
)
def test_beam_search_scores_are_those_of_each_beam_alone(name, keep):
    """Were blocks left behind when beams change places, the scores would not be those of the sequences."""
    model = llama().to(torch.float64)
    tokens = token_ids(8)
    beams = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0}
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    out = generate(model, tokens, KVCache(model, method(name, size=3), keep_decoded=keep), 12, **beams, **wanted)
    assert len({tuple(row.tolist()) for row in out.sequences}) == 3
    assert bool((out.beam_indices.diff(dim=1) != 0).any())  # beams did change places
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        cache = KVCache(model, method(name, size=3))
        total, piece = 0.0, tokens
        for token in row[8:]:
            total += float(model(piece, past_key_values=cache).logits[0, -1].log_softmax(-1)[token])
            piece = token.reshape(1, 1)
        assert total == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize("name", ["nsn", "oscar/token_scope"])
def test_reordering_and_repeating_a_batch(model, name):
    """Whatever is selected is the cache of those sequences: residual, packed part and counts."""
    tokens = token_ids(20, batch=3)
    index = torch.tensor([2, 2, 0])
    more = token_ids(9, batch=6, seed=4)

    def filled(rows):
        cache = KVCache(model, method(name))
        model(rows[:, :11], past_key_values=cache)
        model(rows[:, 11:], past_key_values=cache)
        return cache

    for change, rows in (
        (lambda cache: cache.reorder_cache(index), tokens[index]),
        (lambda cache: cache.batch_select_indices(index[:2]), tokens[index[:2]]),
        (lambda cache: cache.batch_repeat_interleave(2), tokens.repeat_interleave(2, 0)),
    ):
        cache, expected = filled(tokens), filled(rows)
        change(cache)
        assert cache.nbytes == expected.nbytes
        assert cache.layers[0].batch_size == len(rows)
        piece = more[: len(rows)]
        outs = [model(piece, past_key_values=c).logits for c in (cache, expected)]
        torch.testing.assert_close(*outs, atol=1e-4, rtol=0)


def test_repeating_an_empty_cache_does_nothing(model):
    cache = KVCache(model, method())
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([0]))
    assert cache.get_seq_length() == 0
    assert generate(model, token_ids(5), cache, 3).shape == (1, 8)
