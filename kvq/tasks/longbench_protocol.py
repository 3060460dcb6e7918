"""LongBench's subsets by their released protocol: prompts, ends of answers, the scored part of an answer, metrics.

Source: LongBench (arXiv 2308.14508), released `config/dataset2prompt.json`, `pred.py`, `eval.py`, `metrics.py`. Most of
it is in lm-eval's files; this module corrects where they differ from the release (a blank line, the ends of prompts,
first lines, stripped answers, the line of code that is scored).
"""

from __future__ import annotations

import functools
import importlib.util
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import apply_template

from kvq.errors import ConfigError, did_you_mean
from kvq.results.versions import code_behind
from kvq.tasks.reader import Ends, Logits, Pick, greedy

NO_TEMPLATE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
"""Subsets in the form for base models, which never get a chat template."""
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
"""Subsets of whose answers only the first line is scored, after leading newlines are removed."""
_BLANK_LINE = frozenset({"triviaqa", "samsum"})  # between the examples and the question
_ENDINGS = {"lcc": "\n", "repobench-p": "\n", "passage_count": " ", "passage_retrieval_en": " "}
_NUMBERED = {"passage_retrieval_en": r"Paragraph (\d+)", "passage_retrieval_zh": r"段落(\d+)"}
_CLASSES = frozenset({"trec", "lsht"})


@dataclass(frozen=True)
class Subset:
    """One subset: `prompt` is a template over `context` and `question`, `ending` what follows it.

    `metric` compares an answer with one reference; `metric_source` names its code.
    """

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

    def refusal(self, row: Mapping[str, Any]) -> str | None:
        """The reason why an item cannot be scored, or None; the caller skips an empty context or missing answers."""
        answers, classes = row.get("answers"), row.get("all_classes")
        if answers is not None and not _is_text_list(answers):
            return f"answers is {type(answers).__name__}; a list of texts is read"
        for field in ("context", "input"):
            if not isinstance(row.get(field), str | None):
                return f"{field} is {type(row[field]).__name__}; text is read"
        length = row.get("length", 0)
        if length is not None and (type(length) is not int or length < 0):
            return f"length={length!r:.40}: a number of words"
        if self.base in _CLASSES and not _is_text_list(classes):
            return f"all_classes is {type(classes).__name__}; a list of texts is read"
        if self.base in _NUMBERED and any(not re.search(_NUMBERED[self.base], answer) for answer in answers or []):
            return f"answers={answers!r:.60}: each names a paragraph by its number"
        return None

    def ends(self, tokenizer: Any, end_tokens: Sequence[int]) -> Ends:
        """Whether an answer is over: at a token that ends answers, or at the end of the scored line."""

        def over(tokens: Sequence[int]) -> bool:
            if tokens[-1] in end_tokens:
                return True
            return self.base in FIRST_LINE and "\n" in tokenizer.decode(list(tokens)).lstrip("\n")

        return over

    def pick(self, tokenizer: Any, end_tokens: Sequence[int]) -> Pick:
        """Greedy decoding; in samsum the first token may end neither the answer nor the line, as in the release."""
        if self.base != "samsum":
            return greedy
        line_ends = tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
        return _FirstNot(sorted({*end_tokens, *line_ends}))

    def answer(self, text: str) -> str:
        """The scored part of an answer's text."""
        return text.lstrip("\n").split("\n")[0] if self.base in FIRST_LINE else text

    def score(self, row: Mapping[str, Any], text: str) -> float:
        """The best score of `answer(text)` over the item's references, 0 to 1."""
        given = self.answer(text)
        return max(
            float(self.metric(given, reference, all_classes=row.get("all_classes"))) for reference in row["answers"]
        )


class _FirstNot:
    """Greedy decoding whose first token is none of `banned`."""

    def __init__(self, banned: Sequence[int]) -> None:
        self._banned, self._first = list(banned), True

    def __call__(self, logits: Logits) -> Any:
        if self._first and self._banned:
            logits = logits.index_fill(-1, torch.tensor(self._banned, device=logits.device), -torch.inf)
        self._first = False
        return greedy(logits)


@functools.cache
def load_subset(name: str) -> Subset:
    """Read lm-eval's file of a subset ("qasper", "qasper_e") and correct it."""
    found = importlib.util.find_spec("lm_eval.tasks")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(next(iter(found.submodule_search_locations))) / "longbench"
    known = [file.stem for file in folder.glob("*.yaml") if not file.stem.startswith("_")]
    if name not in known:
        raise ConfigError(f"task.subsets={name}: lm-eval has no LongBench subset {name}.{did_you_mean(name, known)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the metrics' packages warn about what they can do without
            given = load_yaml(folder / f"{name}.yaml")
    except ImportError as error:
        raise ConfigError("task=longbench: needs jieba, fuzzywuzzy and rouge; pip install -e '.[eval]'") from error
    base, prompt = name.removesuffix("_e"), given["doc_to_text"]
    if base in _BLANK_LINE:
        prompt = re.sub(r"\}\}\n+\{\{", "}}\n\n{{", prompt)
    if ending := _ENDINGS.get(base, ""):
        prompt = prompt.rstrip()
    # Of the two metrics that a file lists, the first is a name that all subsets share.
    named = given["metric_list"][-1]["metric"]
    whole = given["process_results"]
    metric = code_similarity if named == "code_sim_score" else whole.__globals__[named]
    return Subset(
        name,
        prompt,
        ending,
        int(given["generation_kwargs"]["max_gen_toks"]),
        metric,
        f"{named} {code_behind(whole)}",
        given["dataset_path"],
        given["dataset_name"],
    )


def code_similarity(text: str, reference: str, **_: Any) -> float:
    """Edit similarity of `reference` and the first line of `text` that is neither a comment nor in a code fence.

    Leading newlines do not count; a line of blanks does, as in the released metric.
    """
    ratio = importlib.import_module("fuzzywuzzy.fuzz").ratio
    lines = text.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(ratio(code, reference)) / 100


def _is_text_list(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(text, str) for text in given)
