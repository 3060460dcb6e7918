"""SnapKV and StreamingLLM against the presses of the same names in kvpress, where it can be imported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_zoo.eviction import Seen, SnapKV, StreamingLLM
from tests.methods import chosen
from tests.methods.held import HEADS, states

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed"),
]
TOKENS = 200
WEIGHTS = torch.from_numpy(chosen.weights(states(2, TOKENS, 2 * HEADS)[0].numpy(), states(0, TOKENS)[0].numpy()))


def pressed(folder: Path, name: str, ratio: float, **settings: int) -> list[list[int]]:
    weights = WEIGHTS.flatten(0, 1)[None].float()
    asked = {"name": name, "weights": weights, "keys": states(0, TOKENS), "ratio": ratio, "settings": settings}
    torch.save(asked, folder / "asked.pt")
    command = [sys.executable, "-m", "kvq_zoo.tests.presses", str(folder / "asked.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(eviction: Any, allowed: int) -> list[list[int]]:
    rows = eviction.recent_rows(TOKENS) or 0
    scores = WEIGHTS.mean(1)[None][:, :, -rows:].sum(2).float()
    keys = states(0, TOKENS)
    kept: list[list[int]] = eviction.keep(Seen(keys, keys, scores), allowed)[0].sort(-1).values.tolist()
    return kept


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_snapkv_keeps_the_tokens_of_its_press(tmp_path: Path, ratio: float) -> None:
    """At the press's own window of 64, and at SnapKV's of 32."""
    for window in (64, 32):
        found = pressed(tmp_path, "SnapKVPress", ratio, window_size=window)
        assert len(found[0]) == TOKENS * (1 - ratio)
        assert found == ours(SnapKV(budget=1 - ratio, least=65, window=window), len(found[0]))


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_streamingllm_keeps_the_tokens_of_its_press(tmp_path: Path, ratio: float) -> None:
    found = pressed(tmp_path, "StreamingLLMPress", ratio)
    assert found == ours(StreamingLLM(budget=1 - ratio), len(found[0]))
    assert 4 < len(found[0]) == TOKENS * (1 - ratio)
