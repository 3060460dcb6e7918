"""Quantizers: the last element of a codec, where values become codes."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.packed import ByToken, Queries
from kvq.errors import Unsupported, check_choice, require

Parts = dict[str, Tensor]
_Coded = TypeVar("_Coded", bound="CodeQuantizer")

Axis = Literal["per_channel", "per_token"]
"""The group that shares statistics: tokens of one channel, or channels of one token."""
Gain = Literal["none", "l2", "norm", "parallel", "unit"]
"""One factor per head and token, computed from x and its reconstruction x̂.

`l2` (x·x̂)/(x̂·x̂), `norm` |x|/|x̂| and `parallel` |x|²/(x·x̂) are NSNQuant's strategies 1-3; `unit` is 1/|x̂| (nsn).
"""


def checked_choice(kind: Any, value: str, setting: str) -> Any:
    """`value`, if the `Literal` type `kind` allows it; else raise `ConfigError` naming `setting`."""
    check_choice(setting, value, get_args(kind))
    return value


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to `dtype`; fp16, whose range other dtypes exceed, saturates instead of overflowing to infinity."""
    if dtype is torch.float16:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def check_group(setting: str, size: int | None, whole: str) -> None:
    """Raise `ConfigError` naming `setting` for a group of less than one element; None: the `whole` is one group."""
    require(size is None or size >= 1, setting, size, f"at least 1, or null for {whole}")


def without_prefix(parts: Mapping[str, Tensor], prefix: str) -> Parts:
    """The parts (or tables) whose names begin with `prefix`, named without it; the inverse of `with_prefix`."""
    return {name[len(prefix) :]: part for name, part in parts.items() if name.startswith(prefix)}


def with_prefix(parts: Mapping[str, Tensor], prefix: str) -> Parts:
    """The parts (or tables) with `prefix` before their names."""
    return {f"{prefix}{name}": part for name, part in parts.items()}


class Quantizer(abc.ABC):
    """Maps `[..., heads, tokens, head_dim]` to stored parts and back; the parts' rows (dim -2) run along tokens.

    Attributes:
        token_group: tokens that share statistics; 1: each token on its own, None: the whole block.
        variable_rows: the number of rows of some part depends on the block, so that blocks are stored one by one.
        attended_as: what attention on packed codes decodes, some tokens at a time: `states` of a head, or `components`
            of a `JointTransform`, with one row of each part per token; None: it cannot decode this quantizer's codes.
    """

    gain: Gain = "none"
    token_group: int | None = None
    variable_rows = False
    attended_as: Literal["states", "components"] | None = None

    @property
    def index_bits(self) -> dict[str, int]:
        """Bits of one code, by the name of the part that holds the codes (`codes`); empty where their number varies."""
        return {}

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        """A copy with `extra` bits per code more, but at most `most`, also in each codec that it contains."""
        inner = {name: part for name, part in vars(self).items() if hasattr(part, "with_more_bits")}
        if not inner:
            others = "a Uniform, LloydMax or InnerProductQuantizer has"
            raise Unsupported(f"{type(self).__name__}: has no bits to add; {others}")
        other = copy.copy(self)
        vars(other).update((name, part.with_more_bits(extra, most)) for name, part in inner.items())
        return other

    def check(self, head_dim: int) -> None:  # noqa: B027 - most quantizers work on any head dim
        """Raise `Unsupported` when the quantizer cannot work on `head_dim` channels."""

    @abc.abstractmethod
    def encode(self, x: Tensor, dtype: torch.dtype) -> Parts:
        """Stored parts of `x`, which is in the compute dtype; `dtype` is that of the states before the first stage."""

    @abc.abstractmethod
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The reconstruction, `shape` = `[..., heads, tokens, head_dim]`, in the compute dtype `dtype`."""

    def score(self, parts: Parts, query: Queries, tokens: int) -> ByToken:
        """Products of queries with the `tokens` tokens that each block of `parts` holds; here, with decoded ones."""
        shape = torch.Size((*next(iter(parts.values())).shape[:-2], tokens, query.shape[-1]))
        return query @ self.decode(parts, shape, query.dtype).mT

    def mix(self, parts: Parts, weights: ByToken, dim: int) -> Float[Tensor, "batch heads group dim"]:
        """The sum of all tokens' `dim` channels by these weights; here, of decoded ones."""
        shape = torch.Size((*next(iter(parts.values())).shape[:-2], weights.shape[-1], dim))
        return (weights @ self.decode(parts, shape, weights.dtype)).sum(1)


class CodeQuantizer(Quantizer):
    """Stores a code of `bits` for each value, as the planes of `codes`."""

    bits: int

    @property
    def index_bits(self) -> dict[str, int]:
        return {"codes": self.bits}


def shared_group(groups: Iterable[int | None]) -> int | None:
    """The least common multiple of the parts' token groups; None (the whole block) where one of them is None."""
    known = [1, *groups]
    return None if None in known else math.lcm(*filter(None, known))


def more_bits(quantizer: _Coded, extra: int, most: int) -> _Coded:
    """A copy with `bits` raised by `extra`, but not above `most`."""
    other = copy.copy(quantizer)
    other.bits = max(quantizer.bits, min(quantizer.bits + extra, most))
    return other


class Passthrough(Quantizer):
    """Stores values unchanged. Under it every task must score exactly as in full precision."""

    version: ClassVar[int] = 1
    token_group = 1
    attended_as = "states"

    def encode(self, x: Tensor, dtype: torch.dtype) -> Parts:
        return {"values": x.to(dtype, copy=True)}  # copies: stored values must not change when a caller's tensor does

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return parts["values"].to(dtype, copy=True)


class Zero(Quantizer):
    """Stores nothing and decodes to zeros. Under it no task may score as in full precision."""

    version: ClassVar[int] = 1
    token_group = 1

    def encode(self, x: Tensor, dtype: torch.dtype) -> Parts:
        # A tensor with zero rows: it keeps the device and has no bytes.
        return {"nothing": x.new_empty(*x.shape[:-2], 0, 1)}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=parts["nothing"].device)
