"""Tokens' KL divergences as the metrics of a record."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor


def divergence_metrics(kl: Float[Tensor, " tokens"]) -> dict[str, float]:
    """Mean, upper quantiles and largest of KL divergences in nats.

    Of n tokens the 99.9th percentile stands on n / 1000 and the largest on one; `scored_tokens` of the record says n.
    """
    values = kl.double().numpy()  # torch.quantile takes at most 2**24 numbers
    p99, p999 = np.quantile(values, [0.99, 0.999])
    return {
        "kl_mean": float(values.mean()),
        "kl_p99": float(p99),
        "kl_p999": float(p999),
        "kl_max": float(values.max()),
    }
