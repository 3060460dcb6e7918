"""Hydra's sweep over the runs of an experiment's table, where they are no product of values.

It lives in `hydra_plugins` because Hydra takes sweepers from there alone.
"""

from __future__ import annotations

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper


class ExperimentSweeper(BasicSweeper):
    """Runs each job that the composed `layout` asks for, once, under the command line's overrides."""

    def split_arguments(self, overrides, max_batch_size):
        """Jobs in one batch; the base class asks for them by this name."""
        from kvq.experiments.sweep import sweep_of

        return [[list(job) for job in sweep_of(self.config, overrides).jobs]]

    def validate_batch_is_legal(self, batch):
        """Compose the first job ahead of time: what a command line adds is in each, and a table's own are tested."""
        super().validate_batch_is_legal(batch[:1])
