"""The limit of Gaussian coding in the loss's metric: reverse water-filling over the components of all layers and sides.

Components are independent, with variances λ in nats: noise of relative size d costs λ d / 2. At a level θ those above
it get (1/2) log2(λ / θ) bits. It is the limit of coding one token of one side at a time with normal states and
second-order loss; states are not normal, and tokens, keys with values, and layers can be coded together.

Source: Cover and Thomas, Elements of Information Theory, section 10.3.3.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from kvq.codecs import FisherTransform, JointMoments

_STEPS = 200


def spectrum_of(moments: JointMoments, transform: FisherTransform) -> Float[Tensor, " components"]:
    """λ of a side of a layer in nats, descending, in fp64."""
    return transform.fit_joint(moments)["spectrum"][0].double()


def rate_at(spectrum: Float[Tensor, " components"], level: float) -> float:
    """Mean bits of a component at a level θ."""
    return float((spectrum / level).log2().clamp_min(0).mean() / 2)


def loss_at(spectrum: Float[Tensor, " components"], level: float) -> float:
    """Loss in nats per token at a level θ: (1/2) Σ min(λ, θ)."""
    return float(spectrum.clamp_max(level).sum() / 2)


def level_of_rate(spectrum: Float[Tensor, " components"], bits: float) -> float:
    """The level at which components have `bits` on average, by bisection."""
    return _bisected(spectrum, lambda level: rate_at(spectrum, level) > bits)


def level_of_loss(spectrum: Float[Tensor, " components"], nats: float) -> float:
    """The level at which the loss is `nats`; the largest λ where nothing loses as much."""
    return _bisected(spectrum, lambda level: loss_at(spectrum, level) < nats)


def rate_of_loss(spectrum: Float[Tensor, " components"], nats: float) -> float:
    """Bits of a component, on average, that the limit needs for a loss of `nats`; 0 where none are needed."""
    return rate_at(spectrum, level_of_loss(spectrum, nats))


def _bisected(spectrum: Tensor, too_low: Callable[[float], bool]) -> float:
    """The level between 2^-64 of the largest λ and the largest that divides those that are too low from the others."""
    high = float(spectrum.max())
    low = high * 2.0**-64
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high
