"""What the methods younger than the source documents are held against: pairs of decoded states and their references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import kvq
from kvq.codecs import RandomRotation, bind_codec, fit_codec, rope_table, trellis
from kvq_zoo import qjl
from kvq_zoo.kvtc import CoefficientQuantizer
from kvq_zoo.spectral import SpectralQuantizer
from kvq_zoo.tests import engine_oracles, kvtc_oracle, rival_oracles, triplet_oracles
from kvq_zoo.tests.test_covariance import clipped, moment_of, rotation_of, stored
from kvq_zoo.triplets import LatticeQuantizer, OctahedralQuantizer, norm_levels, square_levels
from tests.calibrated import build
from tests.codecs.oracles import hadamard
from tests.codecs.test_rope import turned
from tests.methods import references
from tests.methods.held import DIM, HEADS, TOKENS, states

Pairs = Iterator[tuple[Tensor, np.ndarray]]
X = states()
NUMBERS = X[0].numpy()


def kvarn(name: str, bits: tuple[int, ...], iterations: int, variances: bool) -> Pairs:
    """The alternating scales of its code or of its paper, and the grid that takes one of them in."""
    method = kvq.build_method(name, bits=2, head_dim=DIM)
    for side, width in zip(("key", "value"), bits, strict=False):
        codec, settings = getattr(method, side), {"iterations": iterations, "variances": variances}
        expected = np.stack([rival_oracles.kvarn(head, side, width, **settings)[0][1] for head in NUMBERS])
        yield codec.decode(codec.encode(X)), expected


def kitty(name: str, boosted: int, kernel: bool) -> Pairs:
    """The boosted channels of a page, and the grids of its simulator or of its kernels."""
    method = kvq.build_method(name, head_dim=DIM)
    assert method.key is not None
    assert method.value is not None
    keys = np.stack([rival_oracles.kitty_keys(head, boosted, kernel)[1] for head in NUMBERS])
    yield method.key.decode(method.key.encode(X)), keys
    values = np.stack([rival_oracles.kitty_values(head, kernel)[1] for head in NUMBERS])
    yield method.value.decode(method.value.encode(X)), values


def rotation(size: int) -> np.ndarray:
    """The rotation that TurboQuant and Block-GTQ drew for `size` channels."""
    return RandomRotation(0).matrix(size, X).numpy()


def greedy_widths(energies: list[float], budget: int) -> list[int]:
    """One bit for each pair, then the next one to the pair whose error is largest, up to 8."""
    widths = [1] * len(energies)
    while sum(widths) < budget:
        open_pairs = [i for i, width in enumerate(widths) if width < 8]
        widths[max(open_pairs, key=lambda i: energies[i] / 4 ** widths[i])] += 1
    return widths


def block_gtq(bits: int) -> Pairs:
    """Keys by the widths that their pairs get one bit at a time; values as one group."""
    method, rope, calibrated = kvq.build_method("block_gtq", bits=bits, head_dim=DIM), rope_table(128, DIM), states(2)
    assert method.key is not None
    assert method.value is not None
    queries = states(3)[0]
    moments = queries.mT @ queries / queries.shape[1]
    fitted = fit_codec(method.key, calibrated[0], None, rope, 0, moments)
    codec = bind_codec(method.key, fitted, HEADS, DIM)
    keys, asked = (turned(x, rope, back=True)[0] for x in (calibrated, states(3)))
    before, rows = turned(X, rope, back=True)[0], []
    for head in range(HEADS):
        energies = rival_oracles.pair_energies(keys[head], asked[None, head])
        widths = greedy_widths(energies, bits * DIM // 2)
        rows.append(rival_oracles.block_gtq_keys(before[head], widths, rotation)[1])
    yield codec.decode(codec.encode(X, rope=rope), rope), turned(torch.from_numpy(np.stack(rows))[None], rope)[0]
    one = rotation(DIM)
    values = [[rival_oracles.turboquant(row.tolist(), bits, one)[2] for row in head] for head in NUMBERS]
    yield method.value.decode(method.value.encode(X)), np.array(values)


def oscar_covariance(name: str, bits: int, side_dtype: type) -> Pairs:
    """Rotate by U H P, clip at a rank, quantize per token; the moments are those of the states themselves."""
    method = build(name, X, bits)
    for codec, share in ((method.key, 0.96), (method.value, 0.92)):
        assert codec is not None
        rows = []
        for head in NUMBERS:
            matrix = rotation_of(moment_of(head)).astype(np.float32).astype(np.float64)
            rows.append([matrix @ stored(clipped(row @ matrix, share), bits, side_dtype) for row in head])
        yield codec.decode(codec.encode(X)), np.array(rows)


def kvtc(bits: float, sizes: tuple[int, ...] = (1, 16, 64, 256), heads: int = 2, seen: int = 512) -> Pairs:
    """Keys before RoPE, values; two heads joined; groups and their bits are the loops' own.

    Components are the method's, in fp32, which are the loops' within 1e-6.
    """
    calibration, rope, given = states(2, seen, heads), rope_table(TOKENS, DIM), X[:, :heads]
    method, n = build("kvtc", calibration, bits), heads * DIM
    for side, codec in (("key", method.key), ("value", method.value)):
        assert codec is not None
        turn = side == "key"
        fitted, x = calibration.float(), given
        if turn:
            fitted = torch.from_numpy(turned(fitted.double(), rope_table(seen, DIM), back=True))
            x = torch.from_numpy(turned(given, rope, back=True))
        rows, own = (part[0].double().transpose(0, 1).flatten(1).numpy() for part in (fitted, x))
        mean, vectors = kvtc_oracle.components(rows)
        tables = codec.stages[-1][1].tables  # type: ignore[attr-defined]
        used = tables["basis"].shape[1]
        np.testing.assert_allclose(tables["basis"].numpy(), vectors[:, :used], atol=1e-6)
        np.testing.assert_allclose(tables["mean"][0].numpy(), mean, atol=1e-6)
        mean, vectors[:, :used] = tables["mean"][0].double().numpy(), tables["basis"].double().numpy()
        z = (rows - mean) @ vectors
        errors = kvtc_oracle.errors_of(z[:: seen // 256], sizes)
        groups = kvtc_oracle.best(errors, n, sizes, int(bits * n))
        tokens = [kvtc_oracle.token(row.tolist(), groups) @ vectors.T + mean for row in (own - mean) @ vectors]
        back = np.array(tokens).reshape(TOKENS, heads, DIM).transpose(1, 0, 2)
        found = codec.decode(codec.encode(given, rope=rope), rope)
        yield found, turned(torch.from_numpy(back)[None], rope)[0] if turn else back


def after_norm(name: str, bits: int, decode: Callable[[list[float], np.ndarray], list[float]]) -> Pairs:
    """Values by a norm in 16 bits, a rotation of the method's own draw, and `decode` of the rotated unit vector."""
    codec = kvq.build_method(name, bits=bits, head_dim=DIM).value
    assert codec is not None
    rotation = codec.stages[-1][1].matrix(DIM, X).numpy()  # type: ignore[attr-defined]
    rows = [
        [decode((row / np.linalg.norm(row) @ rotation).tolist(), rotation) for row in head[:24]] for head in NUMBERS
    ]
    norms = np.float16(np.linalg.norm(NUMBERS[:, :24], axis=-1, keepdims=True)).astype(np.float64)
    yield codec.decode(codec.encode(X[:, :, :24])), np.array(rows) * norms


