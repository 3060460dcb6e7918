"""`python -m kvq.report.wandb`: send finished records to Weights & Biases; what is there already is not sent again.

`track` sends one while a sweep measures, and its errors never stop it. One record is one run there. The view `kvq` of a
project shows bits against quality, each paper and task, figures, and what sets runs apart.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.wandb")

import argparse
import io
import itertools
import json
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from kvq.config.run import NoLogger, WandbLogger, WandbMode
from kvq.errors import KvqError, RecordError, one_line, printable
from kvq.report import command
from kvq.report.labels import label, labelled, model_name, protocol
from kvq.results import Record, Store
from kvq.results.metrics import METRICS, metric_of
from kvq.results.presets import departures_of

VIEW: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "workspace.yaml").read_text(encoding="utf-8"))
_MULTIRUN = ("-m", "--multirun")
# What a run's configuration has as the record has it.
_IN_CONFIG = (
    *("key", "baseline_key", "task", "model", "dataset", "method", "bits", "status", "reason"),
    *("units", "versions"),
)
# Nothing of this machine or its checkout is sent besides the record.
_NOTHING_ELSE = {
    **dict.fromkeys(("silent", "disable_git", "disable_job_creation"), True),
    **dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True),
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    "console": "off",
    "host": "",
}
_given_up: set[str] = set()
_sent: set[str] = set()
"""Keys of the records that this process has sent."""


def entry_of(record: Record, group: str | None = None) -> dict[str, Any]:
    """What `wandb.init` is told of a run; the id follows from its key. `group`: None = the sweep that made it."""
    own, model, words = label(record), model_name(record.model), ", ".join(departures_of(record).protocol)
    name = f"{own} {record.bits or ('fixed rate' if record.baseline_key else '')}".strip()
    task = f"{record.task} ({words})" if words else record.task
    tags = filter(None, (own, record.method, model, record.dataset, record.status))
    return {
        "id": record.key[:32],
        "name": f"{name} · {model} · {record.dataset} · {task}"[:128],
        "group": group if group is not None else sweep_of(record.provenance.command),
        "job_type": record.task[:64],
        "tags": tuple(dict.fromkeys(word[:64] for word in tags)),
        "config": {name: getattr(record, name) for name in _IN_CONFIG}
        | {"label": own, "protocol": protocol(record), "settings": record.config}
        | {"provenance": record.provenance.model_dump(mode="json")},
    }


def sweep_of(command: str) -> str | None:
    """Name of the sweep that a command started, derived from the command; None for a single run."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:  # of a shell that kvq did not write
        words = command.split()[1:]
    is_sweep = any(word in _MULTIRUN or word.startswith("+experiment=") for word in words)
    text = " ".join(word for word in words if is_sweep and word not in _MULTIRUN)
    return re.sub(r"[/\\#?%:]", "-", text)[:128] or None


def sample_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells of a run's samples; what is not a number or text is written as JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return columns, [[v if isinstance(v, str | int | float | None) else json.dumps(v) for v in row] for row in cells]


class CannotTrack(KvqError):
    """Weights & Biases cannot be reached as things are; the message says why, in one line."""


@contextmanager
def _as_cannot_track(what: str = "") -> Iterator[None]:
    """A context manager: what the client raises within its block becomes a `CannotTrack` of one line, after `what`."""
    try:
        yield
    except KvqError:
        raise
    except Exception as error:
        said = str(error) and one_line(error, 300)
        raise CannotTrack(f"{what}{type(error).__name__}: {said}") from error


