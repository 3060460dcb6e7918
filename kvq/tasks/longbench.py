"""`task=longbench`: LongBench and LongBench-E (arXiv 2308.14508) by their released protocol.

Source: released `config/dataset2prompt.json`, `pred.py`, `eval.py`, `metrics.py`. Prompts, answer lengths and metrics
are read from lm-eval's files and corrected where those differ from the release (a blank line, the ends of prompts,
first lines, stripped answers, the line of code that is scored). Greedy decoding, middle truncation. Outputs are also
compared with full precision's by ROUGE-L (NSNQuant, Table 17), which shows differences where both are wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.tasks import _yaml_loader
from lm_eval.utils import apply_template

from kvq.config import DatasetConfig, Loader
from kvq.config.tasks import LongbenchConfig
from kvq.data.rows import load_rows, read_objects
from kvq.data.text import encode, render_chat, set_bos
from kvq.errors import ConfigError, DataError, did_you_mean
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.record import code_behind
from kvq.tasks.items import Items, Sample, Scored, batches_of, by_part, measure_items, pair_items, write_answers
from kvq.tasks.measurement import Baseline, Measurement, Task, items_fingerprint
from kvq.tasks.reader import Ends, Logits, Pick, Reader, check_prefill, end_tokens, greedy

NO_TEMPLATE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
"""Subsets in the form for base models, which never get a chat template."""
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
"""Subsets of whose answers only the first line is scored, after leading newlines are removed."""
BUCKETS = (("0-4k", 4000), ("4-8k", 8000), ("8k+", None))
"""LongBench-E's buckets by words of the context."""


@dataclass(frozen=True)
class Subset:
    """A subset: `prompt` is a template, `ending` follows it; `metric` compares an answer with one reference."""

    name: str
    prompt: str
    ending: str
    max_new_tokens: int
    metric: Callable[..., float]
    metric_source: str
    hub_id: str
    hub_config: str

    @property
    def base(self) -> str:
        """The name without LongBench-E's ending."""
        return self.name.removesuffix("_e")

    def ask(self, row: Mapping[str, Any]) -> str:
        """The prompt's text for an item."""
        return apply_template(self.prompt, dict(row)) + self.ending

    def ends(self, tokenizer: Any, end_tokens: Sequence[int]) -> Ends:
        """Whether an answer is over: at a token that ends answers, or at the end of the scored line."""

        def over(tokens: Sequence[int]) -> bool:
            first_line = self.base in FIRST_LINE and "\n" in tokenizer.decode(list(tokens)).lstrip("\n")
            return tokens[-1] in end_tokens or first_line

        return over

    def pick(self, tokenizer: Any, end_tokens: Sequence[int]) -> Pick:
        """Greedy decoding; in samsum the first token may end neither the answer nor the line, as in the release."""
        if self.base != "samsum":
            return greedy
        banned = sorted({*end_tokens, *tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]})
        written = itertools.count()

        def not_empty(logits: Logits) -> Any:
            if next(written) == 0 and banned:
                logits = logits.index_fill(-1, torch.tensor(banned, device=logits.device), -torch.inf)
            return greedy(logits)

        return not_empty

    def answer(self, text: str) -> str:
        """The scored part of an answer's text."""
        return text.lstrip("\n").split("\n")[0] if self.base in FIRST_LINE else text

    def score(self, row: Mapping[str, Any], text: str) -> float:
        """The best score of `answer(text)` over the item's references, 0 to 1."""
        given, classes, answers = self.answer(text), row.get("all_classes"), row["answers"]
        answers = [answers] if isinstance(answers, str) else answers
        return max(float(self.metric(given, reference, all_classes=classes)) for reference in answers)


