"""Quantizers of papers outside kvq's own sources, and the cache formats of inference engines."""

from kvq.config.plugins import Plugin

_MOVED = {
    "balance": ("VarianceBalance",),
    "block_float": ("BlockFloatQuantizer",),
    "channel_groups": ("PairWidths",),
    "covariance": ("CovarianceRotation", "RankClip"),
    "deflate": ("DeflateCodec",),
    "gear": ("SparseLowRank",),
    "geometric": ("PolarQuantizer",),
    "kvtc": ("CoefficientQuantizer", "PrincipalComponents"),
    "octave": ("LeadingChannels", "RmsLevelsQuantizer"),
    "qjl": ("SketchQuantizer",),
    "query_moments": ("QueryTransform", "SubspaceQuantizer"),
    "rotations": ("BlockRotation",),
    "serving": ("LayerScale", "TurboMindQuantizer"),
    "spectral": ("EigenRotation", "SpectralQuantizer"),
    "triplets": ("LatticeQuantizer", "OctahedralQuantizer"),
}
"""Module -> its classes that were in `kvq.codecs` when their first records were made."""
_POLICIES = ("detected.SinkDetection", "eviction.HeavyHitters", "eviction.SnapKV", "eviction.StreamingLLM")
PLUGIN = Plugin(
    "kvq_zoo",
    renamed={f"kvq.codecs.{name}": f"kvq_zoo.{module}.{name}" for module, names in _MOVED.items() for name in names}
    | {f"kvq.methods.{path}": f"kvq_zoo.{path}" for path in _POLICIES},
    has_versions=True,
)
