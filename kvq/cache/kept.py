"""Keys of chosen tokens in full precision, beside the codes of all tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from typing_extensions import override

from kvq.cache.side import CacheSide, States
from kvq.codecs import Codec, Growable
from kvq.config.residual import ResidualSide
from kvq.errors import Unsupported

_POSITION_BYTES = 4


class KeptSide(CacheSide):
    """Keys of a layer in which some tokens, by their id, are read as they came also where they are packed.

    Their codes are stored as all others'; the exact rows and their positions (int32) are counted on top.

    Args:
        ids: tokens of the vocabulary whose keys are kept.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool, ids: tuple[int, ...]
    ) -> None:
        self._ids = torch.tensor(ids)
        super().__init__(codec, residual, label, keep_decoded)

    @override
    def reset(self) -> None:
        super().reset()
        self._chosen: Bool[Tensor, "batch tokens"] | None = None
        self._at: Int[Tensor, "2 kept"] | None = None
        self._rows: Growable | None = None
        self._in_parts = False

    def note(self, tokens: Int[Tensor, "batch tokens"] | None) -> None:
        """Hear which tokens come next, before their keys do. Raises: Unsupported: nobody knows."""
        if tokens is None:
            raise Unsupported(f"{self.label}: method.kept_keys chooses tokens by input_ids, of which there are none")
        chosen = torch.isin(tokens, self._ids.to(tokens.device))
        self._chosen = chosen if self._chosen is None else torch.cat([self._chosen, chosen], 1)

    @property
    @override
    def packed_bytes(self) -> int:
        """Bytes of codes and side information, and of the kept rows and their positions."""
        if self._rows is None or self._at is None:
            return super().packed_bytes
        rows = self._rows.view
        return super().packed_bytes + rows.numel() * rows.element_size() + self._at.shape[1] * _POSITION_BYTES

    @override
    def append_behind(self, states: States, head: int, quantized_prefill: bool) -> tuple[States, States | None]:
        self._check_noted(states)
        self._in_parts = True
        try:
            return super().append_behind(states, head, quantized_prefill)
        finally:
            self._in_parts = False

    @override
    def _receive(self, states: Tensor) -> bool:
        if not self._in_parts:
            self._check_noted(states)
        return super()._receive(states)

    def _check_noted(self, states: Tensor) -> None:
        if self._chosen is None or self._chosen.shape != (states.shape[0], self.tokens + states.shape[2]):
            raise Unsupported(f"{self.label}: method.kept_keys needs the ids of all tokens; reset() the cache")

    @override
    def _encode(self, states: Tensor, block: int | None, decoded: bool = False) -> Tensor | None:
        start = self.packed_tokens
        out = super()._encode(states, block, decoded)
        assert self._chosen is not None
        at = self._chosen[:, start : start + states.shape[2]].nonzero().T
        rows = _rows(states, at)
        if at.shape[1]:
            moved = at + torch.tensor([[0], [start]], device=at.device)
            self._at = moved if self._at is None else torch.cat([self._at, moved], 1)
            if self._rows is None:
                self._rows = Growable(rows)
            else:
                self._rows.append(rows)
        return None if out is None else _placed(out, at, rows)

    @override
    def _past(self) -> Tensor:
        past = super()._past()
        return past if self._at is None or self._rows is None else _placed(past, self._at, self._rows.view)

    @override
    def fork(self) -> KeptSide:
        other = super().fork()
        assert isinstance(other, KeptSide)
        other._rows = None if self._rows is None else self._rows.fork()
        return other

    @override
    def select(self, index: Tensor) -> None:
        super().select(index)
        if self._chosen is not None:
            self._chosen = self._chosen.index_select(0, index.to(self._chosen.device))
        if self._at is not None and self._rows is not None:
            found = [(self._at[0] == entry).nonzero()[:, 0] for entry in index.tolist()]
            entries = torch.cat([torch.full_like(one, number) for number, one in enumerate(found)])
            which = torch.cat(found)
            self._at = torch.stack([entries, self._at[1, which]])
            self._rows = Growable(self._rows.view.index_select(-2, which))

    @override
    def forget(self, tokens: int) -> None:
        if self._chosen is not None:
            self._chosen = self._chosen[:, :tokens]


def _rows(states: States, at: Int[Tensor, "2 kept"]) -> Tensor:
    """`[heads, kept, head_dim]`: the rows grow along dim -2."""
    return states[at[0], :, at[1]].transpose(0, 1)


def _placed(states: States, at: Int[Tensor, "2 kept"], rows: Tensor) -> Tensor:
    """The states with exact rows in their places; the states themselves stay as they are."""
    out = states.clone()
    out[at[0], :, at[1]] = rows.transpose(0, 1)
    return out
