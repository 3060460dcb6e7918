"""LongBench's released prompts, endings and metrics, written down here once more and compared on all 21 subsets."""

from __future__ import annotations

import difflib
import hashlib
import random
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.data.byte_tokenizer import byte_tokenizer

pytest.importorskip("lm_eval", reason="needs the extra 'eval'")
jieba = pytest.importorskip("jieba", reason="needs the extra 'eval'")
pytest.importorskip("rouge", reason="needs the extra 'eval'")
protocol = pytest.importorskip("kvq.tasks.longbench_protocol")

# The first digits of the sha256 of each released prompt with <C> for the context and <Q> for the input, and the most
# tokens of an answer.
PROMPTS = {
    "narrativeqa": ("ba1d104ebe1a995c", 128),
    "qasper": ("2e68c0138e9dd432", 128),
    "multifieldqa_en": ("e7c5ee43a7d59fef", 64),
    "multifieldqa_zh": ("e028b225386cc24b", 64),
    "hotpotqa": ("520a61a993cc2eb9", 32),
    "2wikimqa": ("520a61a993cc2eb9", 32),
    "musique": ("520a61a993cc2eb9", 32),
    "dureader": ("7b9969fcdb94e18c", 128),
    "gov_report": ("85952eb5e8ea3008", 512),
    "qmsum": ("4835204cda3a27b0", 512),
    "multi_news": ("57f94973a372fb63", 512),
    "vcsum": ("ab4e6487d8800cc9", 512),
    "trec": ("ca8a5adcadb8891b", 64),
    "triviaqa": ("d6c428241d97f9c9", 32),
    "samsum": ("b1b038a2cc3de322", 128),
    "lsht": ("b6143c025a6b4dfb", 64),
    "passage_count": ("3ac87e7805736c10", 32),
    "passage_retrieval_en": ("4b672c64f1dc7330", 32),
    "passage_retrieval_zh": ("cb9eebc51889457b", 32),
    "lcc": ("93273b9714a630e3", 64),
    "repobench-p": ("57ebb7a5dc0bfdc0", 64),
}
ENDINGS = {
    "triviaqa": "<C>\n\n<Q>",
    "samsum": "<C>\n\n<Q>",
    "trec": "<C>\n<Q>",
    "lcc": "<C>Next line of code:\n",
    "repobench-p": "<C><Q>Next line of code:\n",
    "passage_count": "The final answer is: ",
    "passage_retrieval_en": "The answer is: ",
}
CLASSES = ["Human", "Human being", "City", "Other city", "体育", "体育新闻"]


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_the_released_ones_to_the_byte(name: str) -> None:
    subset = protocol.load_subset(name)
    asked = subset.ask({"context": "<C>", "question": "<Q>"})
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == PROMPTS[name][0]
    assert subset.max_new_tokens == PROMPTS[name][1]
    assert asked.endswith(ENDINGS.get(name, ""))
    # What an item holds is left as it is, newlines at its ends included.
    assert subset.ask({"context": "<C>\n", "question": "\n<Q>\n"}) == asked.replace("<C>", "<C>\n").replace(
        "<Q>", "\n<Q>\n"
    )


