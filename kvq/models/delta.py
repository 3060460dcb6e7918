"""Models stored as what differs from another: low-rank changes of matrices, rows of the embedding, norm weights.

A delta's folder has `delta.json` ({"base": <model.path>}) and `delta.safetensors`, all in fp16: `W.left` [out, rank]
and `W.right` [rank, in] for a weight W that becomes W + left @ right, `W.columns` [in] where W's columns are scaled
first, `W.row.I` for its row I and `W` itself for a weight that is replaced. The metadata has the sha256 of the base's
weights under `base_sha256`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float16
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvq.config.files import file_hash
from kvq.errors import DataError

WEIGHTS = "model.safetensors"
FILE = "delta.safetensors"
_FACTORS = (".left", ".right", ".columns")


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
    """Write `delta.safetensors` of the weights in `base`; `changes` by the names above."""
    metadata = {"format": "pt", "base_sha256": file_hash(base / WEIGHTS)}
    save_file({name: change.half().contiguous() for name, change in changes.items()}, folder / FILE, metadata)


@torch.no_grad()
def apply_delta(path: str, model: nn.Module, base: Path, folder: Path) -> None:
    """Change the weights of `model`, loaded from `base` in any dtype, as the delta in `folder` says.

    The sums are of the weights as stored, so a dtype rounds once, as it would those of a whole model.

    Args:
        path: the setting `model.path`, for errors.
        model: what transformers loaded; its parameters are changed in place.
        base: the folder with the base's `model.safetensors`.
        folder: the folder with `delta.safetensors`.

    Raises:
        DataError: the file cannot be read, is of other weights than the base's, or names weights that are not there.
    """
    where = f"model.path={path}: {folder.name}/{FILE}"
    parameters = dict(model.named_parameters())
    try:
        with safe_open(folder / FILE, framework="pt") as delta, safe_open(base / WEIGHTS, framework="pt") as weights:
            known, own = (delta.metadata() or {}).get("base_sha256"), file_hash(base / WEIGHTS)
            if known != own:
                raise DataError(f"{where}: is of weights with sha256={known}, not of {base.name}'s, sha256={own}")
            changes = {name: delta.get_tensor(name) for name in delta.keys()}  # noqa: SIM118 - no mapping
            for name in sorted({_weight(change) for change in changes}):
                new = _changed(name, weights.get_tensor(name), changes)
                parameters[name].copy_(new)
    except (OSError, SafetensorError, KeyError, ValueError, IndexError, RuntimeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where}: cannot be applied: {said[:200]}") from error


def _weight(change: str) -> str:
    """The name of the weight that an entry of the file changes."""
    for kind in _FACTORS:
        change = change.removesuffix(kind)
    return change.split(".row.")[0]


def _changed(name: str, weight: Tensor, changes: dict[str, Tensor]) -> Tensor:
    """The weight as its entries say; an entry of another shape is refused, as torch would stretch some."""

    def entry(suffix: str, *shape: int) -> Tensor:
        found = changes[f"{name}{suffix}"]
        if found.dtype is not torch.float16 or list(found.shape) != list(shape):
            raise ValueError(f"{name}{suffix} is {found.dtype} {list(found.shape)}, not float16 {list(shape)}")
        return found

    if name in changes:
        return entry("", *weight.shape)
    for change in changes:
        if change.startswith(f"{name}.row."):
            weight[int(change.rpartition(".")[2])] = entry(change.removeprefix(name), *weight.shape[1:])
    if not any(f"{name}{factor}" in changes for factor in _FACTORS):
        return weight
    (outputs, inputs), rank = weight.shape, changes[f"{name}.left"].shape[-1]
    columns = entry(".columns", inputs) if f"{name}.columns" in changes else None
    return add_low_rank(weight, entry(".left", outputs, rank), entry(".right", rank, inputs), columns)
