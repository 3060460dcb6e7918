"""Methods as Python calls, made from the files of `conf/method`: `kvq.methods.KIVI(bits=2, group_size=64)`.

A keyword is a setting of the quantizers of keys and values; `key={"group_size": 128}` is of one side. A stage's
settings have its name in front (`rotation_seed`), and a stage's own name with None leaves it out (`hadamard=None`).
`quantize` makes the caches of a model quantized ones while a `with` statement lasts.
`kvq/methods/__init__.pyi` has the signatures for editors and type checkers; `experiments/docs/presets.py` writes it.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from kvq.cache import KVCache
from kvq.cache.hooks import named_arguments, stacks
from kvq.config import compose
from kvq.config.explain import choices
from kvq.config.method import RENAMED
from kvq.errors import ConfigError, did_you_mean
from kvq.methods.build import build_method
from kvq.methods.merged import check_unrotated
from kvq.methods.method import Method
from kvq.models.layers import head_dims_of
from kvq.models.placing import unwrapped

_SIDES = ("key", "value")
_SIMPLE = re.compile(r"(bool|int|float|str)( \| None)?")
_OF_THE_METHOD = {"sink_tokens": "sink_tokens", "residual_policy": "residual.policy", "residual_size": "residual.size"}


@dataclass(frozen=True)
class _Setting:
    """A setting by side (`""`: of the method): its path in the configuration, its type and its default there."""

    paths: dict[str, str]
    annotation: str
    default: Any


class Maker:
    """Makes presets of one method; its signature lists the method's settings with their defaults."""

    def __init__(self, name: str) -> None:
        self.name, self.called = name, names()[name]
        self._settings = _collect_settings(_method_config(name))
        self.__doc__ = f"`method={name}`; settings that are not given are as in `conf/method/{name}.yaml`."
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter("bits", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=3, annotation="Any"),
                *(
                    inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
                    for one, annotation, default in self.keywords()
                ),
            ],
            return_annotation="Preset",
        )

    def keywords(self) -> Iterator[tuple[str, str, Any]]:
        """Name, type and default of each keyword; `...`: keys and values differ, or the stage is there."""
        for one, setting in self._settings.items():
            yield one, setting.annotation, setting.default
        for side in _SIDES:
            if any(side in setting.paths for setting in self._settings.values()):
                yield side, "Mapping[str, Any]", {}

    def __call__(self, bits: Any = 3, **given: Any) -> Preset:
        """A preset."""
        words = []
        apart = {side: given.pop(side, {}) for side in _SIDES}
        for one, value in given.items():
            words += [f"{path}={_override_value(value)}" for path in self._setting(one).paths.values()]
        for side, settings in apart.items():
            for one, value in settings.items():
                paths = self._setting(one, side).paths
                words.append(f"{paths[side]}={_override_value(value)}")
        return Preset(self.name, bits, tuple(words))

    def _setting(self, name: str, side: str | None = None) -> _Setting:
        """The setting of a keyword, of one side or of any. Raises: ConfigError: there is none of that name."""
        known = [one for one, found in self._settings.items() if side is None or side in found.paths]
        name = RENAMED.get(name, name)
        if name not in known:
            of = "" if side is None else f"{side}="
            raise ConfigError(
                f"{self.called}({of}{name}): its settings are {', '.join(known)}.{did_you_mean(name, known)}"
            )
        return self._settings[name]

    def __repr__(self) -> str:
        return f"kvq.methods.{self.called}{inspect.signature(self)}".replace("Ellipsis", "...").replace("'", "")


@functools.cache
def names() -> dict[str, str]:
    """File of each method -> name of its call: the label where it is the file's name but for letters' case."""
    methods = [name for name in choices()["method"] if "/" not in name]
    words = {name: re.sub(r"\W", "", str(_method_config(name).get("label"))) for name in methods}
    return {name: word if word.lower() == name.replace("_", "") else name for name, word in words.items()}


def maker(called: str) -> Maker:
    """The `Maker` that `kvq.methods.<called>` is, such as `KIVI`. Raises: AttributeError: no method has that name."""
    name = next((name for name, other in names().items() if other == called), None)
    if name is None:
        raise AttributeError(
            f"module 'kvq.methods' has no attribute '{called}'.{did_you_mean(called, names().values())}"
        )
    return _maker(name)


_maker = functools.cache(Maker)


@functools.cache
def _method_config(name: str) -> dict[str, Any]:
    """The composed settings of a method, where interpolations are text."""
    found = OmegaConf.to_container(compose([f"method={name}"]).method, resolve=False, enum_to_str=True)
    assert isinstance(found, dict)
    return {str(setting): value for setting, value in found.items()}


