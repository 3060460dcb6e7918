"""The column of bits of docs/methods.md, formula by formula, against the bytes of what is stored."""

import re
from fractions import Fraction

import pytest
import torch

from kvq.cache import KVCache
from kvq.codecs import rope_table
from kvq.config.method import BITS
from kvq.methods.build import build_method
from kvq.methods.transformers_caches import TransformersLayer, is_installed
from tests.calibrated import build, random_states
from tests.formulas import closed_forms, evaluate
from tests.methods_page import ROWS, config
from tests.presets import METHODS
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
    if method.backend is not None:
        layer = TransformersLayer(method.backend, method.residual.key, "a layer")
        layer.update(x, x)
        return layer.key.bits_per_element, layer.value.bits_per_element
    rope = rope_table(x.shape[2], x.shape[3])
    codecs = (method.key, method.key if method.joins_sides else method.value)
    return tuple(codec.encode(x, block, rope=rope).bits_per_element for codec in codecs)


def widths(name):
    """Bits up to 4 that the method has."""
    low, high = config(name).method.bits_range or (2, 2)
    return [bits for bits in BITS.get(name, range(low, high + 1)) if bits <= 4]


@pytest.mark.thin(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CLOSED)
def test_formulas_are_what_is_measured(name, shape):
    if name in BITS and not is_installed(name):
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


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("b + 16/D", Fraction(17, 8)),
        ("64 round(H D/200)/(H D)", Fraction(1, 4)),
        ("16 k (1/R + 1/D) - b", Fraction(-1)),
        ("3 if R > 64 else b", Fraction(2)),
        ("max(1, round(R/100)) ceil(R/48)", Fraction(2)),
    ],
)
def test_the_evaluator(formula, value):
    assert evaluate(formula, {"b": 2, "D": 128, "H": 2, "R": 64, "k": Fraction(8, 3)}) == value


@pytest.mark.parametrize("formula", ["b +", "b + X", "__import__('os')", "b ** 2", "0.5 b", "round(b, key=1)", ""])
def test_what_is_no_formula_is_refused(formula):
    with pytest.raises(ValueError, match="formula"):
        evaluate(formula, {"b": 2, "D": 128, "H": 2, "R": 64})


def test_a_cell_may_have_a_formula_for_each_side_and_define_names():
    names = {"b": 3, "D": 128, "H": 2, "R": 64}
    assert closed_forms("b + 16/D", names) == (Fraction(25, 8), Fraction(25, 8))
    cell = "K c/R, V k + b where k = 4 if R > 64 else 2, c = 16 k"
    assert closed_forms(cell, names) == (Fraction(1, 2), Fraction(5))