def tcq(bits: int) -> Pairs:
    """The best string of each head by dynamic programming over the last states, in loops."""
    table = trellis.books(8, torch.float64, torch.device("cpu"))[bits - 1].tolist()

    def decode(row: list[float], rotation: np.ndarray) -> list[float]:
        best = {0: (0.0, [])}  # state -> cost, values
        for value in row:
            reached: dict[int, tuple[float, list[float]]] = {}
            for state, (cost, values) in best.items():
                for code in range(2**bits):
                    after = (state * 2**bits + code) % 256
                    total = cost + (value * DIM**0.5 - table[after]) ** 2
                    if after not in reached or total < reached[after][0]:
                        reached[after] = total, [*values, table[after]]
            best = reached
        values = min(best.values(), key=lambda one: one[0])[1]
        return (np.array(values) / DIM**0.5 @ rotation.T).tolist()

    yield from after_norm("tcq", bits, decode)


def normal_levels(bits: int) -> list[float]:
    """Lloyd's steps for N(0, 1) until no level moves."""
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(20_000):
        ends = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        mass, slope = np.diff(stats.norm.cdf(ends)), -np.diff(stats.norm.pdf(ends))
        levels, before = slope / mass, levels
        if np.abs(levels - before).max() < 1e-15:
            break
    return [float(level) for level in levels]


