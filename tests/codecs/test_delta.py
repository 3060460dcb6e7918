"""Delta cache: the closed loop word by word, its anchors, and the figures of kvquant-plus-plus."""

import math

import pytest
import torch

from kvq.codecs import (
    Codec,
    DeltaQuantizer,
    InnerProductQuantizer,
    LloydMaxQuantizer,
    Quantizer,
    RandomRotation,
    TokenNorm,
    optimal_levels,
)
from kvq.errors import Unsupported
from tests.codecs.oracles import level_error

DIM = 64


def inner(quantizer=None):
    """TurboQuant's chain around a quantizer."""
    stages = {"norm": TokenNorm(), "rotation": RandomRotation(0)}
    return Codec(stages, ["norm", "rotation"], quantizer or LloydMaxQuantizer(3))


def chain(quantizer=None, **given):
    return Codec({}, [], DeltaQuantizer(inner(quantizer), **given))


def drifting(tokens, jumps=(), drift=0.02, seed=77, batch=1, dtype=torch.float64):
    """Directions that drift, drawn anew at `jumps`; no rotation has this seed."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for token in range(tokens):
        step = torch.randn(batch, 2, 1, DIM, generator=generator, dtype=torch.float64)
        out.append(step if token == 0 or token in jumps else out[-1] + drift * step)
    return torch.cat(out, 2).to(dtype)


def by_hand(x, quantizer, every, threshold):
    """One head of one block, token by token, with a list of what was decoded; and the anchors."""
    codec, out, anchors = inner(quantizer), [], []
    for token, key in enumerate(x):
        if token == 0 or (every and token % every == 0):
            anchors.append(token)
            out.append(key)
            continue
        delta = key - out[-1]
        if threshold and math.sqrt(float(delta @ delta)) > threshold * math.sqrt(float(key @ key)):
            anchors.append(token)
            out.append(key)
            continue
        step = codec.decode(codec.encode(delta[None, None, None]))[0, 0, 0]
        out.append(out[-1] + step)
    return torch.stack(out), anchors


@pytest.mark.parametrize("quantizer", [LloydMaxQuantizer(2), InnerProductQuantizer(3)], ids=["mse", "prod"])
@pytest.mark.parametrize(("every", "threshold"), [(None, 0), (7, 0), (None, 0.5), (7, 0.5)])
def test_the_closed_loop_by_its_definition(every, threshold, quantizer):
    x = drifting(40, jumps=(13, 29), drift=0.05)
    x[:, 1] *= 3
    codec = chain(quantizer, anchor_every=every, anchor_threshold=threshold)
    out = codec.decode(codec.encode(x, 20))
    count = 0
    for head in range(2):
        for start in (0, 20):
            expected, anchors = by_hand(x[0, head, start : start + 20], quantizer, every, threshold)
            torch.testing.assert_close(out[0, head, start : start + 20], expected, rtol=1e-9, atol=1e-9)
            count += len(anchors)
            if threshold:
                assert {13, 9} & set(anchors)  # tokens 13 and 29
    assert count == {(None, 0): 4, (7, 0): 12, (None, 0.5): 8, (7, 0.5): 16}[every, threshold]


def test_one_anchor_in_float32_for_all_tokens():
    """The paper's: exact where a state in 16 bits would round, at 16 bits more for each channel of one token."""
    x = drifting(96, dtype=torch.float32)
    found = {dtype: chain(anchor_dtype=dtype).encode(x.half() if dtype is None else x) for dtype in (None, "float32")}
    assert found["float32"].parts["anchors"].shape == (1, 2, 1, DIM)
    assert torch.equal(found["float32"].parts["anchors"], x[:, :, :1])
    assert found["float32"].nbytes - found[None].nbytes == 2 * DIM * 2
    rounded = chain(anchor_dtype="bfloat16").encode(x).parts["anchors"]
    assert torch.equal(rounded, x[:, :, :1].bfloat16())


@pytest.mark.parametrize("bits", [2, 3])
def test_errors_do_not_add_up(bits):
    """Steady state D/(1 - D) of a drift's energy, however long the block is; an open loop would add T of them."""
    x = drifting(200, drift=0.05)
    codec = chain(LloydMaxQuantizer(bits))
    rest = (codec.decode(codec.encode(x)) - x)[:, :, 40:].square().sum(-1).mean()
    relative = codec.quantizer.relative_error(DIM)
    assert float(rest) == pytest.approx(0.05**2 * DIM * relative / (1 - relative), rel=0.1)


def test_the_error_of_the_inner_product_form_is_that_of_its_codes_times_that_of_a_sign():
    for bits in (2, 3, 4):
        held = [DeltaQuantizer(inner(InnerProductQuantizer(bits, seed=seed))) for seed in range(50, 62)]
        held[0].check(DIM)
        mean = sum(one.relative_error(DIM) for one in held) / len(held)
        codes = level_error(optimal_levels(bits - 1, DIM), DIM)
        assert mean == pytest.approx((math.pi / 2 - 1 / DIM) * codes, rel=0.05)


class Stretched(Quantizer):
    """Decodes to (1 + √r) x, whose relative squared error is r."""

    token_group = 1

    def __init__(self, relative):
        self.factor = 1 + relative**0.5

    def encode(self, x, dtype):
        return {"values": x}

    def decode(self, parts, shape, dtype):
        return self.factor * parts["values"]


@pytest.mark.parametrize("relative", [0.8, 0.99, 1.01, 1.25])
def test_an_error_grows_from_a_relative_error_of_one_on(relative):
    """Where tokens stop moving, each has the error of the one before times r."""
    x = drifting(3)[:, :, [0, *[2] * 99]]
    quantizer = DeltaQuantizer(Codec({}, [], Stretched(relative)))
    codec = Codec({}, [], quantizer)
    rest = (codec.decode(codec.encode(x)) - x).square().sum(-1).mean((0, 1))
    assert float(rest[90] / rest[10]) == pytest.approx(relative**80, rel=1e-6)
    print(f"relative error {relative}: times {float(rest[90] / rest[10]):.3g} over 80 tokens")
    if relative < 1:
        quantizer.check(DIM)
    else:
        with pytest.raises(Unsupported, match="deltas diverge"):
            quantizer.check(DIM)


def test_bits():
    """Codes and norms of all tokens but the anchors, which have the states' own dtype."""
    x = drifting(256, batch=2, dtype=torch.float16)
    plain = chain().encode(x, 128).bits_per_element
    codes = 8 * (16 * 3) / 128  # 127 codes fill the bytes of 128
    assert plain == codes + 127 / 128 * 16 / DIM + 16 / 128
    every = chain(anchor_every=32).encode(x, 128).bits_per_element
    assert every == 8 * (31 + 16) / 128 + 124 / 128 * 16 / DIM + 4 * 16 / 128
    jumping = drifting(256, jumps=(40, 200, 210), batch=2, dtype=torch.float16)
    mask = 8 * 16 / 128 / DIM
    adaptive = chain(anchor_threshold=0.5).encode(jumping, 128)
    assert adaptive.bits_per_element == pytest.approx(plain + mask + 3 * 16 / 256)
    assert [run.rows["far.anchors"] for run in adaptive.runs] == [2, 4]
    assert chain().encode(x.float(), 128).bits_per_element == plain + 16 / 128
