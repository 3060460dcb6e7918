"""Layers of transformers' own quantized cache: the methods `quanto` and `hqq`.

That cache quantizes a whole prefill at once, and attention reads the prefill in full precision. Later tokens wait until
there are `residual.size` of them; then all tokens, decoded ones and waiting ones, are quantized again (a flush). The
error of a token thus depends on how many flushes it has been through (decode mode), and no chunk may go past a flush.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import HQQQuantizedLayer, QuantizedLayer, QuantoQuantizedLayer
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from kvq.cache.chunk_masks import SourceColumns, Transitions
from kvq.cache.layer import Layer
from kvq.cache.rotary import RopeTable
from kvq.config.method import Policy as ResidualPolicy
from kvq.config.method import PrefillBlock, Residual, ResidualSide
from kvq.errors import ConfigError, DataError, Unsupported, at_least, check_choice
from kvq.methods.policies import CHOOSES_TOKENS, Policy

BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
"""Widths that each backend packs."""
_LAYERS: dict[str, type[QuantizedLayer]] = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}

States = Float[Tensor, "batch heads _tokens head_dim"]


def is_installed(backend: str) -> bool:
    """Whether transformers finds the backend's package."""
    return bool({"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}[backend]())


class LibraryCache(Policy):
    """A cache of transformers in the place of codecs.

    Args:
        name: `quanto` or `hqq`.
        bits: bits per code.
        group_size: elements that share a scale and a zero point.

    Raises:
        Unsupported: bits that the backend cannot pack, or a package that is not installed.
    """

    version: ClassVar[int] = 1
    setting = "backend"
    does = "quantizes anew what it decoded (decode mode)"
    needs = frozenset({"sides_alike"})
    excludes = CHOOSES_TOKENS | {"two_codecs", "all_at_once", "prompt_at_once", "sides_apart"}

    def __init__(self, name: str, bits: int, group_size: int = 64) -> None:
        check_choice("name", name, BITS)
        at_least("group_size", group_size, 2)
        self.name, self.bits, self.group_size = name, bits, group_size
        if bits not in (known := BITS[name]):
            raise Unsupported(f"bits={bits}: {name} does {', '.join(map(str, known[:-1]))} or {known[-1]} bits")
        if not is_installed(name):
            raise Unsupported(f"method={name}: needs a package that is not installed; pip install -e '.[{name}]'")

    def check_residual(self, name: str, residual: Residual) -> None:
        """Raise `Unsupported` for another residual than that of transformers' cache."""
        side = residual.key
        if side.policy is not ResidualPolicy.block or side.prefill_block is not PrefillBlock.whole:
            raise Unsupported(f"residual: {name} has that of transformers' cache, policy=block and prefill_block=whole")

    def build_layer(self, residual: ResidualSide, label: str) -> Layer:
        return TransformersLayer(self, residual, label)


@functools.cache
def check_works(backend: str, device: torch.device) -> None:
    """Quantize and dequantize one token, because optimum-quanto compiles C++ the first time it does."""
    held, token = _LAYERS[backend](nbits=4, q_group_size=64), torch.zeros(1, 1, 1, 64, device=device)
    try:
        for _ in range(2):
            held.update(token, token)
    except (RuntimeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        needs = "; it compiles C++ and needs ninja and a compiler" if backend == "quanto" else ""
        raise Unsupported(f"method={backend}: does not work on this machine ({reason}){needs}") from error


def stored_bytes(held: Any) -> int:
    """Bytes of all tensors in a backend's quantized tensor: in mappings, sequences and tensor subclasses."""
    if isinstance(held, Mapping):
        return sum(map(stored_bytes, held.values()))
    if isinstance(held, list | tuple):
        return sum(map(stored_bytes, held))
    if not isinstance(held, Tensor):
        return 0
    parts = getattr(held, "__tensor_flatten__", None)
    return (
        held.numel() * held.element_size() if parts is None else sum(stored_bytes(getattr(held, n)) for n in parts()[0])
    )


class TransformersSide:
    """Keys or values of a `TransformersLayer`, with the properties that a `KVCache` sums up."""

    uses_rope = wants_hidden = False
    rope: RopeTable | None = None

    def __init__(self, layer: TransformersLayer, name: str) -> None:
        self._layer, self._name = layer, name
        self.codec, self.residual, self.label = layer.backend, layer.residual, f"{layer.label} {name}"

    @property
    def batch_size(self) -> int:
        return len(self._layer.held) or -1

    @property
    def tokens(self) -> int:
        """Cached tokens, quantized and waiting."""
        return int(self._layer.held[0].cumulative_length) if self._layer.held else 0

    @property
    def residual_tokens(self) -> int:
        """Tokens that wait in full precision."""
        waiting = self._waiting
        return waiting[0].shape[2] if waiting else 0

    @property
    def packed_tokens(self) -> int:
        """Tokens that are quantized."""
        return self.tokens - self.residual_tokens

    @property
    def packed_bytes(self) -> int:
        """Bytes of every tensor that the backend holds: codes, scales, zero points."""
        return sum(stored_bytes(getattr(held, f"_quantized_{self._name}")) for held in self._layer.held)

    @property
    def residual_bytes(self) -> int:
        """Bytes of the full-precision tokens that wait for the next flush."""
        return sum(part.numel() * part.element_size() for part in self._waiting)

    @property
    def elements_per_token(self) -> int:
        return self._layer.elements_per_token

    @property
    def bits_per_element(self) -> float:
        """Stored bits per quantized element; 0 before the first tokens."""
        return 8 * self.packed_bytes / (self.packed_tokens * self.elements_per_token) if self.packed_tokens else 0.0

    def moves(self, queries: int) -> Transitions:
        """The tokens that are quantized, again or for the first time, before the last of `queries` single ones."""
        at = max(self.residual.size - self.residual_tokens, 1) if self.tokens else 1
        return Transitions(0, (at,) * (self.tokens + at) if at < queries else ())

    def check_finite(self) -> None:
        """No check here: `TransformersLayer.update` checks states."""

    @property
    def _waiting(self) -> list[Tensor]:
        """Full-precision tokens of each sequence, `[1, heads, tokens, head_dim]`."""
        parts = [getattr(held, self._name) for held in self._layer.held]
        return [part for part in parts if part is not None and part.ndim == 4]


class TransformersLayer(Layer):
    """Keys and values of one attention layer in transformers' quantized layers, one for each sequence of a batch.

    transformers quantizes a batch as one tensor, and hqq's groups then span its sequences. With a layer for each
    sequence, no sequence depends on the others.
    """

    irreversible = "its backend quantizes all tokens anew at every flush"

    def __init__(self, backend: LibraryCache, residual: ResidualSide, label: str) -> None:
        super().__init__()
        self.backend, self.residual, self.label = backend, residual, label
        self.held: list[QuantizedLayer] = []
        self.elements_per_token = 0
        self._make_sides()

    def _make_sides(self) -> None:
        """Make the views of keys and values that read this layer."""
        self.key, self.value = TransformersSide(self, "keys"), TransformersSide(self, "values")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        heads, dim, group = key_states.shape[1], key_states.shape[3], self.backend.group_size
        if heads * dim % group:
            raise Unsupported(
                f"{self.label}: {heads} heads of head_dim={dim} are no multiple of group_size={group}, "
                f"and {self.backend.name} takes whole groups only"
            )
        check_works(self.backend.name, key_states.device)
        kind, settings = _LAYERS[self.backend.name], {"nbits": self.backend.bits, "q_group_size": group}
        self.held = [kind(**settings, residual_length=self.residual.size) for _ in range(key_states.shape[0])]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, tokens, head_dim]` states and return those that attention reads, oldest first."""
        for states, side in ((key_states, "keys"), (value_states, "values")):
            if not bool(torch.isfinite(states).all()):
                raise DataError(f"{self.label} {side}: NaN or infinite values; check the model's weights and dtypes")
        if self.token_by_token and self.key.moves(key_states.shape[2]).queries:
            raise Unsupported(
                f"{self.label}: {key_states.shape[2]} tokens at once go past a flush of {self.backend.name}, which "
                "quantizes all tokens anew; end chunks where it flushes"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.held):
            raise DataError(f"{self.label}: batch of {key_states.shape[0]} after {len(self.held)}; reset() the cache")
        self.elements_per_token = key_states.numel() // key_states.shape[2]
        rows = [held.update(key_states[i : i + 1], value_states[i : i + 1]) for i, held in enumerate(self.held)]
        return torch.cat([keys for keys, _ in rows]), torch.cat([values for _, values in rows])

    def write(self) -> dict[str, Any]:
        raise Unsupported(f"method={self.backend.name}: the state of transformers' own caches has no form in a file")

    def columns_for(self, queries: int, device: torch.device, known: SourceColumns | None) -> SourceColumns | None:
        """Always None, no extra columns: chunks end where the layer quantizes, so a token has one form in a chunk."""
        return None

    def reset(self) -> None:
        self.held = []
        self.elements_per_token = 0
        self.is_initialized = False

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the batch by its sequences `indices`, which share their tokens (beam search)."""
        if self.held:
            self.elements_per_token = self.elements_per_token // len(self.held) * int(indices.numel())
            self.held = [copy.copy(self.held[index]) for index in indices.tolist()]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise unless the last `-tokens_to_remove` tokens (a negative number) are all in the residual."""
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): give a negative number of tokens to remove")
        waiting = self.key.residual_tokens
        if -tokens_to_remove > waiting:
            raise Unsupported(
                f"{self.label}: cannot remove {-tokens_to_remove} tokens, only {waiting} are still in the residual; "
                f"tokens quantized by {self.backend.name} cannot be cropped (fork() the cache before them)"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers)."""
        self.check_crop(tokens_to_remove)
        left = self.key.residual_tokens + tokens_to_remove
        for held in self.held if tokens_to_remove else []:
            held.keys, held.values = held.keys[:, :, :left], held.values[:, :, :left]  # type: ignore[index]
            held.cumulative_length += tokens_to_remove

    def fork(self) -> TransformersLayer:
        """A copy that shares the cached tokens: transformers' layer replaces its tensors, it writes into none."""
        other = copy.copy(self)
        other.held = [copy.copy(held) for held in self.held]
        other._make_sides()
        return other
