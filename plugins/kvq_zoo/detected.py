"""Attention sinks that are found by their hidden states, wherever they stand, and stay in full precision."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvq.cache.side import CacheSide, States
from kvq.errors import require
from kvq.methods.kept_keys import Chosen, KeptRows
from kvq.methods.policies import CHOOSES_TOKENS, Policy


class SinkDetection(Policy):
    """A token is a sink of a layer where one channel has most of the energy of the state that enters the layer.

    That is the extreme activation by which KVSink finds sinks. Each layer sees each token by its own state alone, so
    a token's form depends on no other token, and nothing is calibrated.

    Args:
        share: of the state's sum of squares that its largest channel exceeds in a sink.

    Raises:
        ConfigError: a share that is not between 0 and 1.

    Source: KVSink (arXiv 2508.04257), whose channel and thresholds are not known here.
    """

    version: ClassVar[int] = 1
    setting = "sink_detection"
    does = "finds tokens that it keeps"
    needs = frozenset({"own_tokens"})
    excludes = CHOOSES_TOKENS

    def __init__(self, share: float | int = 0.3) -> None:
        require(0 < share < 1, "share", share, "above 0, below 1")
        self.share = share

    def sinks(self, hidden: Float[Tensor, "batch tokens channels"]) -> Chosen:
        """Whether each token is a sink, by the states that enter a layer (before its norm)."""
        energy = hidden.double().square()
        return energy.amax(-1) > self.share * energy.sum(-1)

    def wrap_side(self, like: CacheSide, side: str, layer: int, layers: int) -> CacheSide:
        """A `DetectedSide` in place of a side of the cache."""
        return DetectedSide(like, self)


class DetectedSide(KeptRows):
    """Keys or values whose detected sinks stay in full precision, and out of the statistics of their block.

    In the codes of a block, a sink is the mean of the block's other tokens, so it moves no range. Its codes count.
    """

    wants_hidden = True
    missing = "method.policies.sink_detection needs the states that enter the layer, which the model did not show"

    def __init__(self, like: CacheSide, detection: SinkDetection) -> None:
        self._detection = detection
        super().__init__(like.codec, like.residual, like.label, like.keep_decoded)

    def receive_hidden(self, hidden: Tensor) -> None:
        """Mark the sinks among the next tokens by the states that enter the layer, `[batch, tokens, channels]`."""
        self.note_kept(self._detection.sinks(hidden))

    def _states_to_encode(self, states: States, chosen: Chosen, block: int | None) -> States:
        """The states to encode: each chosen token is replaced by the mean of the other tokens of its block."""
        size = block or states.shape[2]
        if size == 1 or not bool(chosen.any()):
            return states
        out = states.clone()
        for entry, start in {(entry, token // size * size) for entry, token in chosen.nonzero().tolist()}:
            sinks, there = chosen[entry, start : start + size], out[entry, :, start : start + size]
            if not bool(sinks.all()):
                there[:, sinks] = there[:, ~sinks].mean(1, keepdim=True)
        return out
