"""How a model's weights are loaded: quantized, spread over devices, with which attention; and what its files hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import is_accelerate_available, is_bitsandbytes_available, is_gptqmodel_available

from kvq.errors import ConfigError, DataError, Unsupported

if TYPE_CHECKING:
    from kvq.config import ModelConfig

_ON_LOADING = {"4bit": "load_in_4bit", "8bit": "load_in_8bit"}


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

    Args:
        whole: the model's transformers configuration.
        where: the device of a model that is not spread.
    """
    stored = _method_of(getattr(whole, "quantization_config", None))
    _check_form(config, stored)
    if is_quantized(whole) and stored not in AUTO_QUANTIZATION_CONFIG_MAPPING and not _is_old_form(whole):
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise DataError(f"model.path={config.path}: quantization_config.quant_method={stored}: one of {known}")
    quantized = stored is not None or config.load_in is not None
    if quantized and config.outliers:
        raise Unsupported(f"model.outliers: the weights of {config.path} are quantized")
    dtype = getattr(torch, config.dtype.value)
    settings: dict[str, Any] = {"dtype": dtype if stored is None else "auto"}
    if config.load_in in _ON_LOADING:
        form = {_ON_LOADING[config.load_in]: True}
        settings["quantization_config"] = BitsAndBytesConfig(**form, bnb_4bit_compute_dtype=dtype)
    if config.device_map is not None or quantized:
        settings["device_map"] = config.device_map or {"": where}
    if config.max_memory is not None:
        given = config.max_memory.items()
        settings["max_memory"] = {int(name) if str(name).isdigit() else name: size for name, size in given}
    if config.attn_implementation is not None:
        settings["attn_implementation"] = config.attn_implementation
    return settings


def _check_form(config: ModelConfig, stored: str | None) -> None:
    asked, path = config.load_in, config.path
    if asked in _ON_LOADING and stored is not None:
        raise ConfigError(f"model.load_in={asked}: the weights of {path} are quantized already ({stored}); use null")
    if asked is not None and asked not in _ON_LOADING and stored != asked:
        found = "not quantized" if stored is None else f"quantized by {stored}"
        raise ConfigError(
            f"model.load_in={asked}: the weights of {path} are {found}; name a checkpoint made by {asked}, or use "
            f"{' or '.join(_ON_LOADING)}"
        )
    needed = {
        "accelerate": (asked or config.device_map, is_accelerate_available),
        "bitsandbytes": (asked in _ON_LOADING, is_bitsandbytes_available),
        "gptqmodel": (asked in ("gptq", "awq"), is_gptqmodel_available),
    }
    for package, (wanted, installed) in needed.items():
        if wanted and not installed():
            extra = "gptq" if package == "gptqmodel" else "bnb"
            setting = f"load_in={asked}" if asked else f"device_map={config.device_map}"
            raise Unsupported(f"model.{setting}: needs {package}, which is not installed; pip install -e '.[{extra}]'")


def is_quantized(whole: Any) -> bool:
    """Whether a transformers configuration says that the weights are quantized."""
    return getattr(whole, "quantization_config", None) is not None


def _is_old_form(whole: Any) -> bool:
    """Whether bitsandbytes quantized the weights before methods had names, which transformers knows."""
    stored = whole.quantization_config
    return isinstance(stored, dict) and bool(stored.get("load_in_4bit") or stored.get("load_in_8bit"))


def _method_of(stored: Any) -> str | None:
    """The name of the method that made quantized weights; None: they are not."""
    if stored is None:
        return None
    found = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return str(getattr(found, "value", found))


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes: of offloaded weights, the one to which accelerate brings them."""
    device = next(module.parameters()).device
    waits = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device(waits) if device.type == "meta" and waits is not None else device


# Causal masks [1, 1, positions, positions], their fill value, rotary frequencies: buffers of old checkpoints, which
# follow from the configuration.
_OLD_BUFFERS = re.compile(r"(^|\.)(?:(attn|attention)\.((?:masked_)?bias)|rotary_emb\.inv_freq)$")
_WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SHOWN = 4

Stored = Mapping[str, Tensor]
"""Tensors by name, without their numbers (torch's device `meta`)."""


def stored_in(files: Sequence[Path]) -> Stored:
    """The tensors of some files by name: shapes and dtypes, no numbers are read."""
    return {name: found for file in files for name, found in _tensor_shapes(file).items()}


def _tensor_shapes(file: Path) -> dict[str, Tensor]:
    """Tensors of a file on the meta device: shapes and dtypes, no data; `ValueError` where it holds other things."""
    found = load_state_dict(file, map_location="meta")
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError(f"{file.name} holds other things than tensors")
    return found


def check_stored(path: str, stored: Stored, model: nn.Module) -> None:
    """Refuse files whose tensors cannot be the weights of a model that is not quantized.

    Args:
        path: the setting `model.path`, for errors.
        stored: what the files hold.
        model: as the configuration describes it, with numbers or without.
    """
    buffers = tuple(name for name, _ in model.named_buffers())
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def is_ignored(name: str) -> bool:
        """Whether a tensor is a buffer, of older versions too, or one that the model's class ignores on loading."""
        listed = name in buffers or any(
            buffer.endswith(f".{name}") or name.endswith(f".{buffer}") for buffer in buffers
        )
        return listed or is_old_buffer(name, stored) or any(re.search(pattern, name) for pattern in ignored)

    odd = sorted(name for name, found in stored.items() if found.dtype not in _WEIGHTS and not is_ignored(name))
    if odd:
        shown = ", ".join(f"{name} ({str(stored[name].dtype).removeprefix('torch.')})" for name in odd[:_SHOWN])
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise DataError(
            f"model.path={path}: weights that are not {', '.join(str(one)[6:] for one in _WEIGHTS)}, and no "
            f"quantization_config in its config.json that says how to read them: {shown}{more}"
        )


def is_old_buffer(name: str, stored: Stored) -> bool:
    """Whether a tensor is one of those buffers, by its name and, where that is known, its shape."""
    found = _OLD_BUFFERS.search(name)
    if found is None or name not in stored:
        return found is not None
    shape = stored[name].shape
    if found[3] is None:
        return len(shape) == 1
    return shape.numel() == 1 if found[3] == "masked_bias" else len(shape) == 4 and shape[0] == shape[1] == 1
