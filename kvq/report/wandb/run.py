"""One record as one run of Weights & Biases."""

from __future__ import annotations

import io
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config.logger import WandbLogger, WandbMode
from kvq.errors import KvqError, RecordError
from kvq.report.figures.diagnostics import run_figures
from kvq.report.figures.style import png_of
from kvq.report.wandb.entry import Entry, entry_of, sample_table
from kvq.results import Record, Store
from kvq.results.atomic import write_file
from kvq.results.store import cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

# Seconds until an unreachable server is noticed; the client's defaults take a quarter of an hour.
_RETRIES = {"x_graphql_retry_max": 2, "x_file_stream_retry_max": 3, "x_file_transfer_retry_max": 3}
# Nothing of this machine or its checkout is sent beside the record.
_NOTHING_ELSE = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "host": "",
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class CannotTrack(KvqError):
    """Weights & Biases cannot be reached as things are; the message says why, in one line."""


class Tracker:
    """A project of Weights & Biases.

    Raises:
        CannotTrack: the package is missing, or nobody is logged in.
    """

    def __init__(self, settings: WandbLogger, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._wandb = _package()
        if settings.mode is WandbMode.disabled:
            raise CannotTrack("logger.mode or WANDB_MODE is disabled: nothing is sent")
        if settings.mode is WandbMode.online and not _logged_in(self._wandb):
            raise CannotTrack(
                "not logged in to Weights & Biases (wandb login, or WANDB_API_KEY; WANDB_MODE=offline needs none)"
            )
        project = f"{settings.entity or ''}/{settings.project}"
        self._pushed = Pushed(self.folder, project if settings.mode is WandbMode.online else f"offline {project}")

    @property
    def folder(self) -> Path:
        """Where the client keeps its files."""
        return self._store.root / "wandb"

    def push(self, record: Record, again: bool = False) -> bool:
        """Send a record unless it was sent as it is; whether it was sent now. Sent twice, it is the same run there.

        Raises:
            CannotTrack: the server does not answer or refuses.
            RecordError: the folder cannot be written.
        """
        entry = entry_of(record, self._settings.group)
        if not again and self._pushed.has(entry.id, entry.digest) and self._still_there(entry):
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._send(record, entry)
        except KvqError:
            raise
        except Exception as error:
            raise CannotTrack(f"{type(error).__name__}: {_one_line(error)}") from error
        self._pushed.add(entry.id, entry.digest)
        return True

    def _still_there(self, entry: Entry) -> bool:
        online = self._settings.mode is WandbMode.online
        return online or any(self.folder.glob(f"offline-run-*-{entry.id}"))

    def _send(self, record: Record, entry: Entry) -> None:
        known = self._settings
        run = self._wandb.init(
            project=known.project,
            entity=known.entity,
            id=entry.id,
            name=entry.name,
            group=entry.group,
            job_type=entry.job_type,
            tags=entry.tags,
            config=dict(entry.config),
            mode=str(known.mode),
            dir=str(self._store.root),
            resume="allow",
            reinit="create_new",
            allow_val_change=True,
            settings=self._wandb.Settings(
                init_timeout=known.timeout, x_graphql_timeout_seconds=known.timeout, **_RETRIES, **_NOTHING_ELSE
            ),
        )
        try:
            run.summary.update(dict(entry.summary))
            self._log_media(run, record)
            run.log_artifact(self._artifact(record, entry))
        finally:
            run.finish(exit_code=1 if record.status == "failed" else 0)

    def _log_media(self, run: Any, record: Record) -> None:
        """The table of samples and the run's figures, all in one step."""
        media: dict[str, Any] = {}
        try:
            columns, rows = sample_table(self._store.samples(record.key), self._settings.samples)
        except RecordError:
            columns, rows = [], []  # the numbers are sent without them
        if rows:
            media["samples"] = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        for name, figure in run_figures(record, self._store):
            media[f"figures/{name}"] = self._wandb.Image(_picture(figure))
        if media:
            run.log(media)

    def _artifact(self, record: Record, entry: Entry) -> Any:
        """The files of the record, as they lie under `runs/`."""
        artifact = self._wandb.Artifact(
            f"record-{entry.id}", type="record", metadata={"key": record.key, "sha256": entry.digest}
        )
        for path in (self._store.record_path(record.key), self._store.samples_path(record.key)):
            if path.is_file():
                artifact.add_file(str(path), name=path.name)
        return artifact


def _picture(figure: Figure) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png_of(figure)))


def _package() -> Any:
    with _quiet():
        try:
            import wandb
        except ImportError as error:
            raise CannotTrack("wandb is not installed (pip install -e '.[wandb]')") from error
    if not hasattr(wandb, "init"):  # a folder named wandb, which Python takes for a package
        raise CannotTrack("wandb is not installed (pip install -e '.[wandb]')")
    return wandb


def _logged_in(wandb: Any) -> bool:
    with _quiet():
        try:
            return bool(wandb.login(prompt=False))
        except Exception as error:
            raise CannotTrack(f"cannot log in to Weights & Biases: {_one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the client's own messages within the block."""
    before = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_SILENT"]
        else:
            os.environ["WANDB_SILENT"] = before


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class Pushed:
    """Digests of the records that were sent, by project and id, in one file under the results folder.

    Where the file is lost or another process has replaced it, records are sent again; the project stays the same.
    """

    def __init__(self, folder: Path, project: str) -> None:
        self._path = folder / "pushed.json"
        self._project = project

    def has(self, identifier: str, digest: str) -> bool:
        """Whether this very record was sent."""
        return self._read().get(self._project, {}).get(identifier) == digest

    def add(self, identifier: str, digest: str) -> None:
        """Keep that a record was sent.

        Raises:
            RecordError: the folder cannot be written.
        """
        known = self._read()
        known.setdefault(self._project, {})[identifier] = digest
        try:
            write_file(self._path, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())
        except OSError as error:
            raise RecordError(f"results_dir: cannot write '{self._path}': {cause(error)}") from error

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: ids for name, ids in found.items() if isinstance(ids, dict)} if isinstance(found, dict) else {}
