"""Engines (llama.cpp, MLX, ONNX Runtime's attention), and the task that compares their cache formats with kvq's."""

from kvq.config.plugins import Plugin

PLUGIN = Plugin(
    "kvq_engines",
    tasks={"engine": "kvq_engines.perplexity"},
    commands={"kld": "kvq_engines.kld"},
    modules={"figures": ["kvq_engines.figures"]},
    renamed={"kvq.codecs.PairOrder": "kvq_engines.pair_order.PairOrder"},
    has_versions=True,
)
