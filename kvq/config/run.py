"""The schema of every setting.

Values are checked when a run enters (`kvq.config.resolve`); choices and unknown keys while Hydra composes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from kvq.config.backend import backend_of
from kvq.config.bits import Bits, BitsByLayerConfig, mean_label, parse_bits
from kvq.config.calibration import CalibrationConfig
from kvq.config.diagnostics import DiagnosticConfig
from kvq.config.files import DISTRIBUTION, EMBEDDED
from kvq.config.layout import LayoutConfig
from kvq.config.residual import Residual, ResidualConfig, effective_residual
from kvq.config.tasks import TIMED, Scoring, is_timed
from kvq.errors import (
    MAX_THREADS,
    ConfigError,
    at_least,
    check_codec,
    check_folder,
    check_path,
    check_seed,
    did_you_mean,
    not_empty,
    within,
)


class Device(enum.StrEnum):
    """Where the model runs; `auto`: CUDA when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(enum.StrEnum):
    """Dtype of weights and activations, by torch's name."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class Loader(enum.StrEnum):
    """How text is read: from installed packages, as one stream of joined rows, or as cropped documents.

    `items`: no text but the items of a task that brings its own.
    """

    embedded = "embedded"
    text = "text"
    documents = "documents"
    items = "items"


@dataclass
class OutliersConfig:
    """Function-preserving channel outliers: scales are powers of two, counts (0: none) per layer and KV head.

    `sink`: whether the begin-of-text token has them too, in channels drawn from `seed`. If not, they are the channels
    in which its key and its value at position 0 are least, and `seed` has no effect.
    """

    version: ClassVar[int] = 1

    key_scale: float = 8.0
    value_scale: float = 4.0
    key_pairs: int = 0
    value_channels: int = 0
    seed: int = 0
    sink: bool = True

    def __bool__(self) -> bool:
        return bool(self.key_pairs or self.value_channels)

    def __post_init__(self) -> None:
        for setting in ("key_scale", "value_scale"):
            scale = getattr(self, setting)
            if scale <= 0 or not (scale.hex().startswith("0x1.0000000000000p")):
                raise ConfigError(f"model.outliers.{setting}={scale}: a power of two, so that logits stay the same")
        at_least("model.outliers.key_pairs", self.key_pairs, 0)
        at_least("model.outliers.value_channels", self.value_channels, 0)
        check_seed("model.outliers.seed", self.seed)


def _check_stored(setting: str, dtype: Dtype | None) -> None:
    if dtype is Dtype.float64:
        raise ConfigError(f"{setting}={dtype}: null, float16, bfloat16 or float32")


DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which transformers spreads a model over devices."""
LOAD_IN = ("4bit", "8bit", "gptq", "awq")
"""Forms of quantized weights."""


def _is_size(given: Any) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?([KMG]i?B)?", str(given)) is not None


@dataclass
class ModelConfig:
    """A model: `path` is a hub id, a local folder, or `embedded:tiny`. `context` in tokens, None = the model's own.

    `gguf`: the name of a GGUF file there, which is then the whole model; a `path` that ends in .gguf names both, and
    `distribution:NAME/FILE.gguf` a file of an installed Python distribution. `weights`: the type of most of its weights
    (`Q4_1`), said wherever the model is named; `sha256` (hex): of the file. `device_map` spreads the layers over all
    devices, as transformers does; None = one device. `max_memory`: how much of each it may take, by its number or as
    `cpu` (`{0: 20GiB, cpu: 60GiB}`). `load_in`: 4bit or 8bit quantizes weights on loading; gptq or awq says that the
    checkpoint's are. `round_weights`: bits to which the weights of linear layers are rounded, in groups of 128 input
    channels, after a rotation is merged into them. `attn_implementation`: transformers' name for it (None: its choice).
    `trust_remote_code`: its code is run. `bos`: it was trained on texts that begin with that token; None: if its
    tokenizer writes it. `cache_dtype`: what `cache.dtype=null` stands for; None: `dtype`.
    """

    name: str = MISSING
    path: str = MISSING
    gguf: str | None = None
    weights: str | None = None
    sha256: str | None = None
    revision: str | None = None
    dtype: Dtype = Dtype.float32
    context: int | None = None
    device_map: str | None = None
    max_memory: Any = None
    load_in: str | None = None
    round_weights: int | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    bos: bool | None = None
    cache_dtype: Dtype | None = None
    outliers: OutliersConfig = field(default_factory=OutliersConfig)

    def __post_init__(self) -> None:
        check_path("model.path", self.path)  # first: a name may be taken from it
        for setting in ("name", "gguf", "revision", "attn_implementation"):
            not_empty(f"model.{setting}", getattr(self, setting))
        if self.path.endswith(".gguf") and self.gguf is None:
            folder, _, self.gguf = self.path.rpartition("/")
            self.path = folder if folder.startswith(("/", ".", "~", DISTRIBUTION)) else f"./{folder}"
        at_least("model.context", self.context, 2)
        within("model.round_weights", self.round_weights, 2, 8)
        _check_stored("model.cache_dtype", self.cache_dtype)
        if self.device_map is not None and self.device_map not in DEVICE_MAPS:
            hint = did_you_mean(self.device_map, DEVICE_MAPS)
            raise ConfigError(f"model.device_map={self.device_map}: null or one of {', '.join(DEVICE_MAPS)}.{hint}")
        if self.load_in is not None and self.load_in not in LOAD_IN:
            raise ConfigError(f"model.load_in={self.load_in}: null or one of {', '.join(LOAD_IN)}")
        self._check_memory()

    def _check_memory(self) -> None:
        if (given := self.max_memory) is None:
            return
        named = isinstance(given, Mapping) and given
        if not named or not all(re.fullmatch(r"\d+|cpu", str(one)) and _is_size(size) for one, size in given.items()):
            raise ConfigError(f"model.max_memory={given}: sizes by device, such as {{0: 20GiB, cpu: 60GiB}}")
        if self.device_map is None:
            raise ConfigError("model.max_memory: bounds model.device_map, which is null; use model.device_map=auto")


