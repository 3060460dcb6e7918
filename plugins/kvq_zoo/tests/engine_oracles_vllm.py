"""Formats of latents, vLLM's and SGLang's, and of vLLM's Octave, as `engine_oracles` has the others."""

import math

import numpy as np

from kvq_zoo.tests.engine_oracles import FLOATS, by_group, clamp, f32, fp4, half_even, nearest
from tests.codecs.oracles import stored


def scaled_float(least):
    """vLLM's fp8_per_token_head (1e-6), and the latent of fp8_ds_mla (C's FLT_MIN)."""

    def one(group):
        d = max(max(abs(v) for v in group) / 448, least)
        values = [nearest("e4m3", v / d)[1] for v in group]
        return {"values": values, "scale": [f32(d)]}, [f32(d) * v for v in values]

    return one


def as_it_is(group):
    return {"values": group}, group


def nvfp4_up(group):
    """The latent of vLLM's nvfp4_ds_mla: the least e4m3 scale that clips no value, at least 2^-9."""
    wanted = max(max(abs(v) for v in group) / 6, 2.0**-9)
    scale = next((number for number in FLOATS["e4m3"] if number >= wanted), 448.0)
    codes, values = fp4(group, scale, False)
    return {"codes": codes, "scale": [scale]}, values


def ultraquant(group):
    """The power of two next to .156 max|x|, e2m1 with halves down."""
    most = max(abs(v) for v in group)
    if not most:
        return {"codes": [0] * len(group), "scale": [0]}, [0.0] * len(group)
    exponent = math.floor(math.log2(0.156 * most) + 0.5)
    numbers = sorted({sign * number for number in FLOATS["e2m1"] for sign in (-1, 1)})
    values = [min(numbers, key=lambda number: (abs(number - v / 2.0**exponent), number)) for v in group]
    codes = [FLOATS["e2m1"].index(abs(v)) + 8 * (v < 0) for v in values]
    return {"codes": codes, "scale": [exponent + 127]}, [v * 2.0**exponent for v in values]


OCTAVE = {
    3: ((-127, -79, -45, -14, 14, 45, 79, 127), 59),
    4: ((-126, -95, -74, -58, -43, -30, -18, -6, 6, 18, 30, 43, 58, 74, 95, 126), 46),
}


def octave(bits):
    """Levels of vLLM's Octave; of two equally near ones, the lower."""
    levels, unit = OCTAVE[bits]

    def one(group):
        energy = sum(v * v for v in group)
        rms = max(math.sqrt(energy / len(group)), 1e-12)
        codes = [min(range(len(levels)), key=lambda i: (abs(levels[i] - v / rms * unit), i)) for v in group]
        product = sum(v * levels[q] for v, q in zip(group, codes, strict=True))
        scale = stored(64 * energy / product if product > 0 else 0.0)
        return {"codes": codes, "scale": [scale]}, [scale / 64 * levels[q] for q in codes]

    return one


def octave_keys(first):
    """Blocks of 64 channels: 4 bits for the first channels, 3 for the others."""

    def oracle(vector):
        kept, out = {}, []
        for name, bits, part in (("high", 4, vector[:first]), ("low", 3, vector[first:])):
            found, decoded = by_group(64, octave(bits))(part)
            kept |= {f"{name}.{key}": numbers for key, numbers in found.items()}
            out += list(decoded)
        return kept, np.array(out)

    return oracle


def scaled_int4(group):
    """SGLang's int4 of DeepSeek V4: codes by the scale that is stored."""
    scale = nearest("e4m3", max(abs(v) for v in group) / 7)[1]
    codes = [clamp(half_even(v / scale), -7, 7) if scale else 0 for v in group]
    return {"codes": [q + 7 for q in codes], "scale": [scale]}, [q * scale for q in codes]
