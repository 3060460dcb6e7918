"""`kvq export method=engine/vllm_fp8 method.full_precision_layers.key=[0,1] ...`: a format as an engine reads it.

The words are those of a run. What comes out is a command, transformers' arguments, a recipe of ModelOpt, which writes
TensorRT-LLM's checkpoints, or with `map=` widths by layer as an engine reads them; what an engine cannot do is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import yaml

from kvq.config import Config, compose, resolve
from kvq.config.explain import composed
from kvq.config.identity import canonical_method
from kvq.errors import Unsupported
from kvq_lab.words import run_command

_USAGE = """A cache format as an engine reads it: the words of a run, without model and task.

  kvq export method=engine/llamacpp_q8_0_q4_0
  kvq export method=engine/vllm_fp8 method.full_precision_layers.key=[0,1] method.full_precision_layers.value=[0,1]
  kvq export method=quanto bits=4 residual.size=64
  kvq export recipe=modelopt method=engine/tensorrt_fp8 method.full_precision_layers.key=[0]
  kvq export --config-dir mine method=own
  kvq export map=tensorrt method=rtn 'method.bits_by_layer.key=[8,8,4,4]' 'method.bits_by_layer.value=[8,8,4,4]'
"""
_RECIPE = "recipe=modelopt"
_UNITS = {
    "engine/tensorrt_fp8": "kv_fp8",
    "engine/tensorrt_nvfp4": "kv_nvfp4",
    "engine/vllm_fp8/calibrated": "kv_fp8",
    "engine/vllm_nvfp4": "kv_nvfp4",
}
"""ModelOpt's units of cache formats (its modelopt_recipes/configs/ptq/units) that calibrate a number for each layer."""
_MAPS = {
    "modelopt": {4: "NVFP4", 8: "FP8"},
    "tensorrt": {4: "nvfp4", 8: "fp8"},
    "ikllama": {4: "q4_0", 5: "q5_0", 6: "q6_0", 8: "q8_0", 16: "f16"},
}
"""Formats of `map=`, by the width that they stand for; the first two leave layers of 16 bits out."""


def engine_command(config: Config) -> str:
    """The engine's command or arguments for a method's format."""
    method = config.method
    if "backend" in method.policies:
        return _transformers_arguments(config)
    if method.serve is None:
        raise Unsupported(f"method={method.name}: no engine reads it; kvq does: kvq.quantize(model, '{method.name}')")
    if method.bits_by_layer:
        raise Unsupported(f"method.bits_by_layer: the engine of {method.name} stores all layers alike; see map=")
    _check_preset(config)
    layers = {side: sorted(set(method.full_precision_layers.get(side, ()))) for side in ("key", "value")}
    if not any(layers.values()):
        return method.serve
    if not method.serve.startswith("vllm "):
        raise Unsupported(f"method.full_precision_layers: the engine of {method.name} stores all layers alike")
    if layers["key"] != layers["value"]:
        raise Unsupported("method.full_precision_layers: vLLM keeps a layer's keys and values alike; give both alike")
    if min(layers["key"]) < 0:
        raise Unsupported("method.full_precision_layers: vLLM counts layers from 0; give no negative ones")
    return f"{method.serve} --kv-cache-dtype-skip-layers {' '.join(map(str, layers['key']))}"


def modelopt_recipe(config: Config) -> str:
    """A recipe of ModelOpt for its `hf_ptq.py --recipe FILE`: the cache in the method's format, weights as they are.

    Layers in full precision are entries that disable the quantizer of their keys or values.
    """
    method = config.method
    unit = _UNITS.get(method.name)
    if unit is None:
        raise Unsupported(f"{_RECIPE}: ModelOpt calibrates {', '.join(_UNITS)}; method={method.name} is none of them")
    _check_preset(config)
    off = []
    for side, letter in (("key", "k"), ("value", "v")):
        layers = sorted(set(method.full_precision_layers.get(side, ())))
        if layers and layers[0] < 0:
            raise Unsupported(f"{_RECIPE}: method.full_precision_layers.{side}: names count layers from 0")
        off += [{"quantizer_name": f"*layers.{layer}.*{letter}_bmm_quantizer", "enable": False} for layer in layers]
    names = ("base_disable_all", unit)
    recipe = {
        "imports": {name: f"configs/ptq/units/{name}" for name in names},
        "metadata": {"recipe_type": "ptq", "description": f"{method.label or method.name}, written by kvq export"},
        "quantize": {"algorithm": "max", "quant_cfg": [*({"$import": name} for name in names), *off]},
    }
    schema = "# modelopt-schema: modelopt.recipe.config.ModelOptPTQRecipe\n"
    return schema + yaml.safe_dump(recipe, sort_keys=False, width=120).rstrip()


