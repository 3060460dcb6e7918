"""Composing a run's configuration from `conf/` and the command line, for sweeps too, and checking every value of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvq.config import outside
from kvq.config.bits import Bits, BitsByLayerConfig, first_width, parse_bits
from kvq.config.choices import CONFIG_NAME, conf_dir, register_rows
from kvq.config.merging import Composed, Files, by_hydra, merged, merged_part
from kvq.config.method import MethodConfig, with_current_names
from kvq.config.run import LOGGERS, Config
from kvq.config.task import TaskConfig
from kvq.config.tasks import SCHEMAS
from kvq.errors import ConfigError, did_you_mean


def register() -> None:
    """Put schemas, rows of tables and the resolver `${kvbits:key}` where Hydra finds them; may be called again."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for name, schema in SCHEMAS.items():
        store.store(group="task", name=f"{name}_schema", node=schema)
    for name, logger in LOGGERS.items():
        store.store(group="logger", name=f"{name}_schema", node=logger)
    OmegaConf.register_new_resolver("kvbits", _kvbits, replace=True)
    register_rows(conf_dir())


def _kvbits(side: str, *, _root_: DictConfig) -> float | int:
    bits, method = _bits_of(_root_), _root_.get("method")
    own = OmegaConf.select(method, f"bits_by_layer.{side}") if OmegaConf.is_config(method) else None
    if own:  # the settings of the method are those of its first layer
        return first_width(own[0])
    return {"key": bits.key, "value": bits.value}[side]


def _bits_of(root: DictConfig) -> Bits:
    given = root.bits if "bits" in list(root) else None  # `~bits` takes it away
    method = root.get("method")
    real = bool(OmegaConf.is_config(method) and method.get("real_bits"))
    return parse_bits(OmegaConf.to_container(given) if OmegaConf.is_config(given) else given, real)


register()


def compose(overrides: Sequence[str], config_dir: str | Path | None = None) -> DictConfig:
    """Compose the run's configuration from Hydra overrides; also works while a Hydra application runs.

    Args:
        overrides: as on the command line, such as `["method=nsn", "bits=2"]`.
        config_dir: a further folder of configuration groups and modules, as `--config-dir` gives on the command line
            (None: the one that the process uses, if any).
    """
    folder = outside.folder_of(config_dir)
    outside.admit(folder)
    files, overrides = Files.of(conf_dir(), folder), with_current_names(overrides)
    return (merged(files, overrides) or by_hydra(files, overrides)).config


