"""Engines as settings, and the format of an engine's cache that a method is the preset of."""

from __future__ import annotations

import contextlib
import enum
import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvq.codecs import Codec
from kvq.codecs.calibrated import calibrated_parts
from kvq.config.limits import file_hash
from kvq.config.method import Policy
from kvq.errors import ConfigError, DataError, Unsupported, not_empty, require
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models.folder import DISTRIBUTION, carried_gguf
from kvq.models.inputs import Inputs
from kvq_engines.llamacpp import LlamaCpp, write_gguf
from kvq_engines.mlx import Mlx
from kvq_engines.onnxruntime import OnnxRuntime

Engine = LlamaCpp | Mlx | OnnxRuntime

EngineName = enum.StrEnum("EngineName", "llamacpp mlx onnxruntime")
"""Programs that compute logits in the place of transformers."""

EngineWeights = enum.StrEnum("EngineWeights", "float16 float32")
"""Dtype of the matrices of the GGUF file that is written of a model."""


@dataclass
class EngineConfig:
    """A program that computes the logits (`name` None: transformers), with the format that the method is a preset of.

    `file`: a GGUF file of the model (llama.cpp); None: one is written of the weights, in `weights`. `flash_attention`:
    llama.cpp's fused attention, without which it takes no quantized values. `compare`: the preset is scored in PyTorch
    on the same windows too.
    """

    name: EngineName | None = EngineName.llamacpp
    file: str | None = None
    weights: EngineWeights = EngineWeights.float32
    flash_attention: bool = True
    compare: bool = True

    def __post_init__(self) -> None:
        not_empty("task.engine.file", self.file)
        if not self and self.file is not None:
            raise ConfigError(f"task.engine.file={self.file}: needs task.engine.name=llamacpp")
        if self and self.name is not EngineName.llamacpp:
            plain = {"file": None, "weights": EngineWeights.float32, "flash_attention": True}
            for given in (name for name, value in plain.items() if getattr(self, name) != value):
                takes = f"{self.name} takes the model's weights and attends in its own way"
                raise ConfigError(f"task.engine.{given}={getattr(self, given)}: of llamacpp; {takes}")

    def __bool__(self) -> bool:
        return self.name is not None

    @property
    def path(self) -> Path | None:
        """Where `file` lies."""
        if self.file is None:
            return None
        if self.file.startswith(DISTRIBUTION):
            return carried_gguf("task.engine.file", self.file)
        path = Path(self.file).expanduser()
        if not path.is_file():
            raise DataError(f"task.engine.file={self.file}: no such file")
        return path

    def canonical(self) -> dict[str, Any] | None:
        """The settings that decide numbers: of `file` the sha256 (hex), and then no dtype of weights.

        None: transformers, as if the task were ppl.
        """
        if not self:
            return None
        settings = {name: value for name, value in vars(self).items() if value is not None}
        if (path := self.path) is not None:
            del settings["weights"]
            settings["file"] = file_hash(path)
        return settings


LLAMACPP_TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Format:
    """What an engine stores of keys and of values.

    `types`: ggml's of keys and values, MLX's bits and group size, or ONNX Runtime's bits and steps of each layer (None:
    full precision, or not calibrated yet). `rotated`: llama.cpp's Hadamard rotation.
    """

    types: tuple[Any, ...]
    rotated: bool = True


def format_of(method: Method, engine: EngineName, full: str) -> Format:
    """The format of an engine that a method is the preset of.

    Args:
        full: torch's name of the dtype in which a side without a codec is kept.

    Raises:
        Unsupported: a method that the engine has no cache for.
    """
    method.check_needs(f"task.engine={engine}", "codecs_alone", "same_stages", "one_width", "all_layers", "all_tokens")
    codecs = [(side, codec) for side in ("key", "value") if (codec := getattr(method, side)) is not None]
    for side, _ in codecs:
        if (kept := getattr(method.residual, side)).policy is not Policy.sliding or kept.size:
            raise Unsupported(f"task.engine={engine}: quantizes tokens as they come; residual.{side}: sliding, size 0")
    if engine is EngineName.onnxruntime:
        return _onnxruntime_format(method)
    return _mlx_format(method, codecs) if engine is EngineName.mlx else _llamacpp_format(method, codecs, _DTYPES[full])


