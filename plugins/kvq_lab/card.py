"""What `kvq choose` answers: at most three choices as text, and as one HTML file that needs nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from kvq import __version__
from kvq.report.command import write_files
from kvq.report.labels import BY_ENGINE
from kvq.results.statistics import ALPHA
from kvq_lab.advisor import MOST, format_bytes, fp16_bytes
from kvq_lab.choosing import Chooser, Format
from kvq_lab.needles import needles_note, needles_text
from kvq_lab.racing import find_positive

CHOICE, NEAR, OUT = "choice", "near", "out"


@dataclass(frozen=True)
class Choice:
    """A recommended format; `near`: names of larger formats left in the race that are within noise of it."""

    format: Format
    near: tuple[str, ...]


@dataclass(frozen=True)
class Bar:
    """A row of the figure: positions 0 to 1 of loss ± 2 errors, verdict, bytes as text, and why it is not chosen."""

    format: Format
    kind: str
    at: float
    low: float
    high: float
    size: str
    why: str


def find_choices(choosing: Chooser) -> list[Choice]:
    """The recommended formats, at most `MOST`, best first: each is better beyond noise than the next, smaller one."""
    race, formats = choosing.state, choosing.formats
    ladder = [at for at in race.ladder() if formats[at].losses]
    left = [at for at in race.left if formats[at].losses]
    choices = []
    for at, above in zip(ladder, [*ladder[1:], None], strict=True):
        until = left.index(above) if above is not None else len(left)
        near = tuple(formats[one].name for one in left[left.index(at) + 1 : until])
        choices.append(Choice(formats[at], near))
    return choices[: -MOST - 1 : -1]


def worse_than_full(formats: Sequence[Format]) -> set[str]:
    """Names of formats whose loss is above that of full precision beyond noise, all tested together."""
    measured = [one for one in formats if one.losses]
    longest = max((len(one.losses) for one in measured), default=0)
    groups = ([one for one in measured if len(one.losses) == rounds] for rounds in range(1, longest + 1))
    names: set[str] = set()
    for group in filter(None, groups):
        worse = find_positive(np.array([np.concatenate(one.losses) for one in group]), ALPHA / longest)
        names |= {one.name for one, is_worse in zip(group, worse, strict=True) if is_worse}
    return names


def certainty_text(choosing: Chooser) -> str:
    """How sure the answer is, in a sentence or two."""
    race = choosing.state
    pairs = choosing.open_pairs()
    shown = f"{race.rounds} round{'s' * (race.rounds > 1)}, {race.windows} windows of {choosing.window:,} tokens"
    chance = (
        "the chance that a format which belongs among these was dropped is at most 5% if windows are independent and "
        "differences symmetric"
    )
    if not pairs:
        return f"{shown}; decided: each choice is better beyond noise than the next one; {chance}"
    smaller, larger = (choosing.formats[at].name for at in pairs[0])
    same = "" if choosing.question.window is not None else f"window={choosing.window} and "
    return (
        f"{shown}; {len(pairs)} pairs are still within noise, such as {smaller} and {larger}: repeat the command with "
        f"{same}more minutes to go on; {chance}"
    )


def loss_text(one: Format) -> str:
    """Loss in nats per token with its standard error, and the change of perplexity in percent, as text."""
    return f"{one.loss:+.4f} ± {one.error:.4f} nats per token (perplexity {100 * math.expm1(min(one.loss, 50)):+.1f}%)"


def answer_text(choosing: Chooser) -> str:
    """The answer as text."""
    race, plain = choosing.state, fp16_bytes(choosing.shape, choosing.context, choosing.question.batch)
    if not race.rounds:
        done = sum(bool(one.losses) for one in choosing.formats)
        return (
            f"no verdict: {done} of {len(choosing.formats)} formats were measured before the end of the first round; "
            "repeat the command to go on"
        )
    worse = worse_than_full(choosing.formats)
    lines = []
    for place, choice in enumerate(find_choices(choosing), 1):
        one = choice.format
        equal = "" if one.name in worse else "; within noise of full precision"
        lines += [
            f"{place}. {one.name}: {one.line}",
            f"   {format_bytes(one.bytes)}, {plain / one.bytes:.1f} times less than fp16",
            f"   loss {loss_text(one)}, KL p99.9 {one.tail:.2f}{equal}",
        ]
        if (found := needles_text(choosing, one)) is not None:
            lines.append(f"   {found}")
        if choice.near:
            lines.append(f"   no better beyond noise, and larger: {', '.join(choice.near)}")
    out = [f"{choosing.formats[at].name} ({choosing.formats[by].name})" for at, (by, _) in race.dropped.items()]
    if out:
        lines.append(f"dropped, for what is better and not larger: {', '.join(out)}")
    lines += [f"{one.name}: {one.stopped}" for one in choosing.formats if one.stopped]
    notes = filter(None, [needles_note(choosing)])
    return "\n".join([*lines, *choosing.warnings, *notes, certainty_text(choosing)])


def write_card(choosing: Chooser) -> Path:
    """Write the card next to the records and return its path."""
    source = resources.files("kvq_lab").joinpath("card.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    bars, ticks = figure_rows(choosing)
    question = choosing.question
    words = [*question.model, *([f"engine={question.engine}"] if question.engine else [])]
    page = environment.from_string(source).render(
        choosing=choosing,
        question=question,
        model=Path(choosing.model.name).name,
        choices=find_choices(choosing),
        bars=bars,
        ticks=ticks,
        full=fp16_bytes(choosing.shape, choosing.context, question.batch),
        worse=worse_than_full(choosing.formats),
        readable=format_bytes,
        loss_text=loss_text,
        needles_text=needles_text,
        expm1=math.expm1,
        certainty=certainty_text(choosing),
        engine=None if question.engine is None else BY_ENGINE[question.engine][0],
        today=datetime.now(UTC).date().isoformat(),
        version=__version__,
        words=" ".join(words),
    )
    name = re.sub(r"[^\w.-]+", "-", f"{Path(choosing.model.name).name}-{question.engine or 'any'}") + ".html"
    return write_files("choose", question.results / "choose", {name: page})[0]


def figure_rows(choosing: Chooser) -> tuple[list[Bar], list[tuple[float, str]]]:
    """The figure's rows, the largest format first, and its ticks as (position, label); losses are on a log axis."""
    measured = [one for one in choosing.formats if one.losses]
    floor = 10 ** math.floor(math.log10(max(1e-6, min(max(one.loss, one.error, 1e-5) for one in measured))))
    top = 10 ** math.ceil(math.log10(max(max(one.loss + 2 * one.error for one in measured), 10 * floor)))
    decades = round(math.log10(top / floor))

    def position(loss: float) -> float:
        return min(1.0, max(0.0, math.log10(max(loss, floor) / floor) / decades))

    chosen = {choice.format.name for choice in find_choices(choosing)}
    rows = []
    for at, one in sorted(enumerate(choosing.formats), key=lambda pair: -pair[1].bytes):
        if not one.losses:
            continue
        by = choosing.state.dropped.get(at)
        kind = CHOICE if one.name in chosen else NEAR if by is None else OUT
        why = {CHOICE: "", NEAR: "within noise of a smaller one or not among the best three"}.get(kind, "")
        if by is not None:
            why = f"worse than {choosing.formats[by[0]].name}, which is not larger"
        low, high = (position(one.loss + sign * 2 * one.error) for sign in (-1, 1))
        rows.append(Bar(one, kind, position(one.loss), low, high, format_bytes(one.bytes), why))
    return rows, [(step / decades, f"{floor * 10**step:g}") for step in range(decades + 1)]
