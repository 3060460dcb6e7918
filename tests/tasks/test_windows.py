"""Windows cover each token at most once and never cross streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import DataError
from kvq.tasks.scoring import batches, cut_windows


@given(length=st.integers(2, 300), context=st.integers(2, 40), stride=st.integers(1, 40))
def test_sliding_scores_every_token_once(length: int, context: int, stride: int) -> None:
    stride = min(stride, context)
    if length < context:
        with pytest.raises(DataError, match=f"has {length} tokens"):
            cut_windows([torch.arange(length)], context, stride)
        return
    windows = cut_windows([torch.arange(length)], context, stride)
    scored = torch.cat([window.tokens[window.scored_from :] for window in windows]).tolist()
    last = (len(windows) - 1) * stride + context
    # A window starting where the last one ended cannot predict its own first token.
    skipped = set(range(context, last, context)) if stride == context else set()
    assert sorted(scored) == [token for token in range(1, last) if token not in skipped]
    assert len(set(scored)) == len(scored)
    assert length - last < stride


def test_disjoint_windows_score_all_but_their_first_token_and_stay_in_their_stream() -> None:
    windows = cut_windows([torch.arange(10), torch.arange(100, 109)], context=4)
    assert [window.tokens.tolist() for window in windows] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [100, 101, 102, 103],
        [104, 105, 106, 107],
    ]
    assert {window.targets for window in windows} == {3}
    assert len(cut_windows([torch.arange(10)], 4, limit=1)) == 1


def test_batches_keep_order_and_equal_targets() -> None:
    windows = cut_windows([torch.arange(50)], context=10, stride=5)
    groups = batches(windows, 4)
    assert [index for group in groups for index in group] == list(range(len(windows)))
    assert groups[0] == [0]
    assert all(len({windows[index].scored_from for index in group}) == 1 and len(group) <= 4 for group in groups)
