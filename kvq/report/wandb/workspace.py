"""The view `kvq` of a project: bits against quality, each paper and task, figures, what sets runs apart."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from kvq.config.run import WandbLogger
from kvq.report.wandb.run import CannotTrack
from kvq.results import Record
from kvq.results.metrics import METRICS, metric_of

NAME = "kvq"
_QUALITY = {
    name: f"{METRICS[name].title} against effective bits" for name in ("delta_nll", "kl_mean", "accuracy", "score")
}
PAPERS = {"nsn": "nsn", "nsnquant": "NSNQuant", "oscar": "OScaR", "kvquant_plus_plus": "KVQuant++"}
"""Methods of the papers whose tables are repeated here, by the name that a section has."""
TASKS = {"ppl": "perplexity", "tni": "TNI", "latency": "latency", "memory": "memory", "longbench": "LongBench subsets"}
"""Tasks that have a section for each paper, by its name there."""
# What a section shows first, by the beginnings of metrics' names; what begins otherwise has no panel.
_SHOWN = {
    "ppl": ("perplexity", "delta_nll", "kl_mean", "top1_agreement"),
    "tni": ("key_cv", "query_cv", "value_cv", "key_max_over_min", "key_median_over_min", "key_sinks"),
    "latency": ("decode_b", "prefill_b", "decode_over_", "prefill_over_", "cache_bytes_"),
    "memory": ("compression_", "bits_without_residual_", "total_bytes_"),
    "longbench": ("score[subset=", "subset_mean"),
}
_MOST_PANELS = 24
_FIGURES = ("windows", "needles", "error-steps", "tni-groups")
_SIDE_BY_SIDE = ("method", "bits")
_COLUMNS = (
    *(f"config:{name}" for name in ("method", "bits", "model", "dataset", "task")),
    *(f"summary:{name}" for name in ("effective_bits", "perplexity", "delta_nll", "accuracy")),
)


def sections_of(records: Iterable[Record]) -> dict[str, list[str]]:
    """Sections by their names, such as `NSNQuant: perplexity`, each with the metrics that have a panel.

    A paper's runs of a task are those of its method and of its variants; a section without records is left out.
    """
    metrics: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in records:
        metrics[record.method.partition("/")[0], record.task].update(record.metrics)
    found = {}
    for (method, paper), (task, title) in itertools.product(PAPERS.items(), TASKS.items()):
        names = sorted(name for name in metrics[method, task] if not name.endswith("_se"))
        shown = [name for start in _SHOWN[task] for name in names if name.startswith(start)]
        if shown:
            found[f"{paper}: {title}"] = list(dict.fromkeys(shown))[:_MOST_PANELS]
    return found


def workspace_of(settings: WandbLogger, entity: str, records: Iterable[Record] = ()) -> Any:
    """The view, not yet saved; `records`: the project's runs, whose metrics have panels.

    Raises:
        CannotTrack: the package is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise CannotTrack("wandb-workspaces is not installed (pip install -e '.[wandb]')") from error
    summary, config = panels.SummaryMetric, panels.Config
    plots: list[Any] = [
        panels.ScatterPlot(title=title, x=summary("effective_bits"), y=summary(name))
        for name, title in _QUALITY.items()
    ]
    bars: dict[str, list[Any]] = {
        section: [panels.BarPlot(title=metric_of(name).title, metrics=[panels.Metric(name)]) for name in names]
        for section, names in sections_of(records).items()
    }
    axes = [panels.ParallelCoordinatesPlotColumn(metric=config(name)) for name in _SIDE_BY_SIDE]
    axes += [panels.ParallelCoordinatesPlotColumn(metric=summary(name)) for name in ("effective_bits", "delta_nll")]
    return workspaces.Workspace(
        entity=entity,
        project=settings.project,
        name=NAME,
        sections=[
            workspaces.Section(name="Bits and quality", panels=plots, is_open=True),
            *(workspaces.Section(name=section, panels=own) for section, own in bars.items()),
            workspaces.Section(
                name="Figures",
                panels=[panels.MediaBrowser(media_keys=[f"figures/{name}"]) for name in _FIGURES],
                is_open=True,
            ),
            workspaces.Section(
                name="What sets runs apart",
                panels=[panels.ParallelCoordinatesPlot(columns=axes), panels.RunComparer(diff_only="split")],
            ),
        ],
        runset_settings=workspaces.RunsetSettings(pinned_columns=list(_COLUMNS)),
    )


def save_workspace(settings: WandbLogger, records: Iterable[Record]) -> str:
    """Save the view of records in the project and return its address.

    Raises:
        CannotTrack: a package is missing, or the server does not answer or refuses.
    """
    try:
        import wandb

        entity = settings.entity or wandb.Api(timeout=settings.timeout).default_entity
        return str(workspace_of(settings, str(entity), records).save().url)
    except CannotTrack:
        raise
    except Exception as error:
        raise CannotTrack(f"workspace: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
