"""The identity of a run: the settings that decide its numbers, and no others."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from kvq.config.backend import MODE
from kvq.config.composing import full_precision
from kvq.config.residual import Policy, PrefillBlock, ResidualSide
from kvq.config.run import (
    Attention,
    Config,
    Latent,
    MethodConfig,
    ModelConfig,
    OutliersConfig,
    WindowLayers,
    trained_with_bos,
)
from kvq.config.tasks import Windows, is_timed
from kvq.errors import ConfigError

_NOT_NAMED = ("batch_size", "include_path", "prompt_file", "save_logits")
"""Settings of tasks that decide no number: the text of a prompt is in the fingerprint."""


def canonical(
    config: Config,
    model_fingerprint: str,
    dataset_fingerprint: str,
    calibration_fingerprint: str | None = None,
    trained_with: bool | None = None,
) -> dict[str, Any]:
    """The settings that decide a run's numbers, as plain JSON values; the run's key is a hash of them.

    Left out are names, labels and notes, `bits` itself (the codecs have theirs, those of the
    first layer where layers have bits of their own), device, threads, folders, batch size,
    `plan` and `force`, null stages, settings without effect (a stride between disjoint windows) and the residual of a
    side that is not quantized. So an alias is the same run, and full precision is one run whatever `bits` and
    `residual` say. Fingerprints replace weights and text, and `calibration_fingerprint` the calibration text (None: not
    calibrated). `trained_with`: whether the model was trained with a begin-of-text token, where only its tokenizer says
    so. For a task that measures time, `dataset_fingerprint` is the name of the machine, also stored under `machine`.

    Raises:
        ConfigError: a codec without stages or order.
    """
    residual = config.effective_residual
    codecs = {side: getattr(config.method, side) for side in ("key", "value")}
    backend = config.method.backend
    return _plain(
        {
            "model": {
                "dtype": config.model.dtype,
                "outliers": _outliers(config.model.outliers),
                "fingerprint": model_fingerprint,
                **({"trust_remote_code": True} if config.model.trust_remote_code else {}),
                **_loading(config.model),
                **({} if config.cache_dtype is None else {"cache_dtype": config.cache_dtype}),
            },
            "dataset": {
                "loader": config.dataset.loader,
                "documents": config.dataset.documents,
                "max_tokens": config.dataset.max_tokens,
                "fingerprint": dataset_fingerprint,
            },
            "method": canonical_method(config.method) | _calibration(config, calibration_fingerprint),
            "residual": {
                side: _bare_side(getattr(residual, side)) if codecs[side] or backend else None for side in codecs
            },
            "task": _task(config, trained_with),
            "seed": config.seed,
            **_attention(config),
            **_window_layers(config),
            **_latent(config),
            **({"machine": dataset_fingerprint} if is_timed(config.task) else {}),
        }
    )


def canonical_method(method: MethodConfig) -> dict[str, Any]:
    """The settings of a method that decide what it stores, without its residual and the text of its calibration.

    Raises:
        ConfigError: as `canonical`.
    """
    codecs = {side: _bare_codec(getattr(method, side)) for side in ("key", "value")}
    found: dict[str, Any] = _plain(
        codecs
        | _kept_layers(method, codecs)
        | _bits_by_layer(method)
        | _backend(method)
        | _first_layers(method)
        | _sinks(method)
        | _kept_keys(method)
        | ({"gqa_compensation": True} if method.gqa_compensation else {})
        | {name: True for name in ("merge_rotation", "merge_key_rotation") if getattr(method, name)}
        | _more(method)
    )
    return found


def _task(config: Config, trained_with: bool | None) -> dict[str, Any]:
    """The task's settings that decide its numbers; `bos` where model or task has one, so that older keys stay valid."""
    task = {name: value for name, value in vars(config.task).items() if name not in _NOT_NAMED}
    if task.get("windows") is Windows.disjoint:
        task["stride"] = None
    for name in getattr(config.task, "later", ()):
        if task[name] == getattr(type(config.task), name):
            del task[name]
    if "bos" in task:
        own, asked = trained_with_bos(config.model, trained_with), task.pop("bos")
        if own or asked:
            task["bos"] = own if asked is None else asked
    for name in ("regimes", "prefill_steps", "decode_steps"):
        if name in task and (not task[name] or config.method.is_full_precision):
            del task[name]  # nothing of it is timed, as before it could be
    if "engine" in task and (engine := task.pop("engine")):
        task["engine"] = engine.canonical()
    return task


def by_names(config: Config) -> dict[str, Any]:
    """`canonical` of a run whose weights, texts and machine are not known: their fingerprints are empty."""
    reads = getattr(config.task, "reads_weights", True)
    calibrates = reads and config.method.calibration.dataset is not None
    return canonical(config, "", "", "" if calibrates else None)


def names(config: Config) -> dict[str, Any]:
    """What a record calls its run. One of full precision has many spellings, and one name."""
    named = full_precision(config) if config.method.is_full_precision else config
    return {
        "task": config.task.name,
        "model": config.model.name,
        "dataset": config.dataset.name,
        "method": named.method.name,
        "bits": named.bits_label,
    }


