"""MLX-LM on a model in memory: logits of every position of a text, through its quantized cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.errors import DataError, Unsupported, one_line
from kvq_engines.packages import check_installed

PACKAGES: Final = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
_BATCH: Final = 512


class Mlx(contextlib.AbstractContextManager["Mlx"]):
    """A transformers model in MLX-LM, with one type of cache for keys and values.

    Args:
        model: a causal language model of a family that MLX-LM knows, in fp32 or fp16 (fp16 is slow on a CPU).
        context: tokens of the longest text.
        bits, group_size: of the cache; None: full precision.

    Raises:
        ConfigError: MLX-LM is not installed, or in another version.
        DataError: a context beyond the model's.
        Unsupported: a family or a type of RoPE that it does not know. `logits`: bits and groups that its cache cannot
            hold, or bits where layers have windows, whose cache it does not quantize.
    """

    version: ClassVar[int] = 1
    name = "MLX-LM"

    def __init__(self, model: Any, context: int, bits: int | None = None, group_size: int = 64) -> None:
        check_installed("mlx", PACKAGES)
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import _get_classes

        config = model.config.to_dict()
        if context > config["max_position_embeddings"]:
            raise DataError(f"task.context={context}: the model takes {config['max_position_embeddings']} tokens")
        try:
            kind, arguments = _get_classes(config)
        except ValueError as error:
            raise Unsupported(f"task.engine=mlx: {error}") from error
        config |= _rope_bases(config.pop("rope_parameters"))
        if "sliding_attention" in (kinds := config.get("layer_types") or ()):
            config["sliding_window_pattern"] = kinds.index("full_attention") + 1
        self._mx, self._bits, self._group = mx, bits, group_size
        self._model = kind(arguments.from_dict(config))
        weights = {name: mx.array(weight.detach().cpu().numpy()) for name, weight in model.state_dict().items()}
        if "lm_head" not in self._model and model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        renamed = getattr(self._model, "sanitize", dict)(weights)
        self._model.load_weights(list(renamed.items()))
        self._make = make_prompt_cache
        self._caches: list[Any] = []
        self.vocab = int(config["vocab_size"])

    @property
    def build(self) -> str:
        """The engine's versions and its device."""
        named = ", ".join(f"{name} {version}" for name, version in PACKAGES.items())
        return f"{self.name} ({named}; {self._mx.default_device()})"

    def logits(self, tokens: Int[Tensor, " tokens"]) -> Iterator[Float[Tensor, "positions vocab"]]:
        """The logits after each token of a text, in order, some positions at a time, from an empty cache.

        Raises:
            Unsupported: bits and groups that its cache cannot hold.
        """
        self._caches = self._empty_caches()
        yield from self.read(tokens)

    def fill(self, states: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Empty the cache, and store keys and values `[1, heads, tokens, head_dim]` of each layer, as if read.

        Raises:
            Unsupported: as `logits`.
        """
        self._caches = self._empty_caches()
        with self._refusals():
            for cache, pair in zip(self._caches, states, strict=True):
                cache.update_and_fetch(*(self._mx.array(side.float().numpy()) for side in pair))
            self._mx.eval([part for cache in self._caches for stored in _sides(cache) for part in _arrays(stored)])

    def _empty_caches(self) -> list[Any]:
        """An empty cache for each layer, quantized if `bits` are given."""
        from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

        caches = self._make(self._model)
        if self._bits is not None and any(isinstance(cache, RotatingKVCache) for cache in caches):
            raise Unsupported("task.engine=mlx: MLX-LM does not quantize the cache of a layer with a window")
        return caches if self._bits is None else [QuantizedKVCache(self._group, self._bits) for _ in caches]

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise MLX's `ValueError` within the context as `Unsupported`, with the bits and groups that it refuses."""
        try:
            yield
        except ValueError as error:
            asked = f"{self._bits} bits in groups of {self._group}"
            raise Unsupported(f"task.engine=mlx: {asked}: {one_line(error)}") from error

    def read(self, tokens: Int[Tensor, " tokens"]) -> Iterator[Float[Tensor, "positions vocab"]]:
        """The logits after each token of a text that follows what was read before. Raises: Unsupported: as `logits`."""
        for start in range(0, tokens.numel(), _BATCH):
            part = self._mx.array(tokens[start : start + _BATCH].tolist())[None]
            with self._refusals():
                found = self._model(part, cache=self._caches)[0].astype(self._mx.float32)
                self._mx.eval(found)
            yield torch.from_numpy(np.array(found))

    def cached(self, layers: int, heads: int, head_dim: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer as stored of the last text, dequantized: `[heads, tokens, head_dim]`."""

        def decoded(stored: Any) -> Tensor:
            if self._bits is not None:
                stored = self._mx.dequantize(*stored, group_size=self._group, bits=self._bits)
            return torch.from_numpy(np.array(stored.astype(self._mx.float32)))[0]

        return [tuple(map(decoded, _sides(cache))) for cache in self._caches]  # type: ignore[misc]

    @property
    def state_bytes(self) -> int:
        """Bytes of the cached keys and values of the tokens read, without what is allocated ahead."""
        return sum(_stored_bytes(stored) for cache in self._caches for stored in _sides(cache))

    def side_bits(self, side: str) -> float:
        """Bits of an element of `key` or `value`, scales included, as they lie in the cache."""
        at = ("key", "value").index(side)
        stored = [_sides(cache)[at] for cache in self._caches]
        return 8 * sum(map(_stored_bytes, stored)) / sum(_element_count(part, self._bits) for part in stored)

    def close(self) -> None:
        """Free the caches."""
        self._caches = []

    def __exit__(self, *_: object) -> None:
        self.close()


def _rope_bases(ropes: Mapping[str, Any]) -> dict[str, float]:
    """RoPE's bases and share of channels at the top level, for MLX-LM. Raises: Unsupported: RoPE of another type."""
    by_kind = {"full_attention": ropes} if "rope_theta" in ropes else ropes
    for rope in by_kind.values():
        if rope.get("rope_type", "default") != "default":
            raise Unsupported(f"task.engine=mlx: rope_type={rope['rope_type']} is not carried over")
    named = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    share = {name: rope[name] for rope in by_kind.values() for name in ("partial_rotary_factor",) if name in rope}
    return {named[kind]: rope["rope_theta"] for kind, rope in by_kind.items()} | share


def _sides(cache: Any) -> tuple[Any, Any]:
    """Keys and values of the tokens read: arrays, or tuples of codes, scales and offsets."""
    if hasattr(cache, "bits"):
        keys, values = cache.keys_and_values()
        return keys, values
    return cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]


def _arrays(stored: Any) -> tuple[Any, ...]:
    """The arrays of keys or values of a layer: codes, scales and offsets, or one array in full precision."""
    return tuple(stored) if isinstance(stored, (tuple, list)) else (stored,)


def _stored_bytes(stored: Any) -> int:
    """Bytes of keys or values of a layer as they lie in the cache, scales and offsets included."""
    return sum(int(part.nbytes) for part in _arrays(stored))


def _element_count(stored: Any, bits: int | None) -> int:
    """Number of keys' or values' elements that are stored; codes are packed into words of 32 bits."""
    codes = int(_arrays(stored)[0].size)
    return codes if bits is None else codes * 32 // bits
