"""Full-precision log-probabilities of a set of windows, shared by all runs that are compared with them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.tasks.windows import Window

BUDGET_BYTES = 4 * 1024**3
"""Largest size of the reference log-probabilities; beyond it full precision is computed again beside each method."""


def _reserve(file: Path, size: int) -> bool:
    """Allocate a file of `size` bytes on disk: writing to a sparse map on a full disk would kill the process."""
    try:
        with file.open("wb") as stream:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, size)
    except OSError:
        return False
    return True


class ReferenceLogProbs:
    """A memory map `[targets, vocab]` of a temporary file, written once by the full-precision run.

    Args:
        windows: the windows scored; rows follow their targets in order.
        vocab: vocabulary size.
        dtype: dtype of the log-probabilities.
        budget: most bytes to use; above it, or without that much disk, nothing is kept and `kept` is false.
    """

    def __init__(self, windows: Sequence[Window], vocab: int, dtype: torch.dtype, budget: int = BUDGET_BYTES) -> None:
        self._starts = [0]
        for window in windows:
            self._starts.append(self._starts[-1] + window.targets)
        rows = self._starts[-1]
        size = rows * vocab * dtype.itemsize
        self.kept = size <= budget
        # The mapping stays valid after the file is unlinked, so a killed process leaves no file.
        with tempfile.TemporaryDirectory(prefix="kvq-reference-") as folder:
            file = Path(folder) / "logprobs"
            self.kept = self.kept and _reserve(file, size)
            if self.kept:
                self._rows = torch.from_file(str(file), shared=True, size=rows * vocab, dtype=dtype).view(rows, vocab)

    def _slot(self, window: int, offset: int, count: int) -> Tensor:
        start = self._starts[window] + offset
        return self._rows[start : start + count]

    def write(self, indices: Sequence[int], offset: int, log_probs: Float[Tensor, "batch targets vocab"]) -> None:
        """Keep the log-probabilities of the targets from `offset` on, for each window of a batch, if within budget."""
        if not self.kept:
            return
        for row, window in enumerate(indices):
            self._slot(window, offset, log_probs.shape[1]).copy_(log_probs[row])

    def read(self, indices: Sequence[int], offset: int, count: int) -> Float[Tensor, "batch targets vocab"]:
        """The log-probabilities of `count` targets from `offset` on, for each window of a batch."""
        return torch.stack([self._slot(window, offset, count) for window in indices])
