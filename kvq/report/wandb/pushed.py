"""The records that were sent to a project, so that a repeated command does not send them again."""

from __future__ import annotations

import json
from pathlib import Path

from kvq.errors import RecordError
from kvq.results.atomic import write_file
from kvq.results.store import cause


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