def block_rotated(name: str, size: int) -> Pairs:
    """Levels of N(0, 1/D) after rotations of blocks; those are held in `kvq_zoo.tests.test_triplets`."""
    levels = [level / DIM**0.5 for level in normal_levels(3)]

    def decode(row: list[float], rotation: np.ndarray) -> list[float]:
        rounded = [levels[triplet_oracles.nearest(levels, value)] for value in row]
        return (np.array(rounded) @ rotation.T).tolist()

    yield from after_norm(name, 3, decode)


def octopus(bits: int) -> Pairs:
    """Triplets by their definition, with the method's levels, held in `kvq_zoo.tests.test_triplets`."""
    square, norms = square_levels(bits + 1), norm_levels(bits - 1, DIM)

    def decode(row: list[float], rotation: np.ndarray) -> list[float]:
        return (np.array(triplet_oracles.octopus(row, square, norms)) @ rotation.T).tolist()

    yield from after_norm("octopus", bits, decode)


def saw_int4(name: str, blocks: dict[str, int | None]) -> Pairs:
    """Both sides by their Hadamard blocks (None: not rotated) and the grid of the authors' kernel."""
    method, grid = kvq.build_method(name, head_dim=DIM), engine_oracles.ratio(4, engine_oracles.f32)
    for side, block in blocks.items():
        codec, oracle = getattr(method, side), engine_oracles.by_group(DIM, grid)
        if block is not None:
            oracle = engine_oracles.rotated(oracle, block)
        rows = [[oracle(row)[1] for row in head[:24]] for head in NUMBERS]
        yield codec.decode(codec.encode(X[:, :, :24])), np.array(rows)


def eden(name: str, bits: int, unbiased: bool) -> Pairs:
    """Nearest levels of N(0, 1) of a token scaled to sqrt(D); norm times the scale of either form, in 16 bits."""
    levels = normal_levels(bits)
    codec = kvq.build_method(name, bits=bits, head_dim=DIM).value
    assert codec is not None
    turn = codec.stages[-1][1].matrix(DIM, X).numpy()  # type: ignore[attr-defined]
    rows = []
    for head in NUMBERS:
        rows.append([])
        for row in head[:24]:
            norm = float(np.linalg.norm(row))
            z = row @ turn * DIM**0.5 / norm
            near = np.array([levels[triplet_oracles.nearest(levels, value)] for value in z])
            scale = z @ z / (z @ near) if unbiased else z @ near / (near @ near)
            rows[-1].append(float(np.float16(norm * scale)) * (near / DIM**0.5 @ turn.T))
    yield codec.decode(codec.encode(X[:, :, :24])), np.array(rows)


def rabitq(name: str, bits: int, unbiased: bool) -> Pairs:
    """The best point over all crossings, each with its cosine by the definition, and the scale in 16 bits."""
    codec = kvq.build_method(name, bits=bits, head_dim=DIM).key
    assert codec is not None
    turn, top, rows = rotation(DIM), 2 ** (bits - 1) - 1, []
    for row in NUMBERS[:, :24].reshape(-1, DIM):
        z = row @ turn
        crossings = np.outer(np.arange(1, top + 1), 1 / np.abs(z)).ravel()
        times = np.append(crossings * (1 + 1e-12), 0)[:, None]  # behind each crossing, and before the first
        points = np.minimum(np.floor(times * np.abs(z)), top) + 0.5
        point = np.sign(z) * points[(points @ np.abs(z) / np.linalg.norm(points, axis=1)).argmax()]
        unit = (top + 1) * DIM**0.5  # of the numbers that are decoded
        scale = z @ z / (z @ point) if unbiased else z @ point / (point @ point)
        rows.append(float(np.float16(scale * unit)) * (point / unit @ turn.T))
    yield codec.decode(codec.encode(X[:, :, :24])), np.array(rows).reshape(*NUMBERS[:, :24].shape)