def trained_with_bos(model: ModelConfig, tokenizer_writes: bool | None = None) -> bool | None:
    """Whether a model was trained on texts that begin with a begin-of-text token; None: only its tokenizer can say.

    Args:
        tokenizer_writes: what the tokenizer says, where it was asked. Those of embedded models write none.
    """
    if model.bos is not None:
        return model.bos
    return False if model.path.startswith(EMBEDDED) else tokenizer_writes


@dataclass
class DatasetConfig:
    """Text to score: on the hub (`hub_id`), or local (`path`: jsonl, parquet, text or a saved dataset)."""

    name: str = MISSING
    loader: Loader = Loader.text
    path: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    data_files: Any = None
    split: str | None = None
    text_field: str = "text"
    separator: str = "\n\n"
    documents: int | None = None
    seed: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        not_empty("dataset.name", self.name)
        check_path("dataset.path", self.path)
        not_empty("dataset.hub_id", self.hub_id)
        at_least("dataset.documents", self.documents, 1)
        at_least("dataset.max_tokens", self.max_tokens, 2)
        check_seed("dataset.seed", self.seed)
        if self.loader is Loader.embedded and (self.path or self.hub_id):
            raise ConfigError(
                f"dataset.path={self.path or self.hub_id}: dataset={self.name} is embedded and reads no other text; "
                "use dataset=wikitext2 (joined rows) or c4 (documents)"
            )


