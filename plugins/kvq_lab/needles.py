"""What `kvq choose` asks of its choices at the end: how many needles each finds in the user's text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvq.config.explain import composed
from kvq.errors import KvqError
from kvq.report.command import write_files
from kvq.runs import Prepared, run

if TYPE_CHECKING:
    from kvq_lab.choosing import Chooser, Format

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""One needle is hidden at each of these shares of a prompt."""
COST = 1.5
"""Time of a token under a format relative to full precision, at most, for the plan."""
MOST_SHARE = 0.25
"""At most this share of the question's minutes goes to needles."""
STREAM_WINDOWS = 64


def needle_seconds(choosing: Chooser, formats: int) -> float:
    """What full precision and so many formats would take for all depths; 0: no needles are asked for."""
    windows = len(DEPTHS) * choosing.needle_tokens / choosing.window
    seconds = (1 + COST * formats) * windows * choosing.window_seconds
    return seconds if seconds <= 60 * MOST_SHARE * choosing.question.minutes else 0.0


def find_needles(choosing: Chooser, chosen: Sequence[Format], say: Callable[[str], None]) -> None:
    """Set `needles_found` of full precision and of each chosen format: how many it finds, of one a depth."""
    if not chosen or not needle_seconds(choosing, len(chosen)):
        return
    for one in (None, *chosen):
        words = needle_words(choosing, one.words if one is not None else ("method=fp16",))
        try:
            late = time.monotonic() + needle_seconds(choosing, 1) > choosing.ends
            if late and Prepared(composed(words)).state.name != "done":
                say("time is over for needles")
                return
            accuracy = run(composed(words), lambda given=words: given).metrics.get("accuracy")  # type: ignore[misc]
        except KvqError as error:  # a text or a model in which no needle can be hidden
            choosing.warnings.append(f"no needles: {error}")
            choosing.needle_tokens = 0
            say(choosing.warnings[-1])
            return
        found = None if accuracy is None else round(accuracy * len(DEPTHS))
        if one is None:
            choosing.needles_found = found
        else:
            one.needles_found = found


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
    if full is None and choosing.needle_tokens and choosing.state.rounds:
        return "needles: no time for them; give more minutes, or needles=TOKENS for shorter prompts"
    return None