def vecinfer() -> Pairs:
    """Keys over √max of each channel and after a Hadamard, the nearest of the method's centroids on both sides."""
    method = build("vecinfer", X)
    largest = np.abs(NUMBERS.astype(np.float32)).max(1, keepdims=True)
    scale, turn = np.sqrt(largest.astype(np.float64)).astype(np.float32), hadamard(DIM)
    for codec in (method.key, method.value):
        assert codec is not None
        centroids = codec.quantizer._tables["centroids"].double().numpy()  # type: ignore[attr-defined]
        keys = codec is method.key
        found = references.coupled(NUMBERS / scale @ turn if keys else NUMBERS, centroids)
        yield codec.decode(codec.encode(X)), found @ turn.T * scale if keys else found


def nexusquant(bits: int) -> Pairs:
    """Keys before RoPE and values, after a Hadamard."""
    method, rope = kvq.build_method("nexusquant", bits=bits, head_dim=DIM), rope_table(TOKENS, DIM)
    turn = hadamard(DIM)
    for side, codec in (("key", method.key), ("value", method.value)):
        assert codec is not None
        given = torch.from_numpy(turned(X, rope, back=True)) if side == "key" else X
        rows = [[triplet_oracles.nexus((row @ turn).tolist(), bits) for row in head] for head in given[0].numpy()]
        back = torch.from_numpy(np.array(rows) @ turn.T)[None]
        found = codec.decode(codec.encode(X, rope=rope), rope)
        yield found, turned(back, rope)[0] if side == "key" else back[0].numpy()