def _collect_settings(file: Mapping[str, Any]) -> dict[str, _Setting]:
    """The settings of a method that a call takes as keywords, by keyword, from the method's configuration."""
    found: dict[str, _Setting] = {}
    for side in _SIDES:
        for one, setting in _codec_settings(side, file.get(side) or {}):
            other = found.get(one)
            same = other is None or other.default == setting.default
            paths = setting.paths if other is None else other.paths | setting.paths
            found[one] = _Setting(paths, setting.annotation, setting.default if same else ...)
    for one, path in (_OF_THE_METHOD if found else {}).items():
        place, _, last = path.rpartition(".")
        values = file if not place else file.get(place) or {}
        if last in values:
            found[one] = _Setting({"": path}, type(values[last]).__name__, values[last])
    return found


def _codec_settings(side: str, codec: Mapping[str, Any]) -> Iterator[tuple[str, _Setting]]:
    """The settings of a codec: its quantizer's, whose names stand alone, and those of its stages."""
    yield from _part_settings(side, f"{side}.quantizer.", "", codec.get("quantizer") or {})
    for stage, part in (codec.get("stages") or {}).items():
        if part is not None:
            yield stage, _Setting({side: f"{side}.stages.{stage}"}, "None", ...)
            yield from _part_settings(side, f"{side}.stages.{stage}.", f"{stage}_", part)


def _part_settings(side: str, place: str, prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, _Setting]]:
    """The settings of a quantizer or stage at path `place` of a side, each keyword with `prefix` in front."""
    known = inspect.signature(pkgutil.resolve_name(part["_target_"])).parameters if "_target_" in part else {}
    for one, default in part.items():
        if one not in ("_target_", "bits") and not isinstance(default, Mapping | list) and "${" not in str(default):
            said = str(known[one].annotation) if one in known else ""
            annotation = said if _SIMPLE.fullmatch(said) else "str" if isinstance(default, str) else "Any"
            yield f"{prefix}{one}", _Setting({side: f"{place}{one}"}, annotation, default)


