"""Every setting of a run: its schema and ranges, how it is composed and resolved, and what of it names the run."""

from kvq.config.choices import CONFIG_NAME, conf_dir
from kvq.config.composing import VERSION_BASE, compose, full_precision, resolve, resolve_part
from kvq.config.diagnostics import TaskConfig
from kvq.config.method import MethodConfig
from kvq.config.run import Config, DatasetConfig, Dtype, Loader, ModelConfig, OutliersConfig
from kvq.config.tasks import PplConfig, Scoring, Windows

__all__ = [
    "CONFIG_NAME",
    "VERSION_BASE",
    "Config",
    "DatasetConfig",
    "Dtype",
    "Loader",
    "MethodConfig",
    "ModelConfig",
    "OutliersConfig",
    "PplConfig",
    "Scoring",
    "TaskConfig",
    "Windows",
    "compose",
    "conf_dir",
    "full_precision",
    "resolve",
    "resolve_part",
]
