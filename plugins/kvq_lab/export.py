"""`kvq export method=engine/vllm_fp8 method.full_precision_layers.key=[0,1] ...`: a format as an engine reads it.

The words are those of a run. What comes out is a command, transformers' arguments, or a recipe of ModelOpt, which
writes the checkpoints of TensorRT-LLM; where an engine cannot do what is asked, such as bits of its own for a layer, it
says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

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
"""
_SKIPS = "--kv-cache-dtype-skip-layers"
"""vLLM's flag for layers that stay as the model computes them, keys and values together."""
_RECIPE = "recipe=modelopt"
_UNITS = {
    "engine/tensorrt_fp8": "kv_fp8",
    "engine/tensorrt_nvfp4": "kv_nvfp4",
    "engine/vllm_fp8/calibrated": "kv_fp8",
    "engine/vllm_nvfp4": "kv_nvfp4",
}
"""ModelOpt's units of cache formats (its modelopt_recipes/configs/ptq/units) that calibrate a number for each layer."""


def engine_command(config: Config) -> str:
    """The engine's command or arguments for a method's format."""
    method = config.method
    if "backend" in method.policies:
        return _transformers_arguments(config)
    if method.serve is None:
        raise Unsupported(
            f"method={method.name}: no engine reads it; kvq stores it: kvq.quantize(model, '{method.name}')"
        )
    if method.bits_by_layer:
        raise Unsupported(f"method.bits_by_layer: the engine of {method.name} stores all layers alike, or not at all")
    _check_preset(config)
    layers = {side: sorted(set(method.full_precision_layers.get(side, ()))) for side in ("key", "value")}
    if not any(layers.values()):
        return method.serve
    if not method.serve.startswith("vllm "):
        raise Unsupported(f"method.full_precision_layers: the engine of {method.name} stores all layers alike")
    if layers["key"] != layers["value"]:
        raise Unsupported(
            "method.full_precision_layers: vLLM keeps a layer's keys and values together; give both alike"
        )
    if min(layers["key"]) < 0:
        raise Unsupported("method.full_precision_layers: vLLM counts layers from 0; give no negative ones")
    return f"{method.serve} {_SKIPS} {' '.join(map(str, layers['key']))}"


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


def _check_preset(config: Config) -> None:
    """Raise `Unsupported` for a setting of the method that differs from its preset: engines have no flag for it."""
    plain = resolve(compose([f"method={config.method.name}", f"bits={config.bits_label or 3}"])).method
    mine, preset = (canonical_method(method) for method in (config.method, plain))
    changed = [name for name in sorted(mine.keys() | preset.keys()) if mine.get(name) != preset.get(name)]
    changed = [name for name in changed if name != "full_precision_layers"]
    if changed:
        raise Unsupported(f"method.{changed[0]}: departs from {config.method.name}, which is what its engine stores")


def _transformers_arguments(config: Config) -> str:
    """The call of `generate` with transformers' quantized cache."""
    backend, residual = config.method.policies["backend"], config.residual
    size = residual.size if residual.size is not None else config.method.residual.size
    if config.method.bits_by_layer or any(config.method.full_precision_layers.values()):
        raise Unsupported(f"method={config.method.name}: transformers' quantized cache stores all layers alike")
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
    write = modelopt_recipe if _RECIPE in words else engine_command
    print(write(composed([word for word in words if word != _RECIPE], folder)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the command and return 0; 1: no engine can do it; 2: settings that do not compose."""
    return run_command(arguments, _USAGE, _export, Unsupported)
