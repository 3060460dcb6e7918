"""Formats of inference engines from their definitions, one vector of one head and token at a time, in plain loops.

An oracle gives what is stored of a vector (`codes` from the grid's lowest, side information) and its decoded form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from tests.codecs.oracles import hadamard, stored

Stored = dict[str, list]
Oracle = Callable[[np.ndarray], tuple[Stored, np.ndarray]]


def f32(x):
    return float(np.float32(x))


def half_up(x):
    return math.floor(x + 0.5)


def half_away(x):
    return math.copysign(math.floor(abs(x) + 0.5), x)


def half_even(x):
    return round(float(x))


def clamp(x, low, high):
    return int(min(max(x, low), high))


def by_group(size, one):
    """An oracle of whole vectors from one of groups: (stored, decoded) of `size` consecutive channels."""

    def oracle(vector):
        kept, out = {}, []
        for start in range(0, len(vector), size):
            side, decoded = one([float(v) for v in vector[start : start + size]])
            for name, numbers in side.items():
                kept.setdefault(name, []).extend(numbers)
            out += decoded
        return kept, np.array(out)

    return oracle


def largest_of(group):
    return max(group, key=abs)  # the first of them


def q8_0(group):
    d = max(abs(v) for v in group) / 127
    codes = [half_away(v / d) for v in group]
    return {"codes": [q + 127 for q in codes], "scale": [stored(d)]}, [stored(d) * q for q in codes]


def signed_max(bits):
    def one(group):
        middle = 2 ** (bits - 1)
        d = largest_of(group) / -middle
        codes = [min(math.trunc(v * (1 / d) + middle + 0.5), 2**bits - 1) for v in group]
        return {"codes": codes, "scale": [stored(d)]}, [stored(d) * (q - middle) for q in codes]

    return one


def minimum(bits, least=0.0, rounding=half_up):
    """q4_1, q5_1; with `least`, vLLM's values."""

    def one(group):
        low, top = min(group), 2**bits - 1
        d = max((max(group) - low) / top, least)
        codes = [min(rounding((v - low) / d), top) for v in group]
        side = {"codes": codes, "scale": [stored(d)], "zero_point": [stored(low)]}
        return side, [stored(d) * q + stored(low) for q in codes]

    return one


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(group):
    d = largest_of(group) / -127
    codes = []
    for v in group:
        distances = [abs(v * (1 / d) - level) for level in IQ4_NL]
        codes.append(max(i for i, distance in enumerate(distances) if distance == min(distances)))
    pairs = [(v, IQ4_NL[q]) for v, q in zip(group, codes, strict=True)]
    d = sum(v * v * level * v for v, level in pairs) / sum(v * v * level * level for v, level in pairs)
    return {"codes": codes, "scale": [stored(d)]}, [stored(d) * level for _, level in pairs]


def truncated(group):
    """vLLM's int8_per_token_head."""
    d = max(max(abs(v) for v in group) / 127, 1e-6)
    codes = [math.trunc(clamp_float(v * (1 / d), -128, 127)) for v in group]
    return {"codes": [q + 127 for q in codes], "scale": [f32(d)]}, [f32(d) * q for q in codes]


def clamp_float(x, low, high):
    return min(max(x, low), high)


def zero_in_scale(group):
    """vLLM's int4_per_token_head."""
    low = min(group)
    d = max((max(group) - low) / 15, 1e-6)
    zero = clamp(half_away(-low / d), 0, 15)
    codes = [clamp(half_away(v * (1 / d) + zero), 0, 15) for v in group]
    bits = int(np.float32(d).view(np.int32)) & ~0xF
    scale = float(np.int32(bits).view(np.float32))
    kept = float(np.int32(bits | zero).view(np.float32))
    return {"codes": codes, "scale": [kept]}, [(q - zero) * scale for q in codes]


def rounded_to(dtype):
    return lambda x: float(torch.tensor(x, dtype=torch.float64).to(dtype))


def turbomind(bits, dtype=torch.float16):
    """Each step is rounded to `dtype`; infinity is cut to the largest code, infinity times 0 to the lowest."""
    kept = rounded_to(dtype)

    def one(group):
        low, top = kept(min(group)), 2**bits - 1
        d = kept((max(group) - min(group)) / top)
        inverse = kept(1 / d) if d else math.inf
        steps = [kept(kept(kept(v) - low) * inverse) for v in group]
        codes = [0 if math.isnan(v) else top if v > top else clamp(half_even(v), 0, top) for v in steps]
        return {"codes": codes, "scale": [d], "zero_point": [low]}, [q * d + low for q in codes]

    return one


