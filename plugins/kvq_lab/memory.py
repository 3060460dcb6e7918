"""Whether a model fits into the memory that is free, before it is loaded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from kvq.config import Config
from kvq.errors import ConfigError
from kvq.models.load import pick_device, text_config_of
from kvq_lab.advisor import format_bytes


def check_memory(config: Config) -> None:
    """Raise `ConfigError` for a model whose weights are larger than the free memory of its device."""
    model = config.model
    if model.max_memory is not None:
        return
    try:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(text_config_of(model), dtype=getattr(torch, model.dtype.value))
        needed = sum(one.numel() * one.element_size() for one in built.parameters())
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # a class that transformers does not have
        return
    device = pick_device(config.device.value)
    free, where = 0, device.type if model.device_map is None else "all devices together"
    if device.type == "cuda":
        devices = range(torch.cuda.device_count() if model.device_map else 1)
        free += sum(torch.cuda.mem_get_info(one)[0] for one in devices)
    if device.type == "cpu" or model.device_map is not None:
        free += _free_memory()
    if needed > free > 0:
        halves = "" if model.dtype.value in ("bfloat16", "float16") else "model.dtype=bfloat16, "
        spread = "model.device_map=auto, " if device.type == "cuda" and model.device_map is None else ""
        raise ConfigError(
            f"model={model.name}: its weights take {format_bytes(needed)} as {model.dtype.value}, {where} has "
            f"{format_bytes(free)} free; {halves}{spread}a smaller model"
        )


def _free_memory() -> int:
    """Free bytes of main memory; 0: not known."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
