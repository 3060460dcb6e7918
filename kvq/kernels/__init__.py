"""Attention on packed codes, and the extension point for fused kernels."""

from kvq.kernels.dispatch import attend, fused, kernel_for, watched
from kvq.kernels.linear_chain import LinearChain, PackedStates, joint_of, linear_chain_of

__all__ = ["LinearChain", "PackedStates", "attend", "fused", "joint_of", "kernel_for", "linear_chain_of", "watched"]
