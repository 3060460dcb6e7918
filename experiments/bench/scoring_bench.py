"""What scoring costs over the plain forward: `python experiments/bench/scoring_bench.py [repeats] [model]`.

The same windows (two of 1,024 tokens every 512) are scored as in generation by each method of the README's tables, and
read by the model without a cache, with the logits of the same targets, in turn, on one thread. The table has ratios of
one run, so that two machines can be compared: `results/bench/scoring.json`.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from pathlib import Path

import torch
from joint_bench import core_seconds

from kvq.calibration.fit import load_or_fit
from kvq.config.explain import composed
from kvq.methods.method import Method
from kvq.models.load import LoadedModel, onednn_linear
from kvq.results.provenance import cpu_name
from kvq.runs import Prepared
from kvq.tasks.ppl import ppl_windows, reference_of, run_ppl
from kvq.tasks.scoring import LOGIT_CHUNK, Window

ROOT = Path(__file__).parents[2]
OUT = ROOT / "results" / "bench" / "scoring.json"
METHODS = ("fp16", "kivi bits=2", "oscar bits=2", "nsn bits=2", "nsnquant bits=2", "turboquant bits=2", "rtn bits=2")
METHODS += ("kitty", "waterfill_kv bits=2.25 method.calibration.samples=4")
"""Waterfill is fitted to a quarter of its text: that shortens the fitting alone."""
TASK = ("task.context=1024", "task.stride=512", "task.max_windows=2", "threads=1", "cache.keep_decoded=true")


@torch.no_grad()
def read_plainly(loaded: LoadedModel, windows: list[Window]) -> None:
    """The model's forward over each window, and the logits of its targets."""
    for window in windows:
        hidden = loaded.model.base_model(input_ids=window.tokens[None], use_cache=False).last_hidden_state
        last = len(window.tokens) - 1
        for low in range(window.scored_from - 1, last, LOGIT_CHUNK):
            loaded.logits(hidden[:, low : min(low + LOGIT_CHUNK, last)])


def prepare(words: list[str]) -> tuple[Prepared, Method]:
    """A run and its method, with the tables of its calibration."""
    prepared = Prepared(composed(words))
    method = prepared.method
    return prepared, load_or_fit(prepared.inputs, method)[0] if prepared.calibrates else method


def measure(repeats: int, model: str, more: list[str]) -> dict[str, float]:
    """Median over repeats of each method's time over the plain forward's beside it."""
    torch.set_num_threads(1)
    base = [f"model={model}", *TASK, *more]
    full, _ = prepare([*base, "method=fp16"])
    task, loaded = full.config.task, full.inputs.model
    windows = ppl_windows(full.inputs.tokens.streams, task, full.inputs.bos)
    ratios: dict[str, list[float]] = {}
    with onednn_linear():
        for name in METHODS:
            prepared, method = prepare([*base, f"method={name.split()[0]}", *name.split()[1:]])
            reference, _ = reference_of(prepared.inputs, method, windows, task)
            for _ in range(repeats):
                plain = core_seconds(lambda: read_plainly(loaded, windows))
                scored = core_seconds(lambda m=method, r=reference: run_ppl(loaded, m, windows, task, r))
                ratios.setdefault(name, []).append(scored / plain)
            print(f"{name:24} {statistics.median(ratios[name]):.2f}", flush=True)
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


if __name__ == "__main__":
    words = sys.argv[1:]
    count, model = int(words[0]) if words else 3, words[1] if len(words) > 1 else "smollm2_135m"
    found = {"model": model, "repeats": count, "cpu": cpu_name() or platform.processor()}
    found["times_of_the_plain_forward"] = measure(count, model, words[2:])
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
