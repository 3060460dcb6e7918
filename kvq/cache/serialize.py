"""What a cache file holds: tensors by name and a tree of plain numbers, written by `Writer` and read by `Reader`.

A class with state names in `saved` the attributes that it keeps from one forward to the next. A reader believes
nothing: kinds, axes, sizes and counts are checked, and nothing is allocated that is larger than what the file holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvq.codecs import BlockRun, Codec, CodedBlocks, Growable, Packed
from kvq.codecs.rope import Rope
from kvq.errors import DataError

_LEAST_BITS = 1 / 16
"""Fewer bits per element than any codec stores; a file that claims more tokens than it has bytes for is refused."""
_WIDER = 4
"""Values may have more channels per head than keys, whose number the model's configuration gives."""
_TRIED = 32
"""Tokens that are encoded to see which parts a codec stores."""


@dataclass(frozen=True)
class Field:
    """An attribute that a file holds; each may be None.

    Attributes:
        kind: `count` (an integer), `number` (a float, 0 or more), `tensor`, or `rows` (a `Growable`).
        axes: names of a tensor's axes; an axis whose size the reader knows by its name must have it.
        dtype: `states`: theirs; `float`: any floating point.
    """

    kind: Literal["count", "number", "tensor", "rows"]
    axes: str = ""
    dtype: torch.dtype | Literal["states", "float"] = "states"


