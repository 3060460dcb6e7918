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
PLUGIN = Plugin(
    "kvq_zoo",
    renamed={f"kvq.codecs.{name}": f"kvq_zoo.{module}.{name}" for module, names in _MOVED.items() for name in names}
    | {"kvq.methods.detected.SinkDetection": "kvq_zoo.detected.SinkDetection"},
    has_versions=True,
)
