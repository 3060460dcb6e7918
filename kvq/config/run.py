"""The schema of every setting, whose values are checked when a run enters (`kvq.config.resolve`)."""

from __future__ import annotations

import enum
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from omegaconf import MISSING

from kvq.config.bits import Bits, mean_label, parse_bits
from kvq.config.diagnostics import DiagnosticConfig
from kvq.config.limits import Count, Natural, PathName, Seed, Several, Text, among, between, check_limits
from kvq.config.method import MethodConfig, Residual, ResidualConfig, effective_residual
from kvq.config.tasks import TIMED, Scoring, is_timed
from kvq.errors import MAX_THREADS, ConfigError, check_choice, check_path, check_seed, within

AXES = ("model", "method", "setting", "dataset", "metric")
"""Columns of the published figures that tell them apart."""
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which transformers spreads a model over devices."""
EMBEDDED, DISTRIBUTION = "embedded:", "distribution:"
"""Begin a `model.path` of a model of the package, or a file that an installed Python distribution carries."""
_MAX_NAME = 128

Device = enum.StrEnum("Device", "auto cpu cuda")
"""Where the model runs; `auto`: CUDA when there is one."""
CpuLinear = enum.StrEnum("CpuLinear", "torch onednn")
"""The library that multiplies by a model's float32 weights on a CPU."""
Dtype = enum.StrEnum("Dtype", "float16 bfloat16 float32 float64")
"""Dtype of weights and activations, by torch's name."""

Loader = enum.StrEnum("Loader", "embedded text documents items")
"""How text is read: from installed packages, as one stream of joined rows, or as cropped documents.

`items`: no text but the items of a task that brings its own.
"""

WandbMode = enum.StrEnum("WandbMode", "online offline disabled")
"""`offline`: files under `results_dir/wandb`, which `wandb sync` sends later; `disabled`: nothing is sent."""
Attention = enum.StrEnum("Attention", "dense packed")
"""What a decoded token attends to: decoded keys and values, or packed codes (the same up to rounding)."""


@dataclass
class LayoutConfig:
    """A table of a paper, or of one's own: every combination of the labels of its `axes` is a cell.

    Attributes:
        paper: as `results/reference/paper_results.csv` names it; None: no experiment with a table.
        table: as that file names it; None: nothing is published.
        title: of the table.
        common: overrides of every run, separated by spaces.
        axes: labels along each column of the published figures, as they are printed.
        names: label -> overrides (a list: the runs that a cell pools; null: no run, `reasons` says why).
        metric: what is read from a record; `{method}` stands for the piece that `metrics` gives the cell's label.
        metrics: axis -> label -> piece of the metric's name; such an axis may lead to no run of its own.
        rows: axes whose labels begin a row.
        sections: axes with a table of their own for each label.
        units: of what is shown.
        scale: a record's value times this is what the paper prints.
        pool: how the runs of a cell become one figure: `mean` or `sum`.
        reasons: label -> why it cannot be measured.
        own: labels that the paper does not print, shown in addition.
        small: override of the experiment -> the overrides that replace it when the model is an embedded one.
        real: what differs from `small` for a model that an installed distribution carries (`model=smollm2_135m`).
    """

    paper: str | None = None
    table: str | None = None
    title: str | None = None
    common: str = ""
    axes: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    metric: str = "perplexity"
    metrics: dict[str, Any] = field(default_factory=dict)
    rows: list[str] = field(default_factory=lambda: ["method"])
    sections: list[str] = field(default_factory=list)
    units: str = ""
    scale: float = 1.0
    pool: str = "mean"
    reasons: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    small: dict[str, str] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.paper is None:
            return
        pieces = [piece for _, piece, _, _ in string.Formatter().parse(self.metric) if piece is not None]
        without_runs = [label for label, run in self.names.items() if run is None]
        for setting, given, known in (
            *((f"layout.{name}", getattr(self, name), AXES) for name in ("axes", "metrics")),
            *((f"layout.{name}", getattr(self, name), self.labels) for name in ("rows", "sections")),
            ("layout.own", self.own, [label for labels in self.labels.values() for label in labels]),
            ("layout.pool", [self.pool], ("mean", "sum")),
            ("layout.axes", [label for labels in self.axes.values() for label in labels], self.names),
            ("layout.names with a reason for null", without_runs, self.reasons),
            ("layout.metric", pieces, self.metrics),
        ):
            for name in given:
                check_choice(setting, name, known)
        if not self.title or not self.labels:
            raise ConfigError(f"layout.{'axes' if self.title else 'title'}: an experiment's table needs it")

    @property
    def labels(self) -> dict[str, list[str]]:
        """Labels by axis: those of `axes`, then of `metrics`, in the order of `AXES`."""
        read = {axis: list(pieces) for axis, pieces in self.metrics.items()}
        known = read | self.axes
        return {axis: known[axis] for axis in AXES if axis in known}


