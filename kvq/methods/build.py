"""Build a method from its configuration."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvq.codecs import Codec, HeadsCodec, check_single_heads
from kvq.config import Config, MethodConfig
from kvq.config.bits import Bits, bits_per_head, check_range, mean_width, parse_bits
from kvq.config.explain import composed
from kvq.config.identity import canonical_method
from kvq.config.method import ResidualConfig, effective_residual
from kvq.errors import ConfigError, KvqError, Unsupported, did_you_mean
from kvq.methods.kept_keys import KeptKeys
from kvq.methods.method import Method
from kvq.methods.mixed_precision import MixedPrecision
from kvq.methods.policies import MOST_BITS, GqaCompensation, Policy, merged_rotation

_KINDS: dict[str, type[Policy]] = {"eviction": Policy, "token_policy": MixedPrecision}
"""Settings that each give a policy of their name as a mapping with `_target_`, and its kind."""
_Part = TypeVar("_Part")
_type_adapter = functools.cache(functools.partial(TypeAdapter, config=ConfigDict(arbitrary_types_allowed=True)))


def build_method(
    name: str,
    bits: float | int | str | tuple[int, int] | Mapping[str, int] | Bits = 3,
    head_dim: int | Sequence[int] = 128,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> Method:
    """Build a method by the name of its configuration.

    Args:
        name: a file of `conf/method`, such as `"nsn"`; a preset is a name with a slash, `"oscar/token_scope"`.
        bits: a number, `"k3v2"`, `{"key": 3, "value": 2}` or `(3, 2)`.
        head_dim: channels per head of the model it is for; a sequence where its layers differ.
        overrides: Hydra overrides. Those of `residual`, `bits` and `cache` are the run's; all others are relative to
            the method (`"key.quantizer.group_size=null"`, `"key.stages.norm=null"`, `"residual.size=32"`).
        config_dir: a further folder of configurations (with a `method/` in it), for methods kept elsewhere.

    Raises:
        ConfigError: an unknown method, setting or value.
        Unsupported: bits or a head dim that the method cannot do.
    """
    parsed = parse_bits(bits, real=True)
    # Files in `config_dir` may change while the process lives.
    compose_config = _compose_config_once if config_dir is None else _compose_config
    config = compose_config(name, parsed, tuple(overrides), None if config_dir is None else str(config_dir))
    return method_of(config, *([head_dim] if isinstance(head_dim, int) else head_dim))


def _compose_config(name: str, bits: Bits, overrides: tuple[str, ...], config_dir: str | None) -> Config:
    """The composed and checked configuration of a run with this method; arguments as `build_method`."""
    chosen = [f"method={name}", f"bits={bits.label}"]
    for override in overrides:
        sign = override[: len(override) - len(override.lstrip("+~"))]
        rest = override[len(sign) :]
        of_the_run = re.match(r"(residual|bits|cache)(?!\w)", rest)
        chosen.append(override if of_the_run else f"{sign}method.{rest}")
    return composed(chosen, config_dir)


_compose_config_once = functools.lru_cache(maxsize=256)(_compose_config)


def method_of(config: Config, *head_dims: int) -> Method:
    """Build the method of a resolved configuration, checked for each of `head_dims`, which differ between layers."""
    for head_dim in head_dims:
        built = instantiate_method(config.method, config.residual, config.bits, head_dim)
    return built


def instantiate_method(method: MethodConfig, residual: ResidualConfig, bits: Any, head_dim: int) -> Method:
    """Build a method from resolved configuration."""
    by_layer = _build_by_layer(method, residual, bits, head_dim)
    parsed = None
    if method.bits_range is not None:
        parsed = parse_bits(bits, method.real_bits)
        if method.bits_by_layer:
            parsed = method.bits_by_layer.layers(parsed)[0]
        check_range(method.name, method.bits_range, parsed, method.real_bits)
    codecs = {
        side: _build_part(method.name, f"method.{side}", getattr(method, side), Codec, lambda one: one.check(head_dim))
        for side in ("key", "value")
    }
    merged = None
    if method.merge_rotation:
        codecs["value"], merged = merged_rotation(method.name, codecs["value"])
    effective = effective_residual(method.residual, residual)
    for side, codec in codecs.items():
        if codec is not None and getattr(effective, side).keeps_nothing and codec.token_group != 1:
            raise Unsupported(
                f"residual.size=0 under sliding ({side}s): tokens of {method.name} share statistics; "
                "a size of at least 1"
            )
    of_stages = [stage.policy for codec in codecs.values() if codec is not None for _, stage in codec.stages]
    texts = tuple(method.kept_keys.texts)
    kept_keys = KeptKeys(texts, tuple(method.kept_keys.layers)) if texts and codecs["key"] is not None else None
    named = {one: _build_part(method.name, f"method.{one}", getattr(method, one), kind) for one, kind in _KINDS.items()}
    for setting, policy in named.items():
        if policy is not None and policy.setting != setting:
            target = getattr(method, setting)["_target_"]
            raise ConfigError(f"method.{setting} of {method.name}: {target} is a policy of method.{policy.setting}")
    policies = (
        *named.values(),
        *(_build_part(method.name, f"method.policies.{name}", one, Policy) for name, one in method.policies.items()),
        *{policy.setting: policy for policy in of_stages if policy is not None}.values(),
        *(kept_keys, _build_gqa(method, codecs), merged),
    )
    built = Method(
        method.name,
        codecs["key"],
        codecs["value"],
        effective,
        parsed,
        method.full_precision_layers,
        0 if method.is_full_precision else method.sink_tokens,
        policies=tuple(policy for policy in policies if policy is not None),
        by_layer=by_layer,
        settings=canonical_method(method),
    )
    built.check_joined()
    for policy in built.policies:
        policy.check_residual(method.name, effective)
    built.check_pairs()
    if method.calibration.dataset is not None and not built.needs_calibration:
        raise ConfigError(f"method.calibration.dataset={method.calibration.dataset}: {method.name} calibrates nothing")
    return built


def _build_by_layer(method: MethodConfig, residual: ResidualConfig, bits: Any, head_dim: int) -> tuple[Method, ...]:
    """Build one method per layer, at the layer's bits; empty where `method.bits_by_layer` is not set."""
    asked = method.bits_by_layer
    if not asked:
        return ()
    if method.bits_range is None:
        raise ConfigError(f"method.bits_by_layer: {method.name} stores at a fixed rate and takes no bits")
    parsed, (lowest, highest) = parse_bits(bits, method.real_bits), method.bits_range
    occurring = asked.distinct_bits(parsed)
    for side in ("key", "value"):
        wanted = getattr(asked, side)
        if wanted and any(not lowest <= getattr(at, side) <= highest for at in occurring):
            raise Unsupported(f"method.bits_by_layer.{side}={wanted}: {method.name} does {lowest} to {highest} bits")
        parts = [(getattr(at, side), at.policies) for at in asked.at.values()]
        if len({getattr(at, side) for at in occurring}) > 1 and all(part == parts[0] for part in parts):
            raise ConfigError(f"method.bits_by_layer.{side}: {side}s of {method.name} do not follow `bits`")
    built = {label: instantiate_method(at, residual, label, head_dim) for label, at in asked.at.items()}
    for side in ("key", "value"):
        if any(isinstance(widths, list) for widths in getattr(asked, side)):
            _check_heads(side, list(built.values()), head_dim)
    return tuple(_combine_heads(built, *widths) for widths in asked.widths(parsed))


