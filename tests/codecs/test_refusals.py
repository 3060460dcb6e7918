"""What parts of codecs refuse, each in one line that names the setting: a table of data."""

import pytest
import torch

from kvq.codecs import (
    CalibratedChannelSplit,
    ChannelRoot,
    ChannelSplit,
    Codec,
    CoupledQuantizer,
    DeltaQuantizer,
    DoubleQuant,
    GroupedHadamard,
    Hadamard,
    HuffmanCodec,
    InnerProductQuantizer,
    LearnedRotation,
    LloydMaxQuantizer,
    LowRankCorrection,
    NonUniformQuantizer,
    Passthrough,
    PrefillCodec,
    ProductQuantizer,
    ScalarQuantizer,
    SignedMaxQuantizer,
    TokenNorm,
    TrellisQuantizer,
    UndoRope,
    UniformQuantizer,
    VectorQuantizer,
    Zero,
)
from kvq.codecs.lloyd_max import StartingCodebook
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.kernels import build_linear_chain
from kvq.methods.build import build_method
from kvq.tasks.memory import layout


def chain(quantizer, **stages):
    return Codec(stages, list(stages), quantizer)


def uniform(bits=2, axis="per_token", **settings):
    return UniformQuantizer(bits, axis, **settings)


def levels(bits=2, **settings):
    return NonUniformQuantizer(bits, "per_token", **settings)


def delta(quantizer, **settings):
    return DeltaQuantizer(chain(quantizer, norm=TokenNorm()), **settings)


def split(outliers=None):
    stages = {"norm": TokenNorm(), "rotation": Hadamard()}
    return CalibratedChannelSplit(*(chain(LloydMaxQuantizer(bits), **stages) for bits in (4, 2)), outliers)


LLOYD, PLAIN = LloydMaxQuantizer(2), chain(LloydMaxQuantizer(2))
HUFFMAN, ROPE = HuffmanCodec({}, [], LLOYD), Codec({"undo": UndoRope()}, ["undo"], LLOYD)
COMPONENTS = (ScalarQuantizer, TrellisQuantizer)
X = torch.randn(1, 2, 16, 64, generator=torch.Generator().manual_seed(0))