class Tracker:
    """A project of Weights & Biases, to which records of a store are sent; `CannotTrack`: it cannot be reached."""

    def __init__(self, settings: WandbLogger, store: Store) -> None:
        self._settings, self._store, self.folder = settings, store, store.root / "wandb"
        os.environ.setdefault("WANDB_SILENT", "true")  # the client's own messages
        try:
            import wandb

            self._wandb: Any = wandb
            _ = wandb.init  # a folder named wandb, which Python takes for a package, has none
        except (ImportError, AttributeError) as error:
            raise CannotTrack("wandb is not installed (pip install -e '.[wandb]')") from error
        if settings.mode is WandbMode.disabled:
            raise CannotTrack("logger.mode or WANDB_MODE is disabled: nothing is sent")
        if settings.mode is WandbMode.online:
            with _as_cannot_track("cannot log in to Weights & Biases: "):
                known = self._wandb.login(prompt=False)
            if not known:
                ways = "wandb login, or WANDB_API_KEY; WANDB_MODE=offline needs none"
                raise CannotTrack(f"not logged in to Weights & Biases ({ways})")

    def api(self) -> Any:
        """The client's view of what the server has."""
        return self._wandb.Api(timeout=self._settings.timeout)

    def present(self) -> set[str]:
        """Ids of the runs that the project has in full; offline of those that wait in the folder."""
        known = self._settings
        if known.mode is WandbMode.offline:
            return {path.name.rpartition("-")[2] for path in self.folder.glob("offline-run-*")}
        with _as_cannot_track(), suppress(ValueError):  # no such project yet
            path = f"{known.entity or self.api().default_entity}/{known.project}"
            return {run.id for run in self.api().runs(path) if run.state != "failed"}
        return set()

    def push(self, record: Record) -> None:
        """Send a record. Sent twice, it is the same run there."""
        known, timeout = self._settings, self._settings.timeout
        with _as_cannot_track():
            self.folder.mkdir(parents=True, exist_ok=True)
            run = self._wandb.init(
                project=known.project,
                entity=known.entity,
                **entry_of(record, known.group),
                mode=str(known.mode),
                dir=str(self._store.root),
                resume="allow",
                reinit="create_new",
                allow_val_change=True,
                settings=self._wandb.Settings(init_timeout=timeout, x_graphql_timeout_seconds=timeout, **_NOTHING_ELSE),
            )
            code = 1
            try:
                run.summary.update(dict(record.metrics))
                self._log_media(run, record)
                code = int(record.status == "failed")
            finally:
                run.finish(exit_code=code)

    def _log_media(self, run: Any, record: Record) -> None:
        """Send the table of the first samples and the run's figures, all in one step."""
        from PIL import Image

        from kvq.report.figures.drawing import image_of
        from kvq.report.figures.every import run_figures  # matplotlib takes seconds to import

        media: dict[str, Any] = {}
        with suppress(RecordError):  # the numbers are sent without them
            columns, rows = sample_table(self._store.samples(record.key)[: self._settings.samples])
            if rows:
                media["samples"] = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        for name, figure in run_figures(record, self._store):
            media[f"figures/{name}"] = self._wandb.Image(Image.open(io.BytesIO(image_of(figure))))
        if media:
            run.log(media)


def _sections_of(records: Iterable[Record]) -> dict[str, list[str]]:
    """Sections by name (`NSNQuant: perplexity`): metrics with a panel, of a paper's method and its variants."""
    metrics: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in records:
        metrics[record.method.partition("/")[0], record.task].update(record.metrics)
    found = {}
    for (method, paper), (task, (title, starts)) in itertools.product(VIEW["papers"].items(), VIEW["tasks"].items()):
        names = sorted(name for name in metrics[method, task] if not name.endswith("_se"))
        shown = [name for start in starts for name in names if name.startswith(start)]
        if shown:
            found[f"{paper}: {title}"] = list(dict.fromkeys(shown))[: VIEW["most_panels"]]
    return found


