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
from kvq_lab.advisor import parse_count, parse_size
from kvq_lab.card import answer_text, find_choices, write_card
from kvq_lab.choosing import Chooser, Question, Say
from kvq_lab.needles import find_full_needles, find_needles
from kvq_lab.words import parse_number, parse_words, run_command

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


def parse_question(words: Sequence[str]) -> Question:
    """Parse a command line. Raises: ConfigError: an unknown word, no model, or a value that is not a number."""
    more = tuple(word for word in words if word.startswith(("model.", "device=", "cache.", "threads=", "cpu_linear=")))
    values = parse_words([word for word in words if word not in more], _NAMES)
    if "model" not in values:
        raise ConfigError("choose: needs model=PATH; --help says the rest")
    engine = values.get("engine")
    if engine is not None and engine not in BY_ENGINE:
        raise ConfigError(f"engine={engine}: one of {', '.join(BY_ENGINE)}")
    counts: dict[str, int] = {name: parse_count(name, values[name]) for name in ("context", "window") if name in values}
    if "needles" in values:
        counts["needles"] = int(
            parse_number("needles", values["needles"], "tokens, 0 or above", lambda n: n >= 0 and n.is_integer())
        )
    return Question(
        (*_model_words(values["model"]), *more),
        engine,
        tuple(filter(None, values.get("method", "").split(","))),
        batch=parse_count("batch", values.get("batch", "1")),
        memory=parse_size(values["memory"]) if "memory" in values else None,
        minutes=parse_number("minutes", values.get("minutes", "10"), "a number above 0", lambda value: 0 < value < 1e6),
        text=values.get("text", "pydocs"),
        results=Path(values.get("results", "results")),
        context=counts.get("context"),
        window=counts.get("window"),
        needles=counts.get("needles"),
    )


def _model_words(model: str) -> tuple[str, ...]:
    if model in choices()["model"]:
        return (f"model={model}",)
    if "/" in model or model.endswith(".gguf") or Path(model).expanduser().exists():
        return "model=hf", f"model.path={model}"
    names = ", ".join(name for name in choices()["model"] if name != "hf")
    raise ConfigError(f"model={model}: no such folder or GGUF file; or a hub name (owner/name), or one of {names}")


class _TimeLeft(ProgressColumn):
    """A column with the time left of the minutes that the user gave, as minutes:seconds."""

    def __init__(self, choosing: Chooser) -> None:
        super().__init__()
        self._choosing = choosing

    def render(self, task: Task) -> Text:
        left = max(0, int(self._choosing.ends - time.monotonic()))
        return Text(f"{left // 60}:{left % 60:02d} left", style="progress.remaining")


class _TimeBar(_TimeLeft):
    """A column with a progress bar of the minutes that the user gave."""

    max_refresh = 0.5

    def render(self, task: Task) -> ProgressBar:  # type: ignore[override]
        whole = 60 * self._choosing.question.minutes
        return ProgressBar(total=whole, completed=whole - (self._choosing.ends - time.monotonic()), width=32)


@contextmanager
def _show_progress(choosing: Chooser, console: Console) -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), _TimeBar(choosing), _TimeLeft(choosing)
    kept = io.StringIO()  # no terminal, so that bars of libraries stay away while this one is on the screen
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        with redirect_stderr(kept):
            yield progress
        for line in dict.fromkeys(kept.getvalue().splitlines()):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_stages(choosing: Chooser, say: Say) -> None:
    """Measure full precision and the canaries, race formats while time is left, then test the choices on needles."""
    choosing.measure_canaries(say)
    find_full_needles(choosing, say)
    choosing.race(say)
    if choosing.state.rounds:
        find_needles(choosing, [choice.format for choice in find_choices(choosing)], say)


def _choose(words: list[str]) -> int:
    choosing, console = Chooser(parse_question(words)), Console(stderr=True)
    print(printable(choosing.plan()), flush=True)
    with _show_progress(choosing, console) as progress:
        task = progress.add_task("full precision, canaries", total=None)

        def print_above_bar(line: str) -> None:
            """Print a line above the progress bar, and show in the bar how many formats are left."""
            progress.update(task, description=f"{len(choosing.state.left)} left")
            progress.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

        try:
            run_stages(choosing, print_above_bar)
        except (SystemExit, KeyboardInterrupt):  # Ctrl-C: what is measured so far is the answer
            print_above_bar("interrupted")
            for one in choosing.formats:  # of a round that is not complete, some have losses and others none
                del one.losses[choosing.state.rounds :], one.records[choosing.state.rounds :]
    print(printable(answer_text(choosing)))
    if choosing.state.rounds:
        print(f"card: {write_card(choosing)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Race formats and print which to take; 2: a question that cannot be answered, in one line."""
    return run_command(arguments, _USAGE.format(engines=", ".join(BY_ENGINE)), _choose, RecordError)
