"""The weights of a model in memory: their name, and what changes them: rounding, outlier channels, a stored delta.

Outlier channels are implanted without changing a model's function. Scaling a RoPE pair of `k_proj` rows by alpha and
the matching `q_proj` rows by 1/alpha leaves every attention score as it was; scaling rows of `v_proj` by beta and the
matching columns of `o_proj` by 1/beta leaves every output as it was. The cached keys and values then have channel
outliers, as those of 7B models do (KIVI, arXiv 2402.02750, figure 2). A query meets every key with the same 1/alpha, so
a sink can lack them only where its key is next to nothing: `sink: false` takes the channels in which it has least.

A delta is what a model differs in from another: low-rank changes of matrices, rows of the embedding, norm weights. Its
folder has `delta.json` ({"base": <model.path>}) and `delta.safetensors`, all in fp16: `W.left` [out, rank] and
`W.right` [rank, in] for a weight W that becomes W + left @ right, `W.columns` [in] where W's columns are scaled first,
`W.row.I` for its row I and `W` itself for a weight that is replaced. The metadata has the base's `base_sha256`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float16
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from kvq.config import OutliersConfig
from kvq.config.limits import file_hash
from kvq.errors import DataError, Unsupported, one_line
from kvq.models.layers import head_dims_of

WEIGHTS, DELTA = "model.safetensors", "delta.safetensors"
"""The files of a whole model's weights, and of a delta."""
_CHANGE = re.compile(r"\.(left|right|columns|row\.\d+)$")


