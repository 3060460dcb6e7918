"""What `+experiment=<paper>/<table>` prints after its runs."""

from __future__ import annotations

from rich.console import Console

from kvq.papers.expected import Present, experiment_of
from kvq.report.comparisons import read_records
from kvq.report.tables.experiment_files import fill, grids_of
from kvq.report.tables.experiments import Experiment, by_signature
from kvq.report.tables.readings import read_reference
from kvq.report.tables.terminal import print_grid
from kvq.results import Store


def print_experiment(name: str, results_dir: str) -> None:
    """Print an experiment's table of measured and published numbers, from the records of a folder.

    Raises:
        KvqError: the experiment does not compose, or the published figures cannot be read.
    """
    records = read_records(Store(results_dir))[0]
    experiment, console = _known(name, frozenset((record.model, record.method) for record in records)), Console()
    for grid in grids_of(fill(experiment, by_signature(records), read_reference())):
        print_grid(grid, console)
        console.print()


def print_cost(name: str, jobs: int) -> None:
    """Print how many runs were asked for, how many the paper's own experiment has, and what it waits for."""
    experiment = _known(name)
    full = f"{experiment.runs} runs and {experiment.baselines} of full precision beside them"
    print(f"{name}: {jobs} runs here; in full {full}")
    for choice, runs in experiment.waiting.items():
        print(f"{choice} is not in this version: {runs} of the {experiment.runs} runs wait for it")
    for reason in dict.fromkeys(cell.reason for cell in experiment.cells if cell.reason):
        print(f"cells that cannot be measured: {reason}")


def _known(name: str, present: Present = frozenset()) -> Experiment:
    experiment = experiment_of(name, present)
    assert experiment is not None  # the command has composed its layout
    return experiment
