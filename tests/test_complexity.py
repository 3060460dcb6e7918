"""Operations per element in docs/methods.md are those of plain loops that compute what the codecs compute."""

from __future__ import annotations

import math

import pytest
import torch

import kvq
from experiments.docs.complexity import PAGE, of_codec, table
from experiments.docs.places import PLACE, filled
from kvq.codecs import Hadamard, TokenNorm
from kvq.config import compose, resolve

DIM, TOKENS, GROUP = 64, 32, 32


class Counter:
    """Numbers that count what is done with them; what a token or a group shares is not counted."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, value: float) -> float:
        self.done += 1
        return value


def transformed(row: list[float], count: Counter) -> list[float]:
    """The fast Hadamard transform of a row, and its factor."""
    row, step = list(row), 1
    while step < len(row):
        for start in range(0, len(row), 2 * step):
            for place in range(start, start + step):
                low, high = row[place], row[place + step]
                row[place], row[place + step] = count(low + high), count(low - high)
        step *= 2
    return [count(value * len(row) ** -0.5) for value in row]


def normalized(row: list[float], count: Counter) -> tuple[list[float], float]:
    total = 0.0
    for value in row:
        total = count(total + count(value * value))
    norm = math.sqrt(total)
    return [count(value / norm) for value in row], norm


def rounded(group: list[float], count: Counter) -> tuple[list[int], float, float]:
    """Codes of 2 bits of one group, their step and their least value."""
    low, high = group[0], group[0]
    for value in group:
        low, high = count(min(low, value)), count(max(high, value))
    step = (high - low) / 3
    return [count(round(count(count(value - low) / step))) for value in group], step, low


def test_loops_of_oscars_keys_count_as_the_page_does() -> None:
    """Rotate, scale, quantize per channel, and back: the stages' outputs are those of the codec."""
    x = torch.randn(1, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codec = kvq.build_method("oscar", 2, DIM).key
    count = Counter()
    rotated = [transformed(row, count) for row in x[0, 0].tolist()]
    assert torch.allclose(torch.tensor(rotated, dtype=x.dtype), Hadamard().forward(x)[0][0, 0])
    pairs = [normalized(row, count) for row in rotated]
    unit = torch.tensor([row for row, _ in pairs], dtype=x.dtype)
    assert torch.allclose(unit, TokenNorm("head").forward(Hadamard().forward(x)[0])[0][0, 0], atol=1e-3)
    groups = [rounded(channel, count) for channel in unit.T.tolist()]
    encode, decode = of_codec(resolve(compose(["method=oscar", "bits=2"])).method.key, 2)
    logs = int(math.log2(DIM))
    assert count.done == TOKENS * DIM * (encode.logs * logs + encode.more)

    count = Counter()
    channels = [[count(count(code * step) + low) for code in codes] for codes, step, low in groups]
    tokens = [
        [count(value * norm) for value in row]
        for row, (_, norm) in zip(zip(*channels, strict=True), pairs, strict=True)
    ]
    found = torch.tensor([transformed(row, count) for row in tokens], dtype=x.dtype)
    assert count.done == TOKENS * DIM * (decode.logs * logs + decode.more)
    expected = codec.decode(codec.encode(x))[0, 0]
    apart = (found - expected).abs() > 0.02  # a scale in fp16 moves some values over a threshold
    assert float(apart.double().mean()) < 0.05


def test_the_page_has_the_counts_of_the_configurations() -> None:
    """`python experiments/docs/complexity.py` writes them."""
    page = PAGE.read_text(encoding="utf-8")
    assert [place[2] for place in PLACE.finditer(page)].count("complexity") == 1
    assert filled(page, "complexity", table) == page


def test_what_has_no_count_is_named() -> None:
    with pytest.raises(SystemExit, match="complexity: PolarQuantizer: a quantizer without a count"):
        table("polarquant at 4")
    with pytest.raises(SystemExit, match="methods, then 'at' and their bits"):
        table("oscar")
