"""Chosen tokens that attention reads in full precision wherever they stand, beside the codes of all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from typing_extensions import override

from kvq.cache.side import CacheSide, States
from kvq.cache.state import Field, Reader
from kvq.codecs import Growable
from kvq.errors import Unsupported

_POSITION_BYTES = 4
Chosen = Bool[Tensor, "batch tokens"]


class KeptRows(CacheSide):
    """Keys or values in which attention reads the tokens of `note` in full precision also where they are packed.

    These tokens have codes as all others; their full-precision rows and their positions (int32) count in addition.

    Attributes:
        missing: what an error says where `note` was not told of all tokens.
    """

    missing: ClassVar[str]
    drops: ClassVar[bool] = False
    saved: ClassVar[Mapping[str, Field]] = {
        **CacheSide.saved,
        "_chosen": Field("tensor", "batch tokens", torch.bool),
        "_at": Field("tensor", "2 kept", torch.int64),
        "_rows": Field("rows", "heads kept head_dim"),
    }

    @override
    def reset(self) -> None:
        super().reset()
        self._chosen: Chosen | None = None
        self._at: Int[Tensor, "2 kept"] | None = None
        self._rows: Growable | None = None
        self._in_parts = False

    def note(self, chosen: Chosen) -> None:
        """Receive which of the next tokens are kept, before their states."""
        self._chosen = chosen if self._chosen is None else torch.cat([self._chosen, chosen], 1)

    def _coded(self, states: States, chosen: Chosen, block: int | None) -> States:
        """What is encoded in the place of `states`, in blocks of `block` tokens (None: one)."""
        return states

    @property
    @override
    def packed_bytes(self) -> int:
        """Bytes of codes and side information, and of the kept rows and their positions."""
        if self._rows is None or self._at is None:
            return super().packed_bytes
        rows = self._rows.view
        return super().packed_bytes + rows.numel() * rows.element_size() + self._at.shape[1] * _POSITION_BYTES

    @override
    def _check_read(self, given: Reader, packed: int) -> None:
        super()._check_read(given, packed)
        batch = self.batch_size
        if self._chosen is None or self._chosen.shape != (batch, packed + self.residual_tokens):
            raise given.error("_chosen does not say of every token whether it is kept")
        kept = self._chosen[:, :packed]
        at = kept.new_zeros(2, 0, dtype=torch.int64) if self._at is None else self._at
        rows = 0 if self._rows is None else self._rows.rows
        inside = at.shape[0] == 2 and bool((at >= 0).all() and (at[0] < batch).all() and (at[1] < packed).all())
        if not inside or at.shape[1] != rows or rows != int(kept.sum()) or not bool(kept[at[0], at[1]].all()):
            raise given.error("_at does not name the packed tokens that are kept")

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
            raise Unsupported(f"{self.label}: {self.missing}; reset() the cache")

    @override
    def _encode(self, states: Tensor, block: int | None, decoded: bool = False) -> Tensor | None:
        start = self.packed_tokens
        assert self._chosen is not None
        chosen = self._chosen[:, start : start + states.shape[2]]
        out = super()._encode(self._coded(states, chosen, block), block, decoded)
        at = chosen.nonzero().T
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
    """A copy of the states with the full-precision rows in their places."""
    out = states.clone()
    out[at[0], :, at[1]] = rows.transpose(0, 1)
    return out
