"""What encoding in one pass may differ in from a codec's own: values within rounding of the middle between codes."""

import torch

from kvq.codecs import Packed, UniformQuantizer, ZeroPoint
from kvq.kernels.chain import Chain

SHARE = 1e-3
"""Of codes that may be neighbours, and two more in a small tensor; 4e-6 is what random states show."""
ROUNDING = 4e-6
"""Of fp32 sums, of a token's largest value: a step this small holds noise."""


def values(chain: Chain, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """What the quantizer gives back, in fp64, and the largest step of all groups of each block's channel or token."""
    quantizer, (run,) = chain.quantizer, packed.runs
    blocks = {
        name: part.unflatten(2, (run.count, run.rows[name])).transpose(1, 2) for name, part in packed.parts.items()
    }
    shape = torch.Size((packed.batch, run.count, packed.heads, run.tokens, packed.head_dim))
    ones = {"scale": torch.zeros_like(blocks["scale"])} | blocks
    plain = quantizer.decode(ones, shape, torch.float64)
    steps = blocks["scale"].double().amax(-2 if chain.per_channel else -1, keepdim=True)
    return plain, steps


def check(chain: Chain, found: Packed, expected: Packed, largest: float) -> None:
    """`largest`: magnitude of the states behind the stages."""
    assert found.runs == expected.runs
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert (found.parts[name].shape, found.parts[name].dtype) == (part.shape, part.dtype), name
    (mine, _), (theirs, steps) = values(chain, found), values(chain, expected)
    noise, difference = ROUNDING * largest, (mine - theirs).abs()
    # fp16 statistics may round to a neighbour: 2^-10 of a number, times the codes they are multiplied by.
    stored = 2.0**-9 * theirs.abs().clamp_min(2.0**chain.quantizer.bits * steps) + 2.0**-24 * 2**chain.quantizer.bits
    assert bool((difference <= 1.001 * steps + stored + noise).all())
    turned = difference > steps / 2 + stored + noise
    assert int(turned.sum()) <= 2 + SHARE * turned.numel()
    check_statistics(chain.quantizer, found, expected, noise)
    same = ~turned.any(-1).transpose(1, 2).flatten(2)
    for name in {chain.gain_name, f"{chain.norm}.scale"} & expected.parts.keys():
        a, b = (packed.parts[name][..., 0].double()[same] for packed in (found, expected))
        torch.testing.assert_close(a, b, rtol=4e-3, atol=2.0**-23)


def check_statistics(quantizer: UniformQuantizer, found: Packed, expected: Packed, noise: float) -> None:
    for name in {"scale", "zero_point"} & expected.parts.keys():
        a, b = found.parts[name].double(), expected.parts[name].double()
        integer = name == "zero_point" and quantizer.zero_point is ZeroPoint.integer
        if not integer:
            torch.testing.assert_close(a, b, rtol=2.0**-10, atol=max(noise, 2.0**-24))
