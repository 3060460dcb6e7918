"""What decides the weights of the embedded model, beside its data."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(frozen=True)
class Stage:
    """So many `tokens` of the run (None: what the other stages leave), and what the sequences of its steps are.

    All sequences of a step have one length, drawn from `lengths` with the probabilities in `odds`. A share `retrieval`
    of the sequences is for retrieval: one sample, or several short ones, their number drawn from `pieces`; or, for a
    share `copies` of those, shuffled words again and again, which can only be predicted by looking the last time up.
    Of the others, and of the haystacks, a share `prose` is docstrings, the rest sources. Answers, a few tokens of
    hundreds, have `answer_weight` times the weight of other tokens in the loss. `rate` is the learning rates' factor at
    the stage's end, which they go to in a straight line.
    """

    tokens: int | None
    lengths: tuple[int, ...]
    odds: tuple[float, ...]
    retrieval: float
    copies: float = 0.0
    prose: float = 0.8
    answer_weight: float = 10.0
    pieces: tuple[int, ...] = (1, 2)
    rate: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights.

    As long as the rates are constant in the stage that has what the others leave, a longer run begins as a shorter one.
    """

    tokens: int = 23_000_000
    seed: int = 0
    precision: str = "bf16"
    hidden: int = 384
    intermediate: int = 768
    layers: int = 4
    rope_theta: float = 50_000.0
    step_tokens: int = 8192
    part_tokens: int = 2048
    muon_rate: float = 0.006
    adam_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    stages: tuple[Stage, ...] = (
        Stage(6_144_000, (256,), (1.0,), retrieval=0.35, copies=0.5, prose=0.72, answer_weight=5.0, pieces=(1,)),
        Stage(None, (512, 1024, 2048), (0.65, 0.25, 0.1), retrieval=0.15, copies=0.2),
        Stage(10_712_000, (512, 1024, 2048), (0.5, 0.25, 0.25), retrieval=0.18, pieces=(1,), rate=0.0),
    )

    def ends(self) -> list[int]:
        """Return the tokens after which each stage ends."""
        rest = self.tokens - sum(stage.tokens or 0 for stage in self.stages)
        return list(accumulate(rest if stage.tokens is None else stage.tokens for stage in self.stages))

    def stage(self, tokens: int) -> Stage:
        """Return the stage that a step after `tokens` tokens belongs to."""
        return self.stages[min(bisect_right(self.ends(), tokens), len(self.stages) - 1)]

    def rate(self, step: int, tokens: int) -> float:
        """Return the learning rates' factor: linear warm-up by steps, then linear in tokens within each stage."""
        starts, factors = [0, *self.ends()], [1.0, *(stage.rate for stage in self.stages)]
        return min((step + 1) / self.warmup_steps, float(np.interp(tokens, starts, factors)))

    def length(self, step: int, tokens: int) -> int:
        """Return the length of the sequences of a step, in tokens."""
        stage = self.stage(tokens)
        return int(np.random.default_rng([self.seed, 1, step]).choice(stage.lengths, p=stage.odds))

    def parts(self, length: int) -> tuple[int, int]:
        """Return how many parts a step of sequences of this length has, and how many sequences a part has."""
        rows = max(1, self.part_tokens // length)
        return max(1, self.step_tokens // length // rows), rows
