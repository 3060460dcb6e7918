"""Every method against equations of its paper, or facts about its released code, on the same states.

The table "Compared with references" of docs/methods.md has a row for each of them; its figures are those measured here.
`python -m tests.methods.test_held_against` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq
from kvq.cache import KVCache
from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.codecs import Codec, RandomizedHadamard, RandomRotation, Rope, cayley_step, rope_table
from kvq.methods.method import Method
from tests.calibrated import build
from tests.codecs import oracles
from tests.codecs.oracles import Grid, hadamard, quantize
from tests.codecs.test_block_formats import e4m3_numbers, q8_0_codes, signed_max
from tests.codecs.test_nsnquant import oracle as nsnquant_oracle
from tests.codecs.test_rope import turned
from tests.methods import chosen, references
from tests.methods.held import DIM, HEADS, TOKENS, largest_difference, states
from tests.plugins import of_plugins
from tests.random_models import llama

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
HEADING = "## Compared with references\n"
LEAST = 1e-10
"""Differences below are rounding of fp64, which is not the same on every machine; `<` this is printed for them."""
X = states()
NUMBERS = X[0].numpy()


def decoded(codec: Codec | None, x: Tensor = X, rope: Rope | None = None) -> Tensor:
    assert codec is not None
    return codec.decode(codec.encode(x, rope=rope), rope)


def worst(pairs: Iterable[tuple[Tensor, np.ndarray]]) -> float:
    """The largest difference of decoded states from their references."""
    return max(largest_difference(found[0], torch.from_numpy(expected)) for found, expected in pairs)


def both_sides(name: str, expected: Callable[[str, int], np.ndarray], bits: Iterable[int] = (2, 3, 4)) -> float:
    """Keys and values of a method without tables."""
    pairs = []
    for b in bits:
        method = kvq.build_method(name, bits=b, head_dim=DIM)
        pairs += [(decoded(getattr(method, side)), expected(side, b)) for side in ("key", "value")]
    return worst(pairs)


def kivi() -> float:
    return both_sides(
        "kivi",
        lambda side, bits: quantize(NUMBERS, Grid(bits, "per_channel" if side == "key" else "per_token", 32)).values,
    )


def quarot() -> float:
    """The released range of keys holds 0, that of values need not."""
    return both_sides(
        "quarot", lambda side, bits: references.rotated_integer(NUMBERS, hadamard(DIM), bits, 0.95, side == "key")
    )


def nsn() -> float:
    return both_sides("nsn", lambda side, bits: oracles.nsn(NUMBERS, bits))


def oscar(name: str, scope: str, zero_point: str) -> float:
    def expected(side: str, bits: int) -> np.ndarray:
        if side == "key":
            return oracles.oscar_keys(NUMBERS, bits, 32, scope, zero_point)
        return oracles.rotated(NUMBERS, Grid(bits, "per_token", 32, zero_point=zero_point))

    return both_sides(name, expected)


def nsnquant() -> float:
    method, rope = kvq.build_method("nsnquant", bits=1, head_dim=DIM), rope_table(64, DIM)
    x = X[:, :, :64]
    keys = decoded(method.key, x, rope), nsnquant_oracle(x[0].numpy(), rope, 1)
    return worst([keys, (decoded(method.value, x), nsnquant_oracle(x[0].numpy(), None, 1, rotate_first=True))])


def haar() -> np.ndarray:
    """The rotation that TurboQuant and PolarQuant drew."""
    return RandomRotation(0).matrix(DIM, X).numpy()


def turboquant() -> float:
    return both_sides("turboquant", lambda side, bits: references.turboquant(NUMBERS, haar(), bits), (2, 3))


def polarquant() -> float:
    return both_sides("polarquant", lambda side, bits: references.polarquant(NUMBERS, haar()), (2,))


def gear() -> float:
    start = torch.randn(DIM, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    return both_sides("gear", lambda side, bits: references.gear(NUMBERS, bits, side == "key", start), (2, 4))


def q4_0() -> float:
    return both_sides("q4_0", lambda side, bits: signed_max(NUMBERS, 4, 32)[1], (2,))


def q8_0() -> float:
    """In single precision, as ggml computes, and with ties: every 16th token has values that stand on them."""
    x = NUMBERS.astype(np.float32)
    x[:, 5::16] = np.round(x[:, 5::16] * 2) / 2
    x[:, 5::16, ::32] = 127
    step = np.abs(x.reshape(*x.shape[:2], -1, 32)).max(-1) / np.float32(127)
    scale = np.repeat(references.store(step), 32, -1)
    method = kvq.build_method("q8_0", head_dim=DIM)
    return worst([(decoded(method.key, torch.from_numpy(x)[None]).double(), q8_0_codes(x) * scale)])


def fp8() -> float:
    return both_sides("fp8", lambda side, bits: references.fp8(NUMBERS, e4m3_numbers()), (2,))


def qjl() -> float:
    """Scores, over the lengths of the query and of the key, and values."""
    queries = states(3, tokens=4, heads=1)[0, 0]
    method, found = kvq.build_method("qjl", head_dim=DIM), []
    for layer, outlier_rows in ((0, 128), (20, 256)):
        codec = method.codec("key", layer, 32)
        sketch = codec.quantizer._matrix(DIM, X, torch.float64, outlier=False).numpy()
        expected = torch.from_numpy(references.qjl_scores(NUMBERS, queries.numpy(), sketch, outlier_rows))
        scores = queries @ decoded(codec)[0].mT
        lengths = queries.norm(dim=-1)[:, None] * X[0].norm(dim=-1)[:, None, :]
        found.append(float(((scores - expected).abs() / lengths).max()))
    return max(*found, worst([(decoded(method.value), quantize(NUMBERS, Grid(2, "per_token", 32)).values)]))


def rotatekv() -> float:
    calibration = states(2, tokens=96)
    ropes, pairs = (rope_table(96, DIM), rope_table(TOKENS, DIM)), []
    for bits in (2, 3, 4):
        method = build("rotatekv", calibration, bits)
        keys = references.rotatekv_keys(NUMBERS, calibration[0].numpy(), ropes, bits)
        matrix = hadamard(DIM)
        values = references.rotatekv_grid(NUMBERS @ matrix, bits) @ matrix.T
        pairs += [(decoded(method.key, X, ropes[1]), keys), (decoded(method.value), values)]
    return worst(pairs)


def spinquant() -> float:
    """Rotations as learning begins (in fp32, as they are kept); keys by the released range, which holds 0."""
    rotation, pairs = RandomizedHadamard(0).matrix(DIM, X).float().double().numpy(), []
    for bits in (2, 3, 4):
        method = build("spinquant", X, bits)
        pairs.append((decoded(method.key), references.rotated_integer(NUMBERS, hadamard(DIM), bits, 1.0, True)))
        pairs.append((decoded(method.value), references.rotated_integer(NUMBERS, rotation, bits, 1.0, False)))
    return worst(pairs)


def kvquant(name: str) -> float:
    """Thresholds of the keys' channels are those of the calibration; levels are the method's, which k-means fits."""
    calibration, ropes = states(2, tokens=256), (rope_table(256, DIM), rope_table(TOKENS, DIM))
    low, high = np.percentile(turned(calibration, ropes[0], back=True)[0], [0.5, 99.5], axis=1)
    pairs = []
    for bits in (1, 2, 3, 4):
        method = build(name, calibration, bits)
        for side, codec in (("key", method.key), ("value", method.value)):
            assert codec is not None
            tables = codec.quantizer._tables  # type: ignore[attr-defined]
            levels = [tables[table].double().numpy() for table in ("levels", "decoded")]
            if side == "value":
                pairs.append((decoded(codec), references.kvquant(NUMBERS, None, *levels)))
                continue
            states_ = turned(X, ropes[1], back=True)[0]
            keys = references.kvquant(states_, (low.reshape(-1), high.reshape(-1)), *levels)
            pairs.append((decoded(codec, X, ropes[1]), turned(torch.from_numpy(keys)[None], ropes[1])[0]))
    return worst(pairs)


def cq() -> float:
    """Centroids are the method's; `tests/codecs/test_calibrated.py` holds their error against scikit-learn's."""
    calibration, ropes, pairs = states(2, tokens=96), (rope_table(96, DIM), rope_table(TOKENS, DIM)), []
    for name in ("cq/4c9b", "cq/8c10b"):
        method = build(name, calibration)
        keys, values = (codec.quantizer._tables["centroids"].double().numpy() for codec in (method.key, method.value))  # type: ignore[union-attr, attr-defined]
        rows = references.coupled(turned(X, ropes[1], back=True)[0], keys)
        pairs.append((decoded(method.key, X, ropes[1]), turned(torch.from_numpy(rows)[None], ropes[1])[0]))
        pairs.append((decoded(method.value), references.coupled(NUMBERS, values)))
    return worst(pairs)


def layer_of(name: str, *overrides: str) -> tuple[KVCacheLayer, Method]:
    method = kvq.build_method(name, bits=2, head_dim=DIM, overrides=list(overrides))
    return KVCache(llama(head_dim=DIM, heads=2 * HEADS, kv_heads=HEADS), method).layers[0], method


def fed(layer: KVCacheLayer, keys: Tensor, values: Tensor, queries: Tensor) -> list[Tensor]:
    """What the layer holds behind one attention over a prompt."""
    read, _ = layer.update(keys, values)
    if layer.observes:
        layer.observe(Attended(queries, read, None, 1 / math.sqrt(DIM), None))
    return [layer.key._visible(), layer.value._visible()]


def prompt(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the queries of twice as many heads."""
    return states(0, tokens), states(1, tokens), states(2, tokens, 2 * HEADS)


