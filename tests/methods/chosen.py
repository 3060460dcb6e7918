"""Methods that choose tokens, by loops over tokens: what stays, what is salient, what is in the pool.

Arrays are `[heads, tokens, dim]` in fp64; `queries` has more heads, those of a KV head side by side.
"""

from __future__ import annotations

import math

import numpy as np

from tests.codecs.oracles import Grid, quantize, stored

store = np.vectorize(stored)


def weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Causal attention `[kv_heads, shared, queries, tokens]`."""
    shared, tokens = len(queries) // len(keys), keys.shape[1]
    out = np.zeros((len(keys), shared, tokens, tokens))
    for head, other, row in np.ndindex(out.shape[:3]):
        logits = keys[head, : row + 1] @ queries[head * shared + other, row] / math.sqrt(keys.shape[-1])
        mass = np.exp(logits - logits.max())
        out[head, other, row, : row + 1] = mass / mass.sum()
    return out


def highest(scores: np.ndarray, count: int) -> list[int]:
    """The tokens of highest score, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda token: -scores[token])[:count])


def streaming(tokens: int, budget: int, sinks: int = 4) -> list[int]:
    """The first tokens and the newest."""
    return [*range(sinks), *range(tokens - budget + sinks, tokens)]


def heavy_hitters(seen: np.ndarray, budget: int) -> list[list[int]]:
    """Per KV head: half of the budget by the weights received from all queries so far, half the newest."""
    tokens, newest = seen.shape[-1], budget // 2
    received = seen.mean(1).sum(1)
    return [[*highest(row[: tokens - newest], budget - newest), *range(tokens - newest, tokens)] for row in received]


def snapkv(seen: np.ndarray, budget: int, window: int = 32, kernel: int = 5) -> list[list[int]]:
    """Per KV head: what the last queries attend to, averaged over neighbours (none: 0), and the window."""
    before, kept = seen.shape[-1] - window, []
    for head in seen.mean(1)[:, -window:, :before].sum(1):
        reach = kernel // 2
        smooth = [sum(head[max(t - reach, 0) : t + reach + 1]) / kernel for t in range(before)]
        kept.append([*highest(np.array(smooth), budget - window), *range(before, before + window)])
    return kept


def zipcache_salient(seen: np.ndarray, probes: list[int], share: float) -> list[list[int]]:
    """Of each KV head, the same for all: means over the probes that see a token."""
    heads, tokens = len(seen), seen.shape[-1]
    received = np.zeros((heads, tokens))
    for head, token in np.ndindex(received.shape):
        asked = [probe for probe in probes if probe >= token]
        total = sum(seen[head, other, probe, token] for other in range(seen.shape[1]) for probe in asked)
        received[head, token] = total / len(asked)
    received[:] = received.sum(0)
    return [highest(row, round(share * tokens)) for row in received]


def zipcache(x: np.ndarray, salient: list[list[int]], keys: bool) -> np.ndarray:
    """4 bits for salient tokens, 2 for others; keys per channel, values per token behind a root per channel."""
    root = np.ones((len(x), 1, x.shape[-1])) if keys else np.sqrt(np.abs(x).max(1, keepdims=True))
    out, scaled = np.empty_like(x), x / root
    for head, high in enumerate(salient):
        low = [token for token in range(x.shape[1]) if token not in set(high)]
        for some, bits in ((high, 4), (low, 2)):
            grid = Grid(bits, "per_channel" if keys else "per_token")
            out[head, some] = quantize(scaled[head : head + 1, some], grid).values[0]
    return out if keys else out * store(root)


def ott(keys: np.ndarray, values: np.ndarray, bits: int, block: int = 128, pool: int = 3) -> list[np.ndarray]:
    """Keys and values as attention sees them: blocks without those in the pool, the pool, what waits for its block."""
    seen: list[list[np.ndarray]] = [[], []]
    for head in range(len(keys)):
        held: list[int] = []
        parts: list[list[np.ndarray]] = [[], []]
        whole = keys.shape[1] - keys.shape[1] % block
        for start in range(0, whole, block):
            both = held + list(range(start, start + block))
            held = sorted(sorted(both, key=lambda token: np.abs(keys[head, token]).sum())[:pool])
            rest = [token for token in both if token not in held]
            for side, (states, axis) in enumerate(((keys, "per_channel"), (values, "per_token"))):
                parts[side].append(quantize(states[head : head + 1, rest], Grid(bits, axis, 128)).values[0])
        for side, states in enumerate((keys, values)):
            parts[side].append(states[head, held + list(range(whole, keys.shape[1]))])
            seen[side].append(np.concatenate(parts[side]))
    return [np.stack(part) for part in seen]