def lcs_words(reference: list[str], given: list[str]) -> set[str]:
    """Words of a longest common subsequence; of several, the one that is found from the ends, the given text first."""
    best = [[0] * (len(given) + 1) for _ in range(len(reference) + 1)]
    for i, one in enumerate(reference, 1):
        for j, other in enumerate(given, 1):
            best[i][j] = best[i - 1][j - 1] + 1 if one == other else max(best[i - 1][j], best[i][j - 1])
    i, j, words = len(reference), len(given), set()
    while i and j:
        if reference[i - 1] == given[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif best[i - 1][j] > best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def rouge(given: str, reference: str) -> float:
    """ROUGE-L of a summary over distinct words: sentences end at full stops; 0 where there are none."""
    ours, theirs = (
        [" ".join(part.split()).split(" ") for part in text.split(".") if part] for text in (given, reference)
    )
    if not ours or not theirs:
        return 0.0
    shared = set().union(*(lcs_words(one, other) for one in theirs for other in ours))
    sizes = [len({word for sentence in text for word in sentence}) for text in (ours, theirs)]
    precision, recall = len(shared) / sizes[0], len(shared) / sizes[1]
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_zh(given: str, reference: str) -> float:
    return rouge(*(" ".join(jieba.cut(text, cut_all=False)) for text in (given, reference)))


def overlap(ours: list[str], theirs: list[str]) -> float:
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def plain_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(?:the|an|a)\b", " ", kept).split()


# Punctuation of the release, by code points.
PUNCTUATION_ZH = set(string.punctuation) | set(
    map(
        chr,
        [
            *(0xFF01, 0xFF1F, 0xFF61, 0x3002, *range(0xFF02, 0xFF0E), 0xFF0F, 0xFF1A, 0xFF1B, 0xFF1C),
            *(0xFF1D, 0xFF1E, 0xFF20, *range(0xFF3B, 0xFF41), *range(0xFF5B, 0xFF61), 0xFF62, 0xFF63, 0xFF64, 0x3001),
            *(0x3003, *range(0x300B, 0x3012), *range(0x3014, 0x3020), 0x3030, 0x303E, 0x303F, 0x2013, 0x2014),
            *(0x2018, 0x2019, 0x201B, 0x201C, 0x201D, 0x201E, 0x201F, 0x2026, 0x2027, 0xFE4F),
        ],
    )
)


def words_zh(text: str) -> list[str]:
    cut = ("".join(c for c in part.lower() if c not in PUNCTUATION_ZH) for part in jieba.cut(text, cut_all=False))
    return [word for word in ("".join(part.split()) for part in cut) if word]


def share_of(number: str, given: str) -> float:
    found = re.findall(r"\d+", given)
    return found.count(number) / len(found) if found else 0.0


def code(given: str, reference: str) -> float:
    """Of the first line that is neither comment nor fence, in whole hundredths."""
    while given.startswith("\n"):
        given = given[1:]
    line = ""
    for candidate in given.split("\n"):
        if "`" not in candidate and "#" not in candidate and "//" not in candidate:
            line = candidate
            break
    if line == reference:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


def classes(given: str, reference: str) -> float:
    """The share of the right class among those named; the release drops parts of the right name as it walks the list,
    and so steps over the one behind each."""
    named = [name for name in CLASSES if name in given]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            del named[place]
        place += 1
    return 1 / len(named) if reference in named else 0.0


Metric = Callable[[str, str], float]
QA: Metric = lambda given, reference: overlap(plain_words(given), plain_words(reference))  # noqa: E731
METRICS: dict[str, Metric] = {
    **dict.fromkeys(["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"], QA),
    "multifieldqa_zh": lambda given, reference: overlap(words_zh(given), words_zh(reference)),
    **dict.fromkeys(["gov_report", "qmsum", "multi_news", "samsum"], rouge),
    **dict.fromkeys(["dureader", "vcsum"], rouge_zh),
    **dict.fromkeys(["trec", "lsht"], classes),
    "passage_count": lambda given, reference: share_of(reference, given),
    "passage_retrieval_en": lambda given, reference: share_of(reference.split("Paragraph ")[1].split()[0], given),
    "passage_retrieval_zh": lambda given, reference: share_of(re.split("段落", reference)[1], given),
    **dict.fromkeys(["lcc", "repobench-p"], code),
}
PIECES = [
    *("the small green", " city.", "An answer", "a", ", and", "YES", "no.", " . ", "..", " ", "  ", "\n", "\n\n", "\t"),
    *("Paragraph 3", "Paragraph 12", "段落7", "3", "12", "7", "二〇一九年", "模型很小，", "城市是绿色的。", "《书》"),
    *("    return total", "return self.total", "# a comment", "// b", "```", "x = 1", "def f(x):", *CLASSES),
]  # fmt: skip


def drawn(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(PIECES) + rng.choice(["", " ", " ", "\n"]) for _ in range(rng.randint(0, most)))


def references(name: str, rng: random.Random) -> list[str]:
    if name in ("trec", "lsht"):
        return [rng.choice(CLASSES)]
    if name.startswith("passage"):
        number = rng.choice(["3", "7", "12"])
        return [{"passage_count": "", "passage_retrieval_en": "Paragraph "}.get(name, "段落") + number]
    if name in ("lcc", "repobench-p"):
        return [rng.choice(["    return total", "x = 1", "return self.total()"])]
    return [drawn(rng, 6) for _ in range(rng.randint(1, 3))]


@pytest.mark.parametrize("name", PROMPTS)
def test_metrics_are_the_released_ones(name: str) -> None:
    """400 random answers: references and answers of words, marks, code, numbers, class names and newlines."""
    rng, subset = random.Random(name), protocol.load_subset(name)
    found = []
    for _ in range(400):
        answers, text = references(name, rng), drawn(rng, 8)
        if rng.random() < 0.3:
            text = rng.choice(["", "\n", " \n", "\n\n"]) + rng.choice(answers) + rng.choice(["", ".", "\nmore", " 5"])
        line = re.sub(r"\A\n+", "", text).partition("\n")[0] if name in ("trec", "triviaqa", "samsum", "lsht") else text
        expected = max([0.0, *(METRICS[name](line, reference) for reference in answers)])
        row = {"answers": answers, "all_classes": CLASSES}
        found.append(subset.score(row, text))
        assert found[-1] == pytest.approx(expected, abs=1e-12), (text, answers)
    assert max(found) > 0.99
    assert min(found) == 0.0


@pytest.mark.parametrize("name", ["trec", "triviaqa", "samsum", "lsht"])
def test_an_answer_ends_with_its_first_line_once_it_has_begun(name: str) -> None:
    subset, tokenizer = protocol.load_subset(name), byte_tokenizer()
    ends = subset.ends(tokenizer, [])
    tokens = tokenizer("\n\n Paris\nDialogue")["input_ids"]
    over = next(count for count in range(1, len(tokens) + 1) if ends(tokens[:count]))
    assert tokenizer.decode(tokens[:over]) == "\n\n Paris\n"
    assert subset.answer(tokenizer.decode(tokens[:over])) == " Paris"
    assert ends([*tokens[:3]]) is False
    assert subset.ends(tokenizer, tokens[2:3])(tokens[:3])
    assert not protocol.load_subset("qasper").ends(tokenizer, [])(tokens)


def test_the_first_token_of_samsum_is_no_newline() -> None:
    tokenizer = byte_tokenizer()
    (newline,) = tokenizer("\n")["input_ids"]
    pick = protocol.load_subset("samsum").pick(tokenizer, [7])
    logits = torch.zeros(2, 256)
    logits[:, newline], logits[0, 7], logits[:, 9] = 3.0, 2.0, 1.0
    assert pick(logits).tolist() == [9, 9]
    assert pick(logits).tolist() == [newline, newline]
    assert protocol.load_subset("triviaqa").pick(tokenizer, [7])(logits).tolist() == [newline, newline]


GOOD: dict[str, Any] = {"answers": ["Human"], "all_classes": CLASSES, "length": 12, "context": "c", "input": "q"}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("qasper", {"answers": "text"}, "answers is str; a list of texts is read"),
        ("qasper", {"answers": {"a": 1}}, "answers is dict; a list of texts is read"),
        ("qasper", {"answers": ["a", 5]}, "answers is list; a list of texts is read"),
        ("qasper", {"length": "many"}, "length='many': a number of words"),
        ("qasper", {"length": -3}, "length=-3: a number of words"),
        ("qasper", {"length": 1.5}, "length=1.5: a number of words"),
        ("qasper", {"context": 5}, "context is int; text is read"),
        ("trec", {"all_classes": None}, "all_classes is NoneType; a list of texts is read"),
        ("passage_retrieval_en", {"answers": ["3"]}, "each names a paragraph by its number"),
    ],
)
def test_items_that_cannot_be_scored_are_refused(name: str, change: dict[str, Any], says: str) -> None:
    assert says in protocol.load_subset(name).refusal(GOOD | change)


def test_items_that_can_be_scored_are_not_refused() -> None:
    for name in PROMPTS:
        answers = ["Paragraph 3 段落3"] if name in protocol._NUMBERED else ["Human"]
        for change in ({}, {"length": None}, {"answers": []}):
            assert protocol.load_subset(name).refusal(GOOD | {"answers": answers} | change) is None
