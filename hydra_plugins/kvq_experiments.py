"""Sweepers: over products of values, and over the runs of an experiment's table, which are no product.

They live in `hydra_plugins` because Hydra takes sweepers from there alone.
"""

from __future__ import annotations

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.types import HydraContext


class _QuickSweeper(BasicSweeper):
    """Hydra's own sweeper; its jobs are composed by `kvq.config.sweep_loader`, in a fraction of Hydra's time."""

    def setup(self, *, hydra_context, task_function, config):
        """Give the launcher that loader too."""
        from kvq.config.sweep_loader import SweepLoader

        quick = HydraContext(SweepLoader(hydra_context.config_loader), hydra_context.callbacks)
        super().setup(hydra_context=quick, task_function=task_function, config=config)

    def validate_batch_is_legal(self, batch):
        """Say what is wrong with any job before the first begins."""
        for overrides in batch:
            self.hydra_context.config_loader.check(self.config, overrides)


class GroupedSweeper(_QuickSweeper):
    """Hydra's own product of values, with the runs that share a model and a text one after the other."""

    @staticmethod
    def split_arguments(overrides, max_batch_size):
        """Batches of jobs; the base class asks for them by this name."""
        from kvq.papers.sweep import grouped

        jobs = grouped(job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch)
        size = max_batch_size or len(jobs)
        return [jobs[first : first + size] for first in range(0, len(jobs), size)]


_GROUPED = {"_target_": "hydra_plugins.kvq_experiments.GroupedSweeper", "max_batch_size": None, "params": None}
ConfigStore.instance().store(group="hydra/sweeper", name="grouped", node=_GROUPED, provider="kvq")


class ExperimentSweeper(_QuickSweeper):
    """Runs each job that the composed `layout` asks for, once, under the command line's overrides."""

    def split_arguments(self, overrides, max_batch_size):
        """Jobs in one batch; the base class asks for them by this name."""
        from kvq.papers.sweep import sweep_of

        return [[list(job) for job in sweep_of(self.config, overrides).jobs]]

    def validate_batch_is_legal(self, batch):
        """Compose the first job ahead of time: what a command line adds is in each, and a table's own are tested."""
        super().validate_batch_is_legal(batch[:1])