@dataclass
class NoLogger:
    """Only records."""

    name: str = "none"

    def __post_init__(self) -> None:
        if self.name != type(self).name:
            raise ConfigError(f"logger.name={self.name}: choose another logger by logger=..., not by its name")


@dataclass
class WandbLogger(NoLogger):
    """Weights & Biases. `entity`: null = the account's own; `group`: null = one for each sweep's command.
    `mode`: null = that of the environment variable `WANDB_MODE`, else online.

    `samples`: most rows of a run's table of samples; `timeout`: seconds to wait for the server before going on without.
    """

    name: str = "wandb"
    project: str = "kvq"
    entity: str | None = None
    group: str | None = None
    mode: WandbMode | None = None
    samples: Natural = 1000
    timeout: Count = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits("logger", self)
        for setting in ("project", "entity", "group"):
            given = getattr(self, setting)
            if given is not None and not (0 < len(given) <= _MAX_NAME and not set(given) & set("/\\#?%:\n")):
                raise ConfigError(
                    f"logger.{setting}={given[:_MAX_NAME]}: 1 to {_MAX_NAME} characters, none of / \\ # ? % :"
                )
        if self.mode is None:
            named = os.environ.get("WANDB_MODE") or "online"
            check_choice("WANDB_MODE", named, WandbMode)
            self.mode = WandbMode(named)


@dataclass
class OutliersConfig:
    """Function-preserving channel outliers: scales are powers of two, counts (0: none) per layer and KV head.

    `sink`: whether the begin-of-text token has them too, in channels drawn from `seed`. If not, they are the channels
    in which its key and its value at position 0 are least, and `seed` has no effect.
    """

    version: ClassVar[int] = 1
    key_scale: float = 8.0
    value_scale: float = 4.0
    key_pairs: Natural = 0
    value_channels: Natural = 0
    seed: Seed = 0
    sink: bool = True

    def __bool__(self) -> bool:
        return bool(self.key_pairs or self.value_channels)

    def __post_init__(self) -> None:
        for setting in ("key_scale", "value_scale"):
            scale = getattr(self, setting)
            if scale <= 0 or not (scale.hex().startswith("0x1.0000000000000p")):
                raise ConfigError(f"model.outliers.{setting}={scale}: a power of two, so that logits stay the same")
        check_limits("model.outliers", self)


def _check_stored(setting: str, dtype: Dtype | None) -> None:
    """Refuse float64 as dtype of what is stored."""
    if dtype is Dtype.float64:
        raise ConfigError(f"{setting}={dtype}: null, float16, bfloat16 or float32")


@dataclass
class ModelConfig:
    """A model: `path` is a hub id, a local folder, or `embedded:tiny`. `context` in tokens, None = the model's own.

    `gguf`: the name of a GGUF file there, which is then the whole model; a `path` that ends in .gguf names both, and
    `distribution:NAME/FILE.gguf` a file of an installed Python distribution. `weights`: the type of most of its weights
    (`Q4_1`), said wherever the model is named; `sha256` (hex): of the file. `device_map` spreads the layers over all
    devices, as transformers does; None = one device. `max_memory`: how much of each it may take, by its number or as
    `cpu` (`{0: 20GiB, cpu: 60GiB}`). `round_weights`: bits to which the weights of linear layers are rounded,
    in groups of 128 input channels, after a rotation is merged into them. `attn_implementation`: transformers' name for
    it (None: its choice). `trust_remote_code`: its code is run. `bos`: it was trained on texts that begin with that
    token, `chat_bos`: on conversations that do (None: as texts); where both are None, its tokenizer says.
    `cache_dtype`: what `cache.dtype=null` stands for; None: `dtype`.
    """

    name: Text = MISSING
    path: str = MISSING
    gguf: Text | None = None
    weights: str | None = None
    sha256: str | None = None
    revision: Text | None = None
    dtype: Dtype = Dtype.float32
    context: Several | None = None
    device_map: Annotated[str, among(DEVICE_MAPS)] | None = None
    max_memory: Any = None
    round_weights: Annotated[int, between(2, 8)] | None = None
    attn_implementation: Text | None = None
    trust_remote_code: bool = False
    bos: bool | None = None
    chat_bos: bool | None = None
    cache_dtype: Dtype | None = None
    outliers: OutliersConfig = field(default_factory=OutliersConfig)

    def __post_init__(self) -> None:
        check_path("model.path", self.path)  # first: a name may be taken from it
        check_limits("model", self)
        if self.path.endswith(".gguf") and self.gguf is None:
            folder, _, self.gguf = self.path.rpartition("/")
            self.path = folder if folder.startswith(("/", ".", "~", DISTRIBUTION)) else f"./{folder}"
        _check_stored("model.cache_dtype", self.cache_dtype)
        if self.max_memory is not None and (self.device_map is None or not isinstance(self.max_memory, Mapping)):
            allowed = "sizes by device for model.device_map=auto, such as {0: 20GiB, cpu: 60GiB}"
            raise ConfigError(f"model.max_memory={self.max_memory}: {allowed}")


