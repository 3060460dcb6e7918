"""Where every command begins: a signal, a closed pipe or a full disk ends it with at most one line and no traceback.

A module that is a command calls `enter` before it imports anything else, because its imports take seconds.
"""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

COMMANDS = {
    "ls": "kvq.config.explain",
    "report": "kvq.report.__main__",
    "papers": "kvq.papers.__main__",
    "figures": "kvq.papers.figures",
    "html": "kvq.report.html",
    "recommend": "kvq.recommend.advisor",
    "allocate": "kvq.recommend.allocate",
    "export": "kvq.recommend.export",
    "leaderboard": "kvq.recommend.leaderboard",
    "lm_eval": "kvq.tasks.lm_eval_model",
    "pack": "kvq.results.pack",
    "wandb": "kvq.report.wandb",
}
"""Commands by the word that follows `kvq`, `python -m kvq` or `python run.py`; anything else is a run's settings."""
_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
SCRATCH = "KVQ_SCRATCH"
"""The environment variable that names a folder of this process, to be removed at its end."""
_CLEANING_SECONDS = 10.0
_OUTPUT_CLOSED = 128 + 13  # the status that a shell gives to what SIGPIPE ended
# What the tables' marks become where the output's encoding lacks them; everything else becomes a question mark.
_PLAIN = {"≈": "~", "Δ": "D", "±": "~", "†": "+", "–": "-", "—": "-", "−": "-", "·": "-", "×": "x", "’": "'", "…": "."}


_signalled: list[Ended] = []


class Ended(SystemExit):
    """Raised to end a command early, with its exit status and, if there is one, a line for stderr."""

    def __init__(self, status: int, line: str = "") -> None:
        super().__init__(status)
        self.status, self.line = status, line

    @classmethod
    def by_signal(cls, number: int) -> Ended:
        """The `Ended` of a signal, with the exit status that shells give it."""
        return cls(128 + number, f"{_NAMES[signal.Signals(number)]}; what is done is kept, repeat the command to go on")

    @classmethod
    def by_output(cls, error: OSError) -> Ended:
        """The `Ended` of a standard output that cannot be written, silent if its reader has gone, as with `| head`."""
        with suppress(OSError):  # what is still buffered goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        gone = error.errno == errno.EPIPE
        return cls(_OUTPUT_CLOSED) if gone else cls(1, f"standard output: {error.strerror or error}")

    def now(self) -> NoReturn:
        """End the process at once, where a raised exception would be lost."""
        self.say()
        if scratch := os.environ.get(SCRATCH):
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(self.status)

    def say(self) -> None:
        """Write the line to stderr without its buffers, which may be in use."""
        if self.line:
            with suppress(OSError):
                os.write(2, f"error: {self.line}\n".encode())


class _Output(io.TextIOWrapper):
    """Standard output that ends the command when it cannot be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise Ended.by_output(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise Ended.by_output(error) from None


class _Errors(io.TextIOWrapper):
    """Standard error that drops what it cannot write."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def main() -> NoReturn:
    """`kvq`: a command of `COMMANDS` by its name, else a run or a sweep by its settings."""
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    module = COMMANDS.get(named)
    if module is None and named.isidentifier():
        from kvq.config.plugins import commands  # most commands are done without

        module = commands().get(named)
    if module is not None:
        del sys.argv[1]
    enter(module or "kvq.cli")


def enter(module: str) -> NoReturn:
    """Import a module, call its `main` and exit with the status that it returns.

    SIGINT and SIGTERM say one line and exit with 130 and 143, a closed pipe says nothing and exits with 141, any other
    output that cannot be written says one line and exits with 1. A second signal does not wait for what is cleaned up.
    """
    for number in _NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or started with `&` in a script
            signal.signal(number, _stop)
    sys.unraisablehook = _unraisable
    codecs.register_error("kvq.plain", _plain)
    sys.stdout, sys.stderr = _stream(_Output, 1, sys.stdout, "kvq.plain"), _stream(_Errors, 2, sys.stderr, "kvq.plain")
    try:
        status = _status(module)
        sys.stdout.flush()
    except Ended as end:
        end.say()
        status = end.status
    for number in _NAMES:
        if signal.getsignal(number) is _stop:
            signal.signal(number, _stop_now)
    sys.exit(status)


def _status(module: str) -> Any:
    try:
        return importlib.import_module(module).main()
    except Ended:
        raise
    except SystemExit as end:  # of argparse
        return end.code
    except BaseException:
        if _signalled:  # what a library made of it
            raise _signalled[0] from None
        raise


def _stream(kind: type[io.TextIOWrapper], number: int, given: Any, errors: str) -> io.TextIOWrapper:
    """A standard stream in the place of `given`; one that was closed by the caller refuses what is written."""
    if given is None:  # the next file that is opened must not become the standard stream
        os.dup2(os.open(os.devnull, os.O_RDONLY), number)
        return kind(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8", errors)
    buffered = given.line_buffering
    encoding = given.encoding
    return kind(given.detach(), encoding, errors, line_buffering=buffered)


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(one, "?") for one in error.object[error.start : error.end]), error.end


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the command in its own time: with statements and finally clauses run."""
    for other in _NAMES:
        signal.signal(other, _stop_now)
    end = Ended.by_signal(number)
    _signalled.append(end)
    _end_children()
    if _importing(frame):
        end.now()
    late = threading.Timer(_CLEANING_SECONDS, end.now)
    late.daemon = True
    late.start()
    raise end


def _stop_now(number: int, _frame: object) -> NoReturn:
    _end_children()
    Ended.by_signal(number).now()


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: extensions turn what is raised there into errors of their own."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_children() -> None:
    """End the processes that draw or measure, so that nothing waits for them."""
    started = sys.modules.get("multiprocessing")
    for child in started.active_children() if started is not None else ():
        child.kill()


def _unraisable(given: Any) -> None:
    """Let `Ended` end the process also where Python ignores exceptions: in destructors and callbacks."""
    if isinstance(given.exc_value, Ended):
        given.exc_value.now()
    sys.__unraisablehook__(given)


@contextmanager
def apart() -> Iterator[None]:
    """Processes that are started within the context ignore Ctrl-C; this process ends them when it gets it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