def _check_heads(side: str, methods: Sequence[Method], head_dim: int) -> None:
    """Raise `Unsupported` if one of the methods cannot quantize each KV head of `side` with its own bits."""
    for method in methods:
        if method.replaces_layers:
            raise Unsupported(f"method.bits_by_layer.{side}: heads of {method.name} have no bits of their own")
        if (codec := getattr(method, side)) is not None:
            try:
                check_single_heads(codec, head_dim)
            except Unsupported as error:
                raise Unsupported(f"method.bits_by_layer.{side}: {method.name}: {error}") from error


def _combine_heads(built: Mapping[str, Method], key: Any, value: Any) -> Method:
    """The method of one layer whose KV heads may have different bits.

    Args:
        built: methods by the label of their bits, such as `k3v2`.
        key, value: bits of the layer: one number, or one for each KV head (`kvq.config.bits.Widths`).
    """
    keys, values = bits_per_head(key, value)
    whole = next(built[at.label] for at in keys if at is not None)
    codecs: dict[str, Any] = {
        side: HeadsCodec([None if at is None else getattr(built[at.label], side) for at in heads])
        for side, heads in (("key", keys), ("value", values))
        if len(heads) > 1
    }
    return replace(whole, bits=Bits(mean_width(key), mean_width(value)), **codecs)


