from __future__ import annotations

import pytest
import torch

from kvq.diagnostics import token_norms
from kvq.errors import ConfigError
from kvq.tasks.error import imbalanced


def made(**changes: object) -> torch.Tensor:
    known = {
        "tokens": 256,
        "head_dim": 64,
        "sinks": 2,
        "lowness": 10.0,
        "outlier_channels": 4,
        "outlier_size": 20.0,
        "outlier_spread": 0.0,
        "sink_outliers": False,
        "heads": 3,
    }
    return imbalanced(**(known | changes))  # type: ignore[arg-type]


def test_sinks_are_as_low_as_asked() -> None:
    norms = token_norms(made(outlier_size=0.0))
    assert float(norms[..., 2:].mean() / norms[..., :2].mean()) == pytest.approx(10, rel=0.1)
    high = made(outlier_size=0.0, lowness=1.0)
    assert torch.equal(high[:, :, 2:], made(outlier_size=0.0)[:, :, 2:])
    assert torch.allclose(high[:, :, :2] / 10, made(outlier_size=0.0)[:, :, :2])


def test_outlier_channels_stand_out_by_their_mean() -> None:
    means = made()[0, :, 2:].mean(1).abs()
    for head in means:
        assert int((head > 15).sum()) == 4
        assert head.topk(4).values.tolist() == pytest.approx([20] * 4, abs=0.5)
    spread = made(outlier_spread=0.5)[0, :, 2:].std(1)
    assert spread.topk(4, -1).values.flatten().tolist() == pytest.approx([10] * 12, rel=0.2)


def test_sinks_with_the_others_outliers_point_their_way() -> None:
    common = made()[0, 0, 2:].mean(0)
    apart, alike = (
        torch.nn.functional.cosine_similarity(made(sink_outliers=flag)[0, 0, 0], common, dim=0)
        for flag in (False, True)
    )
    assert abs(float(apart)) < 0.5 < 0.9 < float(alike)


def test_more_sinks_than_tokens() -> None:
    with pytest.raises(ConfigError, match=r"task\.sinks=300"):
        made(sinks=300)