def _llamacpp_format(method: Method, codecs: list[tuple[str, Codec]], full: str) -> Format:
    """ggml's types that the codecs are presets of; `full`: the type of a side without a codec."""
    types = {"key": full, "value": full}
    rotations = set()
    for side, codec in codecs:
        given, names = method.settings[side]["quantizer"], [name for name, _ in codec.stages]
        known = {name: settings[side] for name, settings in _presets().items()}
        found = [name for name, one in known.items() if one["quantizer"] == given]
        if not found or names not in (["pairs", "hadamard"], ["pairs"], ["hadamard"], []):
            raise Unsupported(
                f"task.engine=llamacpp: no type of its cache is {method.name}'s {side}; a preset engine/llamacpp_*"
            )
        types[side] = found[0]
        rotations.add("hadamard" in names)
        given, held = method.settings[side]["stages"], known[found[0]]["stages"]
        if any(given[name] != held.get(name) for name in names):
            raise Unsupported(f"task.engine=llamacpp: the engine rotates {side}s otherwise, or has another order")
    if len(rotations) > 1:
        raise Unsupported("task.engine=llamacpp: rotates keys and values, or neither")
    return Format((types["key"], types["value"]), all(rotations))


@functools.cache
def _presets() -> dict[str, Mapping[str, Any]]:
    """The settings of a preset of each type."""
    return {name: build_method(f"engine/llamacpp_{name}", head_dim=64).settings for name in LLAMACPP_TYPES}


def _mlx_format(method: Method, codecs: list[tuple[str, Codec]]) -> Format:
    """MLX's bits and group size that the codecs of both sides are presets of."""
    if not codecs:
        return Format((None, 64))
    sides = [method.settings[side] for side, _ in codecs]
    found = dict(sides[0]["quantizer"])
    free = {name: found.get(name) for name in ("bits", "group_size")}
    wanted = {"_target_": "kvq.codecs.UniformQuantizer", "zero_point": "edge", "axis": "per_token"} | free
    if len(sides) != 2 or sides[0] != sides[1] or sides[0]["stages"] or found != wanted:
        raise Unsupported(f"task.engine=mlx: stores keys and values alike, as engine/mlx_*; not {method.name}")
    return Format((found["bits"], found["group_size"]))


def _onnxruntime_format(method: Method) -> Format:
    """Bits and steps of ONNX Runtime's cache that the codecs of both sides are presets of."""
    if method.is_full_precision:
        return Format((None, None))
    for bits in (8, 4):
        for steps in ("", "/per_tensor"):
            preset = build_method(f"engine/onnxruntime_int{bits}{steps}", head_dim=64)
            if all(preset.settings[side] == method.settings[side] for side in ("key", "value")):
                pairs = zip(*(method.bound.get(side, ()) for side in ("key", "value")), strict=True)
                scales = [tuple(calibrated_parts(codec)["scale"].tables["scale"] for codec in pair) for pair in pairs]
                return Format((bits, scales or None))
    raise Unsupported(f"task.engine=onnxruntime: stores keys and values as engine/onnxruntime_*; not {method.name}")


@contextlib.contextmanager
def open_engine(inputs: Inputs, found: Format) -> Iterator[Engine]:
    """The engine of a run with the model in it; a GGUF file that was written of the weights is deleted afterwards."""
    task = inputs.config.task
    settings: EngineConfig = task.engine
    if settings.name is EngineName.mlx:
        with Mlx(inputs.model.model, task.context, *found.types) as engine:
            yield engine
        return
    if settings.name is EngineName.onnxruntime:
        with OnnxRuntime(inputs.model.model, *found.types) as onnxruntime:
            yield onnxruntime
        return
    with tempfile.TemporaryDirectory(prefix="kvq-gguf-") as folder:
        if (file := settings.path) is None:
            file = Path(folder) / "model.gguf"
            write_gguf(inputs.model.model, file, getattr(torch, settings.weights.value))
        with LlamaCpp(
            file,
            task.context,
            *found.types,
            rotated=found.rotated,
            flash_attention=settings.flash_attention,
            threads=torch.get_num_threads(),
        ) as llamacpp:
            yield llamacpp


def format_for(inputs: Inputs, method: Method) -> Format:
    """The format of a run's method in its engine. Raises: Unsupported: as `format_of`."""
    engine, dtype = inputs.config.task.engine.name, inputs.config.model.dtype
    if inputs.config.cache.dtype is not None and engine is not EngineName.llamacpp:
        raise Unsupported(f"cache.dtype={inputs.config.cache.dtype}: of llamacpp; others store what they compute in")
    computed = {EngineName.onnxruntime: ["float32"], EngineName.mlx: ["float32", "float16"]}.get(engine, [dtype.value])
    require(dtype.value in computed, "model.dtype", dtype, f"{engine} computes in {' or '.join(computed)}", Unsupported)
    return format_of(method, engine, (inputs.config.cache_dtype or dtype).value)