def _build_gqa(method: MethodConfig, codecs: Mapping[str, Codec | None]) -> GqaCompensation | None:
    """The policy for the setting `method.gqa_compensation`, checked to suit the codecs; None: it is off."""
    if not method.gqa_compensation:
        return None
    if not any(codecs.values()):
        raise ConfigError(f"method.gqa_compensation of {method.name}: needs codecs")
    for side, codec in codecs.items():
        try:
            _ = codec and codec.with_more_bits(0, MOST_BITS)
        except Unsupported as error:
            raise Unsupported(f"method.gqa_compensation of {method.name}: {side}: {error}") from error
    return GqaCompensation()


def _build_part(
    name: str, setting: str, config: Any, kind: type[_Part], check: Callable[[Any], None] = lambda _: None
) -> _Part | None:
    """Build the object of `kind` that a mapping with `_target_` describes, and `check` it; None if `config` is None."""
    if config is None:
        return None
    if not isinstance(config, Mapping) or "_target_" not in config:
        what = "a codec (a mapping with _target_), or null for full precision"
        raise ConfigError(f"{setting} of {name}: {what if kind is Codec else 'a mapping with _target_, or null'}")
    part = _build_object(f"{setting} of {name}", setting, config)
    if not isinstance(part, kind):
        module = "kvq.codecs" if kind is Codec else kind.__module__
        raise ConfigError(
            f"{setting} of {name}: {config['_target_']} is a {type(part).__name__}; expected a {module}.{kind.__name__}"
        )
    try:
        check(part)
    except KvqError as error:
        raise type(error)(f"{setting} of {name}: {error}") from error
    return part


def _build_object(whose: str, setting: str, config: Mapping[str, Any]) -> Any:
    """Build the object that a mapping with `_target_` describes, its arguments first; `whose`: start of an error."""
    name = config["_target_"]
    try:
        target = pkgutil.resolve_name(name)
        parameters = inspect.signature(target).parameters
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # no name, or of nothing to call
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        module = str(name).partition(".")[0]
        lacks = isinstance(error, ModuleNotFoundError) and error.name == module
        searched = f"; put {module}.py in the folder of --config-dir=..., set PYTHONPATH or install it" if lacks else ""
        raise ConfigError(f"{setting}._target_={name}: cannot be imported ({reason}){searched}") from error
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    hints, arguments = _type_hints(target), {}
    for argument, value in config.items():
        if argument == "_target_":
            continue
        of_hydra = argument.startswith("_") and argument.endswith("_")
        if of_hydra or (argument not in parameters and not open_ended):
            allowed = ", ".join(parameters) or "it takes none"
            hint = did_you_mean(argument, parameters)
            raise ConfigError(f"{setting}.{argument}: not an argument of {name} ({allowed}).{hint}")
        arguments[argument] = _build_value(whose, f"{setting}.{argument}", value)
        if argument in hints:
            _check_type(f"{setting}.{argument}", name, hints[argument], arguments[argument], value)
    try:
        return target(**arguments)
    except KvqError as error:
        raise type(error)(f"{whose}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{whose}: {' '.join(str(error).split())}") from error


def _build_value(whose: str, setting: str, value: Any) -> Any:
    """A configuration value in which each mapping with `_target_` is replaced by the object that it describes."""
    if isinstance(value, list):
        return [_build_value(whose, f"{setting}.{number}", one) for number, one in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" in value:
        return _build_object(whose, setting, value)
    return {name: _build_value(whose, f"{setting}.{name}", one) for name, one in value.items()}


def _check_type(setting: str, target: str, hint: Any, value: Any, written: Any) -> None:
    """Raise `ConfigError` if `value` does not fit the type `hint`; `written`: the value in the configuration."""
    if isinstance(value, dict) and get_origin(hint) is Mapping:
        for name, one in value.items():
            _check_type(f"{setting}.{name}", target, get_args(hint)[1], one, written[name])
        return
    try:
        _type_adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        wanted = re.sub(r"[a-zA-Z_.]+\.", "", inspect.formatannotation(hint))
        kinds = [kind for kind in get_args(hint) or (hint,) if inspect.isclass(kind) and "." in kind.__module__]
        takes = f"a mapping whose _target_ is a kvq.codecs.{kinds[0].__name__}" if kinds else f"{target} takes {wanted}"
        raise ConfigError(f"{setting}={'null' if written is None else str(written)[:300]}: {takes}") from error


@functools.cache
def _type_hints(target: Any) -> dict[str, Any]:
    """Type hints of a function's or a class's arguments by name; empty where they do not resolve."""
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except NameError:  # names imported for type checkers only
        return {}