def _loading(model: ModelConfig) -> dict[str, Any]:
    """How weights are quantized on loading or in a GGUF file, and the attention asked for; no entry by default, so that
    older keys stay valid. Weights that a checkpoint has in quantized form are in its fingerprint.
    """
    found = {"load_in": model.load_in if model.load_in in ("4bit", "8bit") else None}
    found |= {name: getattr(model, name) for name in ("attn_implementation", "round_weights", "weights")}
    return {name: value for name, value in found.items() if value is not None}


def _outliers(outliers: OutliersConfig) -> dict[str, Any] | None:
    """The outlier channels; `sink` only where the sink lacks them, so that older keys stay valid, and then no seed."""
    if not outliers:
        return None
    left_out = "sink" if outliers.sink else "seed"
    return {name: value for name, value in _plain(outliers).items() if name != left_out}


def _kept_layers(method: MethodConfig, codecs: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that a quantized side keeps in full precision; no entry without any, so that older keys stay valid."""
    asked = method.full_precision_layers.items()
    kept = {side: sorted(set(layers)) for side, layers in asked if layers and codecs[side]}
    return {"full_precision_layers": kept} if kept else {}


def _bits_by_layer(method: MethodConfig) -> dict[str, Any]:
    """Bits of each layer, by side; no entry for a side whose layers have the same, which its codec says."""
    sides = {side: getattr(method.bits_by_layer, side) for side in ("key", "value")}
    own = {side: bits for side, bits in sides.items() if len(set(bits)) > 1}
    return {"bits_by_layer": own} if own else {}


def _backend(method: MethodConfig) -> dict[str, Any]:
    """The backend (transformers' cache) and its mode; no entry without one."""
    backend = method.backend
    return {} if backend is None else {"backend": {**vars(backend), "mode": MODE}}


def _more(method: MethodConfig) -> dict[str, Any]:
    """Eviction, plan and detection of sinks; no entry without them, nor for a detection in full precision."""
    detection = None if method.is_full_precision else method.sink_detection
    parts = {"eviction": method.eviction, "plan": method.plan, "sink_detection": detection}
    return {name: part for name, part in parts.items() if part is not None}


def _first_layers(method: MethodConfig) -> dict[str, Any]:
    """Codecs of the first layers; no entry where they equal those of the others."""
    first = method.first_layers
    own = {side: _bare_codec(getattr(first, side)) for side in ("key", "value")}
    return {"first_layers": {"count": first.count, **own}} if first.count and any(own.values()) else {}


def _sinks(method: MethodConfig) -> dict[str, Any]:
    """First tokens in full precision; no entry without any, so that older keys stay valid."""
    kept = 0 if method.is_full_precision else method.sink_tokens
    return {"sink_tokens": kept} if kept else {}


def _kept_keys(method: MethodConfig) -> dict[str, Any]:
    """Tokens whose keys stay in full precision; no entry without any, so that older keys stay valid."""
    kept = method.kept_keys
    if not kept.texts or method.key is None:
        return {}
    return {"kept_keys": {"texts": sorted(set(kept.texts)), "layers": sorted(set(kept.layers))}}


def _calibration(config: Config, fingerprint: str | None) -> dict[str, Any]:
    """The calibration text; no entry for a method without tables. It includes the data set's name, for figures."""
    settings = config.method.calibration
    if fingerprint is None or config.method.is_full_precision:
        return {}
    wanted = ("dataset", "samples", "length", "tokens", "seed")
    return {"calibration": {name: getattr(settings, name) for name in wanted} | {"fingerprint": fingerprint}}


def _attention(config: Config) -> dict[str, Any]:
    """The attention implementation of a task that measures time; scores do not depend on it."""
    packed = (
        is_timed(config.task) and config.cache.attention is Attention.packed and not config.method.is_full_precision
    )
    return {"attention": config.cache.attention} if packed else {}


def _window_layers(config: Config) -> dict[str, Any]:
    """Window layers that stay in full precision; no entry by default, so that older keys stay valid."""
    kept = config.cache.window_layers is WindowLayers.keep and not config.method.is_full_precision
    return {"window_layers": config.cache.window_layers} if kept else {}


def _latent(config: Config) -> dict[str, Any]:
    """Expanded keys and values in the place of the latent, also in full precision; no entry by default."""
    return {"latent": config.cache.latent} if config.cache.latent is Latent.expanded else {}


def _bare_side(side: ResidualSide) -> dict[str, Any]:
    """A side's residual, without the size where one block quantized at once has none."""
    size = None if side.policy is Policy.none and side.prefill_block is PrefillBlock.whole else side.size
    return {"policy": side.policy, "size": size, "prefill_block": side.prefill_block}


def _bare_codec(codec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if codec is None or "stages" not in codec:
        return None if codec is None else dict(codec)
    if not isinstance(codec["stages"], Mapping) or not isinstance(codec.get("order"), Sequence):
        raise ConfigError("method: a codec has stages (a mapping, perhaps empty) and an order (a list of their names)")
    stages = {name: stage for name, stage in codec["stages"].items() if stage is not None}
    return {**codec, "stages": stages, "order": [name for name in codec["order"] if name in stages]}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}  # class variables are none
    return value
