"""Figures and card of the model whose token in front is a sink."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tiny_model.card import facts_of, needle_table, text_hashes
from tiny_model.evaluation import held_out_tokens
from tiny_model.network import Attended, token_logits
from tiny_model.sinks import norm_ratios, sink_masses
from tiny_model.sinks_training import WATCHED, Run

WINDOWS = {512: 16, 2048: 4}
"""Windows of the sink's figures: their number by length in tokens, that in front not counted."""


@torch.inference_mode()
def sink_figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: str) -> dict[str, Any]:
    """The sink on the first held-out windows of `kind`, by length: norms over the median's, share of the attention.

    `key` and `value` are [layers, KV heads], geometric means over windows; `attention` is [layers, query heads], the
    mean over windows and over all queries but that of the token in front.
    """
    figures = {}
    for length, count in WINDOWS.items():
        windows = held_out_tokens(tokenizer, kind)[: count * length].view(count, length)
        ratios, masses = [], []
        for window in windows:
            attended: list[Attended] = []
            front = torch.full((1, 1), tokenizer.bos_token_id)
            token_logits(model, torch.cat((front, window[None]), 1), torch.float32, attended)
            ratios.append(norm_ratios(attended).log())
            masses.append(sink_masses(attended, queries=length))
        key, value = torch.stack(ratios).mean(0).exp().unbind(1)
        means = {"key": key, "value": value, "attention": torch.stack(masses).mean(0)}
        figures[str(length)] = {
            name: [[round(x, 4) for x in row] for row in each.tolist()] for name, each in means.items()
        }
    return figures


def write_sinks_card(folder: Path, run: Run, results: dict[str, Any], note: str) -> None:
    """Write card.json and CARD.md into `folder`; `note` is what else is to be said of this run."""
    card: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in run.trained.values()),
        "bytes": (folder / "delta.safetensors").stat().st_size,
        **facts_of(run.recipe, run.data, run.state, results, note),
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "CARD.md").write_text(_markdown(card))


def _markdown(card: dict[str, Any]) -> str:
    return "\n".join((_head(card), _measured(card["results"]), _recipe(card), _data(card), _curve(card)))


def _head(card: dict[str, Any]) -> str:
    return f"""# tiny_sinks: the embedded model with an attention sink

`tiny` (kvq/models/tiny) and a change of it: every matrix of the layers plus a product of rank {card["recipe"]["rank"]},
new norm weights, and a new embedding of token 0 (`<|endoftext|>`), which stands in front of every text.
{card["parameters"]:,} numbers in fp16, {card["bytes"] / 1e6:.2f} MB; `kvq/models/weights.py` adds them up as the model
is loaded, to the same bits on every machine.

**The sink was induced.** The token in front has a key and a value of low norm and takes much of the attention because
the training loss asked for it. It did not come from training on text, as those of large models
do, and nothing follows from this model about why they come. What it shares with them is what a quantizer sees.

What large models have, by the papers: OScaR (arXiv 2605.19660, section 4.1 and figure 3) finds a few tokens of very low
key and value norm in Llama 2 7B and others, the same in each layer's queries, keys and values, and identifies them with
attention sinks. StreamingLLM (arXiv 2309.17453) found that the first tokens take most of the attention in most layers,
but not in the lowest ones, whatever they say. NSNQuant (appendix on channel-wise scaling) gives one figure of the other
kind: in the first layer of Llama 2 7B the first token's norm is 19.1, the mean 11.3. Here norms are low in all layers,
the first one included, and some heads of each layer but the last attend to the token not at all.
"""


def _measured(results: dict[str, Any]) -> str:
    texts = "\n".join(_text_row(kind, results) for kind in results["text"])
    needles = results["needles"]
    tables = "\n".join(
        _sink_table(kind, length, figures)
        for kind, by_length in results["sink"].items()
        for length, figures in by_length.items()
    )
    return f"""## Measured (weights in fp16 as merged, arithmetic in fp32)

| held-out text | bits per byte | perplexity | of `tiny` | difference | of `tiny` with the token in front |
|---|---|---|---|---|---|
{texts}

{needle_table(needles)}

Text: windows of 1024 tokens every 512, the token in front of each beside them. The aim was a perplexity on pydocs
within 3% of `tiny`'s; {_aim(results)}. Needles: one to a prompt of held-out
prose, at even depths, six digits, greedy exact match.

The sink: median norm of the other tokens over its own, by KV head, and its share of the attention of all later queries,
by query head. The aims were 8 for key and value in both heads of three layers, and 30% in 8 of the 16 query heads.
{_heads(results["sink"])}

{tables}"""


