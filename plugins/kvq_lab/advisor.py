"""`kvq recommend model=llama_3_1_8b context=32768 engine=llamacpp memory=2GiB`: which cache format to take.

At most three choices, each with the line to paste, its bytes at the context and batch asked for, its loss with error
and the tail of its KL, and what that rests on. A format within noise of a cheaper one is never among them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvq.cache.layer import outside
from kvq.config import Config, compose, resolve
from kvq.config.explain import COMPOSE_ERRORS, choices, composed
from kvq.config.run import EMBEDDED
from kvq.errors import ConfigError, RecordError, printable
from kvq.methods.build import method_of
from kvq.methods.method import Method
from kvq.models.inputs import CacheShape, cache_shape
from kvq.report.comparisons import Comparisons, Verdicts, read_records, samples_of, unbeaten
from kvq.report.labels import BY_ENGINE
from kvq.report.tables.layout import Row
from kvq.results import Record, Store
from kvq.results.presets import method_overrides, model_path, part_of
from kvq.results.statistics import fewest_to_differ
from kvq.tasks.memory import check_shapes_suffice, rows_of
from kvq_lab.leaderboard import decoding_tables
from kvq_lab.words import parse_number, parse_words, run_command

MOST = 3
"""Choices that are printed."""
_OWN = "measured on this model"
_USAGE = """Which cache format to take, from the records of this folder.

  kvq recommend model=llama_3_1_8b context=32768 engine=llamacpp memory=2GiB
  kvq recommend model=smollm2_135m context=8192 loss=0.02

  model=NAME      a model of conf/model (python run.py ls models), or hf with model.path=
  context=TOKENS  of each sequence
  engine=NAME     {engines}; default: any method
  memory=SIZE     of the whole cache: 512MiB, 4GiB
  loss=NATS       at most so much over full precision (nats per token); also 'loss<=0.02'
  batch=N         sequences (default 1)
  results=FOLDER  default: results