def evicting(name: str, kept: Callable[[np.ndarray], list[list[int]]]) -> float:
    keys, values, queries = prompt(200)
    layer, _ = layer_of(name)
    tokens = kept(chosen.weights(queries[0].numpy(), keys[0].numpy()))
    expected = [np.stack([side[0, h, tokens[h]].numpy() for h in range(HEADS)]) for side in (keys, values)]
    return worst(zip(fed(layer, keys, values, queries), expected, strict=True))


def zipcache() -> float:
    keys, values, queries = prompt(100)
    layer, method = layer_of("zipcache")
    seen = chosen.weights(queries[0].numpy(), keys[0].numpy())
    salient = chosen.zipcache_salient(seen, method.policy("token_policy").probes(0, 100).tolist(), 0.6)
    expected = [chosen.zipcache(side[0].numpy(), salient, side is keys) for side in (keys, values)]
    return worst(zip(fed(layer, keys, values, queries), expected, strict=True))


def ott() -> float:
    keys, values, queries = prompt(266)
    layer, _ = layer_of("ott", "token_policy.exempt_layers=0")
    return worst(zip(fed(layer, keys, values, queries), chosen.ott(keys[0].numpy(), values[0].numpy(), 2), strict=True))


MEASURES: dict[str, Callable[[], float]] = {
    "fp8": fp8,
    "q8_0": q8_0,
    "q4_0": q4_0,
    "kivi": kivi,
    "quarot": quarot,
    "nsn": nsn,
    "oscar": lambda: oscar("oscar", "head", "float"),
    "oscar/released": lambda: oscar("oscar/released", "token", "integer"),
    "nsnquant": nsnquant,
    "turboquant": turboquant,
    "polarquant": polarquant,
    "qjl": qjl,
    "gear": gear,
    "ott": ott,
    "zipcache": zipcache,
    "h2o": lambda: evicting("h2o", lambda seen: chosen.heavy_hitters(seen, 64)),
    "snapkv": lambda: evicting("snapkv", lambda seen: chosen.snapkv(seen, 64)),
    "streamingllm": lambda: evicting("streamingllm", lambda seen: [chosen.streaming(200, 64)] * HEADS),
    "kvquant": lambda: kvquant("kvquant"),
    "kvquant/qnorm": lambda: kvquant("kvquant/qnorm"),
    "cq": cq,
    "spinquant": spinquant,
    "rotatekv": rotatekv,
}
for added in of_plugins("PAIRS"):
    MEASURES |= {name: lambda pairs=pairs: worst(pairs()) for name, pairs in added.items()}


