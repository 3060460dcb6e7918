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
_FORMS = {
    "grids.EngineFloat8Quantizer": "Float8Quantizer",
    "grids.EngineUniformQuantizer": "UniformQuantizer",
    "grids.NormalQuantizer": "LloydMaxQuantizer",
    "grids.SignedRestQuantizer": "InnerProductQuantizer",
}
"""Class -> the class of `kvq.codecs` that it derives from, which had its settings when records were made."""
_POLICIES = ("detected.SinkDetection", "eviction.HeavyHitters", "eviction.SnapKV", "eviction.StreamingLLM")
PLUGIN = Plugin(
    "kvq_zoo",
    renamed={f"kvq.codecs.{name}": f"kvq_zoo.{module}.{name}" for module, names in _MOVED.items() for name in names}
    | {f"kvq.methods.{path}": f"kvq_zoo.{path}" for path in _POLICIES},
    keyed={f"kvq_zoo.{path}": f"kvq.codecs.{name}" for path, name in _FORMS.items()} | {"kvq_zoo.qjl.FirstLayers": ""},
    has_versions=True,
)