def ratio(bits, kept_as=stored, rounding=half_up):
    """LMDeploy's PyTorch engine; OpenVINO's `quant_u8` and `quant_u4` with fp32 sides and halves to even."""

    def one(group):
        low, top = min(group), 2**bits - 1
        d = (max(group) - low) / top
        zero = -low / d
        codes = [clamp(rounding(v / d + zero), 0, top) for v in group]
        kept, offset = kept_as(d), kept_as(zero)
        return {"codes": codes, "scale": [kept], "zero_point": [offset]}, [q * kept - kept * offset for q in codes]

    return one


def edge(bits):
    """MLX."""

    def one(group):
        low, high, top = min(group), max(group), 2**bits - 1
        s = max((high - low) / top, 1e-7)
        s, end = (s, low) if abs(low) > abs(high) else (-s, high)
        steps = half_even(end / s)
        offset = 0.0
        if steps != 0:
            s, offset = end / steps, end
        codes = [clamp(half_even((v - offset) / s), 0, top) for v in group]
        side = {"codes": codes, "scale": [stored(s)], "zero_point": [stored(offset)]}
        return side, [stored(s) * q + stored(offset) for q in codes]

    return one


def full_range(bits):
    """ExLlamaV2."""

    def one(group):
        middle, most = 2 ** (bits - 1), max(abs(v) for v in group)
        codes = [clamp(half_even(middle * v / most + middle), 0, 2**bits - 1) for v in group]
        s = stored(most / middle)
        return {"codes": codes, "scale": [s]}, [(q - middle) * s for q in codes]

    return one


def midpoint(bits):
    """ExLlamaV3."""

    def one(group):
        middle, s = 2 ** (bits - 1), max(abs(v) for v in group) + 1e-10
        codes = [clamp(math.floor(middle * v / s + middle), 0, 2**bits - 1) for v in group]
        return {"codes": codes, "scale": [stored(s)]}, [(q - middle + 0.5) / middle * stored(s) for q in codes]

    return one


def numbers_of(mantissa, bias, largest):
    """All numbers from 0 of a small float, ascending: the index of one is its code."""
    steps = 2**mantissa
    found = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    for exponent in itertools.count(1):
        for m in range(steps):
            number = (1 + m / steps) * 2.0 ** (exponent - bias)
            if number > largest:
                return found
            found.append(number)
    return found


FLOATS = {"e4m3": numbers_of(3, 7, 448), "e5m2": numbers_of(2, 15, 57344), "e2m1": numbers_of(1, 1, 6)}


def nearest(kind, x, up=False):
    """Code and number: of two equally near ones that with the even code, or the larger; saturating."""
    numbers = FLOATS[kind]
    at = min(np.searchsorted(numbers, abs(x)), len(numbers) - 1)
    near = [at - 1, at] if at else [at]
    least = min(abs(abs(x) - numbers[i]) for i in near)
    ties = [i for i in near if abs(abs(x) - numbers[i]) == least]
    code = ties[-1] if up else min(ties, key=lambda i: i % 2)
    return code, math.copysign(numbers[code], x)


def cast(kind):
    def one(group):
        values = [nearest(kind, v)[1] for v in group]
        return {"values": values}, values

    return one


def fp4(group, scale, up):
    """Codes with 8 for the sign, and decoded numbers, under a scale."""
    if scale == 0:
        return [0] * len(group), [0.0] * len(group)
    found = [nearest("e2m1", v * (1 / scale), up) for v in group]
    codes = [code + 8 * (v < 0) for (code, _), v in zip(found, group, strict=True)]
    return codes, [number * scale for _, number in found]


def nvfp4(four_over_six=False):
    def one(group):
        most = max(abs(v) for v in group)
        scale = nearest("e4m3", most / 6)[1]
        if four_over_six:
            other = nearest("e4m3", most / 4)[1]
            errors = [
                sum((v - w) ** 2 for v, w in zip(group, fp4(group, s, False)[1], strict=True)) for s in (scale, other)
            ]
            scale = other if errors[1] < errors[0] else scale
        codes, values = fp4(group, scale, False)
        return {"codes": codes, "scale": [scale]}, values

    return one


def mx_block16(group):
    """SGLang."""
    exponent = math.ceil(math.log2(max(max(abs(v) for v in group) / 6, 1e-10)))
    codes, values = fp4(group, 2.0**exponent, True)
    return {"codes": codes, "scale": [exponent + 127]}, values


def static(bits, group):
    """TensorRT-LLM and ONNX Runtime, after division by a fixed number."""
    codes = [clamp(half_even(v), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for v in group]
    return {"codes": [q + 2 ** (bits - 1) for q in codes]}, [float(q) for q in codes]


@cache
def lloyd_max(bits):
    """Levels for N(0, 1) by Lloyd's iterations, cells in closed form."""
    count = 2**bits
    levels = [(2 * i + 1 - count) * 3 / count for i in range(count)]
    for _ in range(4000):
        ends = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
        levels = [
            math.sqrt(2 / math.pi)
            * (math.exp(-a * a / 2) - math.exp(-b * b / 2))
            / (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2)))
            for a, b in itertools.pairwise(ends)
        ]
    return levels


