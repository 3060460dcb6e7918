"""What one pass over windows of text measured: loss and divergence of each window, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.results.statistics import divergence_metrics


@dataclass
class WindowScore:
    """Sums over the scored tokens of one window; `kl` and `top1` need a reference.

    `first`: the position of the first scored token; `by_position`: tokens, nll and kl of each stretch of positions, by
    its first position.
    """

    window: int
    first: int = 1
    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    top1: int = 0
    by_position: dict[str, list[float]] = field(default_factory=dict)

    def add_positions(
        self, start: int, stretch: int, nll: Float[Tensor, " targets"], kl: Float[Tensor, " targets"]
    ) -> None:
        """Add the targets at positions from `start` on to stretches of `stretch` positions."""
        for first in range(start - start % stretch, start + len(nll), stretch):
            part = slice(max(first - start, 0), first + stretch - start)
            sums = len(nll[part]), float(nll[part].sum()), float(kl[part].sum())
            known = self.by_position.get(str(first), [0.0] * len(sums))
            self.by_position[str(first)] = [float(old + new) for old, new in zip(known, sums, strict=True)]


@dataclass
class PplResult:
    """What one pass over the windows measured.

    `stretch`: positions over which losses are reported together beside their mean; None: not reported.
    """

    scores: list[WindowScore]
    storage: dict[str, float]
    kl_per_token: dict[int, list[Tensor]] = field(default_factory=dict)
    stretch: int | None = None

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats per scored token."""
        return sum(s.nll for s in self.scores) / sum(s.tokens for s in self.scores)

    def metrics(self) -> dict[str, float]:
        """The record's metrics, without those that compare with the baseline record."""
        tokens, compared = sum(s.tokens for s in self.scores), bool(self.kl_per_token)
        out = {"nll": self.nll, "perplexity": math.exp(min(self.nll, 700.0)), **self.storage}
        if compared:
            kl = torch.cat(
                [part for window in sorted(self.kl_per_token) for part in self.kl_per_token[window]]
            ).double()
            out |= divergence_metrics(kl.numpy())
            out["top1_agreement"] = sum(s.top1 for s in self.scores) / tokens
        out |= {"scored_tokens": float(tokens), "windows": float(len(self.scores))}
        places = summed_positions([score.by_position for score in self.scores])
        for first, (count, losses, divergences) in places.items():
            out[f"nll[position={first}]"] = losses / count
            if compared:
                out[f"kl_mean[position={first}]"] = divergences / count
        return out

    def samples(self) -> list[dict[str, Any]]:
        """One row per window, for paired statistics."""
        compared = bool(self.kl_per_token)
        names = ["window", "tokens", "nll", *(["kl", "top1"] if compared else [])]
        names += [] if self.stretch is None else ["by_position"]
        return [{name: getattr(score, name) for name in names} for score in self.scores]

    def add(
        self,
        indices: Sequence[int],
        targets: Int[Tensor, "batch targets"],
        log_probs: Float[Tensor, "batch targets vocab"],
        expected: Float[Tensor, "batch targets vocab"] | None,
    ) -> None:
        """Add the targets of some windows; `expected`: log-probabilities that they are compared with."""
        nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()
        kl = torch.zeros_like(nll) if expected is None else divergence(expected, log_probs)
        for row, index in enumerate(indices):
            score = self.scores[index]
            if self.stretch is not None:
                score.add_positions(score.first + score.tokens, self.stretch, nll[row], kl[row].double())
            score.tokens += log_probs.shape[1]
            score.nll += float(nll[row].sum())
        if expected is None:
            return
        same = (log_probs.argmax(-1) == expected.argmax(-1)).sum(-1)
        for row, index in enumerate(indices):
            self.kl_per_token.setdefault(index, []).append(kl[row].cpu())
            self.scores[index].kl += float(kl[row].double().sum())
            self.scores[index].top1 += int(same[row])


def summed_positions(windows: Sequence[Mapping[str, Sequence[float]]]) -> dict[int, tuple[float, ...]]:
    """Tokens and sums of each stretch of positions over windows, by first position, in order."""
    starts = sorted({int(first) for window in windows for first in window})
    return {
        start: tuple(map(sum, zip(*(window[str(start)] for window in windows if str(start) in window), strict=True)))
        for start in starts
    }


def divergence(
    expected: Float[Tensor, "*lead targets vocab"], found: Float[Tensor, "*lead targets vocab"]
) -> Float[Tensor, "*lead targets"]:
    """KL(expected || found) of each target in nats; rounding can make that of two equal distributions negative."""
    return torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1).clamp_min(0)
