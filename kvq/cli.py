"""The command line: Hydra's overrides; every failure is one line and a non-zero exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import hydra
from hydra._internal.utils import get_args_parser  # Hydra has no public way to its own flags
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from tqdm import tqdm

from kvq import __version__
from kvq.config import CONFIG_NAME, VERSION_BASE, compose, conf_dir, plugins, resolve
from kvq.config.bits import check_range
from kvq.config.composing import register
from kvq.config.explain import COMPOSE_ERRORS, ONE_PROCESS, USAGE, explain, overview, setting_of, value_for_choice
from kvq.config.method import with_current_names
from kvq.config.run import LayoutConfig
from kvq.errors import ConfigError, KvqError, Unsupported, check_path, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from omegaconf import DictConfig

    from kvq.config import Config
    from kvq.runs import Baselines, Sweep, SweepPlan

OK, RUN_FAILED, BAD_INPUT = 0, 1, 2


@dataclass
class _Session:
    """The state of one call of `main`."""

    jobs: list[list[str]] = field(default_factory=list)
    baselines: Baselines = field(default_factory=dict)
    sweep: Sweep | None = None
    plan: SweepPlan | None = None
    failed: bool = False
    experiment: str | None = None
    results_dir: str = ""


_session = _Session()


def begin_sweep(config: DictConfig) -> None:
    """Note the experiment of a sweeper's composed configuration; `ConfigError` for a launcher of other processes."""
    if config.layout.paper is not None:
        _session.experiment, _session.results_dir = config.hydra.runtime.choices.experiment, config.results_dir
    if not config.hydra.launcher._target_.endswith(".BasicLauncher"):
        raise ConfigError(f"hydra/launcher: {ONE_PROCESS}")