@cache
def trapezoid_levels(bits, dim):
    """vLLM's solve_lloyd_max: sums of 200 trapezoids, one cell after the other."""
    sigma, count = 1 / math.sqrt(dim), 2**bits

    def mean(a, b):
        points = [a + (b - a) * i / 200 for i in range(201)]
        mass = [math.exp(-x * x / (2 / dim)) * (0.5 if i in (0, 200) else 1) for i, x in enumerate(points)]
        return sum(x * m for x, m in zip(points, mass, strict=True)) / sum(mass)

    levels = [-3.5 * sigma + 7 * sigma * (i + 0.5) / count for i in range(count)]
    for _ in range(200):
        ends = [-10.5 * sigma, *((a + b) / 2 for a, b in itertools.pairwise(levels)), 10.5 * sigma]
        found = [mean(a, b) for a, b in itertools.pairwise(ends)]
        if max(abs(a - b) for a, b in zip(found, levels, strict=True)) < 1e-10:
            break
        levels = found
    return levels


def nearest_levels(direction, bits, trapezoid=False):
    """Of two equally near levels, the higher."""
    size = len(direction)
    levels = trapezoid_levels(bits, size) if trapezoid else [v / math.sqrt(size) for v in lloyd_max(bits)]
    codes = [min(range(len(levels)), key=lambda i: (abs(levels[i] - v), -i)) for v in direction]
    return codes, [levels[q] for q in codes]


def rotated(oracle, size, interleaved=False, normalized=True):
    """The oracle in the basis of Hadamard blocks of `size` consecutive channels, or of the even and the odd ones."""
    matrix = hadamard(size) * (1 if normalized else math.sqrt(size))

    def turn(vector):
        out = np.zeros(len(vector))
        span = 2 * size if interleaved else size
        for start in range(0, len(vector), span):
            for first in range(2) if interleaved else (0,):
                where = slice(start + first, start + span, 2 if interleaved else 1)
                out[where] = [sum(matrix[i, j] * vector[where][i] for i in range(size)) for j in range(size)]
        return out

    def whole(vector):
        kept, decoded = oracle(turn(vector))
        return kept, turn(decoded) / (1 if normalized else size)

    return whole


def drawn_signs(count, seed, flips):
    """vLLM's: 1 of a Bernoulli variable is a plus, or 1 of an integer a minus."""
    generator = torch.Generator().manual_seed(seed)
    if flips:
        return torch.randint(0, 2, (count,), generator=generator).numpy() * -2.0 + 1
    return torch.bernoulli(torch.full((count,), 0.5), generator=generator).numpy() * 2.0 - 1


def signs_first(oracle, seed, flips=False):
    """The oracle behind fixed random signs."""

    def whole(vector):
        signs = drawn_signs(len(vector), seed, flips)
        kept, decoded = oracle(vector * signs)
        return kept, decoded * signs

    return whole


def turboquant_keys(bits):
    """vLLM: the decoded direction is scaled to norm 1."""

    def oracle(vector):
        n = math.sqrt(sum(v * v for v in vector))
        kept, direction = rotated(lambda y: _levels(y, bits, True, True), len(vector))(vector / (n + 1e-8))
        return {**kept, "norm.scale": [stored(n)]}, direction * stored(n)

    return oracle


def _levels(direction, bits, unit, trapezoid=False):
    codes, values = nearest_levels(direction, bits, trapezoid)
    length = math.sqrt(sum(c * c for c in values) + 1e-16) if unit else 1
    return {"codes": codes}, np.array(values) / length


def _signed_levels(direction, bits):
    """LMDeploy's keys: levels, and the sign of each coordinate's error times the error's root mean square."""
    codes, values = nearest_levels(direction, bits)
    rest = [v - c for v, c in zip(direction, values, strict=True)]
    rho = stored(math.sqrt(sum(r * r for r in rest) + 1e-8) / math.sqrt(len(rest)))
    signs = [int(r < 0) for r in rest]
    out = [c + (-rho if s else rho) for c, s in zip(values, signs, strict=True)]
    return {"codes": codes, "signs": signs, "rest": [rho]}, np.array(out)


def lmdeploy_42(side):
    one = (lambda y: _signed_levels(y, 3)) if side == "key" else (lambda y: _levels(y, 2, False))

    def oracle(vector):
        n = math.sqrt(sum(v * v for v in vector) + 1e-8)
        kept, direction = rotated(one, len(vector))(vector / n)
        return {**kept, "norm.scale": [stored(n)]}, direction * stored(n)

    return oracle


def layer_scaled(oracle, number):  # values divided by a number of the layer
    def whole(vector):
        kept, decoded = oracle(vector / number)
        return kept, decoded * number

    return whole
