"""The Hugging Face hub: one check whether it answers, so that a command without a network fails at once.

The hub's libraries retry each file several times with growing pauses, close to half a minute for one name. Where the
hub does not answer, they are switched to offline mode and read their cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from kvq.errors import DataError, first_line

PATIENCE = 3.0
"""Seconds that the hub has to answer."""
STANDS = 60.0
"""Seconds until a hub that did not answer is tried again, so that a long sweep survives a short outage."""
UNREACHABLE = "not in the local hub cache, and the hub cannot be reached"
_silent_until: dict[str, float] = {}
_answered: set[str] = set()


def answers() -> bool:
    """Whether the hub (`HF_ENDPOINT`) answers at all; false where `HF_HUB_OFFLINE` is set."""
    if constants.is_offline_mode():
        return False
    where = constants.ENDPOINT
    if where in _answered:
        return True
    if time.monotonic() < _silent_until.get(where, 0.0):
        return False
    try:
        get_session().head(where, timeout=PATIENCE)
    # The client raises the errors of its transport library, which varies; all mean that the hub does not answer.
    except Exception:
        _silent_until[where] = time.monotonic() + STANDS
        return False
    _answered.add(where)
    return True


def load_rows(setting: str, local: str, hub_id: str | None, *given: Any, first: int | None = None, **named: Any) -> Any:
    """A split of a data set of the hub, a `datasets.Dataset`, or its local copy where the hub does not answer.

    Args:
        setting: begins an error's line, such as `dataset=c4`.
        local: describes the values that `dataset.path=` takes in place of the hub.
        hub_id: None: the configuration names no data set.
        first: so many first rows are streamed, instead of all being downloaded; the cache then keeps nothing.
        given, named: further arguments of `datasets.load_dataset`.
    """
    if hub_id is None:
        raise DataError(f"{setting}: set dataset.path= (a local copy) or dataset.hub_id=")
    from datasets import Dataset, load_dataset

    try:
        with offline_if_silent():
            if first is None:
                return load_dataset(hub_id, *given, **named)
            return Dataset.from_list(list(load_dataset(hub_id, *given, **named, streaming=True).take(first)))
    # The hub's client raises errors of several libraries; all mean that the rows cannot be downloaded.
    except Exception as error:
        raise DataError(
            f"{setting}: cannot load {hub_id} from the hub ({reason(error)}); dataset.path= takes {local}"
        ) from error


def folder_of(name: str, revision: str | None) -> Path | None:
    """The folder of the local cache with the files of a hub id; None: not there, or an invalid id."""
    with suppress(HFValidationError):
        found = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


@contextmanager
def offline_if_silent() -> Iterator[None]:
    """Within the context, the hub's libraries are in offline mode if the hub does not answer now."""
    if answers():
        yield
        return
    before = constants.HF_HUB_OFFLINE
    _set_offline(True)
    try:
        yield
    finally:
        _set_offline(before)


def _set_offline(offline: bool) -> None:
    constants.HF_HUB_OFFLINE = offline
    if "datasets" in sys.modules:  # it keeps a copy of its own
        sys.modules["datasets"].config.HF_HUB_OFFLINE = offline


def reason(error: Exception) -> str:
    """Why a download from the hub failed, in one line: the error's first line, or that the hub does not answer."""
    if not answers():
        return UNREACHABLE
    return first_line(error)