def add_jobs(jobs: Iterable[Sequence[str]]) -> None:
    """Note the overrides of jobs that a sweeper is about to launch."""
    _session.jobs += map(list, jobs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code.

    0: done; 1: a run failed or was refused; 2: the configuration does not compose and nothing was started.
    """
    global _session
    _session = _Session()
    words = with_current_names(sys.argv[1:] if argv is None else argv)
    # argparse takes only overrides before the first flag or after the last.
    overrides = [word for word in words if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    given = [*(word for word in words if word not in overrides), *overrides]
    if "--version" in given:
        print(f"kvq {__version__}")
        return OK
    try:
        flags = _flags(given)
    except KvqError as error:
        return _complain(str(error), error, BAD_INPUT)
    with plugins.using(flags.config_dir):
        if flags.help:
            print(f"{USAGE}\n\n{overview()}")
            return OK
        return _run(given, flags.overrides)


def _run(given: Sequence[str], overrides: Sequence[str]) -> int:
    """Run the jobs of a command line, print their plan or table and return the exit code."""
    try:
        register()
        with _hydra_environment(given):
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name=CONFIG_NAME)(_job)()
    except COMPOSE_ERRORS as error:
        return _complain(explain(error, overrides), error, BAD_INPUT)
    except RecursionError as error:
        return _complain("the configuration's defaults name each other in a circle", error, BAD_INPUT)
    except Exception as error:
        if isinstance(error, TypeError) and (said := value_for_choice(overrides)):  # Hydra takes items for names
            return _complain(said, error, BAD_INPUT)
        if isinstance(error, OSError):  # Hydra's own folders; a run's errors are caught
            where = f" '{error.filename}'" if error.filename else ""
            return _complain(f"hydra: cannot use its folder{where}: {error.strerror or error}", error, BAD_INPUT)
        raise
    for shown in (_session.plan, _session.sweep):
        if shown is not None:
            _attempt(shown.finish, "")
    if _session.experiment is not None:
        _attempt(partial(_show_experiment, _session.experiment, len(_session.jobs)), "")
    return RUN_FAILED if _session.failed else OK


def _flags(given: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags and the overrides; argparse's answer to a wrong flag is raised without its page."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            flags = get_args_parser().parse_args(list(given))
    except SystemExit as error:
        raise ConfigError(f"{said.getvalue().strip().partition('error: ')[2]}; see --help") from error
    check_path("--config-dir", flags.config_dir)
    return flags


@contextmanager
def _hydra_environment(given: Sequence[str]) -> Iterator[None]:
    """Give Hydra what it needs and restore it afterwards.

    It reads `sys.argv`, hides exceptions unless told not to, and wants a folder for its `multirun.yaml`.
    """
    with tempfile.TemporaryDirectory(prefix="kvq-") as scratch:
        changed = {"HYDRA_FULL_ERROR": "1", "KVQ_SCRATCH": scratch}
        with patch.dict(os.environ, changed), patch.object(sys, "argv", [*(sys.argv[:1] or ["kvq"]), *given]):
            yield


def _measuring() -> ModuleType:
    """The module that measures, imported when the first run needs it."""
    from kvq import runs  # takes seconds, so a mistyped name is reported before

    return runs


def _job(cfg: DictConfig) -> None:
    """Run one job. A failure is printed and counts for the exit code; a sweep goes on with its next job."""
    hydra_config = HydraConfig.get()
    sweep = hydra_config.mode == RunMode.MULTIRUN
    _attempt(lambda: _measure(cfg, sweep), " ".join(hydra_config.overrides.task) + ": " if sweep else "")


def _alone(config: Config) -> list[str] | None:
    """Overrides of a run without the experiment that asked for it, which would run all of its table; None: none do."""
    words = list(HydraConfig.get().overrides.task)
    given = [setting_of(word) for word in words]
    if "experiment" not in given:
        return words
    names = ("model", "task", "dataset", "method")
    chosen = [f"{name}={HydraConfig.get().runtime.choices[name]}" for name in names]
    rest = [word for word, name in zip(words, given, strict=True) if name not in (*names, "experiment")]
    with suppress(*COMPOSE_ERRORS):
        if resolve(compose([*chosen, *rest])) == replace(config, layout=LayoutConfig()):
            return [*chosen, *rest]
    return None


def _measure(cfg: DictConfig, several: bool) -> None:
    """Measure one run, or look it up, and add it to the table of the command; `plan=true`: print its state."""
    config = resolve(cfg)
    limits, bits = config.method.bits_range, config.parsed_bits
    if limits is not None and bits is not None and not (config.plan or config.method.bits_by_layer):
        check_range(config.method.name, limits, bits, config.method.real_bits)
    runs = _measuring()
    if config.plan:
        _session.plan = _session.plan or runs.SweepPlan()
        _session.plan.add(config)
        return
    _session.sweep = _session.sweep or runs.Sweep(len(_session.jobs) or 1)
    record = None
    try:
        record = runs.run(config, partial(_alone, config), _session.baselines)
    finally:
        _session.sweep.add(config, record)
    # In a sweep the table shows an unsupported run; a single run fails with the reason.
    if record.status == "unsupported" and not several:
        raise Unsupported(record.reason)


def _show_experiment(name: str, jobs: int) -> None:
    """Print a paper's table with measured and published values; under `plan=true` only its cost."""
    from kvq.papers.expected import print_cost, print_experiment

    if _session.plan is None:
        print_experiment(name, _session.results_dir)
    print_cost(name, jobs)


def _attempt(action: Callable[[], None], prefix: str) -> None:
    """Call `action`; an expected failure prints one line, any other a traceback and one line."""
    try:
        action()
    except KvqError as error:
        _session.failed = True
        _complain(f"{prefix}{error}", error, RUN_FAILED)
    except Exception as error:
        _session.failed = True
        traceback.print_exc()
        _complain(f"{prefix}{type(error).__name__}: {str(error).partition(chr(10))[0]}", None, RUN_FAILED)


def _complain(message: str, error: BaseException | None, code: int) -> int:
    """Print an error as one line (with `KVQ_DEBUG=1` its traceback before) and return the exit code."""
    if error is not None and os.environ.get("KVQ_DEBUG") == "1":
        traceback.print_exception(error)
    tqdm.write(printable(f"error: {message}"), file=sys.stderr)  # without tearing a progress bar
    return code
