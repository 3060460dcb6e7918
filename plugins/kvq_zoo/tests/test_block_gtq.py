"""Block-GTQ against its definition in plain loops, and groups of channels that have other sizes in every head."""

import dataclasses

import numpy as np
import pytest
import torch

from kvq.codecs import (
    Codec,
    Hadamard,
    LloydMaxQuantizer,
    Passthrough,
    RandomRotation,
    UndoRope,
    bind_codec,
    fit_codec,
    plane_widths,
    rope_table,
    unpack,
)
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq_zoo.channel_groups import ChannelGroups, PairWidths, allocate_bits
from kvq_zoo.grids import NormalQuantizer
from kvq_zoo.tests import rival_oracles as by
from tests.codecs.test_rope import turned

HEADS, TOKENS, DIM = 2, 16, 48
PAIRS = DIM // 2
ZEROS = torch.zeros(1, 4, 8)


def uneven(tokens, seed, spread=1.0):
    """States whose pairs have other energies in every head, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(1, HEADS, 1, DIM, generator=generator, dtype=torch.float64))
    return sizes * torch.randn(1, HEADS, tokens, DIM, generator=generator, dtype=torch.float64)


def calibration():
    """Keys as a cache gets them, and queries of 3 query heads for each KV head."""
    return uneven(64, 5)[0], torch.stack([2 * uneven(64, seed)[0] for seed in (6, 7, 8)])


def rotation(size):
    return RandomRotation(0).matrix(size, torch.empty(0, dtype=torch.float64)).numpy()


def fitted(bits, most=4):
    mean = [f"key.quantizer.bits={bits}", f"key.quantizer.most={most}"]
    codec = build_method("block_gtq", bits=1, head_dim=DIM, overrides=mean).key
    keys, queries = calibration()
    rows = queries.transpose(0, 1).flatten(1, 2)
    moments = rows.mT @ rows / rows.shape[1]
    return bind_codec(codec, fit_codec(codec, keys, None, rope_table(64, DIM), 0, moments), HEADS, DIM)


def widths_of(codec, head):
    """Bits of each pair, by the table."""
    widths = [0] * DIM
    for name, channels in codec.quantizer.channels(torch.zeros(1, HEADS, 1, DIM))[head].items():
        for channel in channels.tolist():
            widths[channel] = int(name.removeprefix("bits"))
    assert widths[:PAIRS] == widths[PAIRS:]
    return widths[:PAIRS]


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_keys_are_the_definition(bits):
    codec, x, rope = fitted(bits), uneven(TOKENS, 9), rope_table(TOKENS, DIM)
    packed = codec.encode(x, rope=rope)
    before, decoded = turned(x, rope, back=True)[0], codec.decode(packed, rope)
    groups = 0
    for head in range(HEADS):
        widths = widths_of(codec, head)
        wanted, expected = by.block_gtq_keys(before[head], widths, rotation)
        for name, numbers in wanted.items():
            if name.endswith("codes"):
                width = int(name[len("bits")])
                planes = [packed.parts[f"{head}.{name}.{plane}"] for plane in range(len(plane_widths(width)))]
                assert unpack(planes, width, TOKENS)[0, 0].tolist() == numbers, name
            else:
                assert packed.parts[f"{head}.{name}"].flatten().tolist() == numbers, name
        after = turned(torch.from_numpy(expected)[None, None], rope)[0, 0]
        np.testing.assert_allclose(decoded[0, head], after, rtol=1e-6, atol=1e-8 * float(np.abs(after).max()))
        groups += len(set(widths))
    assert packed.bits_per_element == pytest.approx(bits + 16 * groups / (HEADS * DIM), abs=1e-12)
    assert groups > HEADS or bits == 1


@pytest.mark.parametrize("bits", [1, 2, 3, 7.5])
def test_bits_go_where_the_energy_is(bits):
    """Energies from loops over keys and all query heads before RoPE; no bit would be better at another pair."""
    codec, rope = fitted(bits, most=8), rope_table(64, DIM)
    keys, queries = (torch.from_numpy(turned(x, rope, back=True)) for x in calibration())
    for head in range(HEADS):
        energies = by.pair_energies(keys[head].numpy(), queries[:, head].numpy())
        widths = widths_of(codec, head)
        assert sum(widths) == bits * PAIRS
        assert max(widths) <= 8
        lost = [s / 4 ** (b - 1) for s, b in zip(energies, widths, strict=True) if b > 1]
        won = [s / 4**b for s, b in zip(energies, widths, strict=True) if b < 8]
        assert min(lost, default=np.inf) >= max(won, default=0.0)


@pytest.mark.parametrize("seed", range(4))
def test_widths_are_the_best_of_all_ways(seed):
    energies = np.exp(2 * np.random.default_rng(seed).standard_normal(5)).tolist()
    for total in range(5, 21):
        assert allocate_bits(energies, total / 5, 4) == by.best_widths(energies, total, 4)


def test_a_budget_that_is_no_whole_number_is_cut():
    """As released: int(pairs * mean); equal energies get bits from the first pair on."""
    assert allocate_bits([1.0, 1.0, 1.0], 1.9, 8) == [2, 2, 1]
    assert allocate_bits([0.0, 0.0, 0.0], 2, 3) == [3, 2, 1]


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_values_are_turboquant_for_the_normal_limit(bits):
    codec, x = build_method("block_gtq", bits=bits, head_dim=DIM).value, uneven(TOKENS, 3)
    packed = codec.encode(x)
    planes = [packed.parts[f"codes.{plane}"] for plane in range(len(plane_widths(bits)))]
    codes, decoded = unpack(planes, bits, TOKENS), codec.decode(packed)
    for head in range(HEADS):
        for token in range(TOKENS):
            wanted, norm, vector = by.turboquant(x[0, head, token].tolist(), bits, rotation(DIM))
            assert codes[0, head, token].tolist() == wanted
            assert float(packed.parts["norm.scale"][0, head, token]) == norm
            np.testing.assert_allclose(decoded[0, head, token], vector, rtol=1e-6, atol=1e-8 * norm)
    assert packed.bits_per_element == pytest.approx(bits + 16 / DIM, abs=1e-12)


@pytest.mark.parametrize(("bits", "slope"), [(1, 0.799), (2, 0.940), (3, 0.983), (4, 0.995)])
@pytest.mark.parametrize("side", ["key", "value"])
def test_the_norm_is_corrected_on_both_sides(side, bits, slope):
    """x·x̂ / x·x of tokens in a random direction: √(1 - d) for a codebook of error d, not 1 - d (.638 to .991)."""
    x = torch.randn(1, 1, 512, 128, generator=torch.Generator().manual_seed(0))
    group = torch.full((1, 1, 128), bits - 1, dtype=torch.uint8)
    codec = build_method("block_gtq/buffer", bits=bits, head_dim=128)
    codec = bind_codec(codec.key, {"quantizer.group": group}, 1, 128) if side == "key" else codec.value
    decoded = codec.decode(codec.encode(x))
    assert float((x * decoded).sum() / (x * x).sum()) == pytest.approx(slope, abs=2e-3)
    assert torch.allclose(decoded.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)


def test_presets_are_the_released_paths():
    plain, buffer = build_method("block_gtq", bits=2), build_method("block_gtq/buffer", bits=2)
    assert plain.residual.key.keeps_nothing
    assert plain.residual.value.keeps_nothing
    assert [name for name, _ in plain.key.stages] == ["undo_rope"]
    assert (buffer.residual.key.size, buffer.residual.value.size, buffer.sink_tokens) == (128, 128, 4)
    assert buffer.key.stages == []
    assert plain.key.token_group == buffer.key.token_group == 1


class Given(ChannelGroups):
    """A partition by hand."""

    def fit(self, x, gradients, seed):
        return {"group": torch.tensor([[[0, 1, 1, 0]], [[2, 2, 2, 2]]], dtype=torch.uint8)}


def test_groups_are_encoded_apart_and_put_back():
    exact = Codec({}, [], Passthrough())
    codec = Codec({}, [], Given({"a": exact, "b": exact, "c": exact}))
    x = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    codec = bind_codec(codec, fit_codec(codec, x[0], None, None, 0), 2, 4)
    packed = codec.encode(x, 2)
    assert {name: list(part.shape) for name, part in packed.parts.items()} == {
        "0.a.values": [3, 1, 5, 2],
        "0.b.values": [3, 1, 5, 2],
        "1.c.values": [3, 1, 5, 4],
    }
    assert torch.equal(packed.parts["0.b.values"], x[:, :1, :, 1:3])
    assert torch.equal(codec.decode(packed), x)


def lloyd(bits=1):
    return Codec({}, [], NormalQuantizer(bits))


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: PairWidths(lloyd(), 0.5), ConfigError, "bits=0.5: a mean of at least 1 and at most 8"),
        (lambda: PairWidths(lloyd(), 5, 4), ConfigError, "bits=5: a mean of at least 1 and at most 4"),
        (lambda: PairWidths(lloyd(), 5, 9), ConfigError, "most=9: at most 8"),
        (lambda: PairWidths(lloyd(), 2).check(5), Unsupported, "head_dim=5: an odd number of channels"),
        (lambda: PairWidths(Codec({}, [], Passthrough()), 2), Unsupported, "Passthrough: has no bits to add"),
        (
            lambda: PairWidths(Codec({"u": UndoRope()}, ["u"], LloydMaxQuantizer(1)), 2),
            Unsupported,
            "a group of channels has no token positions",
        ),
        (
            lambda: fit_codec(
                Codec({"h": Hadamard()}, ["h"], PairWidths(lloyd(), 2)), ZEROS, None, None, 0, torch.eye(8)[None]
            ),
            ConfigError,
            "stage 'quantizer': first in its codec, and fitted on a model's queries",
        ),
        (lambda: PairWidths(lloyd(), 2).encode(torch.zeros(1, 1, 1, 4), torch.float32), Unsupported, "has no tables"),
    ],
)
def test_what_cannot_be_is_refused(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


@pytest.mark.parametrize("change", [{"interleaved": True}, {"cos": torch.ones(1, 64, 4), "sin": torch.zeros(1, 64, 4)}])
def test_other_pairs_of_rope_are_refused(change):
    codec, (keys, queries) = build_method("block_gtq", bits=2, head_dim=DIM).key, calibration()
    rows, rope = queries.transpose(0, 1).flatten(1, 2), dataclasses.replace(rope_table(64, DIM), **change)
    with pytest.raises(Unsupported, match="RoPE pairs other channels"):
        fit_codec(codec, keys, None, rope, 0, rows.mT @ rows)
