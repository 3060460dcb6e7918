"""Columns of a chunk in which tokens become quantized, against their definition token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvq
from kvq.cache import KVCache
from kvq.cache.chunk_masks import SourceColumns, Transitions, columns_of
from kvq.errors import Unsupported
from tests.cache.states import states
from tests.random_models import llama

CPU = torch.device("cpu")


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[tuple[int, list[int]]], int, int]:
    """Moves (start, queries) of keys and of values, tokens, queries. Tokens leave in order, none before the first."""
    queries, past = draw(st.integers(2, 7)), draw(st.integers(0, 6))
    tokens = past + queries
    sides = []
    for _ in range(2):
        start = draw(st.integers(0, past))
        count = draw(st.integers(0, past - start))
        at = sorted(draw(st.lists(st.integers(1, queries - 1), min_size=count, max_size=count)))
        sides.append((start, at))
    return sides, tokens, queries


def read(
    columns: SourceColumns, moves: tuple[Transitions, Transitions], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the columns, where full precision is the token and decoded is the token + 1000."""
    out = []
    for side, picks in zip(moves, (columns.keys, columns.values), strict=True):
        first = torch.arange(tokens, dtype=torch.float32)[None, None, :, None]
        count = len(side.queries)
        decoded = torch.arange(side.start, side.start + count, dtype=torch.float32)[None, None, :, None] + 1000
        out.append(picks.join(first, decoded if count else None).flatten())
    return out[0], out[1]


@given(chunks())
def test_every_query_reads_each_token_once_and_in_its_form(case: tuple[list[tuple[int, list[int]]], int, int]) -> None:
    sides, tokens, queries = case
    first, second = (Transitions(start, tuple(at)) for start, at in sides)
    moves = (first, second)
    columns = columns_of(moves, tokens, queries, CPU)
    keys, values = read(columns, moves, tokens)
    assert columns.tokens == tokens
    for query in range(queries):
        seen = columns.visible[query]
        got = sorted(zip(keys[seen].tolist(), values[seen].tolist(), strict=True), key=lambda pair: pair[0] % 1000)
        expected = []
        for token in range(tokens):
            forms = []
            for side in moves:
                at = dict(zip(range(side.start, tokens), side.queries, strict=False)).get(token, queries)
                forms.append(float(token + 1000 if query >= at else token))
            expected.append(tuple(forms))
        assert got == expected


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_the_models_mask_is_kept_for_every_copy(kind: str) -> None:
    moves = Transitions(0, (1, 2)), Transitions(0, (2,))
    columns = columns_of(moves, 5, 3, CPU)
    causal = torch.ones(3, 5, dtype=torch.bool).tril(2)
    least = torch.finfo(torch.float32).min
    additive = torch.zeros(3, 5).masked_fill(~causal, least)
    asked = {"none": None, "bool": causal[None, None], "float": additive[None, None]}[kind]
    mask = columns.mask(asked)
    assert mask is columns.mask(asked)  # made once for all layers
    allowed = torch.cat([causal, causal[:, columns.copies]], 1) & columns.visible
    assert torch.equal(mask[0, 0] if kind != "float" else mask[0, 0] == 0, allowed)
    assert kind != "float" or float(mask.min()) == least
    assert columns.fit_layer(moves, 5, 3, CPU)
    assert not columns.fit_layer(moves, 6, 3, CPU)


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 3, 4, dtype=torch.bool), torch.ones(3, 5)])
def test_a_mask_over_something_else_is_refused(mask: torch.Tensor) -> None:
    columns = columns_of((Transitions(0, (1,)), Transitions(0, ())), 5, 3, CPU)
    with pytest.raises(Unsupported, match=r"attention mask \[.*\], where residual=sliding needs \[.., 3, 5\]") as found:
        columns.mask(mask)
    assert "\n" not in str(found.value)


def test_an_attention_that_was_not_seen_is_refused() -> None:
    """Its mask would not fit what it reads."""
    method = kvq.build_method("kivi", bits=2, head_dim=128, overrides=["residual.size=4"])
    cache = KVCache(llama(), method)
    cache.token_by_token = True
    assert cache.token_by_token
    x = states(9, dim=128)
    with pytest.raises(Unsupported, match="layer 1 attends in a way that kvq cannot follow"):
        cache._update(x, x, 1)
    cache._update(x[:, :, :1], x[:, :, :1], 0)  # nothing moves