"""


@dataclass(frozen=True)
class Question:
    """A question of `kvq recommend`: overrides that name a model, tokens, sequences, and bounds on bytes and loss."""

    model: tuple[str, ...]
    context: int
    engine: str | None = None
    memory: float | None = None
    loss: float | None = None
    batch: int = 1
    results: Path = Path("results")


@dataclass(frozen=True)
class Recommendation:
    """A recommended format, its bytes at the question's context and batch, and what its loss rests on.

    `tables`: of the bytes, those of a calibration's tables. `elsewhere`: what the tables of other real models say of
    it, where the question's model has none.
    """

    row: Row
    bytes: float
    tables: float
    line: str
    evidence: str
    elsewhere: tuple[str, ...] = ()


def parse_question(words: Sequence[str]) -> Question:
    """The question of a command line."""
    model = [word for word in words if word.startswith(("model=", "model."))]
    names = ("model", "context", "engine", "memory", "loss", "batch", "results")
    settings = parse_words([word for word in words if word not in model], names, bounds=True)
    if not model or "context" not in settings:
        raise ConfigError("recommend: needs model=NAME and context=TOKENS; --help says the rest")
    engine = settings.get("engine")
    if engine is not None and engine not in BY_ENGINE:
        raise ConfigError(f"engine={engine}: one of {', '.join(BY_ENGINE)}")
    return Question(
        tuple(model),
        parse_count("context", settings["context"]),
        engine,
        parse_size(settings["memory"]) if "memory" in settings else None,
        _parse_amount("loss", settings["loss"]) if "loss" in settings else None,
        parse_count("batch", settings.get("batch", "1")),
        Path(settings.get("results", "results")),
    )


def parse_count(name: str, text: str) -> int:
    """A whole number from 1 up. Raises: ConfigError: `text` is none."""
    if not text.isdecimal() or not 1 <= int(text) < 10**9:
        raise ConfigError(f"{name}={text}: a whole number, at least 1")
    return int(text)


def _parse_amount(name: str, text: str) -> float:
    """A number of at least 0. Raises: ConfigError: `text` is none."""
    return parse_number(name, text, "a number, at least 0", lambda value: 0 <= value < float("inf"))


def parse_size(text: str) -> float:
    """The bytes that `512MiB` or `4GiB` stands for."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(i?b)?", text.lower())
    if not match:
        raise ConfigError(f"memory={text}: a size such as 512MiB or 4GiB")
    return _parse_amount("memory", match[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}[match[2]]


def name_prefix(model: str) -> str:
    """The letters of a model's name before the first number, which models of a family share."""
    return re.match(r"[a-z]*", model.lower())[0]  # type: ignore[index]


class Advisor:
    """Recommends cache formats for one `Question` (model, context, batch, memory, loss) from the records of a store."""

    def __init__(self, question: Question) -> None:
        self.question, self.store = question, Store(question.results)
        self._comparisons = Comparisons(lambda record: samples_of(record, self.store, {}))
        self.model = composed(question.model).model
        self.shape: CacheShape = cache_shape(self.model)
        longest = self.shape.context
        if longest is not None and question.context > longest:
            raise ConfigError(f"context={question.context}: model={self.model.name} takes at most {longest} tokens")

    def choices(self) -> list[Recommendation]:
        """At most `MOST` formats, the cheapest first where the question bounds the loss, else the best first."""
        nearest, *others = [[row for row in rows if self._fits(row.record)] for rows in self._nearest_tables()]
        rows = {row.record.key: row for row in nearest}
        ranked = self._rank([row.record for row in nearest])
        elsewhere = [self._rank([row.record for row in table]) for table in others]
        chosen = ranked[:MOST] if self.question.loss is not None else ranked[: -MOST - 1 : -1]
        return [
            Recommendation(
                rows[one.key],
                self._total_bytes(one) or 0.0,
                self.table_bytes(one) or 0.0,
                self._command_line(one),
                self._evidence_of(one),
                tuple(map(self._compare, itertools.repeat(one), others, elsewhere)),
            )
            for one in chosen
        ]

    def _rank(self, records: Sequence[Record]) -> list[Record]:
        """Runs, smallest first, each of which has a loss lower beyond noise than the smaller one before it.

        Only runs on the frontier of bytes and loss are tested, because a correction for the number of all pairs of a
        long table would leave no difference significant.
        """
        sized = [(size, record) for record in records if (size := self._total_bytes(record))]
        of_frontier: list[Record] = []
        for _, record in sorted(sized, key=lambda pair: (pair[0], pair[1].metrics["delta_nll"], pair[1].key)):
            if not of_frontier or record.metrics["delta_nll"] <= of_frontier[-1].metrics["delta_nll"]:
                of_frontier.append(record)
        if len(of_frontier) < 2:
            return of_frontier
        return unbeaten(of_frontier, Verdicts(of_frontier, self._comparisons), self._total_bytes)

    def _fits(self, record: Record) -> bool:
        memory, loss, size = self.question.memory, self.question.loss, self._total_bytes(record)
        fits = size is not None and (memory is None or size <= memory)
        return fits and (loss is None or record.metrics["delta_nll"] <= loss)

    def _is_candidate(self, row: Row) -> bool:
        """Whether a row is a finished run of the asked engine with enough windows to compare; bounds are not tested."""
        prefix = "" if self.question.engine is None else f"engine/{self.question.engine}"
        known = not (row.baseline or row.stale or row.variant) and "delta_nll" in row.record.metrics
        asked = all(name.startswith(prefix) for name in row.record.method.split("+"))
        if not known or not asked or row.record.status != "done":
            return False
        losses = self._comparisons.losses(row.record)
        return losses is not None and len(losses.windows) >= fewest_to_differ()

    def _nearest_tables(self) -> list[list[Row]]:
        """Candidate rows of the nearest model with a table: this model, else its family, a real model, any other.

        Where it is neither this model nor of its family, the largest tables of all other real models follow.
        """

        def nearness(rows: list[Row]) -> tuple[int, int]:
            """Sort key, nearest first: 0 this model, 1 its family, 2 a real model, 3 any other; then more rows."""
            model = rows[0].record.model
            ranks = (model == self.model.name, name_prefix(model) == name_prefix(self.model.name), _of_real_model(rows))
            return ranks.index(True) if any(ranks) else len(ranks), -len(rows)

        tables = [table.rows for table in decoding_tables(self.store, read_records(self.store)[0])]
        candidates = [kept for rows in tables if (kept := [row for row in rows if self._is_candidate(row)])]
        if not candidates:
            engine = self.question.engine
            names = [name for name in choices()["method"] if name.startswith(f"engine/{engine or ''}")][:4]
            asked = "a method" if engine is None else f"a format of {engine}"
            run = f"python run.py -m {' '.join(self.question.model)} method={','.join(names)} task.context=1024"
            raise RecordError(f"no run of {asked} is on record; measure some: {run}")
        by_model = {rows[0].record.model: rows for rows in sorted(candidates, key=nearness, reverse=True)}
        nearest = min(by_model.values(), key=nearness)
        if nearness(nearest)[0] < 2:
            return [nearest]
        return [nearest, *(rows for rows in by_model.values() if rows is not nearest and _of_real_model(rows))]

    def _compare(self, record: Record, table: Sequence[Row], ranked: Sequence[Record]) -> str:
        """In words: the loss of a choice on another model, and the best format there that is not larger, if better."""
        if not table:
            return "nothing that fits is measured on the other real model"
        same = next((row for row in table if _preset(row.record) == _preset(record)), None)
        model, size = table[0].record.model, self._total_bytes(record) or 0.0
        if same is None:
            return f"not measured on {model}"
        words = f"on {model} it loses {same.record.metrics['delta_nll']:+.4f}"
        better = [one for one in ranked if (self._total_bytes(one) or 0.0) <= size and _preset(one) != _preset(record)]
        if not better or any(_preset(one) == _preset(record) for one in ranked):
            return words
        best = better[-1]
        return f"{words}, {' '.join(_preset(best)).strip()} {best.metrics['delta_nll']:+.4f} in at most its bytes"

    def _total_bytes(self, record: Record) -> float | None:
        """Bytes of the cache of all sequences and of the calibration's tables, which they share; None: unknown."""
        tables = self.table_bytes(record)
        size = cache_bytes(self.shape, record.method, record.bits, self.question.context)
        if size is None and "bits_per_element" in record.metrics:  # bits that no closed form has, as measured
            size = held_elements(self.shape, self.question.context) * record.metrics["bits_per_element"] / 8
        return None if size is None or tables is None else size * self.question.batch + tables

    def table_bytes(self, record: Record) -> float | None:
        """Bytes of a run's calibrated tables at the shape of the question's model; None: the run's model is unknown."""
        if not record.metrics.get("calibration_bytes"):
            return 0.0
        try:
            return table_bytes_at(record, cache_shape(composed((f"model={record.model}",)).model), self.shape)
        except COMPOSE_ERRORS:
            return None

    def _command_line(self, record: Record) -> str:
        """The line to paste: of an engine, of a pair `A+B` with the keys of A and the values of B, or of a run."""
        lines = [_config_of(name, record.bits).method.serve or "" for name in record.method.split("+")]
        apart = [re.fullmatch(r"(.* -ctk )(\S+)( -ctv )(\S+)", line) for line in (lines[0], lines[-1])]
        if apart[0] and apart[1] and apart[0][1] == apart[1][1]:
            return f"{apart[0][1]}{apart[0][2]}{apart[0][3]}{apart[1][4]}"
        run = ["python run.py", *self.question.model, *method_overrides(record.method, record.bits)]
        return (lines[0] if len(lines) == 1 else "") or " ".join(run)

    def _evidence_of(self, record: Record) -> str:
        """In words: on which model a record was measured, and whether in the engine or by a preset."""
        engine = record.provenance.engine
        how = "in the engine itself" if engine else "by preset, in transformers"
        if record.model == self.model.name:
            return f"{_OWN}, {how}"
        if name_prefix(record.model) == name_prefix(self.model.name):
            return f"measured on another model of this family ({record.model}), {how}"
        return f"measured on {record.model} only: a small model; measure yours, {how}"


def _of_real_model(rows: Sequence[Row]) -> bool:
    return not model_path(rows[0].record.model).startswith(EMBEDDED)


def _preset(record: Record) -> tuple[str, str]:
    """Method and bits of a record."""
    return record.method, record.bits


@functools.lru_cache(maxsize=512)
def _config_of(name: str, bits: str) -> Config:
    """The configuration of a run of a method on the default model; the method's settings do not depend on it."""
    return resolve(compose(method_overrides(name, bits)))


@functools.lru_cache(maxsize=1024)
def cache_bytes(shape: CacheShape, name: str, bits: str, context: int) -> float | None:
    """Bytes of a method's cache of one sequence; None: they do not follow from the shape of the model."""
    try:
        return bytes_of(shape, method_of(_config_of(name, bits), *shape.head_dims), context)
    except COMPOSE_ERRORS:
        return None


def bytes_of(shape: CacheShape, method: Method, context: int) -> float:
    """Bytes of a cache of one sequence. Raises: Unsupported: as `check_shapes_suffice`."""
    check_shapes_suffice(method)
    return float(sum(row["total"] for row in rows_of(shape, method, context, measured=False)))


def held_elements(shape: CacheShape, tokens: int = 1) -> int:
    """Elements of the keys and values that all layers hold of `tokens` tokens; those with a window what is in it."""
    held = ((kind, kind.dim("key") + kind.dim("value"), tokens - outside(tokens, kind.window)) for kind in shape.layers)
    return sum(kind.count * kind.heads * dims * kept for kind, dims, kept in held)


def table_bytes_at(record: Record, measured: CacheShape, other: CacheShape) -> float:
    """Bytes of a run's calibrated tables at the shape of another model, counted from those at the `measured` shape.

    Codebooks grow with the channels of all layers. Matrices, which stages have, grow also with the channels that they
    join: those of `heads_together` heads, or of all of a layer (`layers: all`: of all layers).
    """
    size, method = record.metrics["calibration_bytes"], part_of(record.config, "method")
    stages = [stage for side in ("key", "value") for stage in part_of(part_of(method, side), "stages").values()]
    joined = [stage for stage in stages if stage is not None and "left_out" in stage]

    def joins(shape: CacheShape) -> float:
        if any(stage.get("layers") == "all" for stage in joined):
            return held_elements(shape)
        heads = next((stage["heads_together"] for stage in joined if stage.get("heads_together")), None)
        return max(kind.head_dim * min(heads or kind.heads, kind.heads) for kind in shape.layers)

    return size * held_elements(other) / held_elements(measured) * (joins(other) / joins(measured) if joined else 1.0)


def fp16_bytes(shape: CacheShape, context: int, batch: int) -> float:
    """Bytes of the cache of `batch` sequences of `context` tokens in fp16."""
    return (cache_bytes(shape, "fp16", "", context) or 0.0) * batch


def recommendation_text(choice: Recommendation, rank: int, fp16_bytes: float) -> str:
    """A recommendation as text, four lines and one per other real model; `fp16_bytes`: bytes of the cache in fp16."""
    metrics, record = choice.row.record.metrics, choice.row.record
    error = metrics.get("delta_nll_se")
    loss = f"{metrics['delta_nll']:+.4f}" + ("" if error is None else f" ± {error:.4f}")
    tail = f", KL of one token in a thousand at least {metrics['kl_p999']:.2f}" if "kl_p999" in metrics else ""
    noise = "; a joint test of all rows does not tell it from full precision" if choice.row.within_noise else ""
    name = f"{choice.row.name} {record.bits}".strip()
    tables = f", tables of {format_bytes(choice.tables)} once for all sequences included" if choice.tables else ""
    measured_here = choice.row.pays is not None and choice.evidence.startswith(_OWN)
    pays = f"; tables pay from tokens in flight: {choice.row.pays_text}" if measured_here else ""
    return "\n".join(
        (
            f"{rank}. {name}: {choice.line}",
            f"   {format_bytes(choice.bytes)}, {fp16_bytes / choice.bytes:.1f} times less than fp16{tables}{pays}",
            f"   loss {loss} nats per token{tail}{noise}",
            f"   {choice.evidence}; {record.dataset}, {metrics.get('windows', 0):.0f} windows",
            *(f"   {words}" for words in choice.elsewhere),
        )
    )


def format_bytes(size: float) -> str:
    """A number of bytes in the largest unit of which there is at least one."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def _recommend(words: list[str]) -> int:
    question = parse_question(words)
    advisor = Advisor(question)
    choices, full = advisor.choices(), fp16_bytes(advisor.shape, question.context, question.batch)
    about = f"{advisor.model.name}, {question.batch} x {question.context:,} tokens, fp16 {format_bytes(full)}"
    if not choices:
        print(f"{about}: nothing on record fits; more memory, a shorter context or a larger loss is needed")
        return 1
    print(f"{about}; the {'smallest' if question.loss is not None else 'least loss'} first")
    for place, choice in enumerate(choices, 1):
        print(printable(recommendation_text(choice, place, full)))
    if any(choice.elsewhere for choice in choices):
        yours = " ".join(question.model)
        print(f"Orders differ between models. On yours: kvq choose {yours}, or half a minute a method of its states:")
        print(f"python run.py -m task=error task.context=1024 task.windows=2 {yours} method=kivi,oscar,nsnquant bits=2")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the choices and return 0; 1: there is none; 2: a question that cannot be answered."""
    return run_command(arguments, _USAGE.format(engines=", ".join(BY_ENGINE)), _recommend, RecordError)
