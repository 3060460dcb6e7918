"""The race that `kvq choose` runs: which formats a model can have, the passages, and the rounds, each on record."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kvq.config import Config
from kvq.config.explain import choices, composed
from kvq.data.rows import read_joined_text
from kvq.data.text import encode
from kvq.errors import ConfigError, DataError, KvqError, Unsupported
from kvq.models.inputs import CacheShape, Inputs, cache_shape
from kvq.report.command import write_files
from kvq.report.labels import BY_ENGINE
from kvq.results import Record, Store
from kvq.results.statistics import losses
from kvq.runs import Prepared, run
from kvq_lab.advisor import MOST, bytes_of, format_bytes
from kvq_lab.memory import check_memory
from kvq_lab.racing import Race, round_sizes, run_race

Say = Callable[[str], None]

_ENGINES = "vllm_fp8 vllm_int4_per_token_head vllm_turboquant_3bit_nc llamacpp_q8_0 llamacpp_q5_0 llamacpp_q4_0"
_ENGINES += " lmdeploy_4 lmdeploy_42 mlx_4"
DEFAULT = (*(f"engine/{name}" for name in _ENGINES.split()), "kivi bits=2", "kivi bits=4", "nsnquant bits=2")
"""What is raced where no engine is given."""
CANARY_WINDOWS, WIDTHS, MOST_CHARACTERS = 2, (2, 3, 6), 8_000_000
LEAST_WINDOW, ANSWER_TOKENS, MARGIN = 256, 64, 1.3


@dataclass(frozen=True)
class Question:
    """A question of `kvq choose`: overrides of the model, bound in minutes, `memory` in bytes, `needles` in tokens."""

    model: tuple[str, ...]
    engine: str | None = None
    methods: tuple[str, ...] = ()
    context: int | None = None
    batch: int = 1
    memory: float | None = None
    minutes: float = 10
    text: str = "pydocs"
    window: int | None = None
    needles: int | None = None
    results: Path = Path("results")


@dataclass
class Format:
    """A format in the race.

    Attributes:
        words: overrides that name the format.
        bytes: bytes of the whole cache at the question's context and batch.
        line: the command that uses it, to paste.
        losses: for each round, loss over full precision in nats per token, by window.
        records: the record of each round.
        needles_found: needles of `kvq_lab.needles` that it finds after the race; None: not measured.
    """

    words: tuple[str, ...]
    name: str
    bytes: float
    line: str
    losses: list[Float[np.ndarray, " windows"]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    stopped: str | None = None
    needles_found: int | None = None

    @property
    def loss(self) -> float:
        """Mean loss over full precision in nats per token."""
        return float(np.concatenate(self.losses).mean()) if self.losses else float("nan")

    @property
    def error(self) -> float:
        """Standard error of `loss`: windows are drawn at random, so they are taken as independent."""
        values = np.concatenate(self.losses)
        return float(values.std(ddof=1) / np.sqrt(len(values)))

    @property
    def tail(self) -> float:
        """KL that one token in a thousand exceeds, in nats: mean over rounds, weighted by their windows."""
        weights = [record.metrics["windows"] for record in self.records]
        return float(np.average([record.metrics["kl_p999"] for record in self.records], weights=weights))

    @property
    def seconds(self) -> float | None:
        """Seconds per window in the last round; None: no round was measured."""
        if not self.records:
            return None
        return self.records[-1].provenance.wall_seconds.get("measure", 0.0) / self.records[-1].metrics["windows"]


class Chooser:
    """Finds the formats that a model can have, draws passages of a text, and measures the formats in rounds."""

    def __init__(self, question: Question) -> None:
        self.question, self.store = question, Store(question.results)
        self.ends = time.monotonic() + 60 * question.minutes
        self.base = composed([*question.model, f"results_dir={question.results}"])
        self.model = self.base.model
        check_memory(self.base)
        self.shape: CacheShape = cache_shape(self.model)
        longest = self.shape.context or 8192
        self.context = question.context or min(longest, 8192)
        window = question.window or min(1024, longest, self.context)
        if self.context > longest or window > longest:
            setting = f"context={self.context}" if self.context > longest else f"window={window}"
            raise ConfigError(f"{setting}: model={self.model.name} takes at most {longest} tokens")
        self.longest, self.window = longest - ANSWER_TOKENS, window
        self.needles_found: int | None = None
        self.needle_seconds: float | None = None  # what a choice's needles will take at most
        self.refused: dict[str, str] = {}
        self.formats = self._find_formats(question.engine)
        self.inputs = Inputs(self._config(("method=fp16",)))
        self._set_window(window)
        self.state = Race([one.bytes for one in self.formats])  # what is decided so far
        self.warnings: list[str] = []
        self.window_seconds = 0.0

    def _config(self, words: Sequence[str], number: int | None = None) -> Config:
        return composed(self._overrides(words, number))

    def _overrides(self, words: Sequence[str], number: int | None = None) -> list[str]:
        """All overrides of a run of `words`, on the passages of round `number` (None: no text is set)."""
        task = ["task.windows=disjoint", f"task.context={self.window}", "task.batch_size=2", "cache.keep_decoded=true"]
        text = [] if number is None else ["dataset=text", "dataset.loader=documents", f"dataset.name={self.text_name}"]
        path = [] if number is None else [f"dataset.path={self._round_file(number)}"]
        return [*self.question.model, *words, *task, *text, *path, f"results_dir={self.question.results}"]

    def _find_formats(self, engine: str | None) -> list[Format]:
        """Formats that the model can have and that fit into `memory`, smallest first; sets `refused` for the others."""
        formats = []
        for words in self._format_overrides(engine):
            try:
                if (one := self._build_format(words)) is not None:
                    formats.append(one)
            except KvqError as error:
                self.refused[" ".join(words).removeprefix("method=")] = str(error)
        if not formats:
            self._raise_none(engine)
        fitting = [one for one in formats if self.question.memory is None or one.bytes <= self.question.memory]
        if not fitting:
            least = min(formats, key=lambda one: one.bytes)
            raise ConfigError(
                f"memory={format_bytes(self.question.memory or 0)}: the smallest, {least.name}, takes "
                f"{format_bytes(least.bytes)} at context={self.context} batch={self.question.batch}; give more memory, "
                "or less of these"
            )
        return sorted(fitting, key=lambda one: (one.bytes, one.name))

    def _format_overrides(self, engine: str | None) -> list[tuple[str, ...]]:
        """Overrides of each format to try: the question's methods, else the engine's (None: those of `DEFAULT`)."""
        known = choices()["method"]
        if self.question.methods or engine is None:
            asked = self.question.methods or [one for one in DEFAULT if one.split()[0] in known]
            return [tuple(f"method={one}".split()) for one in asked]
        names = [name for name in known if name.startswith(f"engine/{engine}") and name.count("/") == 1]
        return [words for name in names for words in self._overrides_of(name, list(known))]

    def _overrides_of(self, name: str, known: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield overrides that run a format: one tuple per bit width in `WIDTHS` if its bits can be set; else one.

        A format that needs a calibration, or that cannot run on the model, is replaced by its variant `NAME/un...`.
        """
        method = composed([f"method={name}"]).method
        if method.bits_range is not None:
            yield from ((f"method={name}", f"bits={bits}") for bits in WIDTHS)
            return
        variants = [one for one in known if one.startswith(f"{name}/un")]
        if variants and (method.calibration.dataset is not None or not self._can_run((f"method={name}",))):
            name = variants[0]
        yield (f"method={name}",)

    def _can_run(self, words: Sequence[str]) -> bool:
        with suppress(KvqError):
            return Prepared(self._config(words)).method is not None
        return False

    def _build_format(self, words: tuple[str, ...]) -> Format | None:
        config = self._config(words)
        if config.method.calibration.dataset is not None:
            raise Unsupported("is fitted to a text first, which choose does not do")
        method = Prepared(config).method  # raises where model and format do not fit
        size = bytes_of(self.shape, method, self.context)
        more = [word for word in words if word.partition("=")[0] not in ("method", "bits")]
        name = " ".join(filter(None, [config.method.label or config.method.name, config.bits_label, *more]))
        line = config.method.serve or " ".join(["python run.py", *self.question.model, *words])
        return Format(words, name, size * self.question.batch, line)

    def _raise_none(self, engine: str | None) -> None:
        """Raise `Unsupported`: no format of the engine runs on the model; the message names engines that do."""
        if engine is None:
            names = ", ".join(self.question.methods)
            raise Unsupported(f"choose: none of method={names} can be measured: {next(iter(self.refused.values()))}")
        reason = next(iter(self.refused.values()), "it has none")
        able = (one for one in BY_ENGINE if one != engine and any(map(self._can_run, self._format_overrides(one))))
        others = list(itertools.islice(able, 3))
        rest = f"these work: engine={', '.join(others)}" if others else "no engine's formats do; try method=kivi bits=2"
        raise Unsupported(f"engine={engine}: no format for model={self.model.name} ({reason}); {rest}")

    def _draw_passages(self) -> list[str]:
        """Passages of the text of at least a window of tokens each, in random order; sets `text_name` and `folder`.

        Raises: DataError: fewer passages than the first round needs.
        """
        source, tokenizer = self.question.text, self.inputs.tokenizer
        word = [f"dataset={source}", "dataset.max_tokens=null"] if source in choices()["dataset"] else ["dataset=text"]
        dataset = composed([*word, *([] if source in choices()["dataset"] else [f"dataset.path={source}"])]).dataset
        text = read_joined_text(dataset)[:MOST_CHARACTERS]
        self.text_name = dataset.name if source in choices()["dataset"] else Path(source).stem
        sample = text[: 64 * self.window]
        step = max(1, int(1.25 * self.window * len(sample) / max(1, len(encode(tokenizer, sample)))))
        pieces = [text[start : start + step] for start in range(0, len(text), step)]
        order = np.random.default_rng(0).permutation(len(pieces))[:512]
        passages = [pieces[at] for at in order.tolist() if len(encode(tokenizer, pieces[at])) > self.window]
        first = next(round_sizes(10**6))
        if len(passages) < first:
            least = self.window * len(passages) // first
            shorter = f" or window={least}" if least >= 64 else ""
            raise DataError(
                f"text={source}: has {len(passages)} passages of {self.window} tokens, {first} are needed; give a "
                f"longer text{shorter}"
            )
        digest = hashlib.sha256("\0".join(passages).encode()).hexdigest()[:12]
        self.folder = self.question.results / "choose" / f"{self.text_name}-{digest}"
        return passages

    def _round_file(self, number: int) -> Path:
        """The file with the passages of a round; round 0 is the canaries', two passages of the first."""
        start = sum(self.sizes[: number - 1]) if number else 0
        count = self.sizes[number - 1] if number else CANARY_WINDOWS
        path = self.folder / f"round-{number}.jsonl"
        if not path.is_file():
            rows = [json.dumps({"text": text}) for text in self.passages[start : start + count]]
            write_files("choose", self.folder, {path.name: "\n".join(rows) + "\n"})
        return path

    def plan(self) -> str:
        """What will be measured, in two lines, and a line for each format that is left out, with the reason."""
        formats, minutes = len(self.formats), self.question.minutes
        shown = f"{formats} format{'s' * (formats > 1)} of {self.question.engine or 'several engines'}"
        memory = f" in {format_bytes(self.question.memory)}" if self.question.memory is not None else ""
        lines = [
            f"{self.model.name}, {self.question.batch} x {self.context:,} tokens{memory}: full precision, two "
            f"canaries, then {shown} in rounds of {', '.join(map(str, self.sizes[:4]))} windows",
            f"a window is {self.window:,} tokens of {self.text_name}; it ends after about {minutes:g} "
            f"minute{'s' * (minutes != 1)}; Ctrl-C keeps everything, a repeat goes on",
        ]
        lines += [f"left out: {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def _run_round(self, words: Sequence[str], number: int) -> tuple[Record, Float[np.ndarray, " windows"]]:
        """Run a round or read its record; returns it and losses over full precision, nats per token, by window."""
        overrides = self._overrides(words, number)
        record = run(composed(overrides), lambda: overrides)
        if record.status != "done":
            raise Unsupported(record.reason or record.status)
        ours = losses(self.store.samples(record.key))
        if record.baseline_key is None:
            return record, np.zeros(len(ours.nll))
        full = losses(self.store.samples(record.baseline_key))
        return record, (ours.nll - full.nll) / ours.tokens

    def measure_canaries(self, say: Say) -> None:
        """Measure full precision, a lossless cache and an empty one on two windows; report the time of a window.

        Windows whose length nobody asked for are halved until the first round takes at most half of the time.
        """
        while (share := self._round_share()) > 0.5 and self.question.window is None and self.window > LEAST_WINDOW:
            self._set_window(self.window // 2)
            say(f"windows of {self.window:,} tokens, so that the first round fits into the time; window=TOKENS sets it")
        self.full = self._run_round(("method=fp16",), 0)[0].metrics["nll"]
        same, lost = (float(self._run_round((f"method={name}",), 0)[1].mean()) for name in ("identity", "zero"))
        if abs(same) > 1e-3:
            self.warnings.append(f"canary: a cache that changes nothing has loss {same:+.4f}; take no verdict from it")
        if lost < 0.05:
            self.warnings.append(f"canary: an empty cache costs only {lost:+.4f}: this text does not need the cache")
        for line in self.warnings:
            say(line)
        minutes = share * self.question.minutes
        say(
            f"a window takes about {self.window_seconds:.1f} s, the first round of all formats {minutes:.1f} minutes "
            "or so"
        )

    def _round_share(self) -> float:
        """Estimated share of the minutes that the first round of all formats takes, from the time of `identity`.

        Its run measures full precision first, so that the costs of starting up are not in this time.
        """
        record, _ = self._run_round(("method=identity",), 0)
        self.window_seconds = record.provenance.wall_seconds["measure"] / CANARY_WINDOWS
        return MARGIN * self.window_seconds * len(self.formats) * self.sizes[0] / (60 * self.question.minutes)

    def _set_window(self, window: int) -> None:
        """Set `window` in tokens, draw passages of it, and set the sizes of the rounds."""
        self.window = window
        self.needle_tokens = min(self.window if self.question.needles is None else self.question.needles, self.longest)
        self.passages = self._draw_passages()
        self.sizes = list(round_sizes(len(self.passages)))

    def race(self, say: Say) -> None:
        """Measure rounds until the frontier is decided or time or text runs out; all records are kept."""
        for number, _ in enumerate(self.sizes, 1):
            runners = [one for at, one in enumerate(self.formats) if at in self.state.left and one.stopped is None]
            if len(runners) < 2 or (number > 1 and not self.open_pairs()):
                return
            if number > 1 and not self._has_time(runners, number):
                say(f"no time is left for round {number}")
                return
            for one in runners:
                if number == 1 and not self._has_time([one], number):
                    say(f"time is over in round {number}")
                    return
                self._measure_round(one, number, say)
            if not any(one.losses for one in self.formats):
                raise Unsupported(f"none of the formats could be measured; {runners[0].name}: {runners[0].stopped}")
            self._drop_formats(number, say)

    def open_pairs(self) -> list[tuple[int, int]]:
        """Pairs of formats (smaller, larger) that more windows could tell apart."""
        stopped = {at for at, one in enumerate(self.formats) if one.stopped is not None}
        return [pair for pair in self.state.undecided if not stopped & set(pair)]

    def _has_time(self, formats: Sequence[Format], number: int) -> bool:
        """Whether the formats can finish round `number`, by their seconds per window, and leave time for needles."""
        known = [one.seconds for one in self.formats if one.seconds is not None]
        usual = float(np.median(known)) if known else self.window_seconds * MARGIN
        configs = (composed(self._overrides(one.words, number)) for one in formats)
        new = [one for one, config in zip(formats, configs, strict=True) if Prepared(config).state.name != "done"]
        seconds = self.sizes[number - 1] * (self.window_seconds + sum(one.seconds or usual for one in new))
        return not new or time.monotonic() + seconds <= self.ends - MOST * (self.needle_seconds or 0)

    def _measure_round(self, one: Format, number: int, say: Say) -> None:
        """Measure a format in a round; on an error set its `stopped` to the message and report it."""
        try:
            record, loss = self._run_round(one.words, number)
        except KvqError as error:
            one.stopped = str(error)
            say(f"{one.name}: {error}")
            return
        one.records.append(record)
        one.losses.append(loss)

    def _drop_formats(self, number: int, say: Say) -> None:
        """Decide the race with the losses of the first `number` rounds, and say what dropped out in the last."""
        rounds = []
        for place, size in enumerate(self.sizes[:number]):
            rows = [one.losses[place] if place < len(one.losses) else np.full(size, np.nan) for one in self.formats]
            rounds.append(np.array(rows))
        self.state = run_race(rounds, self.state.sizes)
        out = [self.formats[at].name for at, (_, when) in self.state.dropped.items() if when == number]
        gone = f"; out: {', '.join(out)}" if out else ""
        say(f"round {number}, {self.state.windows} windows: {len(self.state.left)} left{gone}")
