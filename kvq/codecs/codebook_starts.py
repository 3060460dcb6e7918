"""Codebooks of the sphere as Lloyd's steps begin with them: evenly spaced, of equal probability, or by k-means++."""

from __future__ import annotations

import enum
from typing import ClassVar

import numpy as np

from kvq.codecs.levels import Array
from kvq.codecs.lloyd_max import CodebookQuantizer, cells, quantile
from kvq.codecs.quantizers import Gain, choice
from kvq.errors import at_least, check_seed

_SAMPLES = 100_000  # of a coordinate, as in print
_SUPPORT = 0.999  # of |T| lies within evenly spaced levels


class Start(enum.Enum):
    """Levels to begin with: evenly spaced or equally probable ones, or draws by squared distance."""

    even = "even"
    quantile = "quantile"
    kmeans_plus_plus = "kmeans_plus_plus"


def levels_from(bits: int, dim: int, start: Start, steps: int = 0, seed: int = 5) -> Array:
    """2^bits levels for a coordinate T of a uniform unit vector after `steps` of Lloyd's steps, ascending.

    Even levels reach to the 99.9% quantile of |T|, which gives the printed errors to the noise of 100,000 samples
    (0.097 at 1 bit, D=64); k-means++ (Arthur and Vassilvitskii 2007) draws from so many samples. All starts lead to the
    levels of `optimal_levels`, because the density has one optimum.

    Source: KVQuant++, section 2.2.1.
    """
    count = 2**bits
    if start is Start.kmeans_plus_plus:
        levels = _drawn(count, dim, seed)
    elif start is Start.even:
        end = float(quantile(np.array(_SUPPORT), dim))
        levels = np.linspace(-end, end, count)
    else:
        half = quantile((2 * np.arange(count // 2) + 1) / count, dim)
        levels = np.concatenate([-half[::-1], half])
    for _ in range(steps):
        mass, mean = cells(levels, dim, lowest=-1.0)
        levels = mean / mass
    return levels


def _drawn(count: int, dim: int, seed: int) -> Array:
    """Samples of a coordinate: one by chance, each further one by its squared distance from the others."""
    generator = np.random.default_rng([seed, _SAMPLES])  # no other part draws from this stream
    samples = quantile(generator.random(_SAMPLES), dim) * generator.choice([-1.0, 1.0], _SAMPLES)
    chosen = [generator.choice(samples)]
    distance = (samples - chosen[0]) ** 2
    while len(chosen) < count:
        chosen.append(generator.choice(samples, p=distance / distance.sum()))
        distance = np.minimum(distance, (samples - chosen[-1]) ** 2)
    return np.sort(chosen)


class StartingCodebook(CodebookQuantizer):
    """As `LloydMaxQuantizer`, with the levels that Lloyd's steps begin with, or those after few of them.

    Args:
        bits, gain: as `LloydMaxQuantizer` has them.
        start, steps, seed: see `levels_from`.

    Raises:
        ConfigError: unknown gain or start; negative steps or seed.
        Unsupported: other than 1 to 8 bits.

    Source: KVQuant++, section 2.2.1.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, bits: int, start: Start | str, gain: Gain | str = Gain.none, steps: int = 0, seed: int = 5
    ) -> None:
        at_least("steps", steps, 0)
        check_seed("seed", seed)
        super().__init__(bits, gain, levels_from, (choice(Start, start, "start"), steps, seed))
