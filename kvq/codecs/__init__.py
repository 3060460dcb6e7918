"""Tensor maths of quantization: packing, stages, quantizers and the chain that joins them. No transformers here."""

from kvq.codecs.block_formats import Float8Quantizer, HalfAwayQuantizer, LevelsQuantizer, SignedMaxQuantizer
from kvq.codecs.calibrated import (
    Calibrated,
    JointTransform,
    SharingQuantizer,
    Tables,
    bind_codec,
    calibrated_parts,
    fit_codec,
)
from kvq.codecs.channel_groups import CalibratedChannelSplit, ChannelSplit
from kvq.codecs.codec import Codec, StoredWithKeys, gain_factor
from kvq.codecs.components import ComponentQuantizer, Deviation, ScalarQuantizer, TrellisQuantizer, Widths
from kvq.codecs.fitted import ChannelOrder, GroupedHadamard, LearnedRotation, NonUniformQuantizer, cayley_step
from kvq.codecs.lloyd_max import InnerProductQuantizer, LloydMaxQuantizer, Sketch, StartingCodebook, optimal_levels
from kvq.codecs.nested import DeltaQuantizer, LowRankCorrection, Svd
from kvq.codecs.packed import BlockRun, Growable, Packed, PackedStore, merge_runs, pack, plane_widths, unpack
from kvq.codecs.product import CoupledQuantizer, PrefillCodec, ProductQuantizer
from kvq.codecs.quantizers import Axis, Gain, Passthrough, Quantizer, Zero
from kvq.codecs.rotations import Hadamard, RandomizedHadamard, RandomRotation
from kvq.codecs.second_moments import FisherTransform, JointMoments, Metric
from kvq.codecs.split import HeadsCodec, PlannedCodec, TokenSplit, TokenTiers, check_single_heads
from kvq.codecs.stages import (
    ApplyRope,
    Center,
    ChannelRoot,
    ChannelScale,
    ChannelShift,
    DoubleQuant,
    Rope,
    Scope,
    Stage,
    TokenNorm,
    UndoRope,
    rope_table,
)
from kvq.codecs.uniform import ClippedQuantizer, UniformQuantizer, ZeroPoint
from kvq.codecs.variable_length import CodedBlocks, HuffmanCodec, Rate, SparseCodec
from kvq.codecs.vector import VectorQuantizer, codebook_for
