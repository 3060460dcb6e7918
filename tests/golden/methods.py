"""What every method stores and decodes of the states of one fixed random model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.calibration.files import bind_tables
from kvq.calibration.fit import calibrate
from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.config.method import CalibrationConfig
from kvq.methods.build import method_of
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.models.weights import weights_name
from kvq.results.record import versions_of
from tests.cache.states import nearest_bits
from tests.calibrated import keeping
from tests.golden.held import AMPLIFYING, LAYERS, SIDES, Golden
from tests.presets import NAMES, lacks_package
from tests.random_models import llama, token_ids

_TWINS = (
    *("cq/4c9b", "cq/pysource", "cq/8c10b_pysource", "kvquant/pysource"),
    *("waterfill/pysource", "waterfill/mixture", "waterfill/one_window"),
)
"""The same as another method, or calibrated on another text, which is not the text here."""
METHODS = [name for name in NAMES if name not in _TWINS]
HEAD_DIM, CALIBRATED_DIM = 128, 32
PROMPT, STEPS = 184, 9
"""So that blocks of 32 and of 64 tokens fill up in the prompt and again while decoding."""
TRUNCATED = ("engine/vllm_int8_per_token_head",)
"""Truncation makes 126 or 127 of a token's largest channel by the last bit of its state: states have 16 bits here."""
KV_HEADS = {"cq": 1, "vecinfer": 1, "waterfill/pairs": 4}
"""Where not 2: with more in cq, most of k-means' hundreds of centroids end elsewhere on another processor."""
SUMMED = 3
"""Tokens whose projections are added up, so that every token counts and a file stays small."""


def missing(name: str) -> str | None:
    """The package that a method needs and that is not installed."""
    return name if lacks_package(name) else None


@torch.no_grad()
def golden_of(name: str) -> Golden:
    """Run a prompt and then single tokens through the model and a cache of the method; project what attention reads.

    Attention gets the states themselves in its place, unless tokens were evicted: what a code on the other side of a
    boundary moves, on another processor, does not reach the states of later layers.
    """
    config = resolve(compose([f"method={name}", f"bits={nearest_bits(name)}", *fitting(name)]))
    calibrates = config.method.calibration.dataset is not None
    dim = CALIBRATED_DIM if calibrates else HEAD_DIM
    model = llama(layers=LAYERS, head_dim=dim, kv_heads=KV_HEADS.get(name, KV_HEADS.get(name.partition("/")[0], 2)))
    loaded = LoadedModel(model, torch.device("cpu"), cache_dtype=torch.bfloat16 if name in TRUNCATED else None)
    method = _ready(method_of(config, dim), loaded, config.method.calibration)
    cache, ids = KVCache(loaded, method), token_ids(PROMPT + STEPS)
    read: dict[int, tuple[Tensor, Tensor]] = {}
    fed: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in range(LAYERS)}
    for index, layer in enumerate(cache.layers):
        _keep_what_is_read(layer, index, read, fed[index])
    for chunk in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)):
        model(input_ids=chunk, past_key_values=cache)
    places = [(index, side) for index in sorted(read) for side in range(SIDES)]
    numbers = {"decoded": torch.cat([_projected(read[at][side], 2 * at + side) for at, side in places]).tolist()}
    versions = versions_of(canonical(config, "", "", "" if calibrates else None))
    if name in TRUNCATED or not versions.keys().isdisjoint(AMPLIFYING):
        given = {at: [torch.cat(parts, 2) for parts in zip(*fed[at], strict=True)] for at in fed}
        numbers["loss"] = [_loss(read[at][side], given[at][side]) for at, side in places]
    exact = {"packed_bytes": cache.packed_bytes, "nbytes": cache.nbytes}
    return Golden(versions=versions, exact=exact, numbers=numbers)


def _loss(read: Tensor, given: Tensor) -> float:
    """Relative squared error of what attention reads after the last token."""
    return float((read - given).square().sum() / given.square().sum())


def fitting(name: str) -> list[str]:
    """What fits a method of many layers, many kept tokens or a long calibration to three layers and a short prompt."""
    family = name.partition("/")[0]
    if family == "qjl" and name != "qjl/one_sketch":
        return ["method.policies.first_layers.count=1"]
    if name.endswith("/kvsink"):  # no token of a random model is as extreme as a sink
        return ["method.policies.sink_detection.share=0.15"]
    if name.endswith("/start"):  # while decoding
        return [f"method.policies.start.tokens={PROMPT + 3}"]
    if family == "oscar_covariance":  # 64 sinks and a window of 256 would hold all tokens
        return ["method.sink_tokens=8", "residual.size=32"]
    if family == "kvarn":
        return ["method.sink_tokens=8"]
    if family == "turboquant_plus":
        return ["method.full_precision_layers.value=[0]"]
    return ["method.value.stages.rotation.steps=3"] if family == "spinquant" else []


def _ready(method: Method, loaded: LoadedModel, settings: CalibrationConfig) -> Method:
    if (kept := method.policy("kept_keys")) is not None:
        method = keeping(method, dataclasses.replace(kept, ids=(3, 7)))
    if not method.needs_calibration:
        return method
    short = dataclasses.replace(settings, samples=4, length=256, tokens=None)
    windows = token_ids(short.length, seed=2, batch=short.samples)
    with torch.enable_grad():
        found = calibrate(loaded, method, windows, short)
    return bind_tables(method, found, weights_name(loaded.model), [loaded.model.config.head_dim] * LAYERS)


def _keep_what_is_read(
    layer: Any, index: int, read: dict[int, tuple[Tensor, Tensor]], fed: list[tuple[Tensor, Tensor]]
) -> None:
    update = layer.update

    def kept(*args: Any, **kwargs: Any) -> Any:
        fed.append(args[:SIDES])
        read[index] = update(*args, **kwargs)
        whole = tuple(torch.cat(parts, 2) for parts in zip(*fed, strict=True))
        shapes = [[part.shape for part in pair] for pair in (read[index], whole)]
        return whole if shapes[0] == shapes[1] else read[index]

    layer.update = kept


def _projected(x: Tensor, seed: int) -> Tensor:
    """Weighted sums over heads and channels of `[1, heads, tokens, dim]`, then over runs of tokens."""
    heads, tokens, dim = x.shape[1:]
    generator = torch.Generator().manual_seed(1000 + seed)
    weights = torch.randn(heads, dim, generator=generator, dtype=torch.float64)
    by_token = torch.einsum("htd,hd->t", x[0].double(), weights) * torch.randn(
        tokens, generator=generator, dtype=torch.float64
    )
    padding = -tokens % SUMMED
    return torch.nn.functional.pad(by_token, (0, padding)).unflatten(0, (-1, SUMMED)).sum(1)
