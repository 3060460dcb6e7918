"""Loops over rows of numbers, compiled by numba: the numerators of a softmax, and largest magnitudes."""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np

from kvq.kernels.cpu_vectors import OPTIONS

_EXP2 = (1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477)
_EXP2_HIGH = (0.0013333558146428443, 0.00015403530393381608)


@numba.njit(**OPTIONS)
@no_type_check
def highest(numbers):
    """The highest number: bits of floats, with those of a negative one inverted, are ordered as integers are.

    A maximum of integers is vectorized, one of floats is not.
    """
    bits, rest = numbers.view(np.int32), np.int32(0x7FFFFFFF)
    top = np.full(1, -rest, np.int32)
    most = top[0]
    for i in range(bits.shape[0]):
        most = max(most, bits[i] ^ ((bits[i] >> np.int32(31)) & rest))
    top[0] = most ^ ((most >> np.int32(31)) & rest)
    return top.view(np.float32)[0]


@numba.njit(**OPTIONS)
@no_type_check
def weights_of(scores, first):
    """Softmax numerators in place, `exp(score - max)`, zero before token `first`; the sum of each row."""
    rows, tokens = scores.shape
    totals = np.zeros(rows, np.float32)
    ints = np.empty(256, np.int32)
    floats = ints.view(np.float32)
    for row in range(rows):
        line = scores[row]
        line[:first] = 0
        top = highest(line[first:])
        total = 0.0
        for start in range(first, tokens, 256):
            piece = line[start : min(start + 256, tokens)]
            count = piece.shape[0]
            for i in range(count):
                y = max((piece[i] - top) * np.float32(1.4426950408889634), np.float32(-126))
                whole = np.floor(y + np.float32(0.5))
                f = y - whole
                high = np.float32(_EXP2_HIGH[0]) + f * np.float32(_EXP2_HIGH[1])
                for_4 = np.float32(_EXP2[4]) + f * high
                for_3 = np.float32(_EXP2[3]) + f * for_4
                for_2 = np.float32(_EXP2[2]) + f * for_3
                piece[i] = np.float32(1) + f * (np.float32(_EXP2[1]) + f * for_2)
                ints[i] = (np.int32(whole) + 127) << 23
            part = np.float32(0)
            for i in range(count):
                piece[i] *= floats[i]
                part += piece[i]
            total += part
        totals[row] = total
    return totals


@numba.njit(**OPTIONS)
@no_type_check
def largest(numbers, found):
    """The largest magnitude of each row."""
    for h in range(numbers.shape[0]):
        bits, most = numbers[h].view(np.int32), np.int32(0)
        for i in range(bits.shape[0]):
            most = max(most, bits[i] & np.int32(0x7FFFFFFF))
        found.view(np.int32)[h] = most