def nova_kv() -> Pairs:
    """Keys by the basis of its calibration and the method's centroids; values are those of OSCAR."""
    method = build("nova_kv", X)
    assert method.key is not None
    assert method.value is not None
    centroids = method.key.quantizer._centroids(X).numpy()  # type: ignore[attr-defined]
    dealt = [rank for group in range(DIM // 4) for rank in range(group, DIM, DIM // 4)]
    rows = []
    for head, keys in enumerate(NUMBERS):
        forward, inverse = triplet_oracles.query_basis(keys, moment_of(keys))
        found = method.key.stages[0][1].tables["forward"][head].double().numpy()  # type: ignore[attr-defined]
        signs = np.sign((found * forward[:, dealt]).sum(0))
        forward, inverse = forward[:, dealt] * signs, inverse[dealt] * signs[:, None]
        out = []
        for row in keys:
            z = (row - keys.mean(0)) @ forward
            scale = float(np.sqrt((z**2).mean()))
            groups = (z / scale).reshape(-1, 4)
            near = [
                book[((book - group) ** 2).sum(1).argmin()] for book, group in zip(centroids[head], groups, strict=True)
            ]
            out.append(np.concatenate(near) * float(np.float16(scale)) @ inverse + keys.mean(0))
        rows.append(out)
    yield method.key.decode(method.key.encode(X)), np.array(rows)
    values = []
    for head in NUMBERS:
        matrix = rotation_of(moment_of(head)).astype(np.float32).astype(np.float64)
        values.append([matrix @ stored(clipped(row @ matrix, 0.92), 2, np.float16) for row in head])
    yield method.value.decode(method.value.encode(X)), np.array(values)


def spectralquant(name: str, bits: int) -> Pairs:
    """Each head calibrated and decoded by its own loops; keys before RoPE."""
    method, rope = build(name, X, bits), rope_table(TOKENS, DIM)
    for side, codec in (("key", method.key), ("value", method.value)):
        assert codec is not None
        single = X.float().double()
        seen, given = (turned(x, rope, back=True) if side == "key" else x.numpy() for x in (single, X))
        rows = [
            triplet_oracles.spectral(fitted, own, bits, not name.endswith("uniform"))[0]
            for fitted, own in zip(seen[0], given[0], strict=True)
        ]
        back = torch.from_numpy(np.array(rows))[None]
        found = codec.decode(codec.encode(X, rope=rope), rope)
        yield found, turned(back, rope)[0] if side == "key" else back[0].numpy()


def squat(bits: int) -> Pairs:
    """Keys by the minimizer for the second half of the channels; values are KIVI's, which have their own row."""
    codec = build("squat", X, bits).key
    assert codec is not None
    rows = [triplet_oracles.squat(keys, moment_of(keys), bits, 60, 0.001 * 8192) for keys in NUMBERS]
    yield codec.decode(codec.encode(X)), np.array(rows)


PAIRS: dict[str, Callable[[], Iterable[tuple[Tensor, np.ndarray]]]] = {
    "kvarn": lambda: kvarn("kvarn", (4, 2), 8, variances=False),
    "kvarn/mla_k5_g64": lambda: kvarn("kvarn/mla_k5_g64", (5,), 8, variances=False),
    "kvarn/paper": lambda: kvarn("kvarn/paper", (2, 2), 16, variances=True),
    "kitty": lambda: kitty("kitty", 16, kernel=False),
    "kitty/kernel": lambda: kitty("kitty/kernel", 16, kernel=True),
    "block_gtq": lambda: (pair for bits in (2, 3) for pair in block_gtq(bits)),
    "oscar_covariance": lambda: oscar_covariance("oscar_covariance", 2, np.float16),
    "kvtc": lambda: kvtc(1.25),
    "tcq": lambda: tcq(2),
    "planarquant": lambda: block_rotated("planarquant", 2),
    "isoquant": lambda: block_rotated("isoquant", 4),
    "rotorquant": lambda: block_rotated("rotorquant", 3),
    "octopus": lambda: octopus(2),
    "saw_int4": lambda: saw_int4("saw_int4", {"key": 16, "value": None}),
    "saw_int4/128": lambda: saw_int4("saw_int4/128", {"key": 128, "value": None}),
    "saw_int4/rotated_values": lambda: saw_int4("saw_int4/rotated_values", {"key": 16, "value": 16}),
    "eden": lambda: (pair for bits in (1, 2, 4) for pair in eden("eden", bits, unbiased=True)),
    "eden/biased": lambda: eden("eden/biased", 2, unbiased=False),
    "rabitq": lambda: (pair for bits in (1, 2, 4) for pair in rabitq("rabitq", bits, unbiased=True)),
    "rabitq/biased": lambda: rabitq("rabitq/biased", 3, unbiased=False),
    "vecinfer": vecinfer,
    "nexusquant": lambda: nexusquant(3),
    "nova_kv": lambda: nova_kv(),
    "spectralquant": lambda: (pair for bits in (2, 3) for pair in spectralquant("spectralquant", bits)),
    "squat": lambda: (pair for bits in (2, 4) for pair in squat(bits)),
    "spectralquant/uniform": lambda: spectralquant("spectralquant/uniform", 2),
    "oscar_covariance/served": lambda: oscar_covariance("oscar_covariance/served", 2, np.float32),
}
"""Rows of the table of docs/methods.md: what `tests/methods/test_held_against.py` compares."""
UNPACKED = (CoefficientQuantizer,)
PACKING = [qjl]
SIZED = ("kvq_zoo.block_float.BlockFloatQuantizer",)
IN_ALL: dict[type, Callable[[int, float], bool]] = {
    OctahedralQuantizer: lambda bits, stored: stored == 22 * (3 * bits + 1) / 64 + 16 / 64,
    LatticeQuantizer: lambda bits, stored: stored == {2: 2.5, 3: 3.375}[bits] + 16 / 64,
    SpectralQuantizer: lambda bits, stored: stored == bits,  # planes of each head and width, nothing else
    CoefficientQuantizer: lambda bits, stored: bits - 1 < stored <= bits + 7 / 64,  # with scales and shifts
}
"""For `tests/codecs/test_every_method.py`."""
