"""Decode attention the long way: everything decoded in fp64, then softmax over all tokens."""

import dataclasses

import torch

from kvq.kernels import PackedStates


def decoded(states: PackedStates) -> torch.Tensor:
    """All tokens in fp64."""
    parts, start = [], 0
    for packed in states.packed:
        rope = None if states.rope is None else states.rope.narrow(start, packed.tokens)
        start += packed.tokens
        own = slice(None) if states.heads is None else states.heads
        parts.append(states.codec.decode(dataclasses.replace(packed, dtype=torch.float64), rope)[:, own])
    if states.full is not None:
        parts.append(states.full.double())
    return torch.cat(parts, 2)


def attend(query, keys, values, scaling, first=0, softcap=None) -> torch.Tensor:
    """The reference of every form."""
    k, v = (decoded(states)[:, :, first:] for states in (keys, values))
    group = query.shape[1] // k.shape[1]
    scores = query.double() @ k.repeat_interleave(group, 1).mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, `|found - expected| / |expected|`; rounding to bf16 alone makes 1.6e-3 of it."""
    return float((found.double() - expected).norm() / expected.norm())


def states(
    codec, tokens, full, *, heads=2, dim=64, batch=1, block=None, seed=0, dtype=torch.float32, tail=0, rope=None
):
    """`tokens` packed ones in blocks of `block`, then `tail` in a block of their own, `full` in full precision."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        x = torch.randn(batch, heads, count, dim, generator=generator)
        x = (x + torch.randn(1, heads, 1, dim, generator=generator)) * torch.exp(
            torch.randn(batch, heads, count, 1, generator=generator) / 3
        )
        return x.to(dtype)

    packed, start = [], 0
    for count, size in ((tokens, block), (tail, None)):
        if count:
            part = None if rope is None else rope.narrow(start, count)
            packed.append(codec.encode(draw(count), size, part))
            start += count
    rope = None if rope is None or not start else rope.narrow(0, start)
    return PackedStates(codec, tuple(packed), draw(full) if full else None, rope)
