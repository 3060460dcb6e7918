"""Training on a few cores: one process per core; they take parts of each step's batch and share the optimizer's work.

Processes that meet twice a step, and take parts as they get on, lose less to other work on the machine than threads
that meet after every kernel.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from threading import Barrier

import torch
from torch import Tensor
from torch.multiprocessing import get_context, spawn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from tiny_model.corpus import Batch, Sampler, TrainingData
from tiny_model.evaluation import held_out_tokens
from tiny_model.network import TokenLosses, build_model, keep_memory, token_losses
from tiny_model.recipe import Recipe

CURVE_STEPS = 50
CHECKPOINT_STEPS = 250
WATCHED = 32, 1024


@dataclass
class State:
    """Where a run stands; saved with the weights. `read` counts the sequences of each length.

    `curve` has the mean losses since its last point, in nats per token; `held_out` the loss of the first held-out
    prose, which is watched and decides nothing.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    read: dict[int, int] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    held_out: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Shared:
    """What the workers share: weights; per worker a gradient of each weight and four sums; a barrier; the next part."""

    model: LlamaForCausalLM
    gradients: list[list[Tensor]]
    sums: Tensor
    barrier: Barrier
    next_part: Synchronized[int]


def train(
    recipe: Recipe, data: TrainingData, folder: Path, workers: int, resume: bool, compiled: bool
) -> LlamaForCausalLM:
    """Train to the end of the budget, with a checkpoint in `folder` every 250 steps; return the trained model."""
    keep_memory()
    model = build_model(recipe, len(data.tokenizer)).train()
    model.share_memory()
    gradients = [[torch.zeros_like(weight).share_memory_() for weight in model.parameters()] for _ in range(workers)]
    sums = torch.zeros(workers, 4).share_memory_()
    context = get_context("spawn")
    shared = Shared(model, gradients, sums, context.Barrier(workers), context.Value("i", 0))
    spawn(_work, (shared, recipe, folder, data.data_hash, resume, compiled), nprocs=workers)
    return model


def final_state(folder: Path) -> State:
    """Return the state that the last checkpoint in `folder` has of the first worker."""
    return State(**torch.load(_latest(folder) / "worker0.pt", weights_only=True)["state"])


def _work(
    worker: int, shared: Shared, recipe: Recipe, folder: Path, data_hash: str, resume: bool, compiled: bool
) -> None:
    """One worker's run."""
    torch.set_num_threads(1)
    keep_memory()
    workers = len(shared.gradients)
    data = TrainingData.open(folder, data_hash)
    sampler, state = Sampler(data, recipe), State()
    losses = token_losses(shared.model, recipe.precision, compiled)
    optimizers = _optimizers(shared.model, recipe, worker, workers)
    if resume:
        saved = torch.load(_latest(folder) / f"worker{worker}.pt", weights_only=True)
        for optimizer, its in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(its)
        state = State(**saved["state"])
        if worker == 0:
            shared.model.load_state_dict(saved["model"])
    began = time.monotonic() - state.seconds
    shared.barrier.wait()
    bar = tqdm(
        total=recipe.tokens, initial=state.tokens, unit="tok", unit_scale=True, mininterval=20, disable=worker > 0
    )
    while state.tokens < recipe.tokens:
        tokens = _step(worker, shared, recipe, state, sampler, losses, optimizers)
        state.step += 1
        state.tokens += tokens
        state.seconds = time.monotonic() - began
        bar.update(tokens)
        if state.step % CURVE_STEPS == 0:
            _point(worker, shared, state, bar)
        if state.step % CHECKPOINT_STEPS == 0 or state.tokens >= recipe.tokens:
            if worker == 0:
                loss = _held_out(data, losses)
                state.held_out.append({"step": state.step, "tokens": state.tokens, "pydocs": loss})
                print(f"\nheld out: {loss:.4f} nats after {state.tokens:,} tokens", flush=True)
            _save(worker, shared, state, optimizers, folder)