def weights_name(model: nn.Module) -> str:
    """Name of the weights of a model in memory: a hash of all shapes and of the first entries of each, in bfloat16."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        some = _fetch(model, name, weight).detach().flatten()[:1024]  # entries of each weight that enter its name
        first = some.to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{name} {list(weight.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()


def _fetch(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """A weight, brought from where accelerate has offloaded it (CPU or disk)."""
    if weight.device.type != "meta":
        return weight
    module, _, own = name.rpartition(".")
    waiting = getattr(getattr(model.get_submodule(module), "_hf_hook", None), "weights_map", None)
    if waiting is None:
        raise Unsupported(f"model: its weight {name} is not in memory, and names a calibration or saved cache")
    found: Tensor = waiting[own]
    return found


@contextmanager
def rounded_weights(model: Any, bits: int) -> Iterator[None]:
    """Round the linear layers of a model, but for the output embedding, while the context lasts.

    The same weights, bit for bit, come back after it; a second copy of them is in memory meanwhile. Entered after a
    rotation is merged into weights, it gives "merge, then quantize".
    """
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linear.items():
        if module.weight.device.type == "meta" or not module.weight.is_floating_point():
            raise Unsupported(f"model.round_weights={bits}: {name}.weight is quantized already or not in memory")
    for name, weight in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, Conv1D) or (weight.ndim == 3 and len(weight) > 1 and not isinstance(module, _ConvNd)):
            raise Unsupported(f"model.round_weights={bits}: {name} would stay as it is; linear layers alone")
    weights = list({module.weight for module in linear.values() if module is not output})
    before = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.copy_(round_to_nearest(weight.data, bits))
        yield
    finally:
        for weight, own in zip(weights, before, strict=True):
            weight.data.copy_(own)


def round_to_nearest(weight: Float[Tensor, "out in"], bits: int) -> Float[Tensor, "out in"]:
    """Round-to-nearest to a uniform grid of 2^bits levels from the minimum to the maximum of each group.

    A group is 128 input channels of one output row. The result has the weight's dtype.

    Source: the round-to-nearest baseline of GPTQ (arXiv 2210.17323), section 5, at the group size of AWQ's checkpoints.
    """
    groups = []
    for group in weight.float().split(128, dim=1):  # input channels that share a scale and a zero point
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        groups.append(((group - low) / step).round() * step + low)
    return torch.cat(groups, 1).to(weight.dtype)


@torch.no_grad()
def implant_outliers(model: nn.Module, settings: OutliersConfig) -> None:
    """Implant outlier channels in every layer and KV head of a llama-shaped model, in place.

    Powers of two as scales are exact in fp16. Channels are drawn from `settings.seed`, a stream of their own, or are
    those in which the begin-of-text token has least.
    """
    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    for attention in attentions or [model]:
        plain = all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        if not plain or hasattr(attention, "k_norm"):
            raise Unsupported(f"model.outliers: {type(attention).__name__} has no plain q, k, v and o projections")
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads, kv_heads, (head_dim, *others) = config.num_attention_heads, config.num_key_value_heads, head_dims_of(config)
    if set(others) - {head_dim}:
        raise Unsupported(f"model.outliers: {type(model).__name__} has several head dims")
    if settings.key_pairs > head_dim // 2 or settings.value_channels > head_dim:
        raise Unsupported(f"model.outliers: head_dim={head_dim} has {head_dim // 2} pairs and {head_dim} channels")
    begin, sinks = config.bos_token_id, None
    if not settings.sink:
        if begin is None:
            raise Unsupported(f"model.outliers.sink=false: {type(model).__name__} has no begin-of-text token")
        # Of the token at position 0, where RoPE changes nothing.
        first: Any = model(torch.tensor([[begin]], device=model.get_input_embeddings().weight.device), use_cache=True)  # type: ignore[operator]
        sinks = [(one.keys[0, :, 0].cpu(), one.values[0, :, 0].cpu()) for one in first.past_key_values.layers]
    generator = torch.Generator().manual_seed(settings.seed)
    for layer, attention in enumerate(attentions):
        for kv_head in range(kv_heads):
            if sinks is None:
                pairs = torch.randperm(head_dim // 2, generator=generator)[: settings.key_pairs]
                channels = torch.randperm(head_dim, generator=generator)[: settings.value_channels]
            else:
                key, value = (each[kv_head] for each in sinks[layer])
                pairs = key.view(2, -1).norm(dim=0).argsort()[: settings.key_pairs]
                channels = value.abs().argsort()[: settings.value_channels]
            key_rows = torch.cat([pairs, pairs + head_dim // 2])  # RoPE rotates channel i with i + head_dim/2
            _scale_rows(attention.k_proj, kv_head * head_dim + key_rows, settings.key_scale)
            _scale_rows(attention.v_proj, kv_head * head_dim + channels, settings.value_scale)
            for head in range(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads):
                _scale_rows(attention.q_proj, head * head_dim + key_rows, 1 / settings.key_scale)
                attention.o_proj.weight[:, head * head_dim + channels] /= settings.value_scale


def _scale_rows(linear: nn.Linear, rows: Tensor, scale: float) -> None:
    """Multiply rows of the weight, and entries of the bias, in place."""
    linear.weight[rows] *= scale
    if linear.bias is not None:
        linear.bias[rows] *= scale


def add_low_rank(
    weight: Float16[Tensor, "out in"],
    left: Float16[Tensor, "out rank"],
    right: Float16[Tensor, "rank in"],
    columns: Float16[Tensor, " in"] | None = None,
) -> Float16[Tensor, "out in"]:
    """weight x columns + left @ right, added up in fp32 one rank after the other and rounded to fp16.

    The same bits on every machine: a product of two fp16 numbers is exact in fp32, with a fused addition or without,
    and the order of the sums is given.
    """
    total = weight.float() if columns is None else weight.float() * columns.float()
    for column, row in zip(left.float().unbind(1), right.float().unbind(0), strict=True):
        total.addcmul_(column[:, None], row)
    return total.half()


def save_delta(changes: dict[str, Tensor], base: Path, folder: Path) -> None:
    """Write `delta.safetensors` in `folder`, in fp16, with the sha256 of the weights in `base`."""
    metadata = {"format": "pt", "base_sha256": file_hash(base / WEIGHTS)}
    save_file({name: change.half().contiguous() for name, change in changes.items()}, folder / DELTA, metadata)


@torch.no_grad()
def apply_delta(path: str, model: nn.Module, base: Path, folder: Path) -> None:
    """Change the weights of `model`, loaded from the folder `base` in any dtype, as the delta in `folder` says.

    The sums are of the weights as stored, so a dtype rounds once, as it would those of a whole model. `path`: the
    setting `model.path`, for errors.
    """
    where = f"model.path={path}: {folder.name}/{DELTA}"
    parameters = dict(model.named_parameters())
    try:
        with safe_open(folder / DELTA, framework="pt") as delta, safe_open(base / WEIGHTS, framework="pt") as weights:
            known, own = (delta.metadata() or {}).get("base_sha256"), file_hash(base / WEIGHTS)
            if known != own:
                raise DataError(f"{where}: is of weights with sha256={known}, not of {base.name}'s, sha256={own}")
            changes = {name: delta.get_tensor(name) for name in delta.keys()}  # noqa: SIM118 - no mapping
            for name in sorted({_CHANGE.sub("", change) for change in changes}):
                parameters[name].copy_(_apply_changes(name, weights.get_tensor(name), changes))
    except (OSError, SafetensorError, KeyError, ValueError, IndexError, RuntimeError) as error:
        raise DataError(f"{where}: cannot be applied: {one_line(error, 200)}") from error


def _apply_changes(name: str, weight: Tensor, changes: dict[str, Tensor]) -> Tensor:
    """The weight as its entries say."""
    if name in changes:
        return changes[name]
    for change, row in changes.items():
        if change.startswith(f"{name}.row."):
            weight[int(change.rpartition(".")[2])] = row
    if f"{name}.left" not in changes:
        return weight
    return add_low_rank(weight, changes[f"{name}.left"], changes[f"{name}.right"], changes.get(f"{name}.columns"))
