"""One colour for each method, wherever it is drawn: figures, the page, Weights & Biases."""

from __future__ import annotations

import re
import zlib

# The palette of Okabe and Ito, which colour-blind readers can tell apart; without yellow, too light for lines.
FIRST = {
    "nsnquant": "#0072B2",
    "oscar": "#D55E00",
    "nsn": "#009E73",
    "kivi": "#E69F00",
    "rtn": "#CC79A7",
    "turboquant": "#56B4E9",
    "waterfill": "#8E44AD",
}
"""Methods that most figures show; their lines are solid."""
_OTHERS = {
    "fp16": "#5B6470",
    "identity": "#828A94",
    "zero": "#A9AEB5",
    "quarot": "#882255",
    "spinquant": "#FA7E61",
    "rotatekv": "#8C6D1F",
    "oscar_covariance": "#B2456E",
    "kivi_had": "#B8860B",
    "kvtc": "#5D4037",
    "nova_kv": "#9C2F5A",
    "block_gtq": "#00838F",
    "spectralquant": "#3D7A6B",
    "squat": "#B5651D",
    "tcq": "#2E6F95",
    "octopus": "#D17A22",
    "planarquant": "#6C8EAD",
    "isoquant": "#4F7CAC",
    "rotorquant": "#88A9C3",
    "nexusquant": "#7A6FBE",
    "kitty": "#7B3F00",
    "kvarn": "#C2185B",
    "gear": "#44AA99",
    "zipcache": "#117733",
    "ott": "#999933",
    "kvquant": "#6A51A3",
    "cq": "#9E4B9E",
    "turboquant_plus": "#3A86C8",
    "polarquant": "#4B6FA8",
    "qjl": "#2A8C9C",
    "q8_0": "#A0404F",
    "q4_0": "#C44E52",
    "fp8": "#8C564B",
    "snapkv": "#6B8E23",
    "h2o": "#4C9A6A",
    "streamingllm": "#7A9E7E",
    "quanto": "#B07D62",
    "hqq": "#9C6644",
}
ENGINES = "engine"
"""The folder of presets of inference engines' cache formats, each of which is a method of its own."""
BY_ENGINE = {
    "llamacpp": ("llama.cpp", "#2F7F5F"),
    "ikllama": ("ik_llama.cpp", "#5B8C3A"),
    "vllm": ("vLLM", "#3C6FD1"),
    "sglang": ("SGLang", "#D1495B"),
    "lmdeploy": ("LMDeploy", "#B5651D"),
    "tensorrt": ("TensorRT-LLM", "#6A9A1F"),
    "mlx": ("MLX", "#7F7F7F"),
    "exllama2": ("ExLlamaV2", "#8E6C8A"),
    "exllama3": ("ExLlamaV3", "#C43C8E"),
    "openvino": ("OpenVINO", "#00758F"),
}
"""By the beginning of a preset's name: the engine's name and colour."""
# Of methods outside the package, by a hash of their names.
_OWN = ("#E15759", "#4E79A7", "#F28E2B", "#76B7B2", "#59A14F", "#B07AA1", "#9C755F", "#86785F")


def method_of(label: str) -> str:
    """The method of a label, which may also have a variant, changed settings and bits."""
    folder, slash, rest = label.partition("/")
    if folder == ENGINES and slash:
        return f"{folder}/{method_of(rest)}"
    return re.split(r"[/ ,]", label, maxsplit=1)[0]


def engine_of(label: str) -> str | None:
    """The engine whose cache format a label names: "llama.cpp" of `engine/llamacpp_q4_0`; None of other methods."""
    method = method_of(label)
    if not method.startswith(f"{ENGINES}/"):
        return None
    name = method.removeprefix(f"{ENGINES}/").partition("_")[0]
    return BY_ENGINE[name][0] if name in BY_ENGINE else name


def colour_of(label: str) -> str:
    """The colour of a label's method, as #RRGGBB; it is readable on white and on a dark page."""
    method = method_of(label)
    engines = dict(BY_ENGINE.values())
    if (engine := engine_of(method)) in engines:
        return engines[engine]
    own = _OWN[zlib.crc32(method.encode()) % len(_OWN)]
    return FIRST.get(method) or _OTHERS.get(method, own)
