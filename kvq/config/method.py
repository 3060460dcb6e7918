"""The schema of a method: codecs, calibration, residual policies, and what differs by layer and token."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

from omegaconf import MISSING

from kvq.config import plugins
from kvq.config.bits import BitsByLayerConfig
from kvq.config.limits import Count, Natural, PathName, Seed, Several, Text, check_limits
from kvq.errors import ConfigError, require

Policy = enum.StrEnum("Policy", "none block sliding")
"""When tokens leave full precision.

`none`: at once, in blocks of `size`. `block`: a buffer of `size` tokens is quantized whole each time it is full.
`sliding`: the newest `size` tokens stay; those before them leave as soon as a codec's group of them is complete
(one by one where each token has its own statistics, `size` at a time where a whole block shares them). `sliding` of
size 0 is how serving engines store: a token is quantized when it is written, and its own query reads it decoded.
"""

PrefillBlock = enum.StrEnum("PrefillBlock", "size whole")
"""How a prefill is cut: blocks of `size`, or the whole prefill as one block (nsn)."""
TEST_TEXT = 0.05
"""Largest share of n-grams in common with the scored text; texts that are apart share up to 0.01 (docs/methods.md)."""
RENAMED = {
    "halves": "rounding",
    "least_scale": "min_scale",
    "side_dtype": "scale_dtype",
    "plan": "token_policy",
    "kvq.methods.plan.OutlierTokens": "kvq.methods.mixed_precision.OutlierTokens",
    "kvq.methods.plan.Saliency": "kvq.methods.mixed_precision.Saliency",
}
"""Settings and targets by their names of earlier versions, which overrides may still use, and keys and records keep."""
_RENAMED_PATH = re.compile(r"(?P<path>[+~]{0,2}method\.(?:[\w.]+\.)?(?:halves|least_scale|side_dtype|plan))(?=[.=]|$)")
WRITTEN: dict[str, dict[str, Any]] = {
    "kvq.codecs.NonUniformQuantizer": {"chosen": "threshold"},
    "kvq.codecs.ClippedQuantizer": {"step": "levels"},
    "kvq.methods.plan.Saliency": {"divide_by": "probes", "decoding": "shares"},
}
"""Settings that a class no longer has, with the value of all records, which keys keep."""
CodecSettings = Annotated[
    Any, lambda setting, given: require(isinstance(given, Mapping), setting, given, "a codec (stages, order), or null")
]


@dataclass
class ResidualSideConfig:
    """Settings of one side; None = not said here."""

    policy: Policy | None = None
    size: int | None = None
    prefill_block: PrefillBlock | None = None


@dataclass
class ResidualConfig(ResidualSideConfig):
    """Settings for both sides, and for keys or values only, which win."""

    key: ResidualSideConfig = field(default_factory=ResidualSideConfig)
    value: ResidualSideConfig = field(default_factory=ResidualSideConfig)


@dataclass(frozen=True)
class ResidualSide:
    """The residual of keys or values. `size` is in tokens; under `none` it is the codec's block."""

    policy: Policy
    size: int
    prefill_block: PrefillBlock

    def schedule(self, token_group: int | None) -> tuple[int, int]:
        """The number of newest tokens that always stay in full precision, and how many tokens leave together.

        Args:
            token_group: tokens that share statistics in the side's codec (None: the whole block); used by `sliding`.
        """
        if self.policy is Policy.sliding:
            return self.size, token_group or max(self.size, 1)
        return 0, max(self.size, 1)

    @property
    def keeps_nothing(self) -> bool:
        """Every token is quantized as it is written (`sliding` of size 0)."""
        return self.policy is Policy.sliding and self.size == 0

    def for_parallel_scoring(self) -> ResidualSide:
        """See `Residual.for_parallel_scoring`; `ConfigError` where `size` is 0, so that there is no block."""
        if self.keeps_nothing:
            return self
        if self.size == 0:
            raise ConfigError("residual.size=0: token by token, which scoring=parallel cannot be; give a block size")
        return replace(self, policy=Policy.none)


