from __future__ import annotations

import pytest
import torch

from kvq import build_method
from kvq.config.residual import leaving
from kvq.tasks.memory import kind_of, layout

METHODS = ("nsn", "kivi", "oscar", "oscar/token_scope", "nsnquant", "turboquant/outliers", "rtn", "fp8")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tokens", [64, 200, 515])
def test_layout_is_the_sum_of_stored_tensors(name: str, tokens: int) -> None:
    from kvq.codecs import Rope

    method = build_method(name, 2, 64)
    nothing = torch.zeros(1, tokens, 0)
    for codec in (method.key, method.value):
        assert codec is not None
        x = torch.randn(1, 2, tokens, 64, generator=torch.Generator().manual_seed(0)).half()
        for block in (64, None):
            packed = codec.encode(x, block, Rope(nothing, nothing) if codec.uses_rope else None)
            found = layout(codec, tokens, 2, 64, torch.float16, block)
            assert found == {name: part.numel() * part.element_size() for name, part in packed.parts.items()}
            assert sum(found.values()) == packed.nbytes


def test_parts_by_kind() -> None:
    names = {
        "codes.0": "codes",
        "high.codes.1": "codes",
        "signs": "codes",
        "scale": "scales",
        "zero_point": "scales",
        "norm.scale": "norms",
        "norm1.scale.codes.0": "norms",
        "shift.offset.step": "shift",
        "channel_scale.scale": "scales",
        "mask": "other",
        "residual": "residual",
    }
    assert {name: kind_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("tokens", "kept", "group", "whole", "expected"),
    [(300, 0, 128, False, 256), (300, 0, 128, True, 300), (100, 0, 128, True, 0), (300, 128, 1, False, 172)],
)
def test_tokens_that_leave_full_precision(tokens: int, kept: int, group: int, whole: bool, expected: int) -> None:
    assert leaving(tokens, kept, group, whole) == expected
