"""The view `kvq` of a project: bits against quality, the figures, what sets runs apart."""

from __future__ import annotations

from typing import Any

from kvq.config.logger import WandbLogger
from kvq.report.wandb.run import CannotTrack
from kvq.results.metrics import METRICS

NAME = "kvq"
_QUALITY = {
    name: f"{METRICS[name].title} against effective bits" for name in ("delta_nll", "kl_mean", "accuracy", "score")
}
_FIGURES = ("windows", "needles", "error-steps", "tni-groups")
_SIDE_BY_SIDE = ("method", "bits")
_COLUMNS = (
    "config:method",
    "config:bits",
    "config:model",
    "config:dataset",
    "config:task",
    "summary:effective_bits",
    "summary:perplexity",
    "summary:delta_nll",
    "summary:accuracy",
)


def workspace_of(settings: WandbLogger, entity: str) -> Any:
    """The view, not yet saved.

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
    axes = [panels.ParallelCoordinatesPlotColumn(metric=config(name)) for name in _SIDE_BY_SIDE]
    axes += [panels.ParallelCoordinatesPlotColumn(metric=summary(name)) for name in ("effective_bits", "delta_nll")]
    return workspaces.Workspace(
        entity=entity,
        project=settings.project,
        name=NAME,
        sections=[
            workspaces.Section(name="Bits and quality", panels=plots, is_open=True),
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


def save_workspace(settings: WandbLogger) -> str:
    """Save the view in the project and return its address.

    Raises:
        CannotTrack: a package is missing, or the server does not answer or refuses.
    """
    try:
        import wandb

        entity = settings.entity or wandb.Api(timeout=settings.timeout).default_entity
        return str(workspace_of(settings, str(entity)).save().url)
    except CannotTrack:
        raise
    except Exception as error:
        raise CannotTrack(f"workspace: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