def compose_part(part: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> DictConfig | None:
    """`bits` and one part of what `compose` gives, in a fifth of its time.

    None where the overrides decide other parts too, or only `compose` knows what is wrong with them.

    Args:
        part: a top-level setting, such as `method`.
        overrides, config_dir: as in `compose`.
    """
    folder = outside.folder_of(config_dir)
    outside.admit(folder)
    return merged_part(Files.of(conf_dir(), folder), part, with_current_names(overrides))


def resolve_part(cfg: DictConfig, part: str) -> Any:
    """Check one part's values and return it typed, as `resolve` has it.

    Raises:
        ConfigError: as in `resolve`; what several parts have to agree on is not checked.
    """
    if not OmegaConf.is_config(cfg[part]):
        return cfg[part]
    _check_keys(cfg[part], f"{part}.")
    _bits_of(cfg)
    try:
        return _typed(part, OmegaConf.to_object(cfg[part]))
    except OmegaConfBaseException as error:
        raise _one_line(error) from error


def _typed(part: str, settings: Any) -> Any:
    """The settings; a task's are refused where no schema has checked them."""
    if part == "task" and not isinstance(settings, TaskConfig):
        raise _untyped(settings)
    return settings


def resolve(cfg: DictConfig) -> Config:
    """Check every value and return the typed configuration; the method's codecs are plain dicts without interpolations.

    Raises:
        ConfigError: a value out of range, of the wrong type, or missing.
    """
    try:
        _check_keys(cfg)
        _bits_of(cfg)
        config = OmegaConf.to_object(cfg)  # interpolations are resolved on the way
    except OmegaConfBaseException as error:
        raise _one_line(error) from error
    if not isinstance(config, Config):
        raise ConfigError(f"configuration of type {type(config).__name__}: its defaults must begin with config_schema")
    _typed("task", config.task)
    _compose_layers(cfg, config)
    return config


def _compose_layers(cfg: DictConfig, config: Config) -> None:
    """Compose the method at the bits of its layers, where these have bits of their own."""
    by_layer = config.method.bits_by_layer
    if by_layer.at is not None:
        raise ConfigError("method.bits_by_layer.at: follows from key and value; set those")
    if by_layer:
        by_layer.at = {
            bits.label: _method_at(cfg, bits)
            for bits in by_layer.occurring(parse_bits(config.bits, config.method.real_bits))
        }


def _method_at(cfg: DictConfig, bits: Bits) -> MethodConfig:
    whole = copy.deepcopy(cfg)
    whole.bits = bits.label
    whole.method.bits_by_layer = BitsByLayerConfig()
    method = OmegaConf.to_object(whole.method)
    assert isinstance(method, MethodConfig)
    return method


@functools.cache
def _groups_of(kind: type) -> dict[str, tuple[type, ...]]:
    """Fields of a schema that hold another: the classes that each may have."""
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    found = {name: get_args(hint) or (hint,) for name, hint in hints.items() if get_origin(hint) not in (list, dict)}
    return {name: kinds for name, kinds in found.items() if any(map(is_dataclass, kinds))}


def _untyped(task: object) -> ConfigError:
    """Settings of a task that no schema checks."""
    name = task.get("name") if isinstance(task, dict) else None
    if not name:
        return ConfigError(f"task={task}: a choice of the group task; `python run.py ls task` lists all")
    if name in SCHEMAS:
        return ConfigError(f"task.name={name}: its YAML must begin with defaults: [{name}_schema, _self_]")
    return ConfigError(
        f"task.name={name}: nothing checks its settings; its YAML must begin with defaults: [{name}_schema, _self_], "
        f"of the class that {name}.py beside it gives to TASK"
    )


def _check_keys(cfg: DictConfig, prefix: str = "") -> None:
    """Refuse mandatory keys without a value, keys added with `+` that the schema lacks, and values for groups.

    Hydra lets the second pass, and they would be silently ignored; OmegaConf lets interpolations of any kind pass.
    """
    kind: Any = OmegaConf.get_type(cfg)
    groups = _groups_of(kind)
    known = [entry.name for entry in fields(kind)] if is_dataclass(kind) else None
    key: Any
    for key, node in cfg.__dict__["_content"].items():
        name = str(key)  # a number where it names a device
        setting = f"{prefix}{name}"
        if known is not None and name not in known:
            raise ConfigError(f"{setting}: unknown setting.{did_you_mean(name, known)}")
        interpolated = node._is_interpolation()
        if OmegaConf.is_missing(cfg, key) if interpolated else node._is_missing():
            raise ConfigError(f"{setting} has no value: give {setting}=...")
        if interpolated:
            if (kinds := groups.get(name)) and OmegaConf.get_type(cfg[key]) not in kinds:
                raise ConfigError(f"{setting}={cfg[key]}: a group of settings, not a value")
        elif isinstance(node, DictConfig) and not node._is_none():
            _check_keys(node, f"{setting}.")


def _one_line(error: OmegaConfBaseException) -> ConfigError:
    setting = f"{error.full_key}: " if error.full_key else ""
    return ConfigError(f"{setting}{str(error.msg or error).splitlines()[0]}")


@functools.cache
def _full_precision() -> Config:
    return resolve(compose(["method=fp16"]))


def full_precision(config: Config) -> Config:
    """The same run without quantization: its baseline."""
    found = _full_precision()
    return replace(config, method=found.method, bits=found.bits if config.method.real_bits else config.bits)


class SweepLoader(ConfigLoader):
    """Hydra's own loader, `whole`, but for the jobs of a sweep: only the first is composed by it.

    The `hydra` node of the others is that of the first with their overrides and choices. A command line with folders of
    its own, and whatever `kvq.config.merging` does not merge, is left to `whole`.
    """

    def __init__(self, whole: ConfigLoader) -> None:
        self.whole = whole
        self._first: DictConfig | None = None

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job, as Hydra has it."""
        given = list(sweep_overrides)
        found = self.quick(master_config, given)
        if found is None or self._first is None:
            job: DictConfig = self.whole.load_sweep_config(master_config, given)
            if found is not None:
                self._first = copy.deepcopy(job)
            return job
        job = found.config
        with open_dict(job):
            job.hydra = self._first.hydra  # OmegaConf sets a copy
            _set_job(job.hydra, found, given)
        OmegaConf.copy_cache(from_config=master_config, to_config=job)
        return job

    def quick(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> Composed | None:
        """A job without the `hydra` node, for the caller to change; None: Hydra has to compose it."""
        return merged(Files.of(conf_dir()), sweep_overrides) if _reads_own_files(master_config) else None

    def check(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> None:
        """Raise what is wrong with a job ahead of time."""
        if self.quick(master_config, sweep_overrides) is None:
            self.whole.load_sweep_config(master_config, list(sweep_overrides))

    def load_configuration(self, *given: Any, **named: Any) -> DictConfig:
        return self.whole.load_configuration(*given, **named)

    def get_search_path(self) -> Any:
        return self.whole.get_search_path()

    def get_sources(self) -> list[Any]:
        return self.whole.get_sources()

    def list_groups(self, parent_name: str) -> list[str]:
        return self.whole.list_groups(parent_name)

    def get_group_options(self, *given: Any, **named: Any) -> list[str]:
        return self.whole.get_group_options(*given, **named)

    def compute_defaults_list(self, *given: Any, **named: Any) -> Any:
        return self.whole.compute_defaults_list(*given, **named)


class InProcess:
    """Launches a sweep's jobs in this process, one after the other, in a tenth of the time of Hydra's `basic` launcher.

    That one copies the configuration of each job, with Hydra's own settings, five times. What needs them (callbacks of
    a user, folders or environment variables of a job, overrides that only Hydra composes) is left to it, `whole`.
    """

    def __init__(self, whole: Any, loader: SweepLoader, config: DictConfig, task_function: Any, callbacks: Any) -> None:
        self.whole, self.loader, self.config, self.task_function = whole, loader, config, task_function
        job = config.hydra.job
        own = [one for one in callbacks.callbacks if not type(one).__module__.startswith("kvq.")]
        self.all_whole = bool(own or job.chdir or job.env_set or config.hydra.output_subdir)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs; what one raises is raised by its `return_value`."""
        returns: list[JobReturn] = []
        before = HydraConfig.instance().cfg
        node: Any = None
        try:
            for number, given in enumerate(job_overrides, initial_job_idx):
                found = None if self.all_whole else self.loader.quick(self.config, given)
                if found is None:
                    returns += self.whole.launch([given], number)
                    continue
                if node is None:
                    HydraConfig.instance().set_config(self.loader.whole.load_sweep_config(self.config, list(given)))
                    node = HydraConfig.instance().cfg
                HydraConfig.instance().cfg = node
                with read_write(node.hydra), open_dict(node.hydra):
                    _set_job(node.hydra, found, given)
                    node.hydra.job.num = node.hydra.job.id = number
                returns.append(self._run(found.config, list(given)))
        finally:
            HydraConfig.instance().cfg = before
        return returns

    def _run(self, config: DictConfig, given: list[str]) -> JobReturn:
        done = JobReturn(overrides=given, cfg=config, status=JobStatus.COMPLETED)
        try:
            done.return_value = self.task_function(config)
        except Exception as error:
            done.return_value, done.status = error, JobStatus.FAILED
        return done


def _set_job(hydra: Any, found: Composed, given: Sequence[str]) -> None:
    """Change Hydra's own settings, which are open, to those of a job."""
    hydra.overrides.task = list(given)
    hydra.job.override_dirname = ",".join(sorted(given))
    own = {group: name for group, name in found.choices.items() if not group.startswith("hydra/")}
    hydras = {group: name for group, name in hydra.runtime.choices.items() if group.startswith("hydra/")}
    hydra.runtime.choices = own | hydras


def _reads_own_files(master: DictConfig) -> bool:
    """Whether a sweep composes only the package's own folder, and no other one from the command line."""
    sources = [source for source in master.hydra.runtime.config_sources if source["schema"] == "file"]
    return master.hydra.job.config_name == CONFIG_NAME and [Path(source.path) for source in sources] == [conf_dir()]
