"""Invertible stages of a codec: rotations over channels and token norms.

A stage maps `[..., heads, tokens, head_dim]` to the same shape and may keep side information, one tensor
`[..., heads or 1, rows, columns]` per name, which the codec stores and counts.
"""

from __future__ import annotations

import abc
import enum
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs import hadamard
from kvq.codecs.double_quant import DoubleQuant
from kvq.codecs.quantizers import choice
from kvq.errors import ConfigError, Unsupported

Side = dict[str, Tensor]
_FEWEST_ROWS = 8  # of a matrix product; MKL has other code for 1 to 3


class Scope(enum.Enum):
    """The channels that a token's norm covers: those of each head, or those of all heads together."""

    head = "head"
    token = "token"


class Stage(abc.ABC):
    """One invertible step.

    Attributes:
        orthogonal: the step preserves the norm of every token in every head, so a gain commutes with it.
        takes_gain: the step's side information can absorb one factor per head and token.
        uses_rope: `forward` and `inverse` also take `rope`, the rotations of the block's tokens.
        token_group: tokens that share side information; 1: each token has its own, None: the whole block.
    """

    orthogonal = False
    takes_gain = False
    uses_rope = False
    token_group: int | None = None

    def check(self, head_dim: int) -> None:  # noqa: B027 - most stages work on any head dim
        """Raise `Unsupported` when the stage cannot work on `head_dim` channels."""

    @abc.abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        """The transformed `[..., heads, tokens, head_dim]`, and the side information.

        Floating-point side information is stored in fp16, integers (packed codes) unchanged.
        """

    @abc.abstractmethod
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        """Undo `forward` given the stored side information."""

    def absorb(self, side: Side, factor: Tensor) -> Side:
        """Side information that also scales the decoded token by `factor` `[..., heads, tokens, 1]`."""
        raise NotImplementedError(f"{type(self).__name__} takes no gain")


class _Rotation(Stage):
    """An orthogonal matrix applied to the channels of every token."""

    orthogonal = True
    token_group = 1

    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        """The matrix for `head_dim` channels, on the device and in the dtype of `like`."""
        raise NotImplementedError

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return per_block(x, self.matrix(x.shape[-1], x)), {}

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return per_block(y, self.matrix(y.shape[-1], y).mT)


def per_block(
    x: Float[Tensor, "*lead tokens dim"], matrix: Float[Tensor, "dim columns"]
) -> Float[Tensor, "*lead tokens columns"]:
    """`x @ matrix`, one product per block, so that a block's bits do not depend on how many blocks are decoded.

    Nor do a token's bits depend on how many tokens the block has: products of few rows, whose sums BLAS adds up in
    another order, are filled up with zeros.
    """
    flat, tokens = x.reshape(-1, *x.shape[-2:]), x.shape[-2]
    if tokens < _FEWEST_ROWS:
        flat = torch.nn.functional.pad(flat, (0, 0, 0, _FEWEST_ROWS - tokens))
    found = torch.bmm(flat, matrix.expand(flat.shape[0], -1, -1))[:, :tokens]
    return found.reshape(*x.shape[:-1], matrix.shape[1])


class Hadamard(_Rotation):
    """`x H_n / sqrt(n)` (QuaRot, arXiv 2404.00456), in Sylvester's order where n is a power of two; orthonormal.

    Args:
        block: channels n that are rotated together, consecutive ones; None = the head dim; `power_of_two` = the largest
            power of two that divides it.
        interleaved: the even and the odd ones of 2n consecutive channels are rotated apart (ExLlamaV2).
        normalized: divide by sqrt(n); else `x H_n`, undone by `y H_nᵀ / n`; stored scales are then larger by sqrt(n).

    Raises:
        ConfigError: a block below 1, `interleaved` without a block.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        block: int | Literal["power_of_two"] | None = None,
        interleaved: bool = False,
        normalized: bool = True,
    ) -> None:
        if isinstance(block, int) and block < 1:
            raise ConfigError(f"block={block}: at least 1, power_of_two, or null for the head dim")
        if interleaved and not isinstance(block, int):
            raise ConfigError("interleaved=true: with block=<a number>")
        self.block, self.interleaved, self.normalized = block, interleaved, normalized
        self.orthogonal = normalized

    def block_size(self, head_dim: int) -> int:
        """Channels that are rotated together."""
        if isinstance(self.block, str):
            return head_dim & -head_dim
        return head_dim if self.block is None else self.block

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: orders that are no power of two, nor one times 12, 20 or 28; blocks that do not fit."""
        size = self.block_size(head_dim)
        span = size * (1 + self.interleaved)
        if head_dim % span:
            raise Unsupported(f"head_dim={head_dim}: no multiple of {span}, the channels of a Hadamard block")
        if not hadamard.has_order(size):
            raise Unsupported(
                f"head_dim={head_dim}: no Hadamard matrix of {'this order' if size == head_dim else f'order {size}'} "
                "here; powers of two, and 12, 20 and 28 times one, have one"
            )

    @override
    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        self.check(head_dim)
        return _hadamard(
            head_dim, self.block_size(head_dim), self.interleaved, self.normalized, like.dtype, like.device
        )

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        x = super().inverse(y, side)
        return x if self.normalized else x / self.block_size(y.shape[-1])


