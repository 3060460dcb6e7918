"""What the files of a checkpoint hold in addition to the model that its configuration describes."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import load_state_dict

from kvq.errors import DataError

# Causal masks [1, 1, positions, positions], their fill value, rotary frequencies: buffers of old checkpoints, which
# follow from the configuration.
_OLD_BUFFERS = re.compile(r"(^|\.)(?:(attn|attention)\.((?:masked_)?bias)|rotary_emb\.inv_freq)$")
_WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Parameters that a model may have for one that is stored, where layers share weights.
_SHARED = 4
_FEW = 2**20
_SHOWN = 4

Stored = Mapping[str, Tensor]
"""Tensors by name, without their numbers (torch's device `meta`)."""


def stored_in(files: Sequence[Path]) -> Stored:
    """The tensors of some files by name: shapes and dtypes, no numbers are read.

    Raises:
        Exception: of several libraries, for a file that is missing, cut short or garbled.
    """
    return {name: found for file in files for name, found in _tensors(file).items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            entries = packed.infolist()
        if any(one.compress_type for one in entries) or sum(one.file_size for one in entries) > file.stat().st_size:
            raise ValueError(f"{file.name} is compressed, which torch does not write")
    found = load_state_dict(file, map_location="meta")
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError(f"{file.name} holds other things than tensors")
    return found


def check_amount(path: str, config: Any, stored: Stored) -> None:
    """Refuse a configuration with more layers than the files have tensors: building such a model may take forever.

    Args:
        path: the setting `model.path`, for errors.
        config: the transformers configuration of the language model.
        stored: what the files hold.

    Raises:
        DataError: names both numbers.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > len(stored):
        raise DataError(f"model.path={path}: its config.json has {layers} layers, its files {len(stored)} tensors")


def check_stored(path: str, stored: Stored, model: nn.Module) -> None:
    """Refuse files whose tensors cannot be the weights of a model that is not quantized.

    Args:
        path: the setting `model.path`, for errors.
        stored: what the files hold.
        model: as the configuration describes it, with numbers or without.

    Raises:
        DataError: weights that are no floating-point numbers of 16 bits or more, or far fewer than the model has.
    """
    buffers = tuple(name for name, _ in model.named_buffers())
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def is_no_weight(name: str) -> bool:
        listed = name in buffers or any(
            buffer.endswith(f".{name}") or name.endswith(f".{buffer}") for buffer in buffers
        )
        return listed or is_old_buffer(name, stored) or any(re.search(pattern, name) for pattern in ignored)

    odd = sorted(name for name, found in stored.items() if found.dtype not in _WEIGHTS and not is_no_weight(name))
    if odd:
        shown = ", ".join(f"{name} ({str(stored[name].dtype).removeprefix('torch.')})" for name in odd[:_SHOWN])
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise DataError(
            f"model.path={path}: weights that are not {', '.join(str(one)[6:] for one in _WEIGHTS)}, and no "
            f"quantization_config in its config.json that says how to read them: {shown}{more}"
        )
    asked = sum(one.numel() for one in (*model.parameters(), *model.buffers()))
    held = sum(found.numel() for found in stored.values())
    if asked > _SHARED * held + _FEW:
        raise DataError(f"model.path={path}: its config.json describes {asked:,} weights, its files hold {held:,}")


def is_old_buffer(name: str, stored: Stored) -> bool:
    """Whether a tensor is one of those buffers, by its name and, where that is known, its shape."""
    found = _OLD_BUFFERS.search(name)
    if found is None or name not in stored:
        return found is not None
    shape = stored[name].shape
    if found[3] is None:
        return len(shape) == 1
    return shape.numel() == 1 if found[3] == "masked_bias" else len(shape) == 4 and shape[0] == shape[1] == 1
