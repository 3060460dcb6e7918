"""Methods younger than the source documents against oracles in plain loops, and their bits against closed forms."""

import numpy as np
import pytest
import torch

from kvq.codecs import ChannelSplit, Codec, Passthrough, UniformQuantizer, Zero, unpack
from kvq.methods.build import build_method
from kvq_zoo.balance import VarianceBalance
from kvq_zoo.tests import rival_oracles as by

SIDES = ("key", "value")


def states(tokens, dim, heads=1, seed=3):
    """Channels of other means and sizes, and tokens of other norms, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, dim, generator=generator, dtype=torch.float64)
    x = x * torch.exp(torch.randn(1, heads, tokens, 1, generator=generator, dtype=torch.float64))
    x = x + torch.randn(1, heads, 1, dim, generator=generator, dtype=torch.float64)
    x[..., 5::17] *= 8
    return x


def codes(parts, bits, tokens, prefix=""):
    planes = [parts[name] for name in sorted(parts) if name.startswith(f"{prefix}codes.")]
    return unpack(planes, bits, tokens)


def hold(codec, packed, head, wanted, expected, found):
    """Every stored number is the oracle's, and the decoded states are within 1e-6."""
    for name, numbers in wanted.items():
        assert found[name].tolist() == numbers, f"{name} of head {head}"
    decoded = codec.decode(packed)[0, head].numpy()
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=1e-9 * float(np.abs(expected).max()))


KVARN = {
    "kvarn": (128, 4, 2, {}),
    "kvarn/k4v4_g128": (128, 4, 4, {}),
    "kvarn/k4v2_g64": (64, 4, 2, {}),
    "kvarn/k4v4_g64": (64, 4, 4, {}),
    "kvarn/mla_k5_g64": (64, 5, None, {}),
    "kvarn/paper": (128, 2, 2, {"iterations": 16, "variances": True}),
}


@pytest.mark.parametrize("name", KVARN)
def test_kvarn_is_its_definition(name):
    tokens, *widths, settings = KVARN[name]
    method = build_method(name, bits=2, head_dim=32)
    assert method.residual.key.size == method.residual.value.size == tokens
    assert method.sink_tokens == 128
    x = states(tokens, 32, heads=2)
    for side, bits in zip(SIDES, widths, strict=True):
        codec = getattr(method, side)
        packed = codec.encode(x)
        if bits is None:  # the part of a latent with RoPE
            assert torch.equal(codec.decode(packed), x)
            continue
        for head in range(2):
            answers = by.kvarn(x[0, head].numpy(), side, bits, **settings)
            scale = packed.parts["scale"][0, head].flatten().tolist()
            wanted, expected = next((one for one in answers if one[0]["scale"] == scale), answers[0])
            assert packed.parts.keys() - {n for n in packed.parts if n.startswith("codes.")} == wanted.keys() - {
                "codes"
            }
            found = {key: packed.parts[key][0, head].flatten().double() for key in wanted if key != "codes"}
            hold(codec, packed, head, wanted, expected, found | {"codes": codes(packed.parts, bits, tokens)[0, head]})


KITTY = {"kitty": (16, False), "kitty/boost_32": (32, False), "kitty/kernel": (16, True)}


@pytest.mark.parametrize("name", KITTY)
def test_kitty_is_its_definition(name):
    boosted, kernel = KITTY[name]
    method = build_method(name, head_dim=48)
    assert (method.residual.key.size, method.residual.value.size, method.sink_tokens) == (128, 128, 32)
    for side, codec in (("key", method.key), ("value", method.value)):
        x = states(128, 48, heads=2)
        if side == "key":
            x[..., 7], x[..., 8] = 2.5, 1e-8 * x[..., 8]  # channels without a range, and with nearly none
        else:
            x[:, :, 7], x[:, :, 8] = 2.5, 1e-8 * x[:, :, 8]
        packed = codec.encode(x)
        for head in range(2):
            one = x[0, head].numpy()
            wanted, expected = by.kitty_keys(one, boosted, kernel) if side == "key" else by.kitty_values(one, kernel)
            found = {key: packed.parts[key][0, head].flatten() for key in wanted if not key.endswith("codes")}
            for key, bits in (("codes", 2), ("high.codes", 4), ("low.codes", 2)):
                if key in wanted:
                    found[key] = codes(packed.parts, bits, 128, key.removesuffix("codes"))[0, head]
            assert {key for key in packed.parts if "codes" not in key} == {key for key in wanted if "codes" not in key}
            hold(codec, packed, head, wanted, expected, found)


@pytest.mark.parametrize("stored", ["mask", "byte"])
@pytest.mark.parametrize("criterion", ["energy", "mean_abs"])
def test_a_choice_of_channels_is_read_back_however_it_is_stored(criterion, stored):
    """One channel with a single large entry has the most energy, another the largest mean magnitude."""
    x = torch.zeros(1, 1, 16, 20)
    x[..., 3], x[:, :, 5, 11] = 1.0, 10.0
    exact, nothing = (Codec({}, [], part) for part in (Passthrough(), Zero()))
    codec = Codec({}, [], ChannelSplit(1, exact, nothing, criterion, stored))
    packed = codec.encode(x)
    kept = 11 if criterion == "energy" else 3
    assert packed.parts["mask" if stored == "mask" else "place"].nbytes == (3 if stored == "mask" else 20)
    assert torch.equal(codec.decode(packed), x * (torch.arange(20) == kept))


def test_scales_of_rows_fold_into_the_grid():
    """A line multiplied by any number has the same codes, and its scale and offset multiplied by it."""
    x = states(64, 32)
    times = torch.exp(torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    grid = UniformQuantizer(3, "per_channel", scale_dtype="float32")
    one, other = (grid.encode(y, x.dtype) for y in (x, x * times))
    assert torch.equal(one["codes.0"], other["codes.0"])
    for name in ("scale", "zero_point"):
        torch.testing.assert_close(other[name].double(), one[name].double() * times, rtol=1e-6, atol=0)


def test_a_low_key_inside_a_block_is_drowned():
    """Scales are at least e^-0.3, so a key far below unit variance gets the steps of its channels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 128, 128, generator=generator)
    x[:, :, 70] /= 1000
    codec = build_method("kvarn").key
    error = (codec.decode(codec.encode(x)) - x).norm(dim=-1) / x.norm(dim=-1)
    assert float(error[0, 0, 70]) > 10
    assert float(error[0, 0, torch.arange(128) != 70].max()) < 0.2
    # A norm apart does not drown it.
    other = build_method("nsn", bits=4).key
    assert float(((other.decode(other.encode(x)) - x).norm(dim=-1) / x.norm(dim=-1))[0, 0, 70]) < 0.2


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_block_is_balanced_too(tokens):
    x = states(tokens, 16)
    for kept in ("per_token", "per_channel"):
        stage = VarianceBalance(kept)
        y, side = stage.forward(x)
        assert bool(torch.isfinite(side["scale"]).all())
        assert torch.allclose(stage.inverse(y, side), x)
