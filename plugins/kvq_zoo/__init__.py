"""Quantizers of papers outside kvq's own sources, and the cache formats of inference engines."""

from kvq.config.plugins import Plugin

_MOVED = """
balance.VarianceBalance block_float.BlockFloatQuantizer channel_groups.PairWidths covariance.CovarianceRotation
covariance.RankClip deflate.DeflateCodec gear.SparseLowRank geometric.PolarQuantizer kvtc.CoefficientQuantizer
kvtc.PrincipalComponents octave.LeadingChannels octave.RmsLevelsQuantizer qjl.SketchQuantizer
query_moments.QueryTransform query_moments.SubspaceQuantizer rotations.BlockRotation serving.LayerScale
serving.TurboMindQuantizer spectral.EigenRotation spectral.SpectralQuantizer triplets.LatticeQuantizer
triplets.OctahedralQuantizer
"""
"""Classes that were in `kvq.codecs` when their first records were made."""
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
    renamed={f"kvq.codecs.{path.partition('.')[2]}": f"kvq_zoo.{path}" for path in _MOVED.split()}
    | {f"kvq.methods.{path}": f"kvq_zoo.{path}" for path in _POLICIES},
    keyed={f"kvq_zoo.{path}": f"kvq.codecs.{name}" for path, name in _FORMS.items()} | {"kvq_zoo.qjl.FirstLayers": ""},
    has_versions=True,
)
