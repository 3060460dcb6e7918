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
STREAM_WINDOWS = 64


def find_full_needles(choosing: Chooser, say: Say) -> None:
    """Measure full precision's needles before the race, and so how long those of the choices will take.

    There will be none where a choice's would take too large a share of the time, or where full precision finds so few
    that a format's count says nothing.
    """
    limit = 60 * MOST_SHARE * choosing.question.minutes
    windows = len(DEPTHS) * choosing.needle_tokens / choosing.window
    if not windows or windows * choosing.window_seconds > limit:
        return
    record = _run_needles(choosing, ("method=fp16",), say)
    if record is not None:
        choosing.needles_found = _count_found(record)
        seconds = COST * record.provenance.wall_seconds["measure"]
        if choosing.needles_found > len(DEPTHS) // 2 and MOST * seconds <= limit:
            choosing.needle_seconds = seconds


def find_needles(choosing: Chooser, chosen: Sequence[Format], say: Say) -> None:
    """Set `needles_found` of each chosen format: how many it finds, of one a depth."""
    if choosing.needle_seconds is None:
        return
    for one in chosen:
        late = time.monotonic() + choosing.needle_seconds > choosing.ends
        if late and Prepared(composed(needle_words(choosing, one.words))).state.name != "done":
            say("time is over for needles")
            return
        record = _run_needles(choosing, one.words, say)
        if record is None:
            return
        one.needles_found = _count_found(record)


def _run_needles(choosing: Chooser, words: Sequence[str], say: Say) -> Record | None:
    """The record of the needles of a format; None: no needle can be hidden, which is said."""
    overrides = needle_words(choosing, words)
    try:
        record = run(composed(overrides), lambda: overrides)
        if record.status == "done":
            return record
        reason = record.reason or record.status
    except KvqError as error:
        reason = str(error)
    choosing.warnings.append(f"no needles: {reason}")
    choosing.needle_tokens, choosing.needle_seconds = 0, None
    say(choosing.warnings[-1])
    return None


def _count_found(record: Record) -> int:
    return round(record.metrics["accuracy"] * len(DEPTHS))


def needle_words(choosing: Chooser, words: Sequence[str]) -> list[str]:
    """Overrides of a run with needles in the passages of the race, one after the other as one text."""
    path = choosing.folder / "haystack.jsonl"
    if not path.is_file():
        row = json.dumps({"text": " ".join(choosing.passages[:STREAM_WINDOWS])})
        write_files("choose", choosing.folder, {path.name: row + "\n"})
    task = ["task=niah", f"task.lengths=[{choosing.needle_tokens}]", f"task.depths=[{','.join(map(str, DEPTHS))}]"]
    task += ["task.repeats=1", "task.batch_size=1", "task.noise_floor=false"]
    text = ["dataset=text", "dataset.loader=documents", f"dataset.name={choosing.text_name}", f"dataset.path={path}"]
    return [*choosing.question.model, *words, *task, *text, f"results_dir={choosing.question.results}"]


def needles_text(choosing: Chooser, one: Format) -> str | None:
    """The needles of a choice in words; None: there were none, or full precision finds too few to tell anything."""
    full = choosing.needles_found
    if one.needles_found is None or full is None or full <= len(DEPTHS) // 2:
        return None
    beside = "" if full == len(DEPTHS) else f", full precision {full}"
    return f"{one.needles_found} of {len(DEPTHS)} needles in {choosing.needle_tokens:,} tokens{beside}"


def needles_note(choosing: Chooser) -> str | None:
    """Why no needles are shown, where they were asked for and say nothing."""
    full = choosing.needles_found
    if full is not None and full <= len(DEPTHS) // 2:
        return f"needles: full precision itself finds {full} of {len(DEPTHS)} in {choosing.needle_tokens:,} tokens"
    untold = all(one.needles_found is None for one in choosing.formats)
    if untold and choosing.needle_tokens and choosing.state.rounds:
        return "needles: no time for them; give more minutes, or needles=TOKENS for shorter prompts"
    return None
