"""Fill the numbers of templates/*.md from the records, into docs/*.md: `python experiments/docs/findings.py`.

A place is `{{nsnquant 2}}`: a method, bits (`-`: none), then words that narrow the runs down to one. `name=value` is
a field of the record (`model`) or of its configuration (`task.scoring`); `a|b` allows both; a word alone is an alias.
`metric=` names what is read, `as=` its format, `else=` what stands where no run was measured; a dash may stand in a row
of a table, not in a sentence. The metric `rows.error`
is the mean of a column of the run's samples, over the rows that `row.side=key` leaves; `within_noise` is 1 or 0, as
tables test it. Where several runs fit, the one that departs least from presets is read. `a minus b`, `a over b` and `a
paired b` (difference by windows ± standard error) join two places; `b` begins with the words of `a`, but for
its own settings of the method.
`{{stand-in smollm2_135m tiny_sinks generation rho}}` is a column of the figure `stand-ins`, of a real model, an
embedded one and a scoring, and `{{texts tiny_hard rho}}` one of the order of methods by loss and by texts;
`{{search smollm2_135m tpe 0}}` is the hypervolume that a search with a seed ended at, `mean` that of all its seeds.
`{{predicted smollm2_135m both_output_error parallel}}` is Spearman's ρ of an error of states with losses, `{{states
smollm2_135m key_kurtosis_raw}}` the mean over layers of a statistic, `{{rotated gemma3_270m 5}}` what rotating keys
does to the noise of a layer's logits, `{{cause tiny all_layers one_KV_head}}` OScaR's error over KIVI's.
Lines of their own, which the page does not have:

    <!-- alias: outliers = model=tiny_outliers -->
    <!-- use: task=ppl metric=delta_nll as=.3f -->     words of every place until the next such line
    <!-- claim: nsnquant 2 < kivi 2 < 0.1 -->          what a sentence says; where records deny it, the command fails
    <!-- claim: oscar 2 ~ kivi 2 -->                   two runs are within noise of each other, tested as one pair
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from kvq_lab.figures import read_searches

from experiments.docs import predictions
from kvq.report.comparisons import mark_within_noise
from kvq.report.figures.over_models import losses_of, rank_correlations, stand_in_table
from kvq.report.labels import method_departures, named
from kvq.results import Record, Store, is_stale
from kvq.results.noise import compare_pairs
from kvq.results.presets import departures_of
from kvq.results.statistics import delta_nll_of_samples, losses

ROOT = Path(__file__).parents[2]
TEMPLATES = tuple(sorted((ROOT / "experiments" / "docs" / "templates").glob("*.md")))
LINE = re.compile(r" *<!-- (alias|use|claim): (.+?) -->\n")
PLACE = re.compile(r"\{\{(.+?)\}\}", re.S)
JOINED = re.compile(r"\s+(minus|over|paired)\s+")
ITEM = re.compile(r"^(?:- .+\n(?:  .+\n)*|(?:[^\s|#<!-].*\n)+)", re.M)
"""An item of a list, or a paragraph."""
_OWN = ("method", "bits", "model", "dataset", "task")
_OF_A_METHOD = ("method.", "residual.")
_SAID = ("metric", "as", "else")
STAND_IN = "stand-in "
TEXTS = "texts "
SEARCH = "search "
STATES = ("predicted ", "states ", "rotated ", "cause ")
Words = dict[str, str]


class NoSuchRun(ValueError):
    """A place that no record, or more than one, answers."""


class NotMeasured(NoSuchRun):
    """A place that no record answers."""


def text_order_table(records: Sequence[Record]) -> pd.DataFrame:
    """Loss decoding and tokens before a text leaves full precision's, one line per model, method and bits.

    Columns `rho`, `low`, `high`, `methods` as in `stand_in_table`; `loss_stand_in`: the tokens with the sign turned, so
    that a method that is worse by both stands in the same order.
    """
    losses = losses_of(records)
    texts = [
        {"model": r.model, "method": named(r), "loss_stand_in": -r.metrics["kept_tokens"]}
        for r in records
        if r.task == "trajectory" and r.status == "done" and "kept_tokens" in r.metrics
    ]
    if losses.empty or not texts:
        return losses.iloc[:0]
    losses = losses[losses["scoring"] == "generation"]
    joined = losses.merge(pd.DataFrame(texts).drop_duplicates(["model", "method"]), on=["model", "method"])
    return rank_correlations(joined.assign(model_stand_in=joined["model"]))


class Findings:
    """Places and claims, answered by the records of a results folder."""

    def __init__(self, results: Path) -> None:
        self._store = Store(results)
        done = [record for record in self._store.scan()[0] if record.status == "done"]
        self._records = mark_within_noise(done, self._store)
        self._aliases: dict[str, str] = {}
        self._use: Words = {}
        self._pairs: pd.DataFrame | None = None
        self.failed: list[str] = []
        """Claims that the records do not bear out."""

    def page(self, template: str) -> str:
        """The template with its places filled and its lines of settings left out.

        Raises:
            NoSuchRun: a place that is no one run's.
        """
        out = []
        for paragraph in re.split(r"(?<=-->\n)|(?= *<!-- (?:alias|use|claim))", template):
            if line := LINE.fullmatch(paragraph):
                self._set(line[1], line[2])
            else:
                out.append(PLACE.sub(lambda place: self.shown(place[1], _in_table(place)), paragraph))
        return ITEM.sub(lambda item: _wrapped(item[0]), "".join(out))

    def shown(self, place: str, dashes: bool = True) -> str:
        """What stands in a place; `dashes`: whether that may be a dash."""
        try:
            return self._shown(place)
        except NotMeasured:
            first, _, _ = self._parts(place)
            if "else" not in first or (first["else"] == "–" and not dashes):
                raise
            return first["else"]

    def _shown(self, place: str) -> str:
        if place.startswith((STAND_IN, TEXTS, SEARCH, *STATES)):
            words, _, form = place.partition(" as=")
            return f"{self.value(words):{form or '.2f'}}"
        first, join, second = self._parts(place)
        form = (second or first).get("as", ".3f")
        if join != "paired":
            return f"{self.value(place):{form}}"
        runs = [self._run(words) for words in (first, second)]
        found = delta_nll_of_samples(*(self._store.samples(run.key) for run in runs))
        return f"{found.value:{form}} ± {found.standard_error:{form.lstrip('+')}}"

    def value(self, place: str) -> float:
        """The number of a place, without its format."""
        if place.startswith(STAND_IN):
            return self._stand_in(*place.split()[1:])
        if place.startswith(STATES):
            return self._of_states(*place.split())
        if place.startswith(SEARCH):
            return self._hypervolume(*place.split()[1:])
        if place.startswith(TEXTS):
            _, model, column = place.split()
            found = text_order_table(self._records)
            if (found := found[found["model"] == model]).empty:
                raise NotMeasured(f"{place}: no pairs of methods")
            return float(found.iloc[0][column])
        first, join, second = self._parts(place)
        value = self._read(first)
        if not second:
            return value
        return value / self._read(second) if join == "over" else value - self._read(second)

    def _stand_in(self, real: str, model: str, scoring: str, column: str) -> float:
        if self._pairs is None:
            self._pairs = stand_in_table(self._records)
        pairs = self._pairs[["model", "model_stand_in", "scoring"]]
        found = self._pairs[(pairs == [real, model, scoring]).all(axis=1)]
        if found.empty:
            raise NotMeasured(f"{STAND_IN} {real} {model} {scoring}: no pairs of methods")
        return float(found.iloc[0][column])

    def _of_states(self, kind: str, model: str, name: str, scoring: str = "") -> float:
        if kind == "predicted":
            return predictions.predicted(self._records, model, name, scoring)[0]
        if kind == "cause":
            return predictions.cause(model, name, scoring)
        if kind == "rotated":
            return predictions.rotation_noise(model)[0][int(name)]
        return predictions.mean_over_layers(model, name)

    def _hypervolume(self, model: str, sampler: str, seed: str) -> float:
        ends = [
            one["hypervolume"][-1]
            for found in read_searches(self._store).values()
            for one in found
            if f"model={model}" in one["fixed"]
            and one["settings"]["sampler"] == sampler
            and seed in ("mean", str(one["settings"]["seed"]))
        ]
        if not ends:
            raise NotMeasured(f"{SEARCH}{model} {sampler} {seed}: no such search")
        return float(sum(ends) / len(ends))

    def _parts(self, place: str) -> tuple[Words, str, Words]:
        before, join, after = [*JOINED.split(place.strip()), "", ""][:3]
        first = self._words(before, self._use)
        kept = {name: said for name, said in first.items() if name in self._use or not name.startswith(_OF_A_METHOD)}
        return first, join, self._words(after, kept) if after else {}

    def _set(self, kind: str, text: str) -> None:
        if kind == "alias":
            name, _, words = text.partition(" = ")
            self._aliases[name.strip()] = words
        elif kind == "use":
            self._use = self._words(text, {}, named=False)
        elif " ~ " in text:
            first, second = (self._words(side, self._use) for side in text.split(" ~ "))
            runs = (losses(self._store.samples(self._run(words).key)) for words in (first, second))
            if compare_pairs({text: (next(runs), next(runs))}).differs(text):
                self.failed.append(f"{text}: they differ beyond noise, tested as one pair")
        else:
            values = [float(side) if _is_number(side) else self.value(side) for side in text.split(" < ")]
            if any(low >= high for low, high in pairwise(values)):
                self.failed.append(f"{text}: {' < '.join(f'{value:.4g}' for value in values)}")

    def _words(self, text: str, start: Words, named: bool = True) -> Words:
        given = text.split()
        words = dict(start) | (dict(zip(("method", "bits"), given[:2], strict=True)) if named else {})
        for word in given[2 if named else 0 :]:
            more = self._words(self._aliases[word], {}, named=False) if word in self._aliases else {}
            if not more and "=" not in word:
                raise NoSuchRun(f"{text}: no alias '{word}'; there are {', '.join(self._aliases)}")
            words |= more or dict([word.split("=", 1)])
        return words

    def _read(self, words: Words) -> float:
        run, metric = self._run(words), words["metric"]
        if not metric.startswith("rows."):
            if metric not in run.metrics:
                raise NoSuchRun(f"{words}: {run.key} has no metric '{metric}'")
            return run.metrics[metric]
        wanted = {name.removeprefix("row."): value for name, value in words.items() if name.startswith("row.")}
        rows = [row for row in self._store.samples(run.key) if metric[5:] in row and _fits(row, wanted)]
        if not rows:
            raise NoSuchRun(f"{words}: no such rows in {run.key}")
        return sum(row[metric[5:]] for row in rows) / len(rows)

    def _run(self, words: Words) -> Record:
        wanted = {name: value for name, value in words.items() if name not in _SAID and not name.startswith("row.")}
        found = [run for run in self._records if all(_field(run, n) in v.split("|") for n, v in wanted.items())]
        if len(found) > 1:
            found = [run for run in found if not is_stale(run)] or found
        if len(found) > 1:
            found = [run for run in found if not method_departures(run)] or found
        if len(found) > 1:
            fewest = min(len(departures_of(run).protocol) for run in found)
            found = [run for run in found if len(departures_of(run).protocol) == fewest]
        if len(found) != 1:
            raise (NoSuchRun if found else NotMeasured)(f"{wanted}: {len(found)} records; one is needed")
        # Bits of layers have a label of their own (`k2.3v1.9`), so a place that gives it names them.
        departs = [words for words in method_departures(found[0]) if " bits by layer " not in words]
        if departs and not any(name.startswith(_OF_A_METHOD) for name in wanted):
            raise NoSuchRun(
                f"{wanted}: the only record departs from its preset ({', '.join(departs)}); name the setting"
            )
        return found[0]


def _in_table(place: re.Match[str]) -> bool:
    return place.string[place.string.rfind("\n", 0, place.start()) + 1 :].lstrip().startswith("|")


def _wrapped(item: str) -> str:
    text, indent = " ".join(item.split()), "  " * item.startswith("- ")
    return textwrap.fill(text, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+", text.strip()) is not None


def _fits(row: Mapping[str, Any], wanted: Words) -> bool:
    return all(str(row.get(name)) in value.split("|") for name, value in wanted.items())


def _field(record: Record, name: str) -> str:
    """A field as text: null where there is none, - for bits of a method without."""
    if name in _OWN:
        return str(getattr(record, name)) or "-"
    found: Any = record.config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return "null" if found is None else str(found).replace(" ", "")


def page_of(template: Path) -> Path:
    """The page that a template becomes: docs/findings.md of templates/findings.md."""
    return ROOT / "docs" / template.name


def main() -> int:
    """Write the pages; 1 where a claim no longer holds or a place has no run."""
    failed = 0
    for template in TEMPLATES:
        findings = Findings(ROOT / "results")
        try:
            page_of(template).write_text(findings.page(template.read_text(encoding="utf-8")), encoding="utf-8")
        except NoSuchRun as error:
            print(f"{template.name}: {error}", file=sys.stderr)
            failed = 1
        for claim in findings.failed:
            print(f"{template.name}: the records do not bear out: {claim}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
