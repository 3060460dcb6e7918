"""Whether more of a metric is better, in one place."""

from __future__ import annotations

import re

_LOWER = (
    *("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "nll", "loss", "kl_mean", "kl_p99"),
    *("brier_score", "mse", "mae", "rmse", "wer", "cer", "ter", "toxicity", "flips", "lost"),
)


def is_lower_better(metric: str) -> bool:
    """Whether less is better, by the metric's name: `word_perplexity/none[wikitext]` is a perplexity."""
    name = re.split(r"[\[/,]", metric, maxsplit=1)[0].lower()
    return name.removeprefix("delta_") in _LOWER