@dataclass(frozen=True)
class Residual:
    """The residuals of keys and of values."""

    key: ResidualSide
    value: ResidualSide

    def for_parallel_scoring(self) -> Residual:
        """The residual for scoring that quantizes a whole window at once: the same blocks, no recent tokens kept."""
        return Residual(self.key.for_parallel_scoring(), self.value.for_parallel_scoring())


def effective_residual(default: ResidualConfig, override: ResidualConfig) -> Residual:
    """The method's default under the run's override; in each, a side's own setting wins over the common one."""
    return Residual(key=_side("key", default, override), value=_side("value", default, override))


def _side(name: str, default: ResidualConfig, override: ResidualConfig) -> ResidualSide:
    """The residual of one side (`name`): settings of the override before the default's, the side's own first."""
    layers = [getattr(override, name), override, getattr(default, name), default]
    policy = next((layer.policy for layer in layers if layer.policy is not None), None)
    size = next((layer.size for layer in layers if layer.size is not None), None)
    prefill = next((layer.prefill_block for layer in layers if layer.prefill_block is not None), PrefillBlock.size)
    if policy is None:
        raise ConfigError(f"method.residual.policy: the method sets none for its {name}s; one of {', '.join(Policy)}")
    least = 1 if policy is Policy.none else 0
    if size is None or size < least:
        given = "null" if size is None else size
        raise ConfigError(f"residual.size={given} ({name}s): a number of tokens, at least {least} under {policy}")
    return ResidualSide(policy, size, prefill)


def leaving(held: int, kept: int, group: int, whole: bool) -> int:
    """Tokens that leave full precision of `held`: all but `kept`, in whole groups unless they become one block.

    `kept` and `group` are those of a residual's schedule.
    """
    gone = held - kept
    if gone < group:
        return 0
    return gone if whole else gone - gone % group


def current_names() -> dict[str, str]:
    """Name of an earlier version -> current name, of settings and of classes, those of plugins with them."""
    return RENAMED | plugins.merge_tables("renamed")


def earlier_names() -> dict[str, str]:
    """Current name -> the name that keys and records keep."""
    return {name: earlier for earlier, name in current_names().items()} | plugins.merge_tables("keyed")