class Draw(enum.Enum):
    """How a random sign is drawn from torch's generator: an integer below 2, or a Bernoulli variable (vLLM).

    1 is a plus; of `flips` (vLLM's Octave), an integer too, it is a minus.
    """

    integer = "integer"
    bernoulli = "bernoulli"
    flips = "flips"


class RandomizedHadamard(Hadamard):
    """A fixed random sign per channel, then `Hadamard` (RHT). `seed` is independent of data seeds.

    Args:
        seed: of the signs.
        draw: see `Draw`.
        block, interleaved, normalized: as `Hadamard`.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        seed: int = 0,
        block: int | Literal["power_of_two"] | None = None,
        interleaved: bool = False,
        normalized: bool = True,
        draw: Draw | str = Draw.integer,
    ) -> None:
        super().__init__(block, interleaved, normalized)
        self.seed, self.draw = seed, choice(Draw, draw, "draw")

    @override
    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        return _signs(head_dim, self.seed, self.draw, like.dtype, like.device) * super().matrix(head_dim, like)


class RandomRotation(_Rotation):
    """A Haar-distributed rotation (determinant +1) drawn from `seed`: QR of a Gaussian matrix with the sign fix."""

    version: ClassVar[int] = 1

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @override
    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        return rotation(head_dim, self.seed, like.dtype, like.device)


@lru_cache(maxsize=64)
def _hadamard(
    dim: int, block: int, interleaved: bool, normalized: bool, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "dim dim"]:
    matrix = hadamard.matrix(block) / (block**0.5 if normalized else 1)
    if interleaved:
        matrix = torch.kron(matrix, torch.eye(2, dtype=matrix.dtype))
    matrix = torch.block_diag(*[matrix] * (dim // len(matrix)))
    return matrix.to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def _signs(dim: int, seed: int, draw: Draw, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "dim 1"]:
    generator = torch.Generator().manual_seed(seed)
    if draw is Draw.bernoulli:
        ones = torch.bernoulli(torch.full((dim, 1), 0.5), generator=generator)
    else:
        ones = torch.randint(0, 2, (dim, 1), generator=generator)
        ones = 1 - ones if draw is Draw.flips else ones
    return (ones * 2 - 1).to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def rotation(dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "dim dim"]:
    """A Haar-distributed rotation with determinant +1."""
    generator = torch.Generator().manual_seed(seed)
    # `torch.nn.init.orthogonal_` gives the same matrix in row-major order, which moves the last bit of products.
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    q = q * torch.sign(torch.diagonal(r))
    if torch.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q.to(device=device, dtype=dtype)


class TokenNorm(Stage):
    """Divide each token by its norm `s = ||x_t||` (nsn, OScaR), or by `||x_t|| / sqrt(D)` with `rms` (NSNQuant).

    Args:
        scope: `head`: one norm per head and token; `token`: one per token over all heads and channels (OScaR's code).
        rms: divide the norm by the square root of the number of elements it covers.
        double_quant: store norms in a few bits; tokens are divided by the decoded norm, so later stages see and correct
            its error. None = fp16.

    An all-zero token stores 0 and decodes to zeros.

    Raises:
        ConfigError: unknown scope.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, scope: Scope | str = Scope.head, rms: bool = False, double_quant: DoubleQuant | None = None
    ) -> None:
        self.scope = choice(Scope, scope, "scope")
        self.rms = rms
        self.double_quant = double_quant

    @property
    def takes_gain(self) -> bool:  # type: ignore[override]
        """Only a norm per head and token, stored in fp16, can absorb a gain per head and token without much loss."""
        return self.scope is Scope.head and self.double_quant is None

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """1, or None where double quantization gives the norms of a block a common scale."""
        return 1 if self.double_quant is None else None

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        over = (-1,) if self.scope is Scope.head else (-3, -1)
        norm = torch.linalg.vector_norm(x, dim=over, keepdim=True)
        if self.rms:
            count = x.shape[-1] * (x.shape[-3] if self.scope is Scope.token else 1)
            norm = norm / count**0.5
        side = stored_side("scale", norm, self.double_quant)
        if self.double_quant is not None:
            norm = restored("scale", side, self.double_quant, x.shape[-2], 1, x.dtype)
        return x / norm.masked_fill(norm == 0, 1), side

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * restored("scale", side, self.double_quant, y.shape[-2], 1, y.dtype)

    @override
    def absorb(self, side: Side, factor: Tensor) -> Side:
        return {"scale": side["scale"] * factor}


def stored_side(name: str, value: Tensor, double_quant: DoubleQuant | None) -> Side:
    """Side information `[..., rows, columns]` under `name`, unchanged or double quantized."""
    if double_quant is None:
        return {name: value}
    return {f"{name}.{key}": part for key, part in double_quant.encode(value).items()}


def restored(
    name: str, side: Side, double_quant: DoubleQuant | None, rows: int, columns: int, dtype: torch.dtype
) -> Float[Tensor, "*lead rows columns"]:
    """Inverse of `stored_side`."""
    if double_quant is None:
        return side[name]
    parts = {key.removeprefix(f"{name}."): part for key, part in side.items()}
    return double_quant.decode(parts, rows, columns, dtype)
