"""Fused kernels: attention on packed codes and encoding in one pass, for CPUs (numba) and GPUs (Triton)."""

from kvq.config.plugins import Plugin

PLUGIN = Plugin(
    "kvq_kernels", has_versions=True, modules={"kernels": ["kvq_kernels.dispatch"], "trellis": ["kvq_kernels.dispatch"]}
)
