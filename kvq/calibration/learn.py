"""SpinQuant's rotations of values, learned against the model's loss with quantized values."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvq.calibration.collect import loss
from kvq.codecs import Codec, LearnedRotation, cayley_step
from kvq.errors import ConfigError, DataError
from kvq.methods.method import Method
from kvq.models import LoadedModel


def learned_rotation(codec: Codec) -> tuple[str, LearnedRotation] | None:
    """The learned stage and its name; None: the codec has none.

    Raises:
        ConfigError: it is not the first stage of its codec, the only position whose gradient is implemented.
    """
    for number, (name, stage) in enumerate(codec.stages):
        if isinstance(stage, LearnedRotation):
            if number:
                raise ConfigError(f"stage '{name}': a learned rotation stands first in its codec")
            return name, stage
    return None


def learn(
    loaded: LoadedModel,
    method: Method,
    windows: Int[Tensor, "samples length"],
    head_dims: list[int],
) -> dict[str, Tensor]:
    """The tables of the learned rotations of values in every layer, `value.<layer>.<stage>.rotation`.

    Each step updates all layers on one window. Values are quantized as the codec does after its rotation, each token
    separately, with the straight-through gradient of rounding. Keys are not quantized.

    Raises:
        ConfigError: a learned rotation of keys, which would have to rotate queries too.
        DataError: a gradient that is not finite.
    """
    if method.key is not None and learned_rotation(method.key) is not None:
        raise ConfigError(f"method.key of {method.name}: rotations are learned for values")
    found = None if method.value is None else learned_rotation(method.value)
    if found is None or method.value is None:
        return {}
    name, stage = found
    codecs = [method.codec_of("value", index) or method.value for index in range(len(head_dims))]
    rest = [codec.rebuilt(codec.stages[1:]) for codec in codecs]
    kept = method.whole_layers("value", len(head_dims))
    rotations = {index: stage.begin(dim) for index, dim in enumerate(head_dims) if index not in kept}
    for step in tqdm(range(stage.steps), desc="learning rotations", unit="step", leave=False, disable=None):
        leaves = {index: rotation.float().requires_grad_() for index, rotation in rotations.items()}

        def see(index: int, key: Tensor, value: Tensor, leaves: dict[int, Tensor] = leaves) -> tuple[Tensor, Tensor]:
            if index not in leaves:
                return key, value
            return key, _quantized(value, leaves[index].to(value.device), rest[index]).to(value.dtype)

        loss(loaded, windows[step % len(windows)], see, backward=True)
        for index, leaf in leaves.items():
            assert leaf.grad is not None
            if not bool(torch.isfinite(leaf.grad).all()):
                raise DataError(f"calibration: layer {index}: the gradient at its rotation is not finite")
            per_token = leaf.grad.double() / (windows.shape[1] - 1)
            rotations[index] = cayley_step(rotations[index], per_token, stage.rate_at(step))
    return {f"value.{index}.{name}.rotation": rotation.float() for index, rotation in rotations.items()}


def _quantized(
    value: Float[Tensor, "batch heads tokens dim"], rotation: Float[Tensor, "dim dim"], rest: Codec
) -> Float[Tensor, "batch heads tokens dim"]:
    """Values rotated, quantized and rotated back; rounding counts as the identity for gradients."""
    turned = value.float() @ rotation
    with torch.no_grad():
        rounding = rest.decode(rest.encode(turned.detach())) - turned
    return (turned + rounding) @ rotation.mT