def workspace_of(settings: WandbLogger, entity: str, records: Iterable[Record] = ()) -> Any:
    """The view, not yet saved; `records`: the project's runs, whose metrics have panels."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise CannotTrack("wandb-workspaces is not installed (pip install -e '.[wandb]')") from error
    summary, config = panels.SummaryMetric, panels.Config
    against, bits = "against effective bits", summary("effective_bits")
    plots: list[Any] = [
        panels.ScatterPlot(title=f"{METRICS[name].title} {against}", x=bits, y=summary(name))
        for name in VIEW["quality"]
    ]
    bars: dict[str, list[Any]] = {
        section: [panels.BarPlot(title=metric_of(name).title, metrics=[panels.Metric(name)]) for name in names]
        for section, names in _sections_of(records).items()
    }
    figures: list[Any] = [panels.MediaBrowser(media_keys=[f"figures/{name}"]) for name in VIEW["figures"]]
    settings_apart, metrics_apart = VIEW["apart"]
    apart: list[Any] = [*map(config, settings_apart), *map(summary, metrics_apart)]
    axes = [panels.ParallelCoordinatesPlotColumn(metric=metric) for metric in apart]
    return workspaces.Workspace(
        entity=entity,
        project=settings.project,
        name="kvq",
        sections=[
            workspaces.Section(name="Bits and quality", panels=plots, is_open=True),
            *(workspaces.Section(name=section, panels=own) for section, own in bars.items()),
            workspaces.Section(name="Figures", panels=figures, is_open=True),
            workspaces.Section(
                name="What sets runs apart",
                panels=[panels.ParallelCoordinatesPlot(columns=axes), panels.RunComparer(diff_only="split")],
            ),
        ],
        runset_settings=workspaces.RunsetSettings(pinned_columns=VIEW["columns"]),
    )


def track(settings: NoLogger | None, store: Store, record: Record) -> None:
    """Show a run and its full precision where `settings` say; after the first error, one line and nothing more."""
    if not isinstance(settings, WandbLogger) or settings.mode is WandbMode.disabled or _given_up:
        return
    try:
        with _as_cannot_track():
            tracker = Tracker(settings, store)
            baseline = None if record.baseline_key is None else store.get(record.baseline_key)
            for run in (baseline, record):
                if run is not None and run.key not in _sent:
                    tracker.push(run)
                    _sent.add(run.key)
    except KvqError as error:
        _given_up.add(str(error))
        line = f"warning: logger=wandb: {error}; runs go on, make wandb-sync sends their records later"
        tqdm.write(printable(line), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command.parser_of("kvq.report.wandb", __doc__)
    parser.add_argument("--project", default="kvq", help="project (default: kvq)")
    parser.add_argument("--entity", help="account or team (default: the account's own)")
    parser.add_argument("--group", help="group of all runs (default: one for each sweep's command)")
    parser.add_argument("--offline", action="store_true", help="write files for `wandb sync` instead")
    parser.add_argument("--workspace", action="store_true", help="save the view 'kvq' in the project too")
    return command.run(parser.parse_args(arguments), _sync)


def _sync(given: argparse.Namespace) -> int:
    """Send the finished records of a results folder that the project lacks; `given`: the options of `main`."""
    mode = WandbMode.offline if given.offline else None
    settings = WandbLogger(project=given.project, entity=given.entity, group=given.group, mode=mode)
    store = Store(given.results)
    records, broken = labelled(store)
    if not records:
        raise command.no_records(store)
    command.say_skipped(broken)
    tracker = Tracker(settings, store)
    finished = [record for record in records if record.status != "failed"]
    present = tracker.present()
    wanted = [record for record in finished if record.key[:32] not in present]
    for record in tqdm(wanted, desc="wandb", unit="run", disable=None, leave=False):
        tracker.push(record)
    there, failed = len(finished) - len(wanted), len(records) - len(finished)
    print(f"{len(wanted)} sent, {there} there already, {failed} failed and left out")
    if given.workspace:
        with _as_cannot_track("workspace: "):
            account = settings.entity or tracker.api().default_entity
            print(workspace_of(settings, str(account), finished).save().url)
    return 0