def layer_map(config: Config, form: str) -> str:
    """Bits by layer (16: layers in full precision) as `form` says them, in the formats of these widths.

    modelopt: `kv_cache_quantized_layers`, schema 1, for the checkpoint's hf_quant_config.json beside its scales; vLLM
        reads it with `--kv-cache-dtype auto` (vllm PR 56116 and Model-Optimizer PR 2272: their descriptions and tests).
    tensorrt: ranges of layers (TensorRT-LLM PR 13695: description and test of its parser; layers left out are `auto`,
        what the checkpoint says).
    ikllama: types of the first and the last layers (ik_llama.cpp PR 1599; `-ctv-last` is right since PR 1626).

    Raises:
        Unsupported: no bits by layer, bits by head, a width or a sequence of widths that the form cannot say.
    """
    if form not in _MAPS:
        raise Unsupported(f"map={form}: {', '.join(_MAPS)}")
    _check_preset(config, "bits_by_layer", "key", "value")
    key, value = (_layer_formats(config, form, side) for side in ("key", "value"))
    if form == "ikllama":
        return f"llama-server -m M.gguf -fa {_edge_flags('ctk', key)} {_edge_flags('ctv', value)}"
    if key != value:
        layer = next(at for at, pair in enumerate(zip(key, value, strict=True)) if pair[0] != pair[1])
        raise Unsupported(f"map={form}: layer {layer} has keys and values of other bits; a layer has one format")
    if form == "modelopt":
        entries = {f"model.layers.{at}.self_attn": {"quant_algo": name} for at, name in enumerate(key) if name}
        words = {"quant_algo": "MIXED_PRECISION", "quantized_layers": entries, "schema_version": 1}
        return json.dumps({"quantization": {f"kv_cache_{name}": own for name, own in words.items()}}, indent=2)
    runs = [layers for layers in _runs(key) if key[layers[0]]]
    text = ",".join("-".join(map(str, sorted({run[0], run[-1]}))) + f":{key[run[0]]}" for run in runs)
    return f'LLM(M, kv_cache_config=KvCacheConfig(dtype="{text}"))'


def _layer_formats(config: Config, form: str, side: str) -> list[str]:
    """The format of each layer's keys or values; empty where the form leaves the layer out."""
    method, bits = config.method, config.parsed_bits
    if not method.bits_by_layer or bits is None:
        raise Unsupported(f"map={form}: method.bits_by_layer has the bits of each layer; method={method.name} has none")
    widths: list[Any] = [pair[side == "value"] for pair in method.bits_by_layer.widths(bits)]
    for layer in method.full_precision_layers.get(side, ()):
        if not -len(widths) <= layer < len(widths):
            raise Unsupported(f"map={form}: method.full_precision_layers.{side}: {layer}, of {len(widths)} layers")
        widths[layer] = 16
    formats = {16: "", **_MAPS[form]}
    for layer, width in enumerate(widths):
        if isinstance(width, list) or width not in formats:
            raise Unsupported(f"map={form}: {side}s of layer {layer} have {width} bits; it has {sorted(formats)}")
    return [formats[width] for width in widths]


def _runs(types: Sequence[str]) -> list[list[int]]:
    """Numbers of layers, those that follow one another with the same type together."""
    return [list(same) for _, same in groupby(range(len(types)), types.__getitem__)]


def _edge_flags(flag: str, types: list[str]) -> str:
    """ik_llama.cpp's flags of one side: a type, and others of the first and of the last layers."""
    runs = [(types[layers[0]], len(layers)) for layers in _runs(types)]
    if len(runs) > 3:
        raise Unsupported(f"map=ikllama: -{flag} has a type for the first, middle and last layers; {len(runs)} runs")
    base = runs[len(runs) > 1][0]
    ends = zip(("first", "last"), (runs[:-1][:1], runs[2:]), strict=True)
    return " ".join([f"-{flag} {base}", *(f"-{flag}-{end} {name},{count}" for end, own in ends for name, count in own)])


def _check_preset(config: Config, *given: str) -> None:
    """Raise `Unsupported` for a setting but those `given` that differs from the preset: engines lack its flag."""
    bits = "" if config.method.bits_by_layer else config.bits_label
    plain = resolve(compose([f"method={config.method.name}", f"bits={bits or 3}"]))
    mine, preset = (canonical_method(one.method) for one in (config, plain))
    changed = [name for name in sorted(mine.keys() | preset.keys()) if mine.get(name) != preset.get(name)]
    changed = [f"method.{name}" for name in changed if name not in ("full_precision_layers", *given)]
    if "residual" not in given and config.residual != plain.residual:
        changed.append("residual")
    if changed:
        raise Unsupported(f"{changed[0]}: departs from {config.method.name}, which is what its engine stores")


def _transformers_arguments(config: Config) -> str:
    """The call of `generate` with transformers' quantized cache."""
    backend, residual = config.method.policies["backend"], config.residual
    size = residual.size if residual.size is not None else config.method.residual.size
    _check_preset(config, "backend", "residual", "bits_by_layer")
    apart = {residual.key.size, residual.value.size} - {size, None} or config.method.bits_by_layer
    if apart or any(config.method.full_precision_layers.values()):
        raise Unsupported(f"method={config.method.name}: transformers' cache stores all layers alike, and both sides")
    settings = {
        "backend": backend["name"],
        "nbits": backend["bits"],
        "q_group_size": backend["group_size"],
        "residual_length": size,
    }
    return f'model.generate(..., cache_implementation="quantized", cache_config={json.dumps(settings)})'


def _export(words: list[str]) -> int:
    folder = None
    if words[0] == "--config-dir":
        folder, words = (words[1] if len(words) > 1 else None), words[2:]
    form = next((word.removeprefix("map=") for word in words if word.startswith("map=")), None)
    config = composed([word for word in words if word != _RECIPE and not word.startswith("map=")], folder)
    write = modelopt_recipe if _RECIPE in words else engine_command
    print(write(config) if form is None else layer_map(config, form))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the command and return 0; 1: no engine can do it; 2: settings that do not compose."""
    return run_command(arguments, _USAGE, _export, Unsupported)
