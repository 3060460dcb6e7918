"""The identity of a run: the settings that decide its numbers, and no others."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from kvq.config.choices import SIDES
from kvq.config.composing import full_precision
from kvq.config.method import WRITTEN, MethodConfig, Policy, PrefillBlock, ResidualSide, earlier_names, with_names
from kvq.config.run import Attention, Config, trained_with_bos
from kvq.config.tasks import Windows, is_timed
from kvq.errors import ConfigError

_NOT_NAMED = ("batch_size", "include_path", "prompt_file", "path", "answers")
"""Settings of tasks that decide no number: what a file of prompts or answers holds is in the fingerprint."""


def canonical(
    config: Config,
    model_fingerprint: str,
    dataset_fingerprint: str,
    calibration_fingerprint: str | None = None,
    trained_with: bool | None = None,
) -> dict[str, Any]:
    """The settings that decide a run's numbers, as plain JSON values; the run's key is a hash of them.

    Left out are names, labels and notes, `bits` itself (the codecs have theirs, those of the first layer where layers
    differ), where and how a run is computed, null stages, settings without effect and the residual of a side that is
    not quantized: full precision is one run whatever `bits` and `residual` say. Fingerprints replace weights, text and
    calibration text (None: not calibrated). `trained_with`: whether the model was trained with a begin-of-text token,
    where only its tokenizer says so. For a task that measures time, `dataset_fingerprint` is the machine's name.
    """
    residual, method, cache = config.effective_residual, config.method, config.cache
    quantized, timed, calibration = not method.is_full_precision, is_timed(config.task), None
    if quantized and calibration_fingerprint is not None:  # with the data set's name, for figures
        names = ("dataset", "samples", "length", "tokens", "seed")
        calibration = {name: getattr(method.calibration, name) for name in names}
        calibration["fingerprint"] = calibration_fingerprint
    found: dict[str, Any] = {
        "model": _model(config, model_fingerprint),
        "dataset": {
            "loader": config.dataset.loader,
            "documents": config.dataset.documents,
            "max_tokens": config.dataset.max_tokens,
            "fingerprint": dataset_fingerprint,
        },
        "method": canonical_method(method) | _without_empty(calibration=calibration),
        "residual": {
            side: _bare_side(getattr(residual, side))
            if getattr(method, side) or method.policies.get("backend")
            else None
            for side in SIDES
        },
        "task": _task(config, trained_with),
        "seed": config.seed,
    }
    packed = cache.attention is Attention.packed
    return _plain(
        found
        | _without_empty(
            attention=cache.attention if packed and quantized and timed else None,  # scores do not depend on it
            keep_decoded=True if cache.keep_decoded and quantized and timed else None,
            machine=dataset_fingerprint if timed else None,
        )
    )


def canonical_method(method: MethodConfig) -> dict[str, Any]:
    """The settings of a method that decide what it stores, without its residual and the text of its calibration."""
    codecs = {side: _bare_codec(getattr(method, side)) for side in SIDES}
    layers, kept = method.full_precision_layers, method.kept_keys
    bits = {side: getattr(method.bits_by_layer, side) for side in SIDES}
    quantized = not method.is_full_precision
    texts = kept.texts if method.key is not None else []
    found: dict[str, Any] = _plain(
        codecs
        | _without_empty(
            full_precision_layers={side: sorted(set(layers[side])) for side in layers if layers[side] and codecs[side]},
            bits_by_layer={side: given for side, given in bits.items() if any(own != given[0] for own in given)},
            sink_tokens=method.sink_tokens if quantized else 0,
            kept_keys={"texts": sorted(set(texts)), "layers": sorted(set(kept.layers))} if texts else None,
            gqa_compensation=method.gqa_compensation,
            merge_rotation=method.merge_rotation,
            eviction=method.eviction,
            token_policy=method.token_policy,
        )
        | (_without_empty(**method.policies) if quantized else {})
    )
    return dict(with_names(found, earlier_names(), WRITTEN))


def _without_empty(**settings: Any) -> dict[str, Any]:
    """Settings without those that are empty: a setting that came after the first records leaves older keys valid."""
    return {name: value for name, value in settings.items() if value not in (None, False, 0, {})}


def _task(config: Config, trained_with: bool | None) -> dict[str, Any]:
    """The task's settings that decide its numbers; `bos` where model or task has one, so that older keys stay valid."""
    unnamed = {*_NOT_NAMED, *getattr(config.task, "outputs", ())}
    task = {name: value for name, value in vars(config.task).items() if name not in unnamed}
    if task.get("windows") is Windows.disjoint:
        task["stride"] = None
    for name in getattr(config.task, "later", ()):
        if task[name] == getattr(type(config.task), name):
            del task[name]
    if "bos" in task:
        chat = bool(task.get("chat_template"))
        own, asked = trained_with_bos(config.model, chat, trained_with), task.pop("bos")
        if own or asked:
            task["bos"] = own if asked is None else asked
    for name in getattr(config.task, "of_methods", ()) if config.method.is_full_precision else ():
        task.pop(name, None)
    if not task.get("regimes", True):
        del task["regimes"]  # none is timed, as before one could be
    for name in [name for name, value in task.items() if hasattr(value, "canonical")]:
        if (own := task.pop(name).canonical()) is not None:
            task[name] = own
    return task


