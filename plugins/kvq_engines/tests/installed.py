"""Which engines are installed; a test of one that is not is skipped with the command that installs it."""

import importlib.metadata

import pytest


def has(*names):
    try:
        return all(importlib.metadata.version(name) for name in names)
    except importlib.metadata.PackageNotFoundError:
        return False


llamacpp = pytest.mark.skipif(not has("xllamacpp", "cffi", "gguf"), reason="llama.cpp: pip install -e '.[llamacpp]'")
mlx = pytest.mark.skipif(not has("mlx", "mlx-lm"), reason="MLX-LM: pip install -e '.[mlx]'")
onnxruntime = pytest.mark.skipif(not has("onnxruntime", "onnx"), reason="ONNX Runtime: pip install -e '.[onnxruntime]'")
