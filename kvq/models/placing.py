"""How a model's weights are loaded: quantized, spread over devices, with which attention; of a GGUF file, once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvq.errors import DataError, Unsupported

if TYPE_CHECKING:
    from kvq.config import ModelConfig


@contextmanager
def onednn_linear() -> Iterator[None]:
    """Linear layers in float32 on a CPU are computed by oneDNN, but where a gradient is asked for.

    torch multiplies by MKL, which is slow on AMD processors (`experiments/bench --only torch_linear_over_onednn`).
    Results differ as those of two processors do, in the last bits of float32.
    """
    plain, product = nn.Linear.forward, torch.ops.mkldnn._linear_pointwise

    def forward(self: nn.Linear, states: Tensor) -> Tensor:
        if states.dtype is not torch.float32 or states.device.type != "cpu" or torch.is_grad_enabled():
            return plain(self, states)
        return product(states, self.weight, self.bias, "none", [], "")

    with patch.object(nn.Linear, "forward", forward):
        yield


@contextmanager
def full_fp32_products() -> Iterator[None]:
    """float32 products are computed in float32 on a GPU too, not in TF32 or bf16, whatever the process has set."""
    before, before_convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = before_convolutions


def unwrapped(model: nn.Module) -> Any:
    """The transformers model inside of wrappers (`torch.compile`, peft)."""
    return next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)


def base_of(model: nn.Module) -> Any:
    """The model below its output embedding; of some families (Llama 4) `base_model` is the whole."""
    base, inner = getattr(model, "base_model", model), getattr(model, "model", None)
    return inner if base is model and isinstance(inner, nn.Module) else base


def loading_settings(config: ModelConfig, whole: Any, where: torch.device) -> dict[str, Any]:
    """The settings of `from_pretrained` that say in what form and where weights are loaded.

    `whole`: the model's transformers configuration; `where`: the device of a model that is not spread.
    """
    given, path = getattr(whole, "quantization_config", None), config.path
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    stored = None if given is None else str(getattr(method, "value", method))
    if stored is not None and stored not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # transformers reads codes as weights
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise DataError(f"model.path={path}: quantization_config.quant_method={stored}: one of {known}")
    if stored is not None and config.outliers:
        raise Unsupported(f"model.outliers: the weights of {path} are quantized")
    settings: dict[str, Any] = {"dtype": getattr(torch, config.dtype.value) if stored is None else "auto"}
    if config.device_map is not None or stored is not None:
        settings["device_map"] = config.device_map or {"": where}
    if config.max_memory is not None:
        sizes = config.max_memory.items()
        settings["max_memory"] = {int(name) if str(name).isdigit() else name: size for name, size in sizes}
    if config.attn_implementation is not None:
        settings["attn_implementation"] = config.attn_implementation
    return settings


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes: of offloaded weights, the one to which accelerate brings them."""
    device = next(module.parameters()).device
    waits = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device(waits) if device.type == "meta" and waits is not None else device


# Causal masks [1, 1, positions, positions], their fill value, rotary frequencies: buffers of old checkpoints, which
# follow from the configuration.
OLD_BUFFERS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)$")


@contextmanager
def gguf_support(config: ModelConfig) -> Iterator[None]:
    """What transformers needs to read a GGUF file. The file's metadata is parsed once in a process, not for each part,
    and the names of tensors once, not for each module: 10 s less for a model of 30 layers.
    """
    if config.gguf is None:
        yield
        return
    try:
        import gguf
    except ImportError as error:
        raise Unsupported(
            f"model.gguf={config.gguf}: needs the package gguf, which is not installed; pip install -e '.[gguf]'"
        ) from error
    from transformers import modeling_gguf_pytorch_utils as reading

    silent = partial(tqdm, disable=None)  # no bar where there is no terminal
    with (
        patch.object(gguf, "GGUFReader", lambda file: _reader(str(file), Path(file).stat().st_mtime_ns)),
        patch.object(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        patch.object(reading, "tqdm", silent),
    ):
        yield


@lru_cache(maxsize=1)
def _reader(file: str, modified: int) -> Any:
    """A `GGUFReader` of the file, kept for the next call: transformers parses it three times, seconds each."""
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(file)
