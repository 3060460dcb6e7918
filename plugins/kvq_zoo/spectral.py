"""SpectralQuant: a rotation to eigenvectors and a codebook for each coordinate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.fitted import TableRotation
from kvq.codecs.packed import pack_parts, unpack_parts
from kvq.codecs.quantizers import Parts, Quantizer
from kvq.codecs.rotations import eigenvectors
from kvq.errors import Unsupported, require

_MOST = 8


class EigenRotation(TableRotation):
    """Rotates each KV head to the eigenvectors of its states' second moment, by eigenvalue, descending.

    Table: `rotation` `[heads, head_dim, head_dim]` in fp32.

    Source: SpectralQuant's released `calibration.py` and `spectral_rotation.py`.
    """

    version: ClassVar[int] = 1

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: another head dim than that of the calibration."""
        Calibrated.check(self, head_dim)

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`rotation` `[heads, dim, dim]`: in columns, eigenvectors of each head's second moment, largest first."""
        wide = x.double()
        return {"rotation": eigenvectors(wide.mT @ wide / wide.shape[1])[1].flip(-1).float()}


class SpectralQuantizer(Calibrated, Quantizer):
    """Rounds each coordinate of a head to the nearest level of its codebook; nothing but codes is stored.

    Of coordinates by energy λ (mean square), the first s = round((Σ λ)² / Σ λ²) are semantic (1 to dim - 1), the others
    are the tail. Bits h >= l, 1 to 8, are those whose s h + (dim - s) l is nearest to dim `bits`; of equally near pairs
    that with the larger h, then l. A coordinate of the tail has l bits, and they share one codebook. The semantic ones
    have s h bits together, each next one for the largest λ / 4^b of less than 8 (`water_filling`), and a codebook each;
    with 0 bits a coordinate is its mean. Else each has h, and they share a codebook.

    A codebook is fitted to the calibration: Lloyd's steps from even levels between its extremes, at most 200.

    Args:
        bits: mean bits of a coordinate.
        water_filling: version 2; else version 1.

    Tables: `widths` `[heads, 1, dim]`; `book` `[heads, 1, dim]`, a row of `levels` `[heads, books, 2^b]` in fp32, in
    which unused ones are infinite. Row 0 is the tail's.

    Raises:
        ConfigError: `bits` outside of 1 to 8.
        Unsupported: one channel, or another number than that of the calibration.

    Source: SpectralQuant's released `nonuniform_quantization.py` and `waterfill.py`.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, bits: float | int, water_filling: bool = True) -> None:
        require(1 <= bits <= _MOST, "bits", bits, f"a mean of 1 to {_MOST}")
        self.bits, self.water_filling = bits, water_filling

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: one channel, or another number than that of the calibration."""
        require(head_dim >= 2, "head_dim", head_dim, "no coordinates but semantic ones", Unsupported)
        super().check(head_dim)

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """Fit `widths`, `book` and `levels` to states `[heads, tokens, dim]` whose coordinates have falling energy."""
        dim, found = x.shape[-1], []
        for head in x.double():
            energies = head.square().mean(0)
            ratio = energies.sum() ** 2 / energies.square().sum().clamp(min=torch.finfo(energies.dtype).tiny)
            split = min(max(round(float(ratio)), 1), dim - 1)
            high, low = choose_bits(split, dim, self.bits)
            widths = fill_bits(energies[:split].tolist(), high * split) if self.water_filling else [high] * split
            books = [lloyd_levels(head[:, split:], low)]
            if self.water_filling:
                books += [lloyd_levels(head[:, i], width) for i, width in enumerate(widths)]
            else:
                books.append(lloyd_levels(head[:, :split], high))
            rows = list(range(1, split + 1)) if self.water_filling else [1] * split
            found.append((widths + [low] * (dim - split), rows + [0] * (dim - split), books))
        longest = max(len(book) for *_, books in found for book in books)
        levels = torch.full((len(found), max(len(books) for *_, books in found), longest), torch.inf)
        for own, (*_, books) in zip(levels, found, strict=True):
            for row, book in zip(own, books, strict=False):
                row[: len(book)] = book
        tables = {"widths": [widths for widths, *_ in found], "book": [rows for _, rows, _ in found]}
        return {name: torch.tensor(rows)[:, None].to(torch.int16) for name, rows in tables.items()} | {"levels": levels}

    def _codebooks(self, like: Tensor) -> Float[Tensor, "heads dim levels"]:
        """The codebook of each coordinate, ascending, filled up with infinity, in the dtype of `like`."""
        levels = self.table("levels", like)
        book = self.table("book", like)[:, 0].long()
        return levels.gather(1, book[..., None].expand(-1, -1, levels.shape[-1]))

    def _planes(self, like: Tensor) -> Iterator[tuple[int, int, Int[Tensor, " size"]]]:
        """For each head and width above 0: the head, the bits, and the indices of the coordinates that have them."""
        for head, (own,) in enumerate(self.table("widths", like).long()):
            for width in own.unique().tolist():
                if width:
                    yield head, width, (own == width).nonzero()[:, 0]

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`<head>.<bits>.<plane>` for the coordinates of a head with equal bits."""
        levels, parts = self._codebooks(x), Parts()
        middles = (levels[..., 1:] + levels[..., :-1]) / 2
        flat = x.reshape(-1, *x.shape[-3:]).permute(1, 3, 0, 2).contiguous()  # blocks of a coordinate together
        codes = torch.searchsorted(middles, flat.flatten(2)).view(flat.shape).permute(2, 0, 3, 1).reshape(x.shape)
        for head, width, places in self._planes(x):
            own = codes.narrow(-3, head, 1).index_select(-1, places)
            parts |= pack_parts(own, width, f"{head}.{width}")
        return parts

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        codes = torch.zeros(shape, dtype=torch.long, device=next(iter(parts.values())).device)
        for head, width, places in self._planes(torch.empty(shape, dtype=dtype, device=codes.device)):
            own = unpack_parts(parts, width, shape[-2], f"{head}.{width}").long()
            codes.narrow(-3, head, 1).index_copy_(-1, places, own)
        levels = self._codebooks(torch.empty(shape, dtype=dtype, device=codes.device))
        return levels.expand(*shape[:-3], -1, -1, -1).gather(-1, codes.mT).mT


def choose_bits(split: int, dim: int, mean: float | int) -> tuple[int, int]:
    """Choose the bits of the first `split` of `dim` coordinates and the bits of the others, `mean` on average."""
    pairs = [(high, low) for high in range(_MOST, 0, -1) for low in range(high, 0, -1)]
    return min(pairs, key=lambda pair: abs(split * pair[0] + (dim - split) * pair[1] - mean * dim))


def fill_bits(energies: list[float], total: int) -> list[int]:
    """Share out `total` bits: each next one to the coordinate of largest energy / 4^bits with less than 8."""
    widths = [0] * len(energies)
    for _ in range(total):
        open_ones = [i for i, width in enumerate(widths) if width < _MOST]
        widths[max(open_ones, key=lambda i: max(energies[i], 1e-12) / 4.0 ** widths[i])] += 1
    return widths


def lloyd_levels(values: Float[Tensor, "*shape"], bits: int) -> Float[Tensor, " levels"]:
    """2^bits levels for all values, ascending, in fp64: at most 200 of Lloyd's steps from even ones."""
    values = values.flatten().double().sort().values
    sums = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    if not bits:
        return values.mean()[None]
    levels = torch.linspace(float(values[0]), float(values[-1]), 2**bits, dtype=torch.float64)
    for _ in range(200):  # of Lloyd at most
        inner = torch.searchsorted(values, (levels[1:] + levels[:-1]) / 2, right=True)
        ends = torch.nn.functional.pad(inner, (1, 0))
        ends = torch.cat([ends, ends.new_tensor([len(values)])])
        held = ends.diff()
        found = torch.where(held > 0, sums[ends].diff() / held.clamp(min=1), levels)
        moved, levels = float((found - levels).abs().max()), found
        if moved < 1e-6:  # a change of no level above this ends them
            break
    return levels.sort().values
