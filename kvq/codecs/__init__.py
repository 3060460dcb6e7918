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
from kvq.codecs.calibrated import Calibrated, LayerScale, Tables, bind_codec, calibrated_parts, fit_codec
from kvq.codecs.calibrated_rotations import (
    ChannelOrder,
    CovarianceRotation,
    EigenRotation,
    GroupedHadamard,
    LearnedRotation,
    RankClip,
    cayley_step,
)
from kvq.codecs.channel_groups import CalibratedChannelSplit, ChannelGroups, ChannelSplit, LeadingChannels, PairWidths
from kvq.codecs.codec import Codec, gain_factor
from kvq.codecs.coefficients import Budget, CoefficientQuantizer, Groups, PrincipalComponents
from kvq.codecs.components import ComponentQuantizer, Deviation, ScalarQuantizer, TrellisQuantizer, Widths
from kvq.codecs.delta import DeltaQuantizer
from kvq.codecs.fisher import FisherTransform, JointMoments, Metric, QueryTransform
from kvq.codecs.heads import HeadsCodec, check_single_heads
from kvq.codecs.huffman import HuffmanCodec, Rate
from kvq.codecs.kvquant import NonUniformQuantizer, SparseCodec
from kvq.codecs.lattice import LatticeQuantizer
from kvq.codecs.lloyd_max import LloydMaxQuantizer, StartingCodebook, optimal_levels
from kvq.codecs.low_rank import LowRankCorrection, SparseLowRank, Svd
from kvq.codecs.octahedral import OctahedralQuantizer
from kvq.codecs.packed import BlockRun, Growable, Packed, PackedStore, merge_runs
from kvq.codecs.packing import pack, plane_widths, unpack
from kvq.codecs.polarquant import PolarQuantizer, angle_levels
from kvq.codecs.product import CoupledQuantizer, PrefillCodec, ProductQuantizer
from kvq.codecs.quantizers import Axis, Gain, Passthrough, Quantizer, Zero
from kvq.codecs.rope import ApplyRope, Order, PairOrder, Rope, UndoRope, rope_table
from kvq.codecs.rotations import BlockRotation, Hadamard, RandomizedHadamard, RandomRotation
from kvq.codecs.sketches import InnerProductQuantizer, Sketch, SketchQuantizer
from kvq.codecs.spectral import SpectralQuantizer
from kvq.codecs.split import ChannelRoot, PlannedCodec, TokenSplit, TokenTiers
from kvq.codecs.stages import (
    Center,
    ChannelScale,
    ChannelShift,
    DoubleQuant,
    Imbalance,
    Scope,
    Stage,
    TokenNorm,
    VarianceBalance,
)
from kvq.codecs.subspace import SubspaceQuantizer
from kvq.codecs.uniform import ClippedQuantizer, UniformQuantizer, ZeroPoint
from kvq.codecs.vector import VectorQuantizer, codebook_for