@functools.cache
def load_subset(name: str) -> Subset:
    """Read lm-eval's file of a subset ("qasper", "qasper_e") and correct it."""
    folder = Path(_yaml_loader.__file__).with_name("longbench")
    known = [file.stem for file in folder.glob("*.yaml") if not file.stem.startswith("_")]
    if name not in known:
        raise ConfigError(f"task.subsets={name}: lm-eval has no LongBench subset {name}.{did_you_mean(name, known)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the metrics' packages warn about what they can do without
            given = _yaml_loader.load_yaml(folder / f"{name}.yaml")
    except ImportError as error:
        raise ConfigError("task=longbench: needs jieba, fuzzywuzzy and rouge; pip install -e '.[eval]'") from error
    base, prompt = name.removesuffix("_e"), given["doc_to_text"]
    if base in ("triviaqa", "samsum"):  # between the examples and the question
        prompt = re.sub(r"\}\}\n+\{\{", "}}\n\n{{", prompt)
    if ending := {"lcc": "\n", "repobench-p": "\n", "passage_count": " ", "passage_retrieval_en": " "}.get(base, ""):
        prompt = prompt.rstrip()
    # Of the two metrics that a file lists, the first is a name that all subsets share.
    named = given["metric_list"][-1]["metric"]
    whole = given["process_results"]
    metric = code_similarity if named == "code_sim_score" else whole.__globals__[named]
    most, source = int(given["generation_kwargs"]["max_gen_toks"]), f"{named} {code_behind(whole)}"
    return Subset(name, prompt, ending, most, metric, source, given["dataset_path"], given["dataset_name"])


def code_similarity(text: str, reference: str, **_: Any) -> float:
    """Edit similarity of `reference` and the first line of `text` that is no comment and no code fence."""
    ratio = importlib.import_module("fuzzywuzzy.fuzz").ratio
    lines = text.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(ratio(code, reference)) / 100


@dataclass(frozen=True)
class Document:
    """One item as it was read."""

    name: str
    subset: Subset
    row: dict[str, Any]


@dataclass(frozen=True)
class LongItem:
    """One prompt in tokens; `cut`: tokens that its middle lost."""

    document: Document
    prompt: tuple[int, ...]
    cut: int


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L (F) as LongBench computes it; 1 for two empty texts, 0 where only one is empty."""
    if not text.strip() or not reference.strip():
        return float(text.strip() == reference.strip())
    module = importlib.import_module("rouge")
    try:
        return float(module.Rouge().get_scores(text, reference, avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # nothing but full stops has no words to compare
        return float(text == reference)


def read_documents(config: DatasetConfig, task: LongbenchConfig) -> list[Document]:
    """The first `task.limit` items of each subset, from `dataset.path` (a folder, or one file) or the hub."""
    if config.loader is not Loader.items:
        raise ConfigError(f"dataset={config.name}: holds text; task=longbench has items of its own, dataset=longbench")
    out, seen = list[Document](), set[str]()
    for name in task.subsets:
        subset = load_subset(name)
        if config.path is None:
            local, split = "a folder of <subset>.jsonl files", "test"
            rows = list(load_rows(f"task.subsets={name}", local, subset.hub_id, subset.hub_config, split=split))
        else:
            file = Path(config.path).expanduser()
            if file.is_dir():
                names = [f"{subset.name}.jsonl", f"{subset.base}.jsonl"]
                file = next((file / name for name in names if (file / name).is_file()), file / names[0])
            elif len(task.subsets) > 1:
                held = f"{len(task.subsets)} subsets; choose one by task.subsets="
                raise DataError(f"dataset.path={config.path}: no folder, and {held}")
            rows = read_objects(file, "context, input and answers")
        for index, row in enumerate(rows[: task.limit]):
            # `input` in the benchmark's own files is `question` in its mirror on the hub and in the prompts.
            row = {"question": row.get("input", ""), **row}
            named = f"{name}/{row.get('_id') or index}"
            out.append(Document(named if named not in seen else f"{named}/{index}", subset, row))
            seen.add(named)
    return out


def documents(inputs: Inputs) -> list[Document]:
    """The items of a run, read once."""
    config = inputs.config
    task: LongbenchConfig = config.task
    name = repr((config.dataset, task.subsets, task.limit))
    return inputs.shared("longbench", name, lambda: read_documents(config.dataset, task))


def prompt_tokens(inputs: Inputs, document: Document, room: int) -> tuple[list[int], int]:
    """The prompt's tokens, at most `room`, and the number removed from its middle; both ends stay, in equal parts."""
    tokenizer: Any = inputs.tokenizer
    task: LongbenchConfig = inputs.config.task
    text = document.subset.ask(document.row)
    templated = task.chat_template and document.subset.base not in NO_TEMPLATE
    if not templated:
        tokens = set_bos(tokenizer, encode(tokenizer, text), inputs.plain_bos)
        return _cut_middle(tokens, room), max(0, len(tokens) - room)
    plain = encode(tokenizer, text, special=False)
    kept = len(plain)
    while True:
        cut = tokenizer.decode(_cut_middle(plain, kept)) if kept < len(plain) else text
        words = render_chat(tokenizer, cut)
        tokens = set_bos(tokenizer, encode(tokenizer, words, special=False), inputs.bos)
        if len(tokens) <= room or kept == 0:
            return tokens, len(plain) - kept
        kept = max(0, kept - (len(tokens) - room))


def _cut_middle(tokens: Sequence[int], room: int) -> list[int]:
    """The first and the last tokens, `room` in all."""
    if len(tokens) <= room:
        return list(tokens)
    first = room - room // 2
    return [*tokens[:first], *tokens[len(tokens) - room // 2 :]]


def make_items(inputs: Inputs, unequal: bool = False) -> Items[LongItem]:
    """Batches of prompts of one subset each, of equal length unless `unequal`, and skipped items with the reason."""
    task: LongbenchConfig = inputs.config.task
    longest, skipped, items = inputs.longest_context, {}, []
    for document in documents(inputs):
        wanted = document.subset.max_new_tokens
        limits = [task.max_length, None if longest is None else longest - wanted]
        room = min((limit for limit in limits if limit is not None), default=2**31)
        if not str(document.row.get("context") or "").strip():
            skipped[document.name] = "empty context"
        elif not document.row.get("answers"):
            skipped[document.name] = "no answers"
        elif room < 2:
            skipped[document.name] = f"its answer may take {wanted} tokens, the model takes {longest}"
        else:
            tokens, cut = prompt_tokens(inputs, document, room)
            if len(tokens) > room:
                skipped[document.name] = f"its chat template alone takes {len(tokens)} tokens, there is room for {room}"
            else:
                items.append(LongItem(document, tuple(tokens), cut))
    batches = []
    for _, group in itertools.groupby(items, key=lambda item: item.document.subset.name):
        same = list(group)
        lengths = [len(item.prompt) for item in same]
        batches += [[same[index] for index in batch] for batch in batches_of(lengths, task.batch_size, unequal)]
    return Items(batches, lambda item: item.document.name, skipped)


def answer(reader: Reader, inputs: Inputs, batch: Sequence[LongItem]) -> list[Scored]:
    """Answers to prompts of one subset, read together, scored by the subset's metric."""
    tokenizer, subset = inputs.tokenizer, batch[0].document.subset
    finish = end_tokens(reader.loaded, tokenizer)
    ends, pick = subset.ends(tokenizer, finish), subset.pick(tokenizer, finish)

    def sample(place: int, tokens: list[int]) -> Sample:
        item = batch[place]
        text = subset.answer(str(tokenizer.decode(tokens, skip_special_tokens=True)))
        words = int(item.document.row.get("length") or len(str(item.document.row["context"]).split()))
        bucket = next(name for name, most in BUCKETS if most is None or words < most)
        about = {"item": item.document.name, "subset": subset.name, "length": words, "bucket": bucket, "cut": item.cut}
        return about | {"text": text, "score": subset.score(item.document.row, text)}

    return write_answers(reader, [item.prompt for item in batch], subset.max_new_tokens, ends, sample, pick)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for an unknown subset, `Unsupported` for a method that cannot read as `task.prefill` says."""
    for name in inputs.config.task.subsets:
        load_subset(name)
    check_prefill(method, inputs.config.task.prefill)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Answer every item under `method`; a baseline is compared with item by item, by score and by ROUGE-L."""
    task: LongbenchConfig = inputs.config.task
    reader = Reader.of(inputs, method)
    items = make_items(inputs, reader.can_mix_lengths)
    found = measure_items(
        items, lambda batch: answer(reader, inputs, batch), task, journal, baseline, method.label, "score"
    )
    scored = [sample for sample in found.samples if "skipped" not in sample]
    by_subset = by_part(scored, "subset", "score")
    # Subsets have equal weight whatever their number of items, as in the benchmark's own average.
    metrics = found.metrics | by_subset | {"subset_mean": float(np.mean(list(by_subset.values())))}
    metrics["cut_items"] = float(sum(sample["cut"] > 0 for sample in scored))
    if task.buckets:
        metrics |= by_part(scored, "bucket", "score")
    if baseline is not None:
        for sample, theirs in pair_items(scored, baseline.samples):
            sample["rouge_l"] = rouge_l(sample["text"], theirs["text"])
        metrics["rouge_l"] = float(np.mean([sample["rouge_l"] for sample in scored]))
        metrics |= by_part(scored, "subset", "rouge_l", "rouge_l")
    return Measurement(metrics, units_of(metrics), found.samples)


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the items: documents, prompts, answer lengths and metrics of subsets, the model's context."""
    rules = ("name", "prompt", "ending", "max_new_tokens", "metric_source")
    found = ([[getattr(one.subset, rule) for rule in rules], one.row] for one in documents(inputs))
    return items_fingerprint(inputs, found)


TASK = Task(
    check, measure, fingerprint, texts=lambda inputs: [str(one.row.get("context") or "") for one in documents(inputs)]
)