def printed(difference: float) -> str:
    """One digit, rounded up; `< 1e-10` for less."""
    if difference < LEAST:
        return f"< {LEAST:.0e}"
    power = math.floor(math.log10(difference) + 1e-9)
    digit = math.ceil(difference / 10.0**power - 1e-9)
    return f"{digit}e{power}" if digit < 10 else f"1e{power + 1}"


def rows(page: str) -> dict[str, list[str]]:
    """Cells of the table by the method's name."""
    table = page.partition(HEADING)[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells] for cells in lines}


@pytest.mark.every_plugin
def test_the_table_has_a_row_for_each() -> None:
    table = rows(PAGE.read_text(encoding="utf-8"))
    assert set(table) == set(MEASURES)
    assert all(len(cells) == 4 and all(cells) for cells in table.values())


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", MEASURES)
def test_the_difference_is_the_printed_one(name: str) -> None:
    figure = rows(PAGE.read_text(encoding="utf-8"))[name][2]
    difference = MEASURES[name]()
    print(f"{name}: {difference:.2e}")
    assert difference <= float(figure.removeprefix("< "))
    assert printed(difference) == figure


def test_the_measure_sees_a_difference() -> None:
    """Of one wrong number in one token."""
    other = X.clone()
    other[0, 1, 9, 3] *= 1.01
    assert 0 < largest_difference(other, X) < 0.011
    assert largest_difference(X, X) == 0
    assert [printed(v) for v in (0, 9e-11, 2.04e-3, 9.5e-4, 1e-3)] == ["< 1e-10", "< 1e-10", "3e-3", "1e-3", "1e-3"]


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_spinquants_step_is_the_limit_of_the_released_iteration(size: float) -> None:
    """On Rᵀ: Y = X + a/2 W (X + Y), of which the released optimizer does five rounds from X - a Gᵀ."""
    generator = torch.Generator().manual_seed(0)
    begun = RandomizedHadamard(0).matrix(DIM, X)
    gradient = size * torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) / DIM
    down = -gradient.mT @ begun
    half = down - begun.mT @ begun @ down / 2
    skew = half - half.mT
    rate = min(1.5, 1 / (float(skew.abs().sum(0).max()) + 1e-8))
    rounds = [begun.mT - rate * gradient.mT]
    for _ in range(60):
        rounds.append(begun.mT + rate / 2 * skew @ (begun.mT + rounds[-1]))
    found = cayley_step(begun, gradient, 1.5)
    assert largest_difference(found, rounds[-1].mT) < 1e-12
    assert 1e-9 < largest_difference(found, rounds[5].mT) < 1e-3


def write() -> None:
    """Put the measured figures into the table."""
    page = PAGE.read_text(encoding="utf-8")
    for name, cells in rows(page).items():
        old = "| " + " | ".join(cells) + " |"
        assert old in page, f"{name}: one space around each cell"
        cells[2] = printed(MEASURES[name]())
        page = page.replace(old, "| " + " | ".join(cells) + " |")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
