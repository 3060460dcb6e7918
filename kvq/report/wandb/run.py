"""One record as one run of Weights & Biases: its name, tags, configuration and summary, and how it is sent."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvq.config.run import WandbLogger, WandbMode
from kvq.errors import KvqError, RecordError
from kvq.report.figures.diagnostics import run_figures
from kvq.report.figures.style import png_of
from kvq.report.labels import label, model_name, protocol, protocol_departures
from kvq.results import Record, Store
from kvq.results.atomic import write_file
from kvq.results.record import dump_record
from kvq.results.store import cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

_LONGEST_GROUP = 100
_MULTIRUN = ("-m", "--multirun")


class Entry(NamedTuple):
    """A run as a tracker names it; `id` follows from the record's key, `digest` from all of the record."""

    id: str
    digest: str
    name: str
    group: str | None
    job_type: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    summary: Mapping[str, float]


def entry_of(record: Record, group: str | None = None) -> Entry:
    """Describe a run.

    Args:
        record: a finished run.
        group: what it belongs to; None = the sweep whose command made it, where it was one.
    """
    fixed = "" if record.baseline_key is None else "fixed rate"
    own = label(record)
    name = " ".join(word for word in (own, record.bits or fixed) if word)
    model, words = model_name(record.model), ", ".join(protocol_departures(record))
    task = f"{record.task} ({words})" if words else record.task
    return Entry(
        id=record.key[:32],
        digest=hashlib.sha256(dump_record(record)).hexdigest(),
        name=f"{name} · {model} · {record.dataset} · {task}"[:128],
        group=group if group is not None else sweep_of(record.provenance.command),
        job_type=record.task[:64],
        tags=tuple(
            dict.fromkeys(word[:64] for word in (own, record.method, model, record.dataset, record.status) if word)
        ),
        config={
            "key": record.key,
            "baseline_key": record.baseline_key,
            "task": record.task,
            "model": record.model,
            "dataset": record.dataset,
            "label": own,
            "protocol": protocol(record),
            "method": record.method,
            "bits": record.bits,
            "status": record.status,
            "reason": record.reason,
            "settings": record.config,
            "units": record.units,
            "versions": record.versions,
            "provenance": record.provenance.model_dump(mode="json"),
        },
        summary=dict(record.metrics),
    )


def sweep_of(command: str) -> str | None:
    """Name of the sweep that a command was, from the command alone; None for a single run."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:
        words = command.split()[1:]
    if not any(word in _MULTIRUN or word.startswith("+experiment=") for word in words):
        return None
    text = " ".join(word for word in words if word not in _MULTIRUN)
    plain = "".join("-" if character in "/\\#?%:" else character for character in text)
    if len(plain) > _LONGEST_GROUP:
        plain = f"{plain[:_LONGEST_GROUP]}… {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return plain or None


def sample_table(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[Any]]]:
    """Columns and the first `most` rows of a run's samples; what is not a number or text is written as JSON."""
    kept = rows[:most]
    columns = list(dict.fromkeys(name for row in kept for name in row))
    return columns, [[_plain(row.get(name)) for name in columns] for row in kept]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


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
