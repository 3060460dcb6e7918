"""The storage of a cache as metrics."""

from __future__ import annotations

from kvq.cache import KVCache
from kvq.codecs import HuffmanCodec

STORED = (
    "bits_per_element",
    "key_bits",
    "value_bits",
    "effective_bits",
    "packed_bytes",
    "total_bytes",
    "cached_tokens",
    "expanded_bits",
    "index_bits",
    "index_entropy",
)


RECOMPRESSED = ("recompressed_tokens", "recompression_error")
"""Of methods that encode packed tokens again with other bits."""
STATES = ("state_bytes", "state_bits")
"""Of models some of whose layers keep a state of fixed size; both are part of total bytes and effective bits."""


def storage_metrics(cache: KVCache, sequences: int) -> dict[str, float]:
    """Measured bits of a cache in its present state, and bytes of one of its sequences.

    Where indices have Huffman codes, also the mean length of their code words and the Shannon entropy of their
    frequencies in each block, over keys and values. Where packed tokens are encoded again: how many were (each of a
    head, and as often as it was), and the relative squared difference between their decoded forms before and after.
    Where layers keep states of fixed size: their bytes, and their part of the effective bits. Where a latent is cached
    in expanded form, effective bits count against the numbers of the latent, and `expanded_bits` against those cached.
    """
    stored = {
        "bits_per_element": cache.bits_per_element,
        "key_bits": cache.side_bits("key"),
        "value_bits": cache.side_bits("value"),
        "effective_bits": cache.effective_bits,
        "packed_bytes": cache.packed_bytes / sequences,
        "total_bytes": cache.nbytes / sequences,
        "cached_tokens": cache.get_seq_length() - sum(cache.padding or ()) / sequences,
    }
    sides = [(getattr(side, "codec", None), side) for layer in cache.kv_layers for side in (layer.key, layer.value)]
    rates = [codec.rate(part) for codec, side in sides if isinstance(codec, HuffmanCodec) for part in side.packed]
    if indices := sum(rate.indices for rate in rates):
        stored["index_bits"] = sum(rate.coded for rate in rates) / indices
        stored["index_entropy"] = sum(rate.entropy for rate in rates) / indices
    if (latent := cache.latent_bits) is not None:
        stored |= {"expanded_bits": cache.effective_bits, "effective_bits": latent}
    if cache.state_bytes:
        stored["state_bytes"] = cache.state_bytes / sequences
        stored["state_bits"] = stored["effective_bits"] * cache.state_bytes / cache.nbytes
    if (done := cache.recompression) is not None:
        stored |= {
            "recompressed_tokens": done.moves / sequences,
            "recompression_error": done.lost / done.energy if done.energy else 0.0,
        }
    return stored