def trained_with_bos(model: ModelConfig, chat: bool, tokenizer_writes: bool | None = None) -> bool | None:
    """Whether a model was trained on texts (`chat`: conversations) that begin with a begin-of-text token.

    `tokenizer_writes`: what the tokenizer says, where it was asked; None: only it can say. Embedded ones write none.
    """
    known = model.chat_bos if chat and model.chat_bos is not None else model.bos
    if known is not None:
        return known
    return False if model.path.startswith(EMBEDDED) else tokenizer_writes


@dataclass
class DatasetConfig:
    """Text to score: on the hub (`hub_id`), or local (`path`: jsonl, parquet or text).

    `rows`: only the first so many rows; the hub streams them, so that no more is downloaded than what holds them.
    """

    name: Text = MISSING
    loader: Loader = Loader.text
    path: PathName | None = None
    hub_id: Text | None = None
    hub_config: str | None = None
    data_files: Any = None
    split: str | None = None
    text_field: str = "text"
    rows: Count | None = None
    documents: Count | None = None
    seed: Seed = 0
    max_tokens: Several | None = None

    def __post_init__(self) -> None:
        check_limits("dataset", self)
        if self.loader is Loader.embedded and (self.path or self.hub_id):
            raise ConfigError(
                f"dataset.path={self.path or self.hub_id}: dataset={self.name} is embedded and reads no other text; "
                "use dataset=wikitext2 (joined rows) or c4 (documents)"
            )
        if self.loader in (Loader.embedded, Loader.items) and self.rows is not None:
            kind = "embedded; dataset.max_tokens= cuts it" if self.loader is Loader.embedded else "read by items"
            raise ConfigError(f"dataset.rows={self.rows}: dataset={self.name} is {kind}")


@dataclass
class CacheConfig:
    """`keep_decoded`: also keep the decoded copy, for speed; results are the same, and no memory is saved.

    `attention`: what a task that measures speed decodes with; scores always come from dense attention.
    `dtype`: of what the cache keeps in full precision, baseline and residual alike; None = the model's default.
    """

    keep_decoded: bool = False
    attention: Attention = Attention.dense
    dtype: Dtype | None = None

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
    cpu_linear: CpuLinear = CpuLinear.torch
    method: MethodConfig = field(default_factory=MethodConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    task: Any = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    logger: Any = None

    def __post_init__(self) -> None:
        parse_bits(self.bits, self.method.real_bits or self.method.bits_range is None)
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
        if self.cpu_linear is not CpuLinear.torch and self.task is not None and is_timed(self.task):
            raise ConfigError(f"cpu_linear={self.cpu_linear}: {' and '.join(TIMED)} measure the time of torch's own")
        if self.cache.dtype is not None and isinstance(self.task, DiagnosticConfig):
            raise ConfigError(f"cache.dtype={self.cache.dtype}: task={self.task.name} fills no cache; leave it null")
        check_path("results_dir", self.results_dir)
        if (folder := Path(self.results_dir)).exists() and not folder.is_dir():
            raise ConfigError(f"results_dir={self.results_dir}: not a folder")

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
        return residual if in_turn else residual.for_parallel_scoring()


LOGGERS: dict[str, type[NoLogger]] = {"none": NoLogger, "wandb": WandbLogger}
