"""Attention on packed codes, and encoding in one pass."""

from kvq.kernels.attention import attend, form_for, watched
from kvq.kernels.encode import FusedCodec, fused
from kvq.kernels.form import Form, PackedStates, form_of

__all__ = ["Form", "FusedCodec", "PackedStates", "attend", "form_for", "form_of", "fused", "watched"]
