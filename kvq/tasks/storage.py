"""The storage of a cache as metrics."""

from __future__ import annotations

from kvq.cache import KVCache

UNITS = {
    "bits_per_element": "bits",
    "key_bits": "bits",
    "value_bits": "bits",
    "effective_bits": "bits",
    "packed_bytes": "bytes/sequence",
    "total_bytes": "bytes/sequence",
    "cached_tokens": "tokens",
}


def storage_metrics(cache: KVCache, sequences: int) -> dict[str, float]:
    """Measured bits of a cache in its present state, and bytes of one of its sequences."""
    return {
        "bits_per_element": cache.bits_per_element,
        "key_bits": cache.side_bits("key"),
        "value_bits": cache.side_bits("value"),
        "effective_bits": cache.effective_bits,
        "packed_bytes": cache.packed_bytes / sequences,
        "total_bytes": cache.nbytes / sequences,
        "cached_tokens": float(cache.get_seq_length()),
    }