def _override_value(value: Any) -> str:
    """A value as a Hydra override writes it: `null`, `true`, else `str(value)`."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def stub() -> str:
    """The text of `kvq/methods/__init__.pyi`."""
    lines = ["# Written by experiments/docs/presets.py from conf/method: the calls that kvq.methods.presets makes.", ""]
    lines += ["from collections.abc import Mapping", "from typing import Any", ""]
    lines += ["from kvq.methods.presets import Preset", ""]
    for name, called in names().items():
        keywords = [f"{one}: {annotation} = ..." for one, annotation, _ in maker(called).keywords()]
        given = ["bits: Any = ...", *(["*", *keywords] if keywords else [])]
        lines += [f"def {called}({', '.join(given)}) -> Preset: ...  # {name}"]
    return "\n".join(lines) + "\n"


def method_for(model: nn.Module, name: str, bits: Any = 3, overrides: Sequence[str] = ()) -> Method:
    """A method by name, checked against the head dims and the order of channels of a model.

    Args:
        model: a causal LM of transformers.
        name, bits, overrides: as `kvq.build_method`.

    Raises:
        ConfigError, Unsupported: as `kvq.build_method`, for any of the model's head dims.
    """
    config = unwrapped(model).config.get_text_config(decoder=True)
    method = build_method(name, bits, list(dict.fromkeys(head_dims_of(config))), overrides)
    return method.for_model(config)


@dataclass(frozen=True)
class Preset:
    """A method with settings of its own, not yet built for a model; `kvq.quantize` takes it.

    Attributes:
        name: of the method's file, such as `"kivi"`.
        bits: as `kvq.build_method`.
        overrides: what departs from the file, as `kvq.build_method` takes it.
    """

    name: str
    bits: Any = 3
    overrides: tuple[str, ...] = ()

    def build(self, head_dim: int = 128) -> Method:
        """The method for heads of `head_dim` channels. Raises: as `kvq.build_method`."""
        return build_method(self.name, self.bits, head_dim, self.overrides)

    def build_for(self, model: nn.Module) -> Method:
        """The method for a model of transformers. Raises: as `kvq.method_for`."""
        return method_for(model, self.name, self.bits, self.overrides)


class _Caches:
    """The caches that calls of a model get within `quantize`, and which of them were read. Settings as `KVCache`."""

    def __init__(self, model: Any, method: Method, **settings: Any) -> None:
        self._model, self._method, self._settings = model, method, settings
        self._starts: list[set[bool]] = []

    def make(self) -> Cache:
        """A new cache."""
        cache = KVCache(self._model, self._method, **self._settings)
        self._starts.append(cache.starts)
        return EncoderDecoderCache(cache, DynamicCache()) if self._model.config.is_encoder_decoder else cache

    def _uses_cache(self, *asked: bool | None) -> bool:
        """Whether a call uses a cache, by the first of what is asked that is not None."""
        used = next((one for one in asked if one is not None), True)
        if not used:
            self._starts.append({False})
        return used

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook that adds a cache where none is given."""
        call = named_arguments(module, args, kwargs)
        default = getattr(self._model.config.get_text_config(), "use_cache", None)
        if call.get("past_key_values") is not None or not self._uses_cache(call.get("use_cache"), default):
            return None
        return (), call | {"past_key_values": self.make()}

    def wrap_generate(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` that adds a cache where none is given."""

        def generate(*args: Any, **kwargs: Any) -> Any:
            configs = (args[1] if len(args) > 1 else kwargs.get("generation_config"), self._model.generation_config)
            asked = (getattr(config, "use_cache", None) for config in configs)
            if kwargs.get("past_key_values") is None and self._uses_cache(kwargs.get("use_cache"), *asked):
                kwargs["past_key_values"] = self.make()
            return plain(*args, **kwargs)

        return generate

    def warn_of_unread(self) -> None:
        """Warn of calls that read no quantized token."""
        if {False} not in self._starts or self._method.is_full_precision or self._settings["quantized_prefill"]:
            return
        warnings.warn(
            "kvq.quantize: a call read no quantized token, so its loss and logits are of full precision: one forward "
            "reads what it stores only with quantized_prefill=True, and use_cache=False stores nothing",
            stacklevel=4,
        )


@contextmanager
def quantize(
    model: nn.Module,
    method: str | Preset | Method,
    bits: Any = 3,
    *,
    overrides: Sequence[str] = (),
    attention: str = "dense",
    dtype: torch.dtype | None = None,
    quantized_prefill: bool = False,
) -> Iterator[Method]:
    """`with kvq.quantize(model, "kivi", bits=2): model.generate(**inputs)`: caches made inside are quantized.

    A call of the model or of its `generate` that is given no cache gets a new `KVCache`, of an encoder-decoder for the
    decoder's own tokens; a cache that is given is left alone. Of nested statements the inner one holds. After the
    statement the model is as it was, and so are weights that a method rotates. It warns of calls that read no quantized
    token: one forward, such as for a loss, attends at full precision before it stores, and `use_cache=False` stores
    nothing.

    Args:
        model: a causal LM of transformers (docs/models.md).
        method: a name; a call of a method (`kvq.methods.KIVI(bits=2)`), which has its own bits; or a method that is
            built, such as one with its calibration (`kvq.calibrate`, `kvq.bind_calibration`). The last two come without
            `overrides`.
        bits, overrides: as `kvq.build_method`.
        attention, dtype, quantized_prefill: as `KVCache`. With the last, also one forward reads quantized blocks.

    Yields:
        The method.

    Raises:
        ConfigError, Unsupported: as `kvq.build_method` and `KVCache`, such as for a calibrated method without tables.
    """
    if overrides and not isinstance(method, str):
        raise ConfigError("quantize: overrides belong to a method by name, not to a call or to one that is built")
    if isinstance(method, str):
        method = Preset(method, bits, tuple(overrides))
    chosen = method.build_for(model) if isinstance(method, Preset) else method
    plain = unwrapped(model)
    check_unrotated(plain.config.get_text_config())
    settings: Any = {"attention": attention, "dtype": dtype, "quantized_prefill": quantized_prefill}
    caches = _Caches(plain, chosen, **settings)
    parts = {plain, *stacks(plain)} if not plain.config.is_encoder_decoder else {plain}
    with ExitStack() as undo:
        if chosen.merged is not None:
            undo.enter_context(chosen.merged.in_weights(plain))
        KVCache(plain, chosen, **settings)  # what cannot work is refused here, not at the first token
        if hasattr(plain, "generate"):
            undo.enter_context(patch.object(plain, "generate", caches.wrap_generate(plain.generate)))
        for part in parts:
            hook = part.register_forward_pre_hook(caches.before_call, prepend=True, with_kwargs=True)
            undo.callback(hook.remove)
        yield chosen
    caches.warn_of_unread()
