"""What `kvq choose` asks of its choices at the end: how many needles each finds in the user's text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvq.config.explain import composed
from kvq.errors import KvqError
from kvq.report.command import write_files
from kvq.results import Record
from kvq.runs import Prepared, run
from kvq_lab.advisor import MOST

if TYPE_CHECKING:
    from kvq_lab.choosing import Chooser, Format, Say

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""One needle is hidden at each of these shares of a prompt."""
COST = 1.5
"""Time of the needles of a format relative to full precision's, at most, for the plan."""
MOST_SHARE = 0.25
"""At most this share of the question's minutes goes to needles."""


def find_full_needles(choosing: Chooser, say: Say) -> None:
    """Measure needles in full precision before the race; sets `choosing.needles_found`, and `needle_seconds`.

    `needle_seconds`, the time that a format's needles will take, stays None, and no format is tested, where it is too
    large a share of the minutes, or full precision retrieves at most half of the needles.
    """
    limit = 60 * MOST_SHARE * choosing.question.minutes
    windows = len(DEPTHS) * choosing.needle_tokens / choosing.window
    if not windows or windows * choosing.window_seconds > limit:
        return
    record = _run_needles(choosing, ("method=fp16",), say)
    if record is None:
        choosing.needle_tokens = 0
        return
    choosing.needles_found = round(record.metrics["accuracy"] * len(DEPTHS))
    seconds = COST * record.provenance.wall_seconds["measure"]
    if choosing.needles_found > len(DEPTHS) // 2 and MOST * seconds <= limit:
        choosing.needle_seconds = seconds


def find_needles(choosing: Chooser, chosen: Sequence[Format], say: Say) -> None:
    """Set `needles_found` of each chosen format, 0 to `len(DEPTHS)`; stops when time is over."""
    if choosing.needle_seconds is None:
        return
    for one in chosen:
        late = time.monotonic() + choosing.needle_seconds > choosing.ends
        if late and Prepared(composed(needle_words(choosing, one.words))).state.name != "done":
            say("time is over for needles")
            return
        record = _run_needles(choosing, one.words, say)
        if record is not None:
            one.needles_found = round(record.metrics["accuracy"] * len(DEPTHS))


def _run_needles(choosing: Chooser, words: Sequence[str], say: Say) -> Record | None:
    """Run the needles of a format; returns the record, or None after an error, which is reported."""
    overrides = needle_words(choosing, words)
    try:
        record = run(composed(overrides), lambda: overrides)
        if record.status == "done":
            return record
        reason = record.reason or record.status
    except KvqError as error:
        reason = str(error)
    choosing.warnings.append(f"no needles: {reason}")
    say(choosing.warnings[-1])
    return None


def needle_words(choosing: Chooser, words: Sequence[str]) -> list[str]:
    """Overrides of a run with needles in a text of the race's passages joined; writes its file if it is missing."""
    path = choosing.folder / "haystack.jsonl"
    if not path.is_file():
        row = json.dumps({"text": " ".join(choosing.passages[:64])})
        write_files("choose", choosing.folder, {path.name: row + "\n"})
    task = ["task=niah", f"task.lengths=[{choosing.needle_tokens}]", f"task.depths=[{','.join(map(str, DEPTHS))}]"]
    task += ["task.repeats=1", "task.batch_size=1", "task.noise_floor=false"]
    text = ["dataset=text", "dataset.loader=documents", f"dataset.name={choosing.text_name}", f"dataset.path={path}"]
    return [*choosing.question.model, *words, *task, *text, f"results_dir={choosing.question.results}"]


def needles_text(choosing: Chooser, one: Format) -> str | None:
    """A choice's needles in words; None: not measured, or full precision retrieves at most half of them."""
    full = choosing.needles_found
    if one.needles_found is None or full is None or full <= len(DEPTHS) // 2:
        return None
    beside = "" if full == len(DEPTHS) else f", full precision {full}"
    return f"{one.needles_found} of {len(DEPTHS)} needles in {choosing.needle_tokens:,} tokens{beside}"


def needles_note(choosing: Chooser) -> str | None:
    """In words why needles were tested for but are not shown; None: they are shown, or were not asked for."""
    full = choosing.needles_found
    if full is not None and full <= len(DEPTHS) // 2:
        return f"needles: full precision itself finds {full} of {len(DEPTHS)} in {choosing.needle_tokens:,} tokens"
    untold = all(one.needles_found is None for one in choosing.formats)
    if untold and choosing.needle_tokens and choosing.state.rounds:
        return "needles: no time for them; give more minutes, or needles=TOKENS for shorter prompts"
    return None