def _step(
    worker: int,
    shared: Shared,
    recipe: Recipe,
    state: State,
    sampler: Sampler,
    losses: TokenLosses,
    optimizers: list[torch.optim.Optimizer],
) -> int:
    """One step of the optimizer; returns the tokens in it, over all workers."""
    gradients, workers = shared.gradients, len(shared.gradients)
    for weight, gradient in zip(shared.model.parameters(), gradients[worker], strict=True):
        weight.grad = gradient.zero_()
    stage, length = recipe.stage(state.tokens), recipe.length(state.step, state.tokens)
    (parts, rows), read = recipe.parts(length), state.read.get(length, 0)
    while (part := _next_part(shared)) < parts:
        loss, sums = _loss(losses, sampler.part(state.step, part, stage, length, read))
        loss.backward()
        shared.sums[worker] += sums
    state.read[length] = read + parts * rows
    shared.barrier.wait()
    shared.next_part.value = 0
    factor = recipe.rate(state.step, state.tokens)
    owners = _owners(shared.model, workers)
    for weight, owner, *each in zip(shared.model.parameters(), owners, *gradients, strict=True):
        weight.grad = torch.stack(each).sum(0) / parts if owner == worker else None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
    shared.barrier.wait()
    return parts * rows * length


def _next_part(shared: Shared) -> int:
    with shared.next_part.get_lock():
        number = shared.next_part.value
        shared.next_part.value += 1
    return number


def _loss(losses: TokenLosses, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the weighted mean loss, and the sum and number of text tokens' losses and of answer tokens'."""
    weights = torch.from_numpy(batch.weights)
    each = losses(torch.from_numpy(batch.tokens))
    text, answers = each.detach()[: batch.text_rows], each.detach()[weights > 1]
    sums = torch.tensor([text.sum(), text.numel(), answers.sum(), answers.numel()])
    return (each * weights).sum() / weights.sum(), sums


def _owners(model: LlamaForCausalLM, workers: int) -> list[int]:
    """Return, for each weight, the worker that updates it: those of about equal size are dealt out in turn."""
    sizes = [weight.numel() for weight in model.parameters()]
    owners = [0] * len(sizes)
    loads = [0] * workers
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        # Muon's products cost far more per weight than AdamW, which the embedding has.
        loads[owners[index]] += sizes[index] if index else sizes[index] // 8
    return owners


def _optimizers(model: LlamaForCausalLM, recipe: Recipe, worker: int, workers: int) -> list[torch.optim.Optimizer]:
    """Muon for this worker's matrices in the layers, AdamW for the embedding and, not decayed, for the gains."""
    owned = zip(model.named_parameters(), _owners(model, workers), strict=True)
    named = {name: weight for (name, weight), owner in owned if owner == worker}
    matrices = [weight for name, weight in named.items() if weight.ndim == 2 and "embed" not in name]
    embedding = [weight for name, weight in named.items() if "embed" in name]
    gains = [weight for weight in named.values() if weight.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                [{"params": matrices, "peak": recipe.muon_rate}],
                weight_decay=recipe.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups = [
        {"params": params, "weight_decay": decay, "peak": recipe.adam_rate}
        for params, decay in ((embedding, recipe.weight_decay), (gains, 0.0))
        if params
    ]
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True))
    return optimizers


def _point(worker: int, shared: Shared, state: State, bar: tqdm) -> None:
    """Add a point to the curve from all workers' sums, and clear them."""
    shared.barrier.wait()
    text, text_count, answer, answer_count = shared.sums.sum(0).tolist()
    point: dict[str, float] = {"step": state.step, "tokens": state.tokens}
    point |= {"text": round(text / max(1, text_count), 4), "answer": round(answer / max(1, answer_count), 4)}
    state.curve.append(point)
    bar.set_postfix(point)
    shared.barrier.wait()
    shared.sums[worker] = 0


@torch.no_grad()
def _held_out(data: TrainingData, losses: TokenLosses) -> float:
    """Mean loss of the first held-out prose, in nats per token."""
    rows, length = WATCHED
    tokens = held_out_tokens(data.tokenizer, "pydocs")[: rows * length + 1]
    windows = tokens.unfold(0, length + 1, length)
    return math.fsum(losses(windows[row : row + 2]).mean().item() for row in range(0, rows, 2)) / (rows // 2)


def _latest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


def _save(worker: int, shared: Shared, state: State, optimizers: list[torch.optim.Optimizer], folder: Path) -> None:
    """Write a checkpoint beside the last one, then point to it, so that an interrupted run leaves a whole one."""
    target = folder / f"step{state.step}"
    target.mkdir(exist_ok=True)
    saved = {"optimizers": [optimizer.state_dict() for optimizer in optimizers], "state": asdict(state)}
    torch.save(saved | ({"model": shared.model.state_dict()} if worker == 0 else {}), target / f"worker{worker}.pt")
    shared.barrier.wait()
    if worker == 0:
        (folder / "latest.new").write_text(target.name)
        (folder / "latest.new").replace(folder / "latest")
        for old in folder.glob("step*"):
            if old != target:
                shutil.rmtree(old)
