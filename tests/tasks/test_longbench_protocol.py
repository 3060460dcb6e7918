"""LongBench's released prompts and endings, written down here once more, on all 21 subsets; and ends of answers."""

from __future__ import annotations

import difflib
import hashlib
import random

import pytest
import torch

from tests.data.byte_tokenizer import byte_tokenizer

pytest.importorskip("lm_eval", reason="needs the extra 'eval'")
pytest.importorskip("jieba", reason="needs the extra 'eval'")
pytest.importorskip("rouge", reason="needs the extra 'eval'")
protocol = pytest.importorskip("kvq.tasks.longbench")

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


PIECES = [*"    return total|return self.total|# a comment|// b|```|x = 1|def f(x):| ".split("|"), "\n", "\n\n"]


@pytest.mark.parametrize("name", ["lcc", "repobench-p"])
def test_the_similarity_of_code_is_the_released_one(name: str) -> None:
    """On 400 random answers; the other metrics are lm-eval's own functions."""
    rng, subset = random.Random(name), protocol.load_subset(name)
    found = []
    for _ in range(400):
        text = "".join(rng.choice(PIECES) + rng.choice(["", " ", "\n"]) for _ in range(rng.randint(0, 8)))
        reference = rng.choice(["    return total", "x = 1", "return self.total()"])
        found.append(subset.score({"answers": [reference]}, text))
        assert found[-1] == pytest.approx(code(text, reference), abs=1e-12), (text, reference)
    assert max(found) > 0.99
    assert min(found) == 0.0


def test_the_best_reference_counts() -> None:
    subset = protocol.load_subset("triviaqa")
    assert subset.score({"answers": ["a river", "Paris"]}, "\n\nParis\nDialogue") == 1


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
