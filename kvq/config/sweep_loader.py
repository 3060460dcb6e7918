"""What Hydra's sweepers and launchers ask for each job's configuration: put together from kept compositions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf, open_dict

from kvq.config.composing import conf_dir
from kvq.config.merging import CONFIG_NAME, Files, merged


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
        found = merged(Files.of(conf_dir()), given) if _reads_own_files(master_config) else None
        if found is None or self._first is None:
            job: DictConfig = self.whole.load_sweep_config(master_config, given)
            if found is not None:
                self._first = copy.deepcopy(job)
            return job
        job = found.config
        with open_dict(job):
            job.hydra = self._first.hydra  # OmegaConf sets a copy
            job.hydra.overrides.task = given
            job.hydra.job.override_dirname = ",".join(sorted(given))
            own = {group: name for group, name in found.choices.items() if not group.startswith("hydra/")}
            hydras = {group: name for group, name in job.hydra.runtime.choices.items() if group.startswith("hydra/")}
            job.hydra.runtime.choices = own | hydras
        OmegaConf.copy_cache(from_config=master_config, to_config=job)
        return job

    def check(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> None:
        """Raise what is wrong with a job ahead of time."""
        if not _reads_own_files(master_config) or merged(Files.of(conf_dir()), sweep_overrides) is None:
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


def _reads_own_files(master: DictConfig) -> bool:
    """Whether a sweep composes the package's own folder alone, and no other one from the command line."""
    sources = [source for source in master.hydra.runtime.config_sources if source["schema"] == "file"]
    return master.hydra.job.config_name == CONFIG_NAME and [Path(source.path) for source in sources] == [conf_dir()]
