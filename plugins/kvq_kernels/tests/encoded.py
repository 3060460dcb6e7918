"""What encoding in one pass may differ in from a codec's own: values within rounding of the middle between codes."""

import torch

from kvq.codecs import Codec, Packed, UniformQuantizer, VectorQuantizer, gain_factor
from kvq_kernels.dispatch import FusedCodec

ROUNDING = 4e-6
"""Of fp32 sums, of a token's largest value: a step this small holds noise."""


def behind_stages(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """What the quantizer is given, in fp64: `[batch, heads, tokens, dim]` of one block."""
    y = x.double()
    for _, stage in codec.stages:
        y = stage.forward(y)[0]
    return y


def values(codec: Codec, packed: Packed) -> torch.Tensor:
    """What the quantizer gives back, of one block."""
    blocks = {name: part for name, part in packed.parts.items() if "." not in name or name.startswith("codes.")}
    shape = torch.Size((packed.batch, packed.heads, packed.tokens, packed.head_dim))
    return codec.quantizer.decode(blocks, shape, torch.float64)


def check(codec: Codec, x: torch.Tensor, found: Packed, expected: Packed) -> float:
    """Of one block `x`: a code may be another where both are as near; the share of those that are."""
    chain = FusedCodec(codec).chain
    same_layout(found, expected)
    y, mine, theirs = behind_stages(codec, x), values(codec, found), values(codec, expected)
    noise = ROUNDING * float(y.abs().max())
    steps = expected.parts["scale"].double().amax(-2 if chain.per_channel else -1, keepdim=True)
    # fp16 statistics may round to a neighbour: 2^-10 of a number, and of the step that codes are multiplied by.
    stored = 2.0**-9 * theirs.abs().clamp_min(2.0**chain.quantizer.bits * steps) + 2.0**-24 * 2**chain.quantizer.bits
    slack, difference = stored + noise, (mine - theirs).abs()
    assert bool((difference <= steps + slack).all())
    assert bool(((y - mine).abs() <= (y - theirs).abs() + slack).all())
    check_statistics(chain.quantizer, found, expected, noise)
    turned = difference > steps / 2 + slack
    for name in {chain.gain_name, f"{chain.norm}.scale"} & expected.parts.keys():
        a, b = (packed.parts[name][..., 0].double()[~turned.any(-1)] for packed in (found, expected))
        torch.testing.assert_close(a, b, rtol=4e-3, atol=2.0**-23)
    return float(turned.double().mean())


def same_layout(found: Packed, expected: Packed) -> None:
    """The same parts, shapes, dtypes and blocks."""
    assert found.runs == expected.runs
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert (found.parts[name].shape, found.parts[name].dtype) == (part.shape, part.dtype), name


def check_statistics(quantizer: UniformQuantizer, found: Packed, expected: Packed, noise: float) -> None:
    """A scale or lowest value is the same or its fp16 neighbour; an integer zero point moves with codes, if at all."""
    for name in {"scale", "zero_point"} & expected.parts.keys():
        if name == "scale" or quantizer.zero_point == "float":
            a, b = found.parts[name].double(), expected.parts[name].double()
            torch.testing.assert_close(a, b, rtol=2.0**-10, atol=max(noise, 2.0**-24))


def check_nearest(quantizer: VectorQuantizer, y: torch.Tensor, parts: dict[str, torch.Tensor], gain: torch.Tensor):
    """In fp64 no entry is nearer than the one of `parts`, and the gain is the formula's."""
    found = quantizer.decode(parts, y.shape, torch.float64)
    entries = quantizer.tables()[0].double()
    vectors = y.double().unflatten(-1, (-1, 8))
    nearest = torch.cdist((vectors.abs() if quantizer.bits == 2 else vectors).flatten(0, 3), entries).amin(-1)
    distance = (vectors - found.unflatten(-1, (-1, 8))).norm(dim=-1).flatten()
    assert float((distance - nearest).abs().max()) < 1e-5
    torch.testing.assert_close(gain.double(), gain_factor(y.double(), found, quantizer.gain), rtol=1e-5, atol=1e-5)
