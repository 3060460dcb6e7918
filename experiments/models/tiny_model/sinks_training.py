"""Training of the low-rank changes that make a sink, in one process, with checkpoints to go on from."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaForCausalLM

from tiny_model.corpus import Sampler, TrainingData
from tiny_model.evaluation import held_out_tokens
from tiny_model.network import Attended, keep_memory, token_logits
from tiny_model.sinks import SinkRecipe, adapt, losses, norm_ratios, sink_masses
from tiny_model.training import State

CHECKPOINT_STEPS = 100
WATCHED = 12, 512
# Longer sequences are rare, and compiling takes a minute for each length.
COMPILED_TOKENS = 512


@dataclass
class Run:
    """What a run computes with."""

    recipe: SinkRecipe
    data: TrainingData
    base: LlamaForCausalLM
    model: LlamaForCausalLM
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    state: State


def train_sinks(
    recipe: SinkRecipe, data: TrainingData, base: LlamaForCausalLM, folder: Path, resume: bool, compiled: bool
) -> Run:
    """Train to the end of the budget, with a checkpoint in `folder` every 100 steps."""
    keep_memory()
    base = base.requires_grad_(False)
    model = copy.deepcopy(base)
    trained = adapt(model, recipe)
    optimizer = torch.optim.AdamW(
        trained.values(), lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    run = Run(recipe, data, base, model, trained, optimizer, State())
    if resume:
        _load(run, folder / "sinks.pt")
    compiled_losses = torch.compile(losses, dynamic=False) if compiled else losses
    sampler, state = Sampler(data, recipe), run.state
    began, sums = time.monotonic() - state.seconds, torch.zeros(4)
    bar = tqdm(total=recipe.tokens, initial=state.tokens, unit="tok", unit_scale=True, mininterval=20)
    while state.tokens < recipe.tokens:
        length = recipe.length(state.step, state.tokens)
        tokens = _step(run, sampler, compiled_losses if length <= COMPILED_TOKENS else losses, length, sums)
        state.step, state.tokens, state.seconds = state.step + 1, state.tokens + tokens, time.monotonic() - began
        bar.update(tokens)
        if state.step % CHECKPOINT_STEPS == 0 or state.tokens >= recipe.tokens:
            divergence, sink, first, steps = sums.tolist()
            point = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds)}
            means = {"divergence": divergence / steps, "sink": sink / steps, "first": first / steps}
            state.curve.append({**point, **{name: round(mean, 4) for name, mean in means.items()}})
            state.held_out.append({**point, **_watch(run)})
            print(f"\n{state.curve[-1]}\n{state.held_out[-1]}", flush=True)
            _save(run, folder / "sinks.pt")
            sums.zero_()
    return run


def _step(run: Run, sampler: Sampler, losses_of: Callable[..., Any], length: int, sums: Tensor) -> int:
    """One step of the optimizer; returns the tokens in it."""
    recipe, state = run.recipe, run.state
    stage = recipe.stage(state.tokens)
    (parts, rows), read = recipe.parts(length), state.read.get(length, 0)
    run.optimizer.zero_grad()
    for part in range(parts):
        batch = sampler.part(state.step, part, stage, length, read)
        divergence, sink, first = losses_of(
            run.model, run.base, recipe, torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights), sampler.end
        )
        ((divergence + sink + first / length) / parts).backward()
        sums += torch.stack((divergence, sink, first, torch.ones(()))).detach()
    state.read[length] = read + parts * rows
    torch.nn.utils.clip_grad_norm_(run.trained.values(), 1.0)
    for group in run.optimizer.param_groups:
        group["lr"] = recipe.adam_rate * recipe.rate(state.step, state.tokens)
    run.optimizer.step()
    return parts * rows * length


@torch.no_grad()
def _watch(run: Run) -> dict[str, float]:
    """Losses on the first held-out prose of both models, in nats per token, and how far the sink has come."""
    rows, length = WATCHED
    windows = held_out_tokens(run.data.tokenizer, "pydocs")[: rows * length].view(rows, length)
    attended: list[Attended] = []
    begin = torch.full((rows, 1), run.data.encode(run.data.tokenizer.bos_token)[0])
    with_begin = token_logits(run.model, torch.cat((begin, windows), 1), torch.float32, attended)[:, 1:-1]
    without = token_logits(run.base, windows, torch.float32)[:, :-1]
    ours, theirs = (cross_entropy(each.flatten(0, 1), windows[:, 1:].flatten()) for each in (with_begin, without))
    ratios, masses = norm_ratios(attended), sink_masses(attended)
    print("\nratios", (1 / ratios).flatten(1).round(decimals=1).tolist(), "\nmasses", masses.round(decimals=2).tolist())
    return {
        "pydocs": round(ours.item(), 4),
        "tiny": round(theirs.item(), 4),
        "largest_ratio": round(ratios.max().item(), 4),
        "mean_mass": round(masses.mean().item(), 4),
        "heads_at_30": float((masses >= 0.3).sum()),
    }


def _save(run: Run, path: Path) -> None:
    """Write a checkpoint beside the last one, then put it in its place."""
    weights = {name: parameter.detach() for name, parameter in run.trained.items()}
    new = path.with_suffix(".new")
    torch.save({"trained": weights, "optimizer": run.optimizer.state_dict(), "state": asdict(run.state)}, new)
    new.replace(path)


def _load(run: Run, path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    run.model.load_state_dict(saved["trained"], strict=False)
    run.optimizer.load_state_dict(saved["optimizer"])
    run.state = State(**saved["state"])