def by_names(config: Config) -> dict[str, Any]:
    """`canonical` of a run whose weights, texts and machine are not known: their fingerprints are empty."""
    reads = getattr(config.task, "reads_weights", True)
    calibrates = reads and config.method.calibration.dataset is not None
    return canonical(config, "", "", "" if calibrates else None)


def names(config: Config) -> dict[str, Any]:
    """The names in the record of a run; all spellings of a run in full precision share one name."""
    named = full_precision(config) if config.method.is_full_precision else config
    return {
        "task": config.task.name,
        "model": config.model.name,
        "dataset": config.dataset.name,
        "method": named.method.name,
        "bits": named.bits_label,
    }


def _model(config: Config, fingerprint: str) -> dict[str, Any]:
    """What decides the weights, with their rounding on loading, and how they attend.

    Of outlier channels without which the sink is, the seed decides nothing; older keys have no `sink`.
    """
    model, left_out = config.model, "sink" if config.model.outliers.sink else "seed"
    own = {name: value for name, value in _plain(model.outliers).items() if name != left_out}
    outliers = own if model.outliers else None
    return {"dtype": model.dtype, "outliers": outliers, "fingerprint": fingerprint} | _without_empty(
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attn_implementation,
        round_weights=model.round_weights,
        weights=model.weights,
        cache_dtype=config.cache_dtype,
    )


def _bare_side(side: ResidualSide) -> dict[str, Any]:
    """A side's residual, without the size where one block quantized at once has none."""
    size = None if side.policy is Policy.none and side.prefill_block is PrefillBlock.whole else side.size
    return {"policy": side.policy, "size": size, "prefill_block": side.prefill_block}


def _bare_codec(codec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A codec's settings without stages that are null; None: full precision."""
    if codec is None or "stages" not in codec:
        return None if codec is None else dict(codec)
    if not isinstance(codec["stages"], Mapping) or not isinstance(codec.get("order"), Sequence):
        raise ConfigError("method: a codec has stages (a mapping, perhaps empty) and an order (a list of their names)")
    stages = {name: stage for name, stage in codec["stages"].items() if stage is not None}
    return {**codec, "stages": stages, "order": [name for name in codec["order"] if name in stages]}


def _plain(value: Any) -> Any:
    """Enums as names, dataclasses as dicts, mappings and sequences with them inside: values that JSON can hold."""
    if value is None or type(value) in (str, int, float, bool):  # most are
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}  # class variables are none
    return value