@dataclass
class FirstLayersConfig:
    """Codecs of the first `count` layers, where they are not those of the others (None: as the others)."""

    count: int = 0
    key: Any = None
    value: Any = None

    def __post_init__(self) -> None:
        at_least("method.first_layers.count", self.count, 0)
        check_codec("method.first_layers.key", self.key)
        check_codec("method.first_layers.value", self.value)


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
    `plan`: which ones it treats apart. `full_precision_layers`: layers whose keys or values are not quantized, by side;
    negative ones count from the end. `backend`: another library's cache in the place of codecs, which are then null (a
    `BackendConfig` once checked). `gqa_compensation`: ceil(log4 g) bits more for g query heads of a KV head, up to 8.
    `merge_rotation`: the model's weights rotate values, in the place of the first stage of their codec;
    `merge_key_rotation`: keys and queries too, without rotary embeddings. `sink_tokens`: first tokens that stay in full
    precision; `kept_keys`: and keys of these, in some layers; `sink_detection`: or those that this finds anywhere.
    `latent_only`: a format of the latent of multi-head latent attention, refused where another thing is cached.
    """

    name: str = MISSING
    label: str | None = None
    arxiv: str | None = None
    note: str | None = None
    serve: str | None = None
    bits_range: list[int] | None = None
    real_bits: bool = False
    latent_only: bool = False
    bits_by_layer: BitsByLayerConfig = field(default_factory=BitsByLayerConfig)
    key: Any = None
    value: Any = None
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    full_precision_layers: dict[str, list[int]] = field(default_factory=lambda: {"key": [], "value": []})
    backend: Any = None
    first_layers: FirstLayersConfig = field(default_factory=FirstLayersConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    sink_tokens: int = 0
    gqa_compensation: bool = False
    merge_rotation: bool = False
    merge_key_rotation: bool = False
    kept_keys: KeptKeysConfig = field(default_factory=KeptKeysConfig)
    sink_detection: Any = None
    eviction: Any = None
    plan: Any = None

    def __post_init__(self) -> None:
        not_empty("method.name", self.name)
        check_codec("method.key", self.key)
        check_codec("method.value", self.value)
        at_least("method.sink_tokens", self.sink_tokens, 0)
        for side in self.full_precision_layers:
            if side not in ("key", "value"):
                raise ConfigError(f"method.full_precision_layers.{side}: key or value")
        limits = self.bits_range
        if limits is not None and not (len(limits) == 2 and 1 <= limits[0] <= limits[1]):
            raise ConfigError(f"method.bits_range={limits}: [lowest, highest], or null for a fixed rate")
        self.backend = backend_of(self.backend)
        if self.backend is not None and (self.key is not None or self.value is not None or limits is None):
            raise ConfigError("method.backend: stands in the place of key and value, and needs bits_range")

    @property
    def is_full_precision(self) -> bool:
        return self.key is None and self.value is None and self.backend is None and self.eviction is None


class Attention(enum.StrEnum):
    """What a decoded token attends to: decoded keys and values, or packed codes (the same up to rounding)."""

    dense = "dense"
    packed = "packed"


class WindowLayers(enum.StrEnum):
    """What becomes of layers that attend to a window of tokens: quantized as the others, or kept in full precision."""

    quantize = "quantize"
    keep = "keep"


class Latent(enum.StrEnum):
    """What a cache holds of multi-head latent attention: the latent, or the keys and values that it expands to."""

    latent = "latent"
    expanded = "expanded"


@dataclass
class CacheConfig:
    """`keep_decoded`: also keep the decoded copy, for speed; results are the same, and no memory is saved.

    `attention`: what a task that measures speed decodes with; scores always come from dense attention.
    `dtype`: of what the cache keeps in full precision, baseline and residual alike; None = the model's default.
    `window_layers`: see `WindowLayers`; they hold no more than their window and part of a block either way.
    `latent`: see `Latent`.
    """

    keep_decoded: bool = False
    attention: Attention = Attention.dense
    dtype: Dtype | None = None
    window_layers: WindowLayers = WindowLayers.quantize
    latent: Latent = Latent.latent

    def __post_init__(self) -> None:
        _check_stored("cache.dtype", self.dtype)
        if self.keep_decoded and self.attention is Attention.packed:
            raise ConfigError("cache.attention=packed: reads codes; cache.keep_decoded=true is for dense attention")


@dataclass
class Config:
    """One run."""

    bits: Any = 3
    seed: int = 0
    plan: bool = False
    force: bool = False
    results_dir: str = "results"
    device: Device = Device.auto
    threads: int | None = None
    method: MethodConfig = field(default_factory=MethodConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    task: Any = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    logger: Any = None

    def __post_init__(self) -> None:
        parse_bits(self.bits, self.method.real_bits)
        limit, asked = self.model.context, getattr(self.task, "context", None)
        if limit is not None and asked is not None and asked > limit:
            name = self.model.name
            raise ConfigError(f"task.context={asked}: model={name} takes at most {limit} tokens (model.context)")
        within("threads", self.threads, 1, MAX_THREADS)
        check_seed("seed", self.seed)
        if self.cache.attention is Attention.packed and self.task is not None and not is_timed(self.task):
            name = getattr(self.task, "name", self.task)
            raise ConfigError(
                f"cache.attention=packed: task={name} scores with dense attention; packed is for {' and '.join(TIMED)}"
            )
        if self.cache.dtype is not None and isinstance(self.task, DiagnosticConfig):
            raise ConfigError(f"cache.dtype={self.cache.dtype}: task={self.task.name} fills no cache; leave it null")
        check_folder("results_dir", self.results_dir)

    @property
    def parsed_bits(self) -> Bits | None:
        """Bits of keys and values; None for a fixed-rate method, which ignores `bits`."""
        return None if self.method.bits_range is None else parse_bits(self.bits, self.method.real_bits)

    @property
    def bits_label(self) -> str:
        """Bits as a record's name has them, means where layers have bits of their own; empty for a fixed rate."""
        bits, by_layer = self.parsed_bits, self.method.bits_by_layer
        if bits is None:
            return ""
        return mean_label(by_layer.layers(bits)) if by_layer else bits.label

    @property
    def cache_dtype(self) -> Dtype | None:
        """Dtype of what a cache keeps in full precision; None: the model's own."""
        asked = self.cache.dtype or self.model.cache_dtype
        return None if asked is self.model.dtype or isinstance(self.task, DiagnosticConfig) else asked

    @property
    def effective_residual(self) -> Residual:
        """The method's default under this run's `residual`; `parallel` and `continuation` quantize at once."""
        residual = effective_residual(self.method.residual, self.residual)
        in_turn = getattr(self.task, "scoring", Scoring.generation) is Scoring.generation
        return residual if in_turn else residual.at_once()
