"""Attention on packed codes, and encoding in one pass."""

from kvq.kernels.dispatch import FusedCodec, attend, fused, kernel_for, watched
from kvq.kernels.linear_chain import LinearChain, PackedStates, joint_of, linear_chain_of

__all__ = [
    "FusedCodec",
    "LinearChain",
    "PackedStates",
    "attend",
    "fused",
    "joint_of",
    "kernel_for",
    "linear_chain_of",
    "watched",
]
