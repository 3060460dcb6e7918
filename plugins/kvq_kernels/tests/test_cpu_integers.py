"""Products of codes in integers, against fp64: exact but for the rounding of queries and weights to 16 bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")
import numba

from kvq_kernels import cpu_integers, cpu_vectors
from kvq_kernels.cpu_vectors import TILE
from tests.properties import examples

pytestmark = pytest.mark.skipif(not cpu_vectors.has("avx512vnni"), reason="no AVX-512 VNNI")


def packed(codes, width):
    """`[tokens, dim]` to bytes of consecutive tokens of a channel."""
    per = 8 // width
    return sum(codes[place::per].astype(np.uint8) << (place * width) for place in range(per)).astype(np.uint8)


def products(numbers, codes, width):
    """Products of `[rows, dim]` with the codes, not yet divided by the place of a code in its byte, and the units."""
    rows, dim = numbers.shape
    ready = np.zeros((rows, cpu_integers.words(dim)), np.float32)
    found = np.zeros((rows, len(codes)), np.float32)
    fill, dots = cpu_integers.digits(dim, None, 1.0), cpu_integers.dots(width, dim, rows)

    @numba.njit
    def run(numbers, tops, ready, plane, found):
        for row in range(rows):
            fill(numbers, row, tops[row], ready)
        dots(ready, plane, 0, 0, found.shape[1], found)

    run(numbers, np.abs(numbers).max(1), ready, packed(codes, width), found)
    places = np.arange(len(codes)) % (8 // width) * width
    return found / 2.0**places, ready[:, 0]


def weighted(weights, codes, width):
    """Sums of codes with weights `[rows, TILE]`, and the units."""
    rows, dim = len(weights), codes.shape[1]
    ready = np.zeros((rows, cpu_integers.words(TILE)), np.float32)
    out = np.zeros((rows, dim), np.float32)
    fill, sums = cpu_integers.digits(TILE, width, 1.0), cpu_integers.sums(width, dim, rows)

    @numba.njit
    def run(weights, tops, ready, plane, out):
        for row in range(rows):
            fill(weights, row, tops[row], ready)
        sums(ready, plane, 0, 0, TILE, out)

    run(weights, np.abs(weights).max(1), ready, packed(codes, width), out)
    return out, ready[:, 0]


def within(found, exact, units, codes):
    """At most half a unit for each code, and the rounding of the sum to fp32."""
    bound = 0.5 * units[:, None] * codes + 4e-7 * np.abs(exact) + 1e-30
    assert (np.abs(found - exact) <= bound).all()


@pytest.mark.slow
@settings(max_examples=examples(12))
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)
def test_within_the_rounding(width, dim, rows, seed):
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 1 << width, (TILE, dim))
    queries = (draw.standard_normal((rows, dim)) * draw.lognormal(0, 2, (1, dim))).astype(np.float32)
    found, units = products(queries, codes, width)
    within(found, queries.astype(np.float64) @ codes.T, units, codes.sum(1)[None])
    weights = (draw.standard_normal((rows, TILE)) * draw.lognormal(0, 2, (1, TILE))).astype(np.float32)
    found, units = weighted(weights, codes, width)
    within(found, weights.astype(np.float64) @ codes, units, codes.sum(0)[None])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_stay_within_32_bits(sign):
    codes = np.full((TILE, cpu_integers.MOST_CHANNELS), 255)
    numbers = np.full((1, cpu_integers.MOST_CHANNELS), sign * 3.5, np.float32)
    assert products(numbers, codes, 8)[0] == pytest.approx(sign * 3.5 * 255 * cpu_integers.MOST_CHANNELS)
    assert weighted(numbers[:, :TILE], codes, 8)[0] == pytest.approx(sign * 3.5 * 255 * TILE)


def test_zeros_and_tiny_numbers():
    codes = np.full((TILE, 64), 3)
    assert not products(np.zeros((2, 64), np.float32), codes, 2)[0].any()
    tiny = np.full((1, 64), 1e-38, np.float32)
    assert np.abs(products(tiny, codes, 2)[0]).max() < 1e-27
