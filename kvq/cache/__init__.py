"""The quantized cache for transformers models: residual policies, packed storage, forks."""

from kvq.cache.cache import KVCache, KVCacheLayer
from kvq.cache.side import CacheSide

__all__ = ["CacheSide", "KVCache", "KVCacheLayer"]
