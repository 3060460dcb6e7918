"""Vector codebooks: exact search, small temporaries, what is shipped, and how good it is on fresh Gaussian data."""

import functools
import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from kvq.codecs import codebook_for
from kvq.codecs.vector import (
    CODEBOOKS,
    FILE,
    FILE_SHA256,
    E8PCodebook,
    PlainCodebook,
    SignedCodebook,
    e8p_patterns,
    load_codebooks,
)
from kvq.errors import DataError

COSINE = {
    ("kmeans", 1): 0.8237,
    ("finetuned", 1): 0.8249,
    ("kmeans", 2): 0.9515,
    ("finetuned", 2): 0.9520,
    ("e8p", 2): 0.9539,
}
"""Over whole tokens of 128 channels, assignment by L2, by independent code."""


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def codewords(name, bits, dtype=torch.float64):
    """Every codeword of a codebook, `[2^(8 bits), 8]`."""
    book = codebook_for(name, bits, dtype, torch.device("cpu"))
    first = torch.arange(256, dtype=torch.uint8)
    if bits == 1:
        return book.lookup([first])
    pairs = torch.cartesian_prod(first, first)
    return book.lookup([pairs[:, 0].contiguous(), pairs[:, 1].contiguous()])


ALL = [(name, bits) for name, kinds in CODEBOOKS.items() for bits in kinds]


@pytest.mark.parametrize(("name", "bits"), ALL)
def test_the_nearest_of_all_codewords_is_found(name, bits):
    """Against a search of all 256 or 65,536, in fp64."""
    book, every = codebook_for(name, bits, torch.float64, torch.device("cpu")), codewords(name, bits)
    vectors = torch.cat([normal(1, 60, 8), 3 * normal(1, 20, 8, seed=1), 0.1 * normal(1, 20, 8, seed=2)], 1)
    found = book.lookup(book.search(vectors))
    best = torch.cdist(vectors[0], every).amin(-1)
    torch.testing.assert_close((vectors - found)[0].norm(dim=-1), best, rtol=1e-12, atol=1e-12)
    assert len(every.unique(dim=0)) >= {1: 200, 2: 2**15}[bits]


def test_e8p_is_a_shifted_lattice():
    patterns = e8p_patterns().double()
    norm = patterns.square().sum(-1)
    assert [int((norm <= 10).sum()), int((norm == 12).sum())] == [227, 29]
    assert len(patterns.unique(dim=0)) == 256
    book = E8PCodebook(patterns, scale=1.0)
    first = torch.arange(256, dtype=torch.uint8)
    pairs = torch.cartesian_prod(first, first)
    points = book.lookup([pairs[:, 0].contiguous(), pairs[:, 1].contiguous()])
    assert len(points.unique(dim=0)) == 2**16
    unshifted = points + torch.where(pairs[:, 1:] >= 128, 0.25, -0.25)
    assert bool(((unshifted - 0.5) % 1 == 0).all())
    assert bool((unshifted.sum(-1) % 2 == 0).all())


@given(
    groups=st.integers(1, 5),
    rows=st.sampled_from([1, 3, 16, 700, 1024, 1500, 2049]),
    kind=st.sampled_from([PlainCodebook, SignedCodebook, E8PCodebook]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_groups_codes_depend_on_it_alone(groups, rows, kind, dtype):
    """Bit for bit, however many groups are searched together."""
    entries = e8p_patterns().to(dtype) if kind is E8PCodebook else normal(256, 8, seed=3, dtype=dtype).abs()
    book = kind(entries)
    vectors = normal(groups, rows, 8, seed=rows, dtype=dtype)
    together = book.search(vectors)
    for number in range(groups):
        alone = book.search(vectors[number : number + 1])
        assert all(torch.equal(a[0], b[number]) for a, b in zip(alone, together, strict=True))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    ("name", "bits", "limit"), [("finetuned", 1, 2**21), ("finetuned", 2, 2**21), ("e8p", 2, 2**24)]
)
def test_no_score_of_every_vector_with_every_codeword(name, bits, limit):
    vectors = normal(8, 4096, 8, dtype=torch.float32)
    book = codebook_for(name, bits, torch.float32, vectors.device)
    with Largest() as largest:
        book.search(vectors)
    assert largest.bytes <= max(limit, 2 * vectors.nbytes) < 8 * 4096 * 256 * 4


def test_the_shipped_file_is_the_one_the_code_names():
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == FILE_SHA256
    assert FILE.stat().st_size < 50_000
    with safe_open(str(FILE), "pt") as file:
        assert set(file.metadata()) == {"seed", "steps"}


@pytest.mark.parametrize("bits", [1, 2])
def test_tuned_entries_take_four_bits(bits):
    """An integer times one fp16 step: 0 to 15 beside sign bits, else -7 to 7."""
    entries = load_codebooks()[f"finetuned_{bits}b"]
    step = entries.abs().max() / (15 if bits == 2 else 7)
    assert step.half().float() == pytest.approx(float(step), rel=1e-6)
    codes = entries / step
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    assert bool((entries >= 0).all()) == (bits == 2)


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "gaussian8.safetensors").write_bytes(FILE.read_bytes()[:-1])
    load_codebooks.cache_clear()
    monkeypatch.setattr("kvq.codecs.vector.FILE", tmp_path / "gaussian8.safetensors")
    with pytest.raises(DataError, match=r"gaussian8.safetensors is missing or damaged.*make codebooks"):
        load_codebooks()
    monkeypatch.undo()
    load_codebooks.cache_clear()


@functools.cache
def cosines(name, bits, tokens, seed=77):
    """Cosine of each of `tokens` fresh tokens of 16 sub-vectors: of 62,500 tokens 10⁶ sub-vectors."""
    x = normal(tokens, 16, 8, seed=seed, dtype=torch.float32)
    book = codebook_for(name, bits, x.dtype, x.device)
    y = torch.cat([book.lookup(book.search(part)) for part in x.split(4096)])
    return torch.cosine_similarity(x.flatten(1), y.flatten(1), dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), COSINE)
def test_cosine_on_fresh_gaussian_data(name, bits):
    tokens = 20_000 if name == "e8p" else 62_500  # whose search takes three times as long
    assert float(cosines(name, bits, tokens).double().mean()) == pytest.approx(COSINE[name, bits], abs=0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("tuned", ["finetuned", "finetuned_fp16"])
def test_tuning_beats_k_means_beyond_the_paired_error(bits, tuned):
    """On the same 10⁶ fresh sub-vectors; the shipped entries have 4 bits, those of k-means 16."""
    gain = (cosines(tuned, bits, 62_500) - cosines("kmeans", bits, 62_500)).double()
    assert float(gain.mean()) > 5 * float(gain.std()) / len(gain) ** 0.5