def with_names(settings: Any, names: Mapping[str, str], more: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Settings of a part, and of the parts in it, with some of their names and targets replaced.

    A target whose name is empty has none. `more`: settings that a target has where they are not given.
    """
    if isinstance(settings, Mapping):
        found = {names.get(name, name): with_names(value, names, more) for name, value in settings.items()}
        if isinstance(target := found.get("_target_"), str):
            found["_target_"] = names.get(target, target)
            if not found["_target_"]:
                del found["_target_"]
                return found
            found = {**(more or {}).get(found["_target_"], {}), **found}
        return found
    return [with_names(value, names, more) for value in settings] if isinstance(settings, list) else settings


def with_current_names(overrides: Sequence[str]) -> list[str]:
    """Replace the names of settings of earlier versions by the current ones."""
    words = list(overrides)
    for index, word in enumerate(words):
        if (match := _RENAMED_PATH.match(word)) is not None:
            before, _, earlier = match["path"].rpartition(".")
            words[index] = f"{before}.{RENAMED[earlier]}{word[match.end() :]}"
    return words


@dataclass
class CalibrationConfig:
    """The data that a calibrated method is fitted to; `dataset` null: the method is not calibrated.

    Attributes:
        dataset: a configuration of `conf/dataset`. `pydocs+pysource`: a mixture, whose texts share the samples.
        path: a local copy of that text (a file or a folder), as `dataset.path`; of a mixture, of its part `text`.
        split: null: `calibration` of an embedded corpus, `train` of a data set on the hub; a local text has none.
        samples, length: number of sequences and their length in tokens; drawn by `seed`.
        tokens: number of tokens of all samples that are fitted to, drawn by `seed`; null: all.
        seed: of the draws of samples and tokens, and of the starting points of fits.
        allow_test_text: calibrate all the same on a text that shares more than `TEST_TEXT` of its n-grams with what is
            scored, for a bound on what a calibration can reach. Records have the share, tables mark it.
    """

    version: ClassVar[int] = 1
    dataset: str | None = None
    path: PathName | None = None
    split: str | None = None
    samples: Count = 16
    length: Several = 2048
    tokens: int | None = None
    seed: Seed = 0
    allow_test_text: bool = False

    def __post_init__(self) -> None:
        check_limits("method.calibration", self)
        if self.tokens is not None and self.tokens < self.samples:
            raise ConfigError(f"method.calibration.tokens={self.tokens}: at least 1 of each of {self.samples} samples")
        if self.split == "test" and not self.allow_test_text:
            raise ConfigError("method.calibration.split=test: never the text under test; train, or null")


def _with_orders(settings: Any) -> Any:
    """The settings of a codec, where an order that is null or absent is that in which the stages stand."""
    if isinstance(settings, Mapping):
        parts = {name: _with_orders(part) for name, part in settings.items()}
        if isinstance(parts.get("stages"), dict) and parts.get("order") is None:
            parts["order"] = list(parts["stages"])
        return parts
    return [_with_orders(part) for part in settings] if isinstance(settings, list) else settings


@dataclass
class KeptKeysConfig:
    """Tokens by their texts, whose keys `layers` keep in full precision (none: no tokens)."""

    texts: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=lambda: [0])


@dataclass
class MethodConfig:
    """A method: one codec each for keys and values (None = full precision), and its default residual.

    `serve`: of an engine's format, the command that serves model M with it. `bits_range` is the lowest and highest
    `bits` it can do; None = a fixed rate, whatever `bits` says. `real_bits`: fractions too, down to 0.5.
    `bits_by_layer`: bits of each layer, in the place of `bits`. `eviction`: which tokens a layer keeps (None = all).
    `token_policy`: which ones have bits of their own. `full_precision_layers`: layers whose keys or values are not
    quantized, by side; negative ones count from the end. `gqa_compensation`: ceil(log4 g) bits more for g query heads
    of a KV head, up to 8. `merge_rotation`: the model's weights rotate values, in the place of the first stage of their
    codec. `sink_tokens`: first tokens that stay in full precision; `kept_keys`: and keys of these, in some layers.
    `values_of`: another method, whose codec and residual of values, not first tokens, replace these (`kivi+nsnquant`).
    `policies`: further ones by name, such as a plugin's; `backend`: another library's cache in the place of codecs.
    `latent_only`: a format of the latent of multi-head latent attention, refused where another is cached.
    """

    name: Text = MISSING
    label: str | None = None
    arxiv: str | None = None
    note: str | None = None
    serve: str | None = None
    bits_range: list[int] | None = None
    real_bits: bool = False
    latent_only: bool = False
    bits_by_layer: BitsByLayerConfig = field(default_factory=BitsByLayerConfig)
    key: CodecSettings = None
    value: CodecSettings = None
    values_of: str | None = None
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    full_precision_layers: dict[str, list[int]] = field(default_factory=lambda: {"key": [], "value": []})
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    sink_tokens: Natural = 0
    gqa_compensation: bool = False
    merge_rotation: bool = False
    kept_keys: KeptKeysConfig = field(default_factory=KeptKeysConfig)
    eviction: Any = None
    token_policy: Any = None
    policies: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_limits("method", self)
        for name in ("key", "value", "eviction", "token_policy", "policies"):
            setattr(self, name, _with_orders(with_names(getattr(self, name), current_names())))
        for name in sorted(self.policies.keys() & {entry.name for entry in fields(self)}):
            raise ConfigError(f"method.policies.{name}: the name of a setting of the method")
        for side in sorted(self.full_precision_layers.keys() - {"key", "value"}):
            raise ConfigError(f"method.full_precision_layers.{side}: key or value")
        limits = self.bits_range
        if limits is not None and not (len(limits) == 2 and 1 <= limits[0] <= limits[1]):
            raise ConfigError(f"method.bits_range={limits}: [lowest, highest], or null for a fixed rate")

    @property
    def is_full_precision(self) -> bool:
        """Whether neither codecs, another library's cache nor an eviction policy changes the cache."""
        codecs = self.key is not None or self.value is not None
        return not codecs and self.eviction is None and self.policies.get("backend") is None
