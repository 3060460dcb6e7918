"""A cache layer that sums the attention weights that its tokens receive, for policies that choose tokens by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.cache.layer import KVCacheLayer
from kvq.cache.serialize import Field, Reader
from kvq.errors import Unsupported


class AttendedLayer(KVCacheLayer):
    """Holds one sum per KV head and token. Attention does not read the sums, so they do not count as storage.

    Attributes:
        setting: names the policy in errors.
    """

    setting: str
    no_padding_reason = "goes by attention, in which padding takes part"
    saved: ClassVar[Mapping[str, Field]] = {
        **KVCacheLayer.saved,
        "_received": Field("tensor", "batch heads tokens", "float"),
    }
    _received: Float[Tensor, "batch kv_heads tokens"] | None = None

    def _add(self, received: Float[Tensor, "batch kv_heads tokens"], kept: float = 1.0) -> None:
        """Add the weights that all tokens, also new ones, have received since the last call; `kept` of earlier sums."""
        if self._received is not None:
            new = received.shape[-1] - self._received.shape[-1]
            received = received + kept * torch.nn.functional.pad(self._received, (0, new))
        self._received = received

    @property
    def _summed(self) -> int:
        """How many tokens have a sum: those in full precision; tokens that are evicted or packed have none."""
        return self.key.residual_tokens

    @override
    def read(self, given: Reader) -> None:
        super().read(given)
        summed = self._summed
        if self._received is not None and self._received.shape[-1] != summed:
            raise given.error(f"_received is of {self._received.shape[-1]} tokens; the method has sums of {summed}")

    @override
    def reset(self) -> None:
        super().reset()
        self._received = None

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._received is not None:
            self._received = self._received.index_select(0, indices.to(self._received.device))

    @override
    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises: Unsupported: always; the sums before an update are not kept."""
        raise Unsupported(f"{self.setting}: {self.irreversible} (fork() the cache before)")