WRONG = {
    "group_size=0: at least 1": lambda: SignedMaxQuantizer(4, 0),
    "start=kmeans: one of even, quantile, kmeans_plus_plus": lambda: StartingCodebook(2, start="kmeans"),
    "steps=-1: at least 0": lambda: StartingCodebook(2, "even", steps=-1),
    "outliers=0: at least 1": lambda: split(0),
    "codebook=kmean: one of .*Did you mean 'kmeans'": lambda: VectorQuantizer(2, "kmean"),
    "gain=paralel.*Did you mean 'parallel'": lambda: VectorQuantizer(2, gain="paralel"),
    "order: unknown stage 'nrom'. Did you mean 'norm'": lambda: Codec({"norm": TokenNorm()}, ["nrom"], LLOYD),
    "each stage once": lambda: Codec({"norm": TokenNorm()}, ["norm", "norm"], LLOYD),
    "leaves out stage 'a'; set it to null": lambda: Codec({"b": TokenNorm(), "a": Hadamard()}, ["b"], LLOYD),
    "unknown stage 'norm'": lambda: Codec({}, ["norm"], LLOYD),
    "deviation=unit_norm: with widths=equal": lambda: ScalarQuantizer(2, widths="pooled", deviation="unit_norm"),
    "widths=pooled_: one of equal, pooled, own": lambda: TrellisQuantizer(2, widths="pooled_"),
    "memory=5: at least 6": lambda: TrellisQuantizer(2, memory=5),
    "anchor_every=0: at least 1$": lambda: delta(LLOYD, anchor_every=0),
    "anchor_threshold=-1: at least 0$": lambda: delta(LLOYD, anchor_threshold=-1),
    "codec=.*: a mapping whose _target_": lambda: DeltaQuantizer(LLOYD),
    "double_quant.axis=per_tokn: one of.*Did you mean 'per_token'": lambda: DoubleQuant(4, "per_tokn"),
    "double_quant.group_size=0: at least 1": lambda: DoubleQuant(4, "per_token", 0),
    "block=0: at least 1": lambda: Hadamard(block=0),
    "interleaved=true: with block=": lambda: Hadamard(interleaved=True),
    "rounding=evn: one of even, up": lambda: uniform(4, rounding="evn"),
    "rank=0: at least 1": lambda: LowRankCorrection(PLAIN, rank=0),
    "svd=fast: one of exact, randomized": lambda: LowRankCorrection(PLAIN, svd="fast"),
    "oversample=-1": lambda: LowRankCorrection(PLAIN, oversample=-1),
    "seed=-1": lambda: LowRankCorrection(PLAIN, seed=-1),
    "channels=0: at least 1": lambda: ProductQuantizer(channels=0),
    "rows=0: at least 1": lambda: ProductQuantizer(rows=0),
    "quantizer=LloydMaxQuantizer: a kvq.codecs.P": lambda: PrefillCodec({}, [], LLOYD),
    "scope=tokens: one of head, token. Did you mean 'token'": lambda: TokenNorm(scope="tokens"),
    "sketch=gausian.*Did you mean 'gaussian'": lambda: InnerProductQuantizer(2, "gausian"),
    "outliers=0: at least 1$": lambda: ChannelSplit(0, PLAIN, PLAIN),
    "axis=per_chanel: .*Did you mean 'per_channel'": lambda: uniform(axis="per_chanel"),
    "zero_point=int: one of float, integer": lambda: uniform(zero_point="int"),
    "clip=1.5": lambda: uniform(clip=1.5),
    "outliers=0.7": lambda: levels(outliers=0.7),
    "channels=0: at least": lambda: CoupledQuantizer(0, 9),
    "steps=0": lambda: LearnedRotation(steps=0),
    "rate=0.0": lambda: LearnedRotation(rate=0.0),
    "start=identity: one of random_hadamard, hadamard": lambda: LearnedRotation(start="identity"),
    "heads=0": lambda: GroupedHadamard(0),
}
UNSUPPORTED = {
    "bits=1: a grid with a signed scale has 2 to 16 bits": lambda: SignedMaxQuantizer(1),
    "bits=9: a Lloyd-Max codebook has 1 to 8 bits": lambda: LloydMaxQuantizer(8, 1),
    "bits=0: a Lloyd-Max codebook has 1 to 8 bits": lambda: LloydMaxQuantizer(0),
    "head_dim=2: a Lloyd-Max codebook of the sphere needs at least 3 channels": lambda: LLOYD.check(2),
    "outliers=0: head_dim=3 leaves no other channels": lambda: split().check(3),
    r"low \(84 of 112 channels\): head_dim=84: no Hadamard matrix": lambda: split().check(112),
    "has no tables: calibrate first": lambda: split().encode(X, X.dtype),
    "a split takes no calibrated part inside of it": lambda: CalibratedChannelSplit(chain(split()), PLAIN),
    "takes no calibrated part": lambda: CalibratedChannelSplit(chain(LowRankCorrection(chain(split()))), PLAIN),
    "bits=3: codebook finetuned has 1 or 2 bits": lambda: VectorQuantizer(3),
    "bits=1: codebook e8p has 2 bits": lambda: VectorQuantizer(1, "e8p"),
    "head_dim=100: vector codebooks take 8 channels at a time": lambda: VectorQuantizer(2).check(100),
    "head_dim=72: no Hadamard matrix of this order here": lambda: chain(LLOYD, hadamard=Hadamard()).check(72),
    **{
        f"bits={bits}: {kind.__name__} with widths=equal takes a whole number": lambda kind=kind, bits=bits: kind(bits)
        for kind in COMPONENTS
        for bits in (0, 9, 2.5)
    },
    "bits=0.4: .*takes 0.5 to 8": lambda: ScalarQuantizer(0.4, widths="pooled"),
    "Quantizer has no tables: calibrate": lambda: TrellisQuantizer(2, widths="own").encode(X[0], X.dtype),
    "bits=7: .*1 to 6": lambda: TrellisQuantizer(7, memory=6),
    "a block's tokens share statistics": lambda: delta(uniform(axis="per_channel")),
    "codec: 32 tokens share statistics": lambda: delta(uniform(2, "per_channel", group_size=32)),
    "put undo_rope and apply_rope around the delta$": lambda: DeltaQuantizer(ROPE),
    "a delta takes a kvq.codecs.Codec, not a HuffmanCodec": lambda: DeltaQuantizer(HUFFMAN),
    "deltas diverge: .* error is 1.00 at head_dim=64": lambda: delta(Zero()).check(64),
    "double_quant.bits=1: 2 to 16": lambda: DoubleQuant(1, "per_token"),
    "Passthrough stores no indices": lambda: HuffmanCodec({}, [], Passthrough()),
    "NonUniformQuantizer stores no indices": lambda: HuffmanCodec({}, [], levels()),
    "'codes' has 9 bits; indices of 1 to 8": lambda: HuffmanCodec({}, [], uniform(9)),
    "'codes' has 16 bits": lambda: HuffmanCodec({}, [], VectorQuantizer(2)),
    "a split takes a kvq.codecs.Codec, not a HuffmanCodec": lambda: ChannelSplit(1, HUFFMAN, PLAIN),
    "cache.attention=packed: HuffmanCodec stores": lambda: build_linear_chain(HUFFMAN),
    "its bytes follow the values": lambda: layout(HUFFMAN, 64, 1, 64, torch.float16, 32),
    "a low-rank correction takes a kvq.codecs.Codec, not a HuffmanCodec": lambda: LowRankCorrection(HUFFMAN),
    "a low-rank correction has no token positions": lambda: LowRankCorrection(ROPE),
    "a low-rank correction takes no learned part inside of it": lambda: LowRankCorrection(
        chain(uniform(), rotation=LearnedRotation())
    ),
    "code_bits=17: an index of coupled channels": lambda: ProductQuantizer(code_bits=17),
    "head_dim=30": lambda: PrefillCodec({"a": Hadamard()}, ["a"], ProductQuantizer()).check(30),
    "stage 'c'.*several tokens": lambda: PrefillCodec({"c": ChannelRoot()}, ["c"], ProductQuantizer()),
    "use kvq.codecs.PrefillCodec": lambda: chain(ProductQuantizer()).encode(X),
    "ProductQuantizer stores no indices": lambda: HuffmanCodec({}, [], ProductQuantizer()),
    "bits=1: the inner-product form has 2 to 8 bits": lambda: InnerProductQuantizer(1),
    "put undo_rope and apply_rope around the split": lambda: ChannelSplit(1, ROPE, PLAIN),
    "bits=0: an asymmetric": lambda: uniform(0),
    "bits=17: .*1 to 16 bits": lambda: uniform(17),
    "bits=1: a symmetric .* 2 to 16 bits": lambda: uniform(1, symmetric=True),
    "bits=9: a lookup table has 1 to 8": lambda: levels(9),
    "index of an outlier has 16 bits": lambda: levels()._outlier_parts(*[torch.zeros(1, 2**16 + 1)] * 2),
    "code_bits=17": lambda: CoupledQuantizer(8, 17),
    "head_dim=6: 4 channels are coupled at a time": lambda: CoupledQuantizer(4, 9).check(6),
    "residual.size=0 under sliding .keys.: tokens of kivi share statistics": lambda: build_method(
        "kivi", bits=2, overrides=["residual.policy=sliding", "residual.size=0"]
    ),
    "outliers=32: head_dim=32 leaves no other channels": lambda: build_method("turboquant/outliers", 2, 32),
    "key of nsnquant: head_dim=72: no Hadamard": lambda: build_method("nsnquant", 2, 72),
    "bits=3: nsnquant does 1 to 2 bits": lambda: build_method("nsnquant", 3),
}


@pytest.mark.parametrize(
    ("kind", "says", "make"),
    [(kind, *row) for kind, table in ((ConfigError, WRONG), (Unsupported, UNSUPPORTED)) for row in table.items()],
)
def test_one_line_names_the_setting(kind, says, make):
    with pytest.raises(kind, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("quantizer", [uniform(), Passthrough(), Zero()])
def test_no_tokens(quantizer):
    with pytest.raises(DataError, match=r"encode: shape \[1, 2, 0, 16\] holds no tokens"):
        chain(quantizer).encode(torch.zeros(1, 2, 0, 16))
