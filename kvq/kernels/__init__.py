"""Attention on packed codes, and the extension point for fused kernels."""

from kvq.kernels.eager import attend_packed as attend
from kvq.kernels.eager import fuse_codec, time_steps
from kvq.kernels.linear_chain import LinearChain, PackedStates, build_linear_chain

__all__ = ["LinearChain", "PackedStates", "attend", "build_linear_chain", "fuse_codec", "time_steps"]
