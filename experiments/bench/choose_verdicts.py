"""Whether a short `kvq choose` agrees with the full records: `python experiments/bench/choose_verdicts.py WORDS`.

`WORDS` are those of `kvq choose` (`model=smollm2_135m minutes=10 text=wiki.test.jsonl results=mine`). The race is run,
or read where it is on record, and held against the records of `results/` in generation that have most of its formats on
that model: a drop is false where no format of at most its bytes loses less on these records. What was found stands in
`results/bench/choose_verdicts.json`, by model.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvq_lab.card import answer_text, find_choices
from kvq_lab.choose import parse_question, run_stages
from kvq_lab.choosing import Chooser, Format

from kvq.results import Record, Store

ROOT = Path(__file__).parents[2]
OUT = ROOT / "results" / "bench" / "choose_verdicts.json"


def run_choose(words: list[str]) -> Chooser:
    """The race of a command line, measured as far as its minutes go."""
    choosing = Chooser(parse_question(words))
    print(choosing.plan(), flush=True)
    run_stages(choosing, print)
    print(answer_text(choosing), flush=True)
    return choosing


def full_records(choosing: Chooser) -> dict[str, Record]:
    """Records in generation of the raced formats, by format: of those that share a baseline, the largest set."""
    names = {(one.records[0].method, one.records[0].bits): one.name for one in choosing.formats if one.records}
    found: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in Store(ROOT / "results").scan()[0]:
        name = names.get((record.method, record.bits))
        plain = not record.from_presets.method and not record.from_presets.first_token
        if name is None or not plain or (record.model, record.task, record.status) != (_model(choosing), "ppl", "done"):
            continue
        if record.config["task"]["scoring"] == "generation" and record.baseline_key is not None:
            found[record.baseline_key][name] = record
    return max(found.values(), key=len, default={})


def _model(choosing: Chooser) -> str:
    return str(choosing.model.name)


def verdict(choosing: Chooser) -> dict[str, Any]:
    """Choices and drops of a race against the full records."""
    full, formats = full_records(choosing), choosing.formats
    size = {one.name: one.bytes for one in formats}
    loss = {name: record.metrics["delta_nll"] for name, record in full.items()}

    def on_frontier(name: str) -> bool:
        return not any(size[other] <= size[name] and loss[other] < loss[name] for other in loss)

    dropped = [formats[at].name for at in choosing.state.dropped]
    chosen = [choice.format.name for choice in find_choices(choosing)]
    pairs = list(itertools.combinations([one for one in formats if one.losses and one.name in loss], 2))
    same = sum((a.loss < b.loss) == (loss[a.name] < loss[b.name]) for a, b in pairs)
    return {
        "minutes": choosing.question.minutes,
        "text": choosing.text_name,
        "windows": choosing.state.windows,
        "window": choosing.window,
        "formats": len(formats),
        "on_record": sorted(loss),
        "record_windows": max((record.metrics["windows"] for record in full.values()), default=0),
        "choices": [_choice(choosing, one) for one in chosen],
        "choices_on_frontier": [name for name in chosen if name in loss and on_frontier(name)],
        "dropped": dropped,
        "false_drops": [name for name in dropped if name in loss and on_frontier(name)],
        "pairs": len(pairs),
        "pairs_in_the_same_order": same,
    }


def _choice(choosing: Chooser, name: str) -> dict[str, Any]:
    one: Format = next(one for one in choosing.formats if one.name == name)
    return {"name": name, "loss": one.loss, "standard_error": one.error, "needles": one.needles_found}


def main() -> None:
    choosing = run_choose(sys.argv[1:])
    written = json.loads(OUT.read_text(encoding="utf-8")) if OUT.is_file() else {}
    written[_model(choosing)] = verdict(choosing)
    OUT.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(written[_model(choosing)], indent=1))


if __name__ == "__main__":
    main()
