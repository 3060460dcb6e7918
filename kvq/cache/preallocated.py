"""The full-precision reference for timings: a cache with room for all tokens from the start, and PyTorch's attention.

In decoding the queries that share a head are rows of one attention, which reads every key and value once: the fastest
way in which `scaled_dot_product_attention` takes grouped queries (with 4 to a head 1.7 to 1.9 times as fast as
`enable_gqa=True`, `results/bench/cpu.json`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import override

from kvq.cache.packed import Held, check_replaceable, first_seen, use_packed_attention
from kvq.errors import Unsupported
from kvq.models.layers import head_dims_of, state_layers_of


@dataclass(frozen=True)
class DenseStates(Held):
    """Keys or values in full precision as attention on grouped queries reads them."""

    states: Float[Tensor, "batch heads tokens head_dim"]

    @override
    def attend(
        self, module: nn.Module, query: Tensor, values: Any, mask: Tensor | None, given: dict[str, Any]
    ) -> Float[Tensor, "batch one heads dim"]:
        batch, heads, _, dim = query.shape
        first = first_seen(mask, self.states.shape[2], given.get("sliding_window"))
        keys, read = self.states[:, :, first:], values.states[:, :, first:]
        rows = query.reshape(batch, keys.shape[1], -1, dim)
        out = nn.functional.scaled_dot_product_attention(rows, keys, read, scale=given.get("scaling"))
        return out.reshape(batch, 1, heads, -1)


class _Layer(CacheLayerMixin):
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.held = room, 0

    @override
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.room, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.held + key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.held : end] = key_states
        self.values[:, :, self.held : end] = value_states
        self.held = end
        seen = self.keys[:, :, :end], self.values[:, :, :end]
        return (DenseStates(seen[0]), DenseStates(seen[1])) if key_states.shape[2] == 1 else seen

    def get_seq_length(self) -> int:
        return self.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class PreallocatedCache(Cache):
    """A cache with room for `room` tokens in every layer, in the dtype of the model.

    Raises:
        Unsupported: a model whose attention is not transformers' `sdpa` or `eager`.
    """

    def __init__(self, model: nn.Module, room: int) -> None:
        check_replaceable(model)
        use_packed_attention(model)
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        if state_layers_of(config):
            raise Unsupported("task.references=preallocated: has room for keys and values alone, not for states")
        super().__init__(layers=[_Layer(room) for _ in head_dims_of(config)])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, room that is not filled included."""
        layers: list[Any] = self.layers
        held = [states for layer in layers if layer.is_initialized for states in (layer.keys, layer.values)]
        return sum(states.numel() * states.element_size() for states in held)
