"""Methods bound to calibrations made for the occasion: fitted to given states, the same in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.calibration.budget import fit_sharing, joint_parts
from kvq.calibration.collect import LayerStates
from kvq.codecs import (
    Codec,
    CoupledQuantizer,
    JointMoments,
    LearnedRotation,
    SharingQuantizer,
    bind_codec,
    calibrated_parts,
    fit_codec,
    rope_table,
)
from kvq.methods.build import build_method
from kvq.methods.kept_keys import KeptKeys
from kvq.methods.method import Method


def fitted(codec: Codec, x: Tensor) -> Codec:
    """The codec with tables fitted to `x`, `[batch, heads, tokens, dim]`; learned parts as learning begins."""
    parts = calibrated_parts(codec)
    if not parts:
        return codec
    if isinstance(codec.quantizer, CoupledQuantizer):
        codec.quantizer.iterations = 2  # enough to be a codebook
    flat = x.detach().float().transpose(0, 1).flatten(1, 2)
    heads, tokens, dim = flat.shape
    if joint_parts(codec) is not None:
        place = ("key", 0)
        return bind_codec(codec, fit_sharing({place: codec}, {place: joint_moments(codec, flat)})[place], heads, dim)
    if isinstance(codec.quantizer, SharingQuantizer):
        place, states = ("key", 0), LayerStates(flat, flat, rope=rope_table(tokens, dim))
        after_sinks = torch.full((tokens,), 1000)
        return bind_codec(
            codec, codec.quantizer.fit_layers({place: codec}, {0: states}, after_sinks)[place], heads, dim
        )
    if any(isinstance(part, LearnedRotation) for part in parts.values()):
        tables = {f"{name}.rotation": part.initial_rotation(dim).float() for name, part in parts.items()}  # type: ignore[attr-defined]
    else:
        moments = flat.double().mT @ flat.double() / tokens
        tables = fit_codec(codec, flat, None, rope_table(tokens, dim), 0, moments)
    return bind_codec(codec, tables, heads, dim)


def joint_moments(codec: Codec, x: Tensor) -> JointMoments:
    """Moments of `x` `[heads, tokens, dim]` before RoPE, and a Fisher information with directions of its own."""
    heads, tokens, dim = x.shape
    wide = x.double()
    rows = (rope_table(tokens, dim).rotate(wide, back=True) if codec.uses_rope else wide).transpose(0, 1).flatten(1)
    root = torch.randn(rows.shape[1], rows.shape[1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mean = rows.mean(0)
    covariance = (rows - mean).mT @ (rows - mean) / tokens
    fisher = root @ root.mT / len(root) + torch.eye(len(root))
    fourths = [float(part.square().sum(1).square().mean()) for part in (rows - mean, root.mT)]
    return JointMoments(mean, covariance, fisher, heads, tokens, *fourths)


def build(name: str, x: Tensor, bits: object = 2, overrides: Sequence[str] = ()) -> Method:
    """A method whose codecs are fitted to `x` where they are calibrated."""
    method = build_method(name, bits=bits, head_dim=x.shape[-1], overrides=overrides)  # type: ignore[arg-type]
    codecs = {side: codec if codec is None else fitted(codec, x) for side, codec in sides(method).items()}
    return dataclasses.replace(method, **codecs)  # type: ignore[arg-type]


def bound(method: Method, x: Tensor, layers: int) -> Method:
    """The method with the same tables, fitted to `x`, in every layer.

    A basis of all layers is fitted to `x` shifted for each, one of keys with values to `x` for either.
    """
    x = torch.cat([x, x.flip(-2)], -3) if method.joins_sides else x
    codecs = {side: codec for side, codec in sides(method).items() if codec is not None and calibrated_parts(codec)}
    every = torch.cat([x.roll(layer, 2) for layer in range(layers)], 1)
    own = {side: fitted(codec, every if codec.joins_layers else x) for side, codec in codecs.items()}
    return dataclasses.replace(method, bound={side: [codec] * layers for side, codec in own.items()})


def keeping(method: Method, policy: KeptKeys) -> Method:
    """The method with this policy of kept keys, in the place of its own."""
    return dataclasses.replace(method, policies=(*method.without_policies("kept_keys").policies, policy))


def sides(method: Method) -> dict[str, Codec | None]:
    """Codecs by side."""
    return {"key": method.key, "value": method.value}


def random_states(heads: int, dim: int, tokens: int = 256, seed: int = 5) -> Tensor:
    """States with channels of different means and sizes, and a few far ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, dim, generator=generator)
    x = x * (1 + torch.rand(1, heads, 1, dim, generator=generator)) + torch.randn(1, heads, 1, dim, generator=generator)
    far = torch.rand(x.shape, generator=generator) < 0.004
    return torch.where(far, 6 * x, x)
