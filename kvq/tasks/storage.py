"""What a cache holds, as metrics."""

from __future__ import annotations

from kvq.cache import KVCache

STORED = (
    "bits_per_element",
    "key_bits",
    "value_bits",
    "effective_bits",
    "packed_bytes",
    "total_bytes",
    "cached_tokens",
)


def storage_metrics(cache: KVCache, sequences: int) -> dict[str, float]:
    """Measured bits, and bytes of one of its sequences, of a cache as it stands."""
    return {
        "bits_per_element": cache.bits_per_element,
        "key_bits": cache.side_bits("key"),
        "value_bits": cache.side_bits("value"),
        "effective_bits": cache.effective_bits,
        "packed_bytes": cache.packed_bytes / sequences,
        "total_bytes": cache.nbytes / sequences,
        "cached_tokens": float(cache.get_seq_length()),
    }