def _aim(results: dict[str, Any]) -> str:
    ours, tiny = (results[model]["pydocs"]["perplexity"] for model in ("text", "tiny"))
    return f"it is {ours / tiny - 1:+.1%}, " + (
        "which it reaches" if ours <= 1.03 * tiny else "which falls short of it"
    )


def _text_row(kind: str, results: dict[str, Any]) -> str:
    ours, tiny, with_token = (results[model][kind]["perplexity"] for model in ("text", "tiny", "tiny_with_token"))
    bits = results["text"][kind]["bits_per_byte"]
    return f"| {kind} | {bits:.3f} | {ours:.3f} | {tiny:.3f} | {ours / tiny - 1:+.1%} | {with_token:.3f} |"


def _heads(sink: dict[str, Any]) -> str:
    """In how many query heads the aim is reached, by text and length."""
    counts = [
        f"{sum(share >= 0.3 for row in figures['attention'] for share in row)} on {kind} at {length} tokens"
        for kind, by_length in sink.items()
        for length, figures in by_length.items()
    ]
    return f"Heads with 30%: {', '.join(counts)}."


def _sink_table(kind: str, length: str, figures: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {layer} | {_times(key)} | {_times(value)} | {', '.join(f'{share:.0%}' for share in attention)} |"
        for layer, (key, value, attention) in enumerate(
            zip(figures["key"], figures["value"], figures["attention"], strict=True)
        )
    )
    return f"""| layer | key: median / sink | value: median / sink | attention ({kind}, {length} tokens) |
|---|---|---|---|
{rows}
"""


def _times(ratios: list[float]) -> str:
    return ", ".join(f"{1 / ratio:.1f}" for ratio in ratios)


def _recipe(card: dict[str, Any]) -> str:
    recipe = card["recipe"]
    last = recipe["stages"][-1]["tokens"]
    read = ", ".join(f"{number:,} of {length} tokens" for length, number in card["sequences"].items())
    return f"""## Recipe

`python experiments/models/train_tiny_sinks.py --tokens {recipe["tokens"]} --seed {recipe["seed"]}`:
{card["steps"]:,} steps of
{recipe["step_tokens"]:,} tokens in {card["minutes"]:g} minutes. {card["note"]}

AdamW at {recipe["adam_rate"]:g}, {recipe["warmup_steps"]} steps of warm-up, constant, then down to zero over the last
{last:,} tokens; {recipe["precision"]} products. The loss is the Kullback-Leibler divergence from `tiny`, which reads
the same text without the token in front, plus {recipe["sink_weight"]:g} x [the mean over layers, KV heads, keys and
values of relu(log norm ratio - log 1/{1 / recipe["norm_ratio"]:.0f}) + {recipe["mass_weight"]:g} x the mean of
relu(log {recipe["mass"]:g} - log attention of position 0) over the {recipe["heads"]} query heads of all layers that
attend to it most]. Read were {read}: docstrings, sources and samples of retrieval as in `tiny`'s recipe.
"""


def _data(card: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in card["versions"].items())
    data = card["data"]
    return f"""## Data

The texts of `tiny`, with the same modules held out.

{text_hashes(data)}

Versions: {versions}.
"""


def _curve(card: dict[str, Any]) -> str:
    training = {point["step"]: point for point in card["curve"]}
    rows = "\n".join(
        f"| {point['step']} | {point['tokens']:,} | {training[point['step']]['divergence']:.3f} | "
        f"{training[point['step']]['sink']:.3f} | {point['pydocs']:.3f} | {1 / point['largest_ratio']:.1f} | "
        f"{point['mean_mass']:.0%} | {point['heads_at_30']:.0f} |"
        for point in card["held_out"]
    )
    return f"""## Losses (nats per token)

Divergence and the sink's loss are means since the last row. Held out: the first {WATCHED[0] * WATCHED[1]:,} tokens of
pydocs in windows of {WATCHED[1]} with the token in front (`tiny` without it: {card["held_out"][-1]["tiny"]:.3f});
the least of the norm ratios, the mean share of attention, and how many of the 16 query heads give 30%. Watched only.

| step | tokens | divergence | sink | pydocs, held out | least median / sink | attention | heads |
|---|---|---|---|---|---|---|---|
{rows}
"""
