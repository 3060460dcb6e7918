"""Tensor maths of quantization: packing, stages, quantizers and the chain that joins them. No transformers here."""

from kvq.codecs.block_float import BlockFloatQuantizer
from kvq.codecs.block_formats import (
    Float8Quantizer,
    HalfAwayQuantizer,
    LevelsQuantizer,
    RmsLevelsQuantizer,
    SignedMaxQuantizer,
    TurboMindQuantizer,
)
from kvq.codecs.calibrated import Calibrated, Tables, bind_codec, calibrated_parts, fit_codec
from kvq.codecs.calibrated_rotations import ChannelOrder, GroupedHadamard, LearnedRotation, cayley_step
from kvq.codecs.channel_groups import ChannelGroups, PairWidths
from kvq.codecs.channel_split import CalibratedChannelSplit, ChannelSplit, LeadingChannels
from kvq.codecs.clipped import ClippedQuantizer
from kvq.codecs.codebook_starts import StartingCodebook
from kvq.codecs.codebooks import codebook_for
from kvq.codecs.codec import Codec, gain_factor
from kvq.codecs.components import ComponentQuantizer, Deviation, ScalarQuantizer, TrellisQuantizer, Widths
from kvq.codecs.covariance import CovarianceRotation, RankClip
from kvq.codecs.cq import CoupledQuantizer
from kvq.codecs.delta import DeltaQuantizer
from kvq.codecs.double_quant import DoubleQuant
from kvq.codecs.fisher import FisherTransform, JointMoments, Metric
from kvq.codecs.gear import SparseLowRank
from kvq.codecs.huffman import HuffmanCodec, Rate
from kvq.codecs.kvquant import NonUniformQuantizer, SparseCodec
from kvq.codecs.layer_scale import LayerScale
from kvq.codecs.lloyd_max import LloydMaxQuantizer, optimal_levels
from kvq.codecs.low_rank import LowRankCorrection, Svd
from kvq.codecs.nsnquant import Center, ChannelScale, ChannelShift
from kvq.codecs.packed import BlockRun, Growable, Packed, PackedStore, merge_runs
from kvq.codecs.packing import pack, plane_widths, unpack
from kvq.codecs.pair_order import Order, PairOrder
from kvq.codecs.polarquant import PolarQuantizer, angle_levels
from kvq.codecs.product import PrefillCodec, ProductQuantizer
from kvq.codecs.qjl import SketchQuantizer
from kvq.codecs.quantizers import Axis, Gain, Passthrough, Quantizer, UniformQuantizer, Zero, ZeroPoint
from kvq.codecs.rope import ApplyRope, Rope, UndoRope, rope_table
from kvq.codecs.stages import Hadamard, RandomizedHadamard, RandomRotation, Scope, Stage, TokenNorm
from kvq.codecs.token_groups import ChannelRoot, PlannedCodec, TokenSplit, TokenTiers
from kvq.codecs.turboquant import InnerProductQuantizer, Sketch
from kvq.codecs.variance_balance import Imbalance, VarianceBalance
from kvq.codecs.vector import VectorQuantizer

__all__ = [
    "ApplyRope",
    "Axis",
    "BlockFloatQuantizer",
    "BlockRun",
    "Calibrated",
    "CalibratedChannelSplit",
    "Center",
    "ChannelGroups",
    "ChannelOrder",
    "ChannelRoot",
    "ChannelScale",
    "ChannelShift",
    "ChannelSplit",
    "ClippedQuantizer",
    "Codec",
    "ComponentQuantizer",
    "CoupledQuantizer",
    "CovarianceRotation",
    "DeltaQuantizer",
    "Deviation",
    "DoubleQuant",
    "FisherTransform",
    "Float8Quantizer",
    "Gain",
    "GroupedHadamard",
    "Growable",
    "Hadamard",
    "HalfAwayQuantizer",
    "HuffmanCodec",
    "Imbalance",
    "InnerProductQuantizer",
    "JointMoments",
    "LayerScale",
    "LeadingChannels",
    "LearnedRotation",
    "LevelsQuantizer",
    "LloydMaxQuantizer",
    "LowRankCorrection",
    "Metric",
    "NonUniformQuantizer",
    "Order",
    "Packed",
    "PackedStore",
    "PairOrder",
    "PairWidths",
    "Passthrough",
    "PlannedCodec",
    "PolarQuantizer",
    "PrefillCodec",
    "ProductQuantizer",
    "Quantizer",
    "RandomRotation",
    "RandomizedHadamard",
    "RankClip",
    "Rate",
    "RmsLevelsQuantizer",
    "Rope",
    "ScalarQuantizer",
    "Scope",
    "SignedMaxQuantizer",
    "Sketch",
    "SketchQuantizer",
    "SparseCodec",
    "SparseLowRank",
    "Stage",
    "StartingCodebook",
    "Svd",
    "Tables",
    "TokenNorm",
    "TokenSplit",
    "TokenTiers",
    "TrellisQuantizer",
    "TurboMindQuantizer",
    "UndoRope",
    "UniformQuantizer",
    "VarianceBalance",
    "VectorQuantizer",
    "Widths",
    "Zero",
    "ZeroPoint",
    "angle_levels",
    "bind_codec",
    "calibrated_parts",
    "cayley_step",
    "codebook_for",
    "fit_codec",
    "gain_factor",
    "merge_runs",
    "optimal_levels",
    "pack",
    "plane_widths",
    "rope_table",
    "unpack",
]
