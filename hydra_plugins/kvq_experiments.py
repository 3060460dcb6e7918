"""Sweepers: over products of values, and over the runs of an experiment's table, which need not be a product.

They are in `hydra_plugins` because Hydra finds sweepers only there.
"""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import OmegaConf


class GroupedSweeper(Sweeper):
    """The product of the values on the command line; runs that share a model and a text follow one another.

    Jobs are composed by `kvq.config.composing`, in a fraction of Hydra's time.
    """

    def __init__(self, max_batch_size=None, params=None):
        self.max_batch_size, self.params = max_batch_size, params or {}

    def setup(self, *, hydra_context, task_function, config):
        """Called by Hydra before `sweep`."""
        from kvq.config.composing import InProcess, SweepLoader

        self.config, self.loader = config, SweepLoader(hydra_context.config_loader)
        quick = HydraContext(self.loader, hydra_context.callbacks)
        plugins = Plugins.instance()
        self.launcher = plugins.instantiate_launcher(hydra_context=quick, task_function=task_function, config=config)
        if isinstance(self.launcher, BasicLauncher):
            self.launcher = InProcess(self.launcher, self.loader, config, task_function, hydra_context.callbacks)

    def sweep(self, arguments):
        """Launch the jobs of the command line's overrides, one batch after the other."""
        given = [*(f"{name}={value}" for name, value in self.params.items()), *arguments]
        batches = self.batches(OverridesParser.create(config_loader=self.loader).parse_overrides(given))
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        returns, started = [], 0
        for batch in batches:
            self.check(batch)
            returns.append(self.launcher.launch(batch, initial_job_idx=started))
            for job in returns[-1]:
                _ = job.return_value  # raises what the job raised
            started += len(batch)
        return returns

    def batches(self, overrides):
        """Jobs (lists of overrides) in batches of at most `max_batch_size`."""
        jobs = self.jobs(overrides)
        size = self.max_batch_size or max(len(jobs), 1)
        return [jobs[first : first + size] for first in range(0, len(jobs), size)]

    def jobs(self, overrides):
        """Jobs in the order in which they run."""
        from kvq.papers.sweep import grouped, product

        return grouped(product(overrides))

    def check(self, batch):
        """Raise the error of any job's configuration before the first job begins."""
        from kvq.config.merging import unchanging

        with unchanging():
            for overrides in batch:
                self.loader.check(self.config, overrides)


_GROUPED = {"_target_": "hydra_plugins.kvq_experiments.GroupedSweeper", "max_batch_size": None, "params": None}
ConfigStore.instance().store(group="hydra/sweeper", name="grouped", node=_GROUPED, provider="kvq")


class ExperimentSweeper(GroupedSweeper):
    """Runs each job that the composed `layout` asks for, once, under the command line's overrides."""

    def jobs(self, overrides):
        """Jobs of the layout that can be composed here."""
        from kvq.papers.sweep import sweep_of

        return [list(job) for job in sweep_of(self.config, overrides).jobs]

    def check(self, batch):
        """Compose the first job: the command line adds the same to each, and tests compose the jobs of the tables."""
        super().check(batch[:1])


class SearchSweeper(GroupedSweeper):
    """Trials over the swept values, chosen by Optuna (`kvq.sweep.search`)."""

    def __init__(self, max_batch_size=None, params=None, **settings):
        super().__init__(max_batch_size, params)
        self.settings = settings

    def sweep(self, arguments):
        """Ask for trials, launch them and learn from their records."""
        from kvq.sweep.search import Search, Settings, Space, summary

        given = [*(f"{name}={value}" for name, value in self.params.items()), *arguments]
        space = Space.of(OverridesParser.create(config_loader=self.loader).parse_overrides(given))
        settings = {
            name: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for name, v in self.settings.items()
        }
        search = Search(space, Settings(**settings), self.launch)
        if self.config.plan:
            print(f"plan: {search.settings.trials} trials of {search.space.size or 'infinitely many'} combinations")
            return []
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        self.started, self.returns = 0, []
        verdicts = search.run()
        for line in summary(search, verdicts):
            print(line)
        return self.returns

    def launch(self, jobs):
        """Run some jobs; what a job raised is raised."""
        self.check(jobs)
        self.returns.append(self.launcher.launch([list(job) for job in jobs], initial_job_idx=self.started))
        for job in self.returns[-1]:
            _ = job.return_value
        self.started += len(jobs)


_SEARCH = {
    "_target_": "hydra_plugins.kvq_experiments.SearchSweeper",
    "max_batch_size": None,
    "params": None,
    "trials": 40,
    "sampler": "tpe",
    "objectives": ["kl_mean", "effective_bits"],
    "seed": 0,
    "together": 1,
    "winners": 5,
    "verdict": [],
    "reference": None,
}
ConfigStore.instance().store(group="hydra/sweeper", name="kvq_search", node=_SEARCH, provider="kvq")
