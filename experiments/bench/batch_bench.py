"""Prompts of unequal length answered together and one by one: read with the cache of a method, then decoded."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from attention_bench import in_turns, ratios

from kvq.config.tasks import Prefill
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq.tasks.items import ROWS, read_in_batches
from kvq.tasks.reader import Reader

CELLS = (
    *((name, Prefill.whole) for name in ("kivi", "nsn", "nsnquant", "turboquant", "oscar")),
    ("kivi", Prefill.chunked),
)
BITS = 2
SHORTEST, STEP, NEW_TOKENS = 160, 16, 16
"""Prompts of 160, 176, ... tokens, as many as a batch has by default."""


def measure(loaded: LoadedModel, pairs: int) -> dict[str, Any]:
    """Seconds of prompts one by one over those of the same prompts in a batch, paired, by method and prefill.

    `whole`: a batch is read in one forward. `chunked`: prompts are read one by one either way and decoded together.
    """
    draw = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, loaded.text_config.vocab_size, (SHORTEST + STEP * row,), generator=draw).tolist()
        for row in range(ROWS)
    ]
    cells = {}
    for name, prefill in CELLS:
        reader = Reader(loaded, build_method(name, bits=BITS), prefill)

        def answer(rows: int, reader: Reader = reader) -> None:
            for _, cache, logits in read_in_batches(reader, prompts, rows):
                reader.write(cache, logits, NEW_TOKENS, lambda row: False)

        runs = {"alone": lambda answer=answer: answer(1), "together": lambda answer=answer: answer(ROWS)}
        seconds = in_turns(runs, loaded.device, pairs)
        cells[f"{name}_{prefill}"] = ratios(seconds["alone"], seconds["together"]) | {
            "seconds_median": {way: statistics.median(taken) for way, taken in seconds.items()}
        }
    lengths = [len(prompt) for prompt in prompts]
    return {"prompt_tokens": lengths, "new_tokens": NEW_TOKENS, "bits": BITS, "cells": cells}


def show(found: dict[str, Any]) -> None:
    """Print what `measure` found."""
    for name, values in found["cells"].items():
        low, high = values["ratio_min"], values["ratio_max"]
        print(f"{'batches':<34}{name:<20}{values['ratio_median']:8.2f}x  ({low:.2f} to {high:.2f})")
