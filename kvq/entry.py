"""Where every command begins: a signal or an output that fails ends it with one line at most and the right exit status.

A module that is a command calls `enter` before it imports anything else, because its imports take seconds.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

COMMANDS = {
    "ls": "kvq.config.explain",
    "report": "kvq.report.__main__",
    "papers": "kvq.papers.__main__",
    "figures": "kvq.report.figures.every",
    "html": "kvq.report.html",
    "pack": "kvq.results.store",
    "wandb": "kvq.report.wandb",
}
"""Commands by the word that follows `kvq`, `python -m kvq` or `python run.py`; anything else is a run's settings."""
_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_stopped: list[int] = []  # the exit status of a signal


def _ending(work: Callable[..., Any]) -> Any:
    def guarded(*given: Any) -> Any:
        try:
            return work(*given)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
            closed = error.errno == errno.EPIPE  # 141, as a shell says of what SIGPIPE ended
            sys.exit(128 + 13 if closed else f"error: standard output: {error.strerror or error}")

    return guarded


class _Output(io.TextIOWrapper):
    """Standard output that ends the command where it cannot be written: silently if its reader has gone (`| head`)."""

    write, flush = _ending(io.TextIOWrapper.write), _ending(io.TextIOWrapper.flush)


def main() -> NoReturn:
    """`kvq`: a command of `COMMANDS` by its name, else a run or a sweep by its settings."""
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    module = COMMANDS.get(named)
    if module is None and named.isidentifier():
        from kvq.config.plugins import merge_tables  # most commands are done without

        module = merge_tables("commands").get(named)
    if module is not None:
        del sys.argv[1]
    enter(module or "kvq.cli")


def enter(module: str) -> NoReturn:
    """Import a module, call its `main` and exit with the status that it returns, or 130 or 143 after a signal."""
    for number in _NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or started with `&` in a script
            signal.signal(number, _stop)
    if isinstance(out := sys.stdout, io.TextIOWrapper):  # not closed
        encoding, buffered = out.encoding, out.line_buffering
        sys.stdout = _Output(out.detach(), encoding, "replace", line_buffering=buffered)
    try:
        status = importlib.import_module(module).main()
    except SystemExit as end:  # of argparse, or of what could not be written
        status = end.code
    except BaseException:
        if not _stopped:
            raise
    if sys.stdout is not None:
        sys.stdout.flush()
    sys.exit(_stopped[0] if _stopped else status)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the command, after what stands in its finally clauses. A second signal ends the process at once."""
    for each in _NAMES:
        signal.signal(each, signal.SIG_DFL)
    started = sys.modules.get("multiprocessing")
    for child in started.active_children() if started is not None else ():
        child.kill()
    line = f"error: {_NAMES[signal.Signals(number)]}; what is done is kept, repeat the command to go on\n"
    with suppress(OSError):
        os.write(2, line.encode())  # without the buffers of stderr, which may be in use
    _stopped.append(128 + number)
    sys.exit(128 + number)
