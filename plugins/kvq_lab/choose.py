"""`kvq choose model=PATH engine=llamacpp minutes=10`: race an engine's cache formats on one's own model.

Full precision first, then two canaries, then the formats in rounds of windows drawn at random from a text. Each round
of a format is an ordinary record, so a repeated command goes on where the last one ended. `kvq_lab.racing` decides.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from kvq.config.explain import choices
from kvq.errors import ConfigError, RecordError, printable
from kvq.report.labels import BY_ENGINE
from kvq_lab.advisor import count_of, size_of
from kvq_lab.card import answer_of, choices_of, write_card
from kvq_lab.choosing import Choosing, Question, Say
from kvq_lab.needles import find_needles
from kvq_lab.words import answered, given_words, number

_USAGE = """Race cache formats on your model, and say which to take.

  kvq choose model=Qwen/Qwen3-8B engine=vllm context=32768 memory=4GiB minutes=10
  kvq choose model=smollm2_135m engine=llamacpp minutes=5 text=my_documents.txt

  model=PATH      a folder, a GGUF file, a hub name, or a model of conf/model; model.dtype=, model.device_map=auto, ...
  engine=NAME     {engines}; default: some of each
  method=NAMES    these instead, with commas between; 'kivi bits=2' where a method has widths
  context=TOKENS  of each sequence when serving, for the bytes (default 8192, or what the model takes)
  batch=N         sequences (default 1)
  memory=SIZE     only formats whose whole cache fits: 4GiB
  minutes=N       after which it ends (default 10)
  text=FILE       to measure on (jsonl, parquet, text, a folder), or a data set of conf/dataset; default pydocs
  window=TOKENS   of each passage (default 1024, or what the model takes)
  needles=TOKENS  of the prompts in which the choices look for five needles at the end (default: a window; 0: none)
  results=FOLDER  default: results; the card is FOLDER/choose/NAME.html
"""

_NAMES = ("model", "engine", "method", "context", "batch", "memory", "minutes", "text", "window", "needles", "results")


def question_of(words: Sequence[str]) -> Question:
    """The question of a command line. Raises: ConfigError: an unknown word, no model, or a number that is none."""
    more = tuple(word for word in words if word.startswith(("model.", "device=", "cache.", "threads=", "cpu_linear=")))
    given = given_words([word for word in words if word not in more], _NAMES)
    if "model" not in given:
        raise ConfigError("choose: needs model=PATH; --help says the rest")
    engine = given.get("engine")
    if engine is not None and engine not in BY_ENGINE:
        raise ConfigError(f"engine={engine}: one of {', '.join(BY_ENGINE)}")
    counts: dict[str, int] = {name: count_of(name, given[name]) for name in ("context", "window") if name in given}
    if "needles" in given:
        counts["needles"] = int(number("needles", given["needles"], "tokens, 0 or above", lambda value: value >= 0))
    return Question(
        (*_model_words(given["model"]), *more),
        engine,
        tuple(filter(None, given.get("method", "").split(","))),
        batch=count_of("batch", given.get("batch", "1")),
        memory=size_of(given["memory"]) if "memory" in given else None,
        minutes=number("minutes", given.get("minutes", "10"), "a number above 0", lambda value: 0 < value < 1e6),
        text=given.get("text", "pydocs"),
        results=Path(given.get("results", "results")),
        context=counts.get("context"),
        window=counts.get("window"),
        needles=counts.get("needles"),
    )


def _model_words(given: str) -> tuple[str, ...]:
    if given in choices()["model"]:
        return (f"model={given}",)
    if "/" in given or given.endswith(".gguf") or Path(given).expanduser().exists():
        return "model=hf", f"model.path={given}"
    names = ", ".join(name for name in choices()["model"] if name != "hf")
    raise ConfigError(f"model={given}: no such folder or GGUF file; or a hub name (owner/name), or one of {names}")


class _TimeLeft(ProgressColumn):
    """A bar of the time that has passed, and the time left."""

    def __init__(self, choosing: Choosing) -> None:
        super().__init__()
        self._choosing = choosing

    def render(self, task: Task) -> Text:
        left = max(0, int(self._choosing.ends - time.monotonic()))
        return Text(f"{left // 60}:{left % 60:02d} left", style="progress.remaining")


class _Bar(_TimeLeft):
    max_refresh = 0.5

    def render(self, task: Task) -> ProgressBar:  # type: ignore[override]
        whole = 60 * self._choosing.question.minutes
        return ProgressBar(total=whole, completed=whole - (self._choosing.ends - time.monotonic()), width=32)


@contextmanager
def _progress(choosing: Choosing, console: Console) -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), _Bar(choosing), _TimeLeft(choosing)
    kept = io.StringIO()  # no terminal, so that bars of libraries stay away while this one is on the screen
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        with redirect_stderr(kept):
            yield progress
        for line in dict.fromkeys(kept.getvalue().splitlines()):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def measure(choosing: Choosing, say: Say) -> None:
    """Measure canaries and formats as far as the time goes, then needles under the choices."""
    choosing.canaries(say)
    choosing.race(say)
    if choosing.state.rounds:
        find_needles(choosing, [choice.format for choice in choices_of(choosing)], say)


def _work(words: list[str]) -> int:
    choosing, console = Choosing(question_of(words)), Console(stderr=True)
    print(printable(choosing.plan()), flush=True)
    with _progress(choosing, console) as progress:
        task = progress.add_task("full precision, canaries", total=None)

        def say(line: str) -> None:
            progress.update(task, description=f"{len(choosing.state.left)} left")
            progress.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

        try:
            measure(choosing, say)
        except (SystemExit, KeyboardInterrupt):  # Ctrl-C: what is measured so far is the answer
            say("interrupted")
    print(printable(answer_of(choosing)))
    if choosing.state.rounds:
        print(f"card: {write_card(choosing)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Race formats and print which to take; 2: a question that cannot be answered, in one line."""
    return answered(arguments, _USAGE.format(engines=", ".join(BY_ENGINE)), _work, RecordError)
