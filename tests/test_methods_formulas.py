"""The column of bits of docs/methods.md, formula by formula, against the bytes of what is stored."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
import yaml

import kvq
from experiments.docs.citations import ROOT, bibtex
from experiments.docs.complexity import PAGE as COMPLEXITY_PAGE
from experiments.docs.complexity import of_codec, table
from experiments.docs.places import PLACE, filled
from kvq.cache import KVCache
from kvq.codecs import Hadamard, TokenNorm, rope_table
from kvq.config import compose, resolve
from kvq.config.plugins import all_choices
from kvq.methods.build import build_method
from tests.calibrated import build, random_states
from tests.formulas import closed_forms
from tests.methods_page import PAGE, PRESETS, ROWS, config
from tests.presets import METHODS, lacks_package
from tests.random_models import llama, token_ids

SHAPES = [(1, 64, 2, 128), (2, 128, 1, 128), (8, 64, 3, 128), (8, 128, 1, 64), (4, 24, 2, 80), (2, 200, 1, 256)]
"""KV heads, tokens of a block, blocks and head dim; the codes of a multiple of 8 tokens fill their bytes."""
CELLS = {name: cells[2] for name, cells in ROWS.items()}
EVICTION = re.compile(r"as `fp16`, of (\d+/\d+) of the (?:tokens|prompt)")
DATA = re.compile(r"(.+) \(depends on the data: (?:(\w) is .{5,}|.{10,})\)")
FITTED = re.compile(r"(.+) \(depends on the calibration: (\w) is .{10,}\)")
PLANNED = "kvtc"
"""Its groups are chosen for each side, so each has letters of its own."""
EVICTING = [name for name, cell in CELLS.items() if EVICTION.fullmatch(cell)]
BY_DATA = [name for name, cell in CELLS.items() if DATA.fullmatch(cell)]
BY_CALIBRATION = [name for name, cell in CELLS.items() if FITTED.fullmatch(cell)]
CLOSED = [name for name in METHODS if name not in (*EVICTING, *BY_DATA, *BY_CALIBRATION, "fp16", "identity")]


def measured(name, bits, fitted, x, block):
    """Bits per element of keys and of values `x` in blocks, by the method fitted to `fitted`."""
    if name.startswith("waterfill"):
        heads, dim = x.shape[1], x.shape[3]
        # At least as many tokens as channels of all heads: components without variance get no bits.
        fitted = torch.randn(1, heads, 3 * heads * dim, dim, generator=torch.Generator().manual_seed(1))
    if "StoredWithKeys" in str(config(name).method.value):
        fitted, x = (torch.cat([keys, keys.flip(2)], 1) for keys in (fitted, x))
    method = build(name, fitted, bits)
    if (library := method.policy("backend")) is not None:
        layer = library.build_layer(method.residual.key, "a layer")
        layer.update(x, x)
        return layer.key.bits_per_element, layer.value.bits_per_element
    rope = rope_table(x.shape[2], x.shape[3])
    codecs = (method.key, method.key if method.joins_sides else method.value)
    return tuple(codec.encode(x, block, rope=rope).bits_per_element for codec in codecs)


def widths(name):
    """Bits up to 4 that the method has."""
    low, high = config(name).method.bits_range or (2, 2)
    return [bits for bits in ((2, 4) if name == "quanto" else range(low, high + 1)) if bits <= 4]


@pytest.mark.thin(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CLOSED)
def test_formulas_are_what_is_measured(name, shape):
    if lacks_package(name):
        pytest.skip(f"needs the extra [{name}]")
    heads, block, blocks, dim = shape
    x = torch.randn(1, heads, block * blocks, dim, generator=torch.Generator().manual_seed(0))
    for bits in widths(name):
        expected = closed_forms(CELLS[name], {"b": bits, "D": dim, "H": heads, "R": block})
        found = measured(name, bits, x, x.half(), block)
        assert found == pytest.approx(tuple(map(float, expected)), abs=1e-12), f"bits={bits}"


@pytest.mark.parametrize("name", BY_DATA)
def test_bits_that_depend_on_the_data_do(name):
    """A row may go without a formula only where there is none."""
    x = torch.randn(1, 2, 128, 128, generator=torch.Generator().manual_seed(0))
    other = random_states(2, 128, 128)
    assert measured(name, 2, x, x.half(), 64) != measured(name, 2, x, other.half(), 64)


def stored(name, shape):
    """For each width: the letters of a formula, and keys and values of `shape` as they are stored."""
    heads, block, blocks, dim = shape
    x = random_states(heads, dim, block * blocks)
    rope = rope_table(block * blocks, dim)
    for bits in widths(name):
        method = build(name, x, bits)
        both = [codec.encode(x.half(), block, rope=rope) for codec in (method.key, method.value)]
        yield {"b": bits, "D": dim, "H": heads, "R": block}, both


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name in BY_DATA if DATA.fullmatch(CELLS[name])[2]])
def test_formulas_of_what_the_data_decide(name, shape):
    """Such a formula has a letter for the share of entries that are kept apart, which is counted."""
    formula, letter = DATA.fullmatch(CELLS[name]).groups()
    for names, both in stored(name, shape):
        for side, packed in enumerate(both):
            elements = packed.tokens * names["H"] * names["D"]
            names[letter] = Fraction(int(packed.parts["outlier.count"].sum()), elements)
            assert packed.bits_per_element == pytest.approx(float(closed_forms(formula, names)[side]), abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name in BY_CALIBRATION if name != PLANNED])
def test_formulas_of_what_the_calibration_decides(name, shape):
    """Such a formula has a letter for the number of norms of a key, which are counted."""
    formula, letter = FITTED.fullmatch(CELLS[name]).groups()
    for names, both in stored(name, shape):
        names[letter] = Fraction(sum(part.endswith("norm.scale") for part in both[0].parts), names["H"])
        expected = tuple(map(float, closed_forms(formula, names)))
        assert tuple(packed.bits_per_element for packed in both) == pytest.approx(expected, abs=1e-12)


@pytest.mark.every_plugin
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] * shape[3] <= 320], ids=str)
def test_formulas_of_groups_that_a_calibration_chooses(shape):
    heads, block, blocks, dim = shape
    formula = FITTED.fullmatch(CELLS[PLANNED])[1]
    x, rope = random_states(heads, dim, block * blocks), rope_table(block * blocks, dim)
    for bits in widths(PLANNED):
        method = build(PLANNED, x, bits, [f"{side}.quantizer.tokens=8" for side in ("key", "value")])
        for side, codec in enumerate((method.key, method.value)):
            groups, packed = codec.quantizer.groups(x), codec.encode(x.half(), block, rope=rope)
            codes = sum(size * kind for size, kind in zip(groups.sizes, groups.kinds, strict=True))
            letters = {"c": codes, "g": packed.parts["scale"].shape[-1], "D": dim, "H": heads}
            assert packed.bits_per_element == pytest.approx(float(closed_forms(formula, letters)[side]), abs=1e-12)
            assert packed.bits_per_element <= bits + 7 / (heads * dim)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 16), (torch.float32, 32)])
def test_full_precision_is_that_of_the_models_dtype(dtype, bits):
    assert (CELLS["fp16"], CELLS["identity"]) == ("16 (fp32: 32)", "as `fp16`")
    model = llama(head_dim=32).to(dtype)
    cache = KVCache(model, build_method("fp16", head_dim=32))
    model(token_ids(30), past_key_values=cache)
    assert cache.effective_bits == bits
    x = torch.randn(1, 2, 30, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert measured("identity", 2, x, x, 30) == (bits, bits)


@pytest.mark.parametrize(("heads", "dim", "tokens"), [(1, 32, 256), (2, 64, 320), (4, 32, 480)])
@pytest.mark.parametrize("name", EVICTING)
def test_evicting_methods_hold_the_share_they_name(name, heads, dim, tokens):
    model = llama(head_dim=dim, kv_heads=heads)
    sizes = {}
    for method in (name, "fp16"):
        cache = KVCache(model, build_method(method, head_dim=dim))
        model(token_ids(tokens), past_key_values=cache)
        sizes[method] = cache.nbytes
    assert Fraction(sizes[name], sizes["fp16"]) == Fraction(EVICTION.fullmatch(CELLS[name])[1])


def test_every_paper_of_a_method_is_in_the_citation_file() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for choice in all_choices():
        arxiv = choice.read().get("arxiv") if choice.group == "method" else None
        assert arxiv is None or f"arXiv:{arxiv}" in cited, choice.name


def test_the_bibtex_file_is_up_to_date() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    made = bibtex(citation)
    assert (ROOT / "docs" / "citations.bib").read_text(encoding="utf-8") == made
    keys = [line for line in made.split("\n") if line.startswith("@")]
    assert len(set(keys)) == len(keys) == len(citation["references"]) + 1


def built(name):
    """The method at 2 bits."""
    if lacks_package(name):
        pytest.skip(f"needs the extra [{name}]")
    return build_method(name, bits=2)


def expanded(text):
    """All names that `a/x`, `y` and `a/{x,y}_z` stand for; a name without a slash takes the folder before it."""
    folder, names = "", set()
    for name in re.findall(r"`([\w/{},]+)`", text):
        parts = [part.split(",") for part in re.split(r"[{}]", name)]
        folder = name.rpartition("/")[0] or folder
        names |= {full if "/" in full else f"{folder}/{full}" for full in map("".join, itertools.product(*parts))}
    return names


@pytest.mark.every_plugin
def test_every_method_has_a_row():
    assert set(ROWS) == set(METHODS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_place(name):
    lines = [line for line in PAGE.splitlines() if not line.startswith("| method")]
    assert any(name in expanded(line) for line in lines)


@pytest.mark.every_plugin
def test_no_preset_is_made_up():
    table = PAGE.split("## Ablations and variants")[1]
    named = set().union(*(expanded(line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")))
    assert {name.lstrip("/") for name in named} <= set(PRESETS) | set(METHODS) | {"nsnquant/nsnquant"}


@pytest.mark.parametrize("name", METHODS)
def test_bits_and_paper_are_those_of_the_configuration(name):
    method, (bits_range, arxiv) = config(name).method, (ROWS[name][3], ROWS[name][7])
    assert bits_range == ("–" if method.bits_range is None else "-".join(map(str, method.bits_range)))
    assert arxiv == (method.arxiv or "–")


@pytest.mark.parametrize("name", METHODS)
def test_rotations_and_rope_are_those_of_the_chain(name):
    method, (_, _, _, _, _, rotation, keys, _) = built(name), ROWS[name]
    if method.key is None:
        return
    stages = {type(stage).__name__ for _, stage in method.key.stages}
    wanted = {"Hadamard": "Hadamard", "Haar": "RandomRotation", "signs, Hadamard": "RandomizedHadamard"}
    assert stages & set(wanted.values()) == ({wanted[rotation]} if rotation in wanted else set())
    assert method.key.uses_rope == ("before RoPE" in keys)


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
    page = COMPLEXITY_PAGE.read_text(encoding="utf-8")
    assert [place[2] for place in PLACE.finditer(page)].count("complexity") == 1
    assert filled(page, "complexity", table) == page
