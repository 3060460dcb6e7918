"""Calibrating: fit a method's tables, also rotations learned against the loss, and bind the method to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvq.calibration import files
from kvq.calibration.budget import check_enough, fit_components, joint_parts
from kvq.calibration.collect import (
    Kept,
    LayerStates,
    Place,
    TextWindows,
    collect_states,
    compute_loss,
    drawn_positions,
    made_once,
    text_name,
)
from kvq.calibration.files import Calibration, bind_tables
from kvq.calibration.text import load_text
from kvq.codecs import Codec, LearnedRotation, SharingQuantizer, Tables, calibrated_parts, cayley_step, fit_codec
from kvq.codecs.codec import isolated
from kvq.config.method import CalibrationConfig
from kvq.data.text import encode
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.layers import head_dims_of
from kvq.models.load import LoadedModel
from kvq.models.weights import weights_name
from kvq.results.provenance import PeakMemory

_kept: Kept[dict[int, LayerStates]] = {}


def learned_rotation(codec: Codec | None) -> tuple[str, LearnedRotation] | None:
    """The learned stage and its name; None: there is none."""
    for number, (name, stage) in enumerate([] if codec is None else codec.stages):
        if isinstance(stage, LearnedRotation):
            if number:
                raise ConfigError(f"stage '{name}': a learned rotation stands first in its codec")
            return name, stage
    return None


def learn(loaded: LoadedModel, method: Method, windows: TextWindows, head_dims: list[int]) -> dict[str, Tensor]:
    """The tables of the learned rotations of values in every layer, `value.<layer>.<stage>.rotation`.

    Each step updates all layers on one window. Values are quantized as the codec does after its rotation, each token
    separately, with the straight-through gradient of rounding. Keys are not quantized.
    """
    if learned_rotation(method.key) is not None:
        raise ConfigError(f"method.key of {method.name}: rotations are learned for values")
    found = learned_rotation(method.value)
    if found is None or method.value is None:
        return {}
    name, stage = found
    codecs = [method.codec_of("value", index) or method.value for index in range(len(head_dims))]
    rest = [codec.with_stages(codec.stages[1:]) for codec in codecs]
    kept = method.full_precision_indices("value", len(head_dims))
    rotations = {index: stage.initial_rotation(dim) for index, dim in enumerate(head_dims) if index not in kept}
    for step in tqdm(range(stage.steps), desc="learning rotations", unit="step", leave=False, disable=None):
        leaves = {index: rotation.float().requires_grad_() for index, rotation in rotations.items()}

        def see(index: int, key: Tensor, value: Tensor, leaves: dict[int, Tensor] = leaves) -> tuple[Tensor, Tensor]:
            if index not in leaves:
                return key, value
            rotation = leaves[index].to(value.device)
            turned = value.float() @ rotation
            with torch.no_grad():  # rounding counts as the identity for gradients
                rounding = rest[index].decode(rest[index].encode(turned.detach())) - turned
            return key, ((turned + rounding) @ rotation.mT).to(value.dtype)

        compute_loss(loaded, windows[step % len(windows)], see, backward=True)
        for index, leaf in leaves.items():
            assert leaf.grad is not None
            if not bool(torch.isfinite(leaf.grad).all()):
                raise DataError(f"calibration: layer {index}: the gradient at its rotation is not finite")
            per_token = leaf.grad.double() / (windows.shape[1] - 1)
            rotations[index] = cayley_step(rotations[index], per_token, stage.rate_at(step))
    return {f"value.{index}.{name}.rotation": rotation.float() for index, rotation in rotations.items()}


@isolated()
def calibrate(loaded: LoadedModel, method: Method, windows: TextWindows, settings: CalibrationConfig) -> Calibration:
    """Fit a method's tables to a model on windows of text. Methods of a sweep share states that are small enough."""
    start, memory = time.perf_counter(), PeakMemory(loaded.device)
    head_dims = head_dims_of(loaded.text_config)
    tensors = learn(loaded, method, windows, head_dims)
    sharing = _places(method, len(head_dims), lambda codec: joint_parts(codec) is not None)
    shared, earlier_moments = fit_components(loaded, sharing, windows, settings, method.joins_sides)
    at_once = _places(method, len(head_dims), lambda codec: isinstance(codec.quantizer, SharingQuantizer))
    if at_once and getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: caches latents; bits are shared over keys and values of heads")
    apart = _places(method, len(head_dims), lambda codec: learned_rotation(codec) is None)
    apart = {place: codec for place, codec in apart.items() if place not in sharing and place not in at_once}
    parts = [part for codec in apart.values() for part in calibrated_parts(codec).values()]
    gradients, queries = any(part.wants_gradients for part in parts), any(part.wants_moments for part in parts)
    shown = windows if apart or at_once else windows[:1]  # else for the number of heads alone
    states, earlier = made_once(
        _kept,
        (*text_name(loaded, shown, settings), gradients, queries),
        lambda: collect_states(loaded, shown, settings.tokens, gradients, settings.seed, queries),
        lambda states: sum(layer.nbytes for layer in states.values()) <= 2**30,  # for the next methods
    )
    fitted: dict[Place, Tables] = {}
    for (side, index), codec in tqdm(apart.items(), desc="fitting", unit="codec", leave=False, disable=None):
        fitted[side, index] = _fit(codec, side, states[index], settings.seed, loaded.device)
    fitted |= _fit_at_once(at_once, states, windows, settings)
    _check_tokens(_named(fitted), states, windows)
    tensors |= _named(shared) | _named(fitted)
    return Calibration(
        {name: tensors[name] for name in sorted(tensors)},
        method.name,
        weights_name(loaded.model),
        [layer.key.shape[0] for layer in states.values()],
        head_dims,
        time.perf_counter() - start + earlier + earlier_moments,
        memory.read(),
    )


