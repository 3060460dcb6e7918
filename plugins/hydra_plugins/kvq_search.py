"""The sweeper `hydra/sweeper=kvq_search`, in `hydra_plugins` because Hydra finds sweepers only there."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins.kvq_experiments import GroupedSweeper


class SearchSweeper(GroupedSweeper):
    """Trials over the swept values, chosen by Optuna (`kvq_lab.search`)."""

    def __init__(self, max_batch_size=None, params=None, **settings):
        super().__init__(max_batch_size, params)
        self.settings = settings

    def sweep(self, arguments):
        """Ask for trials, launch them and learn from their records."""
        from kvq_lab.search import Search, Settings, Space, summary_lines

        given = [*(f"{name}={value}" for name, value in self.params.items()), *arguments]
        space = Space.from_overrides(OverridesParser.create().parse_overrides(given))
        settings = {
            name: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for name, v in self.settings.items()
        }
        self.started, self.returns = 0, []
        search = Search(space, Settings(**settings), self.run)
        if self.config.plan:
            print(f"plan: {search.settings.trials} trials of {search.space.size or 'infinitely many'} combinations")
            return []
        self.save()
        verdicts = search.run()
        for line in summary_lines(search, verdicts):
            print(line)
        return self.returns

    def run(self, jobs):
        """Run the jobs of trials."""
        self.returns.append(self.launch([list(job) for job in jobs], self.started))
        self.started += len(jobs)


_SEARCH = {
    "_target_": "hydra_plugins.kvq_search.SearchSweeper",
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
