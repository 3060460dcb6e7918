"""What Hydra finds here: folders of plugins' configurations, and sweepers over products of values and over tables.

They are in `hydra_plugins` because Hydra finds them only there.
"""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf, open_dict, read_write


class PluginFolders(SearchPathPlugin):
    """Adds the configurations of kvq's plugins to Hydra's search path, in kvq's own commands alone."""

    def manipulate_search_path(self, search_path):
        """Called by Hydra before it composes."""
        from kvq.config.choices import conf_dir
        from kvq.config.plugins import conf_dirs

        paths = [entry.path for entry in search_path.get_path()]
        if any(path in (str(conf_dir()), f"file://{conf_dir()}") for path in paths):
            for folder in conf_dirs()[1:]:
                search_path.append("kvq", f"file://{folder}")


class GroupedSweeper(Sweeper):
    """The product of the values on the command line; runs that share a model and a text follow one another.

    Jobs of this process are composed by `kvq.config.composing`, each once and before the first begins.
    """

    composed_before = None  # the number of jobs that are composed before the first begins; None: all

    def __init__(self, max_batch_size=None, params=None):
        self.max_batch_size, self.params = max_batch_size, params or {}

    def setup(self, *, hydra_context, task_function, config):
        """Called by Hydra before `sweep`."""
        from kvq.cli import begin_sweep

        begin_sweep(config)
        self.config, self.task_function = config, task_function
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        job = config.hydra.job
        # Callbacks, folders and environment variables of a job need Hydra's launcher.
        asks_hydra = hydra_context.callbacks.callbacks or job.chdir or job.env_set or config.hydra.output_subdir
        self.here = isinstance(self.launcher, BasicLauncher) and not asks_hydra

    def sweep(self, arguments):
        """Launch the jobs of the command line's overrides."""
        given = [*(f"{name}={value}" for name, value in self.params.items()), *arguments]
        batches = self.batches(OverridesParser.create().parse_overrides(given))
        self.save()
        size = len(batches[0]) if batches else 0  # of all but the last
        return [self.launch(batch, number * size) for number, batch in enumerate(batches)]

    def batches(self, overrides):
        """Jobs (lists of overrides) in batches of at most `max_batch_size`."""
        jobs = self.jobs(overrides)
        size = self.max_batch_size or max(len(jobs), 1)
        return [jobs[first : first + size] for first in range(0, len(jobs), size)]

    def save(self):
        """Write the sweep's own configuration, as Hydra's sweeper does."""
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")

    def launch(self, jobs, started):
        """Run jobs (lists of overrides), of which `started` came before; what a job raised is raised."""
        from kvq.cli import add_jobs
        from kvq.config.composing import composition

        add_jobs(jobs)
        ahead = [composition(words) for words in jobs[: self.composed_before]]
        if not self.here:
            returns = self.launcher.launch([list(words) for words in jobs], initial_job_idx=started)
            for job in returns:
                _ = job.return_value
            return returns
        before, returns = HydraConfig.instance().cfg, []
        HydraConfig.instance().set_config(self.config)
        try:
            for number, words in enumerate(jobs):
                found = ahead[number] if number < len(ahead) else composition(words)
                self._describe(found, words, started + number)
                value = self.task_function(found.config)
                returns.append(JobReturn(words, found.config, status=JobStatus.COMPLETED, _return_value=value))
        finally:
            HydraConfig.instance().cfg = before
        return returns

    def _describe(self, found, words, number):
        node = HydraConfig.instance().cfg.hydra
        with read_write(node), open_dict(node):
            node.overrides.task, node.job.override_dirname = list(words), ",".join(sorted(words))
            node.job.num = node.job.id = number
            node.runtime.choices = {**node.runtime.choices, **found.choices}

    def jobs(self, overrides):
        """Jobs in the order in which they run."""
        from kvq.papers.sweep import group_jobs, list_jobs

        return group_jobs(list_jobs(overrides))


_GROUPED = {"_target_": "hydra_plugins.kvq_experiments.GroupedSweeper", "max_batch_size": None, "params": None}
ConfigStore.instance().store(group="hydra/sweeper", name="grouped", node=_GROUPED, provider="kvq")


class ExperimentSweeper(GroupedSweeper):
    """Runs each job that the composed `layout` asks for, once, under the command line's overrides."""

    composed_before = 1  # the command line adds the same to each, and tests compose the jobs of the tables

    def jobs(self, overrides):
        """Jobs of the layout that can be composed here."""
        from kvq.papers.sweep import sweep_of

        return [list(job) for job in sweep_of(self.config, overrides)]