def _places(method: Method, layers: int, wanted: Callable[[Codec], bool]) -> dict[Place, Codec]:
    """The wanted codecs, by side and layer, of the layers that are quantized."""
    codecs: dict[Place, Codec] = {}
    for side, codec in (("key", method.key), ("value", method.value)):
        if codec is not None and calibrated_parts(codec) and wanted(codec):
            kept = method.full_precision_indices(side, layers)
            codecs |= {(side, at): method.codec_of(side, at) or codec for at in range(layers) if at not in kept}
    return codecs


def _named(tables: Mapping[Place, Tables]) -> dict[str, Tensor]:
    return {f"{side}.{at}.{name}": table for (side, at), own in tables.items() for name, table in own.items()}


def _fit_at_once(
    codecs: Mapping[Place, Codec], states: Mapping[int, LayerStates], windows: Tensor, settings: CalibrationConfig
) -> dict[Place, Tables]:
    """Tables of codecs that their quantizers fit with all layers at once."""
    if not codecs:
        return {}
    positions = torch.cat([own for _, own in drawn_positions(windows, settings.tokens, settings.seed)])
    found: dict[Place, Tables] = {}
    for kind in {type(codec.quantizer): None for codec in codecs.values()}:
        assert issubclass(kind, SharingQuantizer)
        found |= kind.fit_layers(
            {place: codec for place, codec in codecs.items() if type(codec.quantizer) is kind}, states, positions
        )
    return found


def _check_tokens(tables: Mapping[str, Tensor], states: Mapping[int, LayerStates], windows: Tensor) -> None:
    """Warn of tables with nearly as many numbers as the states that they are fitted to. Raises: DataError: with more.

    Tables of codecs that share bits over components have a check of their own, before they are fitted.
    """
    numbers = sum(table.numel() for table in tables.values() if table.is_floating_point())
    sides = {name.partition(".")[0] for name in tables}
    seen = sum(getattr(layer, side).numel() for layer in states.values() for side in sides)
    given = f"calibration.samples={len(windows)}, length={windows.shape[1]}"
    counts = f"{given}: {numbers:,} numbers of tables from {seen:,} of states"
    check_enough(counts, seen, numbers, "more tokens are needed")


def _fit(codec: Codec, side: str, states: LayerStates, seed: int, device: torch.device) -> Tables:
    """The tables of a codec that is fitted to the states of its layer."""
    x, gradients, moments = getattr(states, side).to(device), states.gradients.get(side), states.moments(side)
    found = fit_codec(
        codec,
        x.float() if x.dtype != torch.float64 else x,
        None if gradients is None else gradients.to(device).float(),
        None if states.rope is None else states.rope.to(device),
        seed,
        None if moments is None else moments.to(device),
    )
    return {name: table.cpu() for name, table in found.items()}


def load_or_fit(inputs: Inputs, method: Method) -> tuple[Method, Calibration]:
    """A run's method with its tables, fitted now unless a file has them and can be read."""
    path, text, loaded = files.file_of(inputs), load_text(inputs), inputs.model
    assert text is not None
    with files.locked(path):
        try:
            found = files.read(path)
        except DataError as error:
            if path.exists():
                print(f"{error}; calibrating again", file=sys.stderr)
            files.write(path, calibrate(loaded, method, text.windows, inputs.config.method.calibration))
            found = files.read(path)
    return bind_tables(method, found, weights_name(loaded.model), head_dims_of(loaded.text_config)), found


def _check_calibrated(method: Method) -> None:
    if not method.needs_calibration:
        raise Unsupported(f"method={method.name}: calibrates nothing; use it without a calibration")


def bind_calibration(method: Method, model: nn.Module, file: str | Path) -> Method:
    """A calibrated method with the tables of a file, for use with `kvq.KVCache(model, method)`.

    Args:
        method: from `kvq.build_method`, with the settings that were calibrated.
        model: the causal LM that it was calibrated on.
        file: under `results/calibration`, as a run leaves it.

    Raises:
        DataError: no file, or one that is not a calibration.
        Unsupported: a calibration of another model, number of layers or head dim; a method that calibrates nothing.
    """
    _check_calibrated(method)
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    return bind_tables(method, files.read(file), weights_name(model), head_dims_of(config))


def calibrate_on_text(
    model: nn.Module, method: Method, text: str, tokenizer: Any, *, samples: int = 16, length: int = 2048, seed: int = 0
) -> Method:
    """A calibrated method with tables fitted to a model on a text, for use with `kvq.KVCache(model, method)`.

    Args:
        model: a causal LM of transformers.
        method: from `kvq.build_method` for the model's head dim.
        text: not the text that is scored; the first `samples` windows of `length` tokens are read.
        tokenizer: the model's.
        samples, length, seed: as `method.calibration` of a run; fewer samples where the text is shorter.

    Raises:
        DataError: a text of less than one window.
        Unsupported: a method that calibrates nothing, or that cannot be fitted to this model.
    """
    _check_calibrated(method)
    ids = encode(tokenizer, text, special=False)
    if len(ids) < length:
        raise DataError(f"calibration: the text has {len(ids)} tokens, fewer than one window of length={length}")
    windows = torch.tensor(ids[: min(samples, len(ids) // length) * length]).view(-1, length)
    loaded = LoadedModel(model, next(model.parameters()).device)
    settings = CalibrationConfig(samples=len(windows), length=length, seed=seed)
    found = calibrate(loaded, method, windows, settings)
    return bind_tables(method, found, weights_name(model), head_dims_of(loaded.text_config))
