"""Bars of the embedded model: bits per byte of held-out text, and needles found in it."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvq.data.rows import load_corpus
from kvq.data.text import build_needle_prompt, draw_needles


def held_out_tokens(tokenizer: PreTrainedTokenizerBase, kind: str) -> Int[Tensor, " tokens"]:
    """The held-out text of `kind` as token ids, documents separated by an empty line."""
    text = "\n\n".join(load_corpus(kind, "test").documents)
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@torch.inference_mode()
def bits_per_byte(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    context: int = 1024,
    tokens: int = 200_000,
    front: tuple[int, ...] = (),
) -> dict[str, float]:
    """Bits per byte and perplexity on the first `tokens` held-out tokens, in windows of `context` every half of it.

    All targets but the first token count once; those behind the first window have at least `context` / 2 tokens
    before them. `front` stands before each window and is not scored. Returns `bits_per_byte`, `perplexity` (per token),
    `tokens` and `bytes` scored.
    """
    ids = held_out_tokens(tokenizer, kind)[:tokens]
    nll, scored_to = 0.0, 1
    for start in range(0, len(ids) - 1, context // 2):
        window = ids[start : start + context]
        inputs = torch.cat((torch.tensor(front, dtype=window.dtype), window))
        logits = model(inputs[None], use_cache=False).logits[0, len(front) :].float()
        first = scored_to - start
        nll += torch.nn.functional.cross_entropy(logits[first - 1 : -1], window[first:], reduction="sum").item()
        scored_to = start + len(window)
        if scored_to == len(ids):
            break
    scored_bytes = len(tokenizer.decode(ids[1:]).encode())
    return {
        "bits_per_byte": nll / math.log(2) / scored_bytes,
        "perplexity": math.exp(nll / (len(ids) - 1)),
        "tokens": len(ids) - 1,
        "bytes": scored_bytes,
    }


@torch.inference_mode()
def needle_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    seed: int,
    front: tuple[int, ...] = (),
) -> float:
    """Share of `count` fresh single needles, at even depths of held-out prose, whose value greedy decoding gives.

    `length` is the prompt's, in tokens, without `front`, which stands before it. The answer is teacher-forced: greedy
    decoding reproduces it exactly when each of its tokens is the likeliest after those before it.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    stream = held_out_tokens(tokenizer, "pydocs").tolist()
    rng = np.random.default_rng([seed, length])
    hits = 0
    for depth in np.linspace(0, 1, count):
        needles = draw_needles(rng, 1)
        start = int(rng.integers(len(stream) - length))
        prompt = build_needle_prompt(stream[start : start + length], needles, [float(depth)], length, encode)
        answer = encode(needles[0].answer)
        inputs = torch.tensor([[*front, *prompt, *answer[:-1]]])
        logits = model(inputs, use_cache=False, logits_to_keep=len(answer)).logits[0]
        hits += logits.argmax(-1).tolist() == answer
    return hits / count