class Writer:
    """Collects the state of a part of a cache under a prefix.

    Attributes:
        tree: plain numbers, as JSON data.
        tensors: by name, shared by all parts.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None, prefix: str = "") -> None:
        self.tree: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors
        self._prefix = prefix

    def part(self, name: str) -> Writer:
        inner = Writer(self.tensors, f"{self._prefix}{name}.")
        self.tree[name] = inner.tree
        return inner

    def fields(self, owner: Any, saved: Mapping[str, Field]) -> None:
        """Write the attributes of `owner` that are named."""
        for name, field in saved.items():
            value = getattr(owner, name)
            if field.kind in ("count", "number"):
                self.tree[name] = value
            elif value is not None:
                self.tensor(name, value.view if isinstance(value, Growable) else value)

    def tensor(self, name: str, tensor: Tensor) -> None:
        self.tensors[f"{self._prefix}{name}"] = tensor

    def packed(self, name: str, packed: Packed) -> None:
        """Write stored blocks."""
        self.tree[name] = [[run.tokens, run.count, run.rows] for run in packed.runs]
        self.tensors.update({f"{self._prefix}{name}.{part}": tensor for part, tensor in packed.parts.items()})


class Reader:
    """Reads what a `Writer` wrote.

    Args:
        tree, tensors: as the file has them; what is read is taken out of them.
        where: names the file, in errors.
        device: where tensors go.
        dtype: of the states.
    """

    def __init__(
        self,
        tree: Any,
        tensors: dict[str, Tensor],
        where: str,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
    ) -> None:
        self.tree, self.tensors, self.where, self.dtype, self.device = tree, tensors, where, dtype, device
        self._prefix = prefix
        self.sizes: dict[str, int] = {}
        """Sizes of axes that are known, by name; `most_heads` and `most_tokens` bound heads and tokens."""
        if not isinstance(tree, dict):
            raise self.error(f"{_short(tree)} where a mapping belongs")

    def part(self, name: str, device: torch.device | None = None) -> Reader:
        """A reader for a part of this one, on another device where one is given."""
        where = self.device if device is None else device
        inner = Reader(self.tree.pop(name, None), self.tensors, self.where, self.dtype, where, f"{self._prefix}{name}.")
        inner.sizes = dict(self.sizes)
        return inner

    def count(self, name: str, lowest: int = 0, highest: int = 2**48) -> int:
        """A whole number within limits."""
        value = self.tree.pop(name, None)
        if type(value) is not int or not lowest <= value <= highest:
            raise self.error(f"{name} is {_short(value)}; a whole number, {lowest} to {highest}")
        return value

    def number(self, name: str) -> float:
        """A finite number, 0 or more."""
        value = self.tree.pop(name, None)
        if type(value) is not float or not 0 <= value < math.inf:
            raise self.error(f"{name} is {_short(value)}; a finite number, 0 or more")
        return value

    def shape(self) -> tuple[int, int, int] | None:
        """Batch, heads and channels per head, which are known from here on; None: nothing is cached."""
        value = self.tree.pop("shape", None)
        if value is None:
            return None
        whole = isinstance(value, list) and len(value) == 3 and all(type(size) is int and size > 0 for size in value)
        if not whole:
            raise self.error(f"shape is {_short(value)}; batch, heads and head_dim")
        batch, heads, head_dim = value
        most, known = self.sizes["most_heads"], self.sizes["head_dim"]
        if head_dim > _WIDER * known or heads > most or self.sizes.setdefault("batch", batch) != batch:
            raise self.error(f"shape is {value}; the layer has head_dim {known}, at most {most} heads and one batch")
        self.sizes |= {"heads": heads, "head_dim": head_dim}
        return batch, heads, head_dim

    def fields(self, owner: Any, saved: Mapping[str, Field]) -> None:
        """Set the attributes of `owner` that are named."""
        for name, field in saved.items():
            if field.kind in ("count", "number"):
                setattr(owner, name, self.count(name) if field.kind == "count" else self.number(name))
                continue
            tensor = self.tensor(name, field)
            setattr(owner, name, Growable(tensor) if tensor is not None and field.kind == "rows" else tensor)

    def tensor(self, name: str, field: Field) -> Tensor | None:
        """A tensor of these axes and this dtype; None: the file has none."""
        found = self.tensors.pop(f"{self._prefix}{name}", None)
        if found is None:
            return None
        axes, dtype = field.axes.split(), self.dtype if field.dtype == "states" else field.dtype
        wanted = [int(axis) if axis.isdigit() else self.sizes.get(axis, axis) for axis in axes]
        fits = len(axes) == found.ndim and all(
            size == want for size, want in zip(found.shape, wanted, strict=True) if isinstance(want, int)
        )
        right = found.dtype.is_floating_point if dtype == "float" else found.dtype is dtype
        if not fits or not right or (field.kind == "rows" and not found.shape[-2]):
            shape = ", ".join(map(str, wanted))
            raise self.error(f"{name} is {found.dtype} {list(found.shape)}, not {dtype} [{shape}]")
        return found.to(self.device)

    def packed(self, name: str, codec: Codec) -> Packed | None:
        """Stored blocks of a codec, None where there are none; `decoded` tries the tensors."""
        if name not in self.tree:
            return None
        runs = tuple(self._run(name, run) for run in _listed(self.tree.pop(name)))
        if not runs:
            raise self.error(f"{name} has no blocks")
        start = f"{self._prefix}{name}."
        parts = {key[len(start) :]: self.tensors.pop(key) for key in list(self.tensors) if key.startswith(start)}
        batch, heads, head_dim = (self.sizes[axis] for axis in ("batch", "heads", "head_dim"))
        tried = self._tried(codec, heads, head_dim)
        if parts.keys() != tried.keys():
            raise self.error(f"{name} holds {_named(parts)}; the codec stores {_named(tried)}")
        for part, tensor in parts.items():
            like = tried[part]
            # Lists of outliers have no rows of their own; decoding tells whether their lengths are right.
            rows = sum(run.count * run.rows.get(part, 0) for run in runs)
            if not any(part in run.rows for run in runs) and tensor.ndim == 4:
                rows = tensor.shape[2]
            wanted = [batch, like.shape[1], rows, like.shape[3]]
            if list(tensor.shape) != wanted or tensor.dtype is not like.dtype:
                raise self.error(f"{name}.{part} is {tensor.dtype} {list(tensor.shape)}, not {like.dtype} {wanted}")
        parts = {part: tensor.to(self.device) for part, tensor in parts.items()}
        packed = Packed(parts, runs, batch, heads, head_dim, self.dtype)
        # A codec that stores nothing (`zero`) is held to what the model can read, so are streams of very few bytes.
        stores = any(part.numel() for part in tried.values())
        fits = stores and packed.bits_per_element >= _LEAST_BITS
        lists = not stores or isinstance(codec, CodedBlocks)
        if not fits and not (lists and packed.tokens <= self.sizes["most_tokens"]):
            raise self.error(f"{name} claims {packed.tokens} tokens, for which it holds {packed.nbytes} bytes")
        return packed

    def _tried(self, codec: Codec, heads: int, head_dim: int) -> dict[str, Tensor]:
        """The parts that a codec stores of a few tokens."""
        none = torch.zeros(1, _TRIED, 0, device=self.device)
        waves = torch.arange(heads * _TRIED * head_dim, device=self.device).sin().view(1, heads, _TRIED, head_dim)
        try:
            return codec.encode(waves.to(self.dtype), rope=Rope(none, none) if codec.uses_rope else None).parts
        except Exception as error:  # a shape that the codec does not take
            raise self.error(f"the codec stores no {heads} heads of {head_dim} channels") from error

    def _run(self, name: str, run: Any) -> BlockRun:
        tokens, count, rows = run if isinstance(run, list) and len(run) == 3 else (0, 0, {})
        numbers = [tokens, count, *rows.values()] if isinstance(rows, dict) else [None]
        if any(type(number) is not int or not 0 <= number < 2**48 for number in numbers) or not tokens or not count:
            raise self.error(f"{name}: {_short(run)} is not a run of blocks (tokens, blocks, rows of each part)")
        return BlockRun(tokens, count, rows)

    def decoded(self, packed: Packed, codec: Codec, rope: Rope | None) -> Tensor:
        """The tokens of stored blocks."""
        shape = [packed.batch, packed.heads, packed.tokens, packed.head_dim]
        try:
            found = codec.decode(packed, rope)
        except Exception as error:  # each part of a codec fails in its own way on what is not its own
            raise self.error(f"its {packed.tokens} tokens cannot be decoded ({type(error).__name__})") from error
        if list(found.shape) != shape:
            raise self.error(f"its {packed.tokens} tokens decode to {list(found.shape)}, not {shape}")
        return found

    def finish(self) -> None:
        """Raise `DataError` for entries of the tree that nothing has read."""
        if self.tree:
            raise self.error(f"{_short(next(iter(self.tree)))} means nothing here")

    def error(self, said: str) -> DataError:
        return DataError(": ".join(filter(None, (self.where, self._prefix.rstrip("."), said))))


def _named(parts: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted(parts))[:200] or "nothing"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _short(value: Any) -> str:
    return repr(value)[:60]
