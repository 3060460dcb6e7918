"""The embedded model's card: recipe, data, versions, losses and measured bars, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from kvq.data.rows import PACKAGES, load_corpus
from tiny_model.corpus import TrainingData
from tiny_model.recipe import Recipe, Stage
from tiny_model.training import CURVE_STEPS, WATCHED, State

_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def facts_of(recipe: Recipe, data: TrainingData, state: State, results: dict[str, Any], note: str) -> dict[str, Any]:
    """The fields that every card has: recipe, hashes of the texts, versions, cost, results and curves."""
    names = [*(_DISTRIBUTIONS.get(name, name) for name in PACKAGES), "tokenizers", "torch", "transformers"]
    return {
        "recipe": asdict(recipe),
        "data": {
            "train_sha256": data.data_hash,
            "test_sha256": {kind: load_corpus(kind, "test").fingerprint for kind in ("pydocs", "pysource")},
        },
        "versions": {name: version(name) for name in sorted(names)},
        "steps": state.step,
        "minutes": round(state.seconds / 60, 1),
        "note": note,
        "sequences": {str(length): number for length, number in sorted(state.read.items())},
        "results": results,
        "curve": state.curve,
        "held_out": state.held_out,
    }


def needle_table(needles: dict[str, float]) -> str:
    """Found needles by the length of the prompt, as Markdown."""
    return f"""| prompt length, tokens | {" | ".join(needles)} |
|---|{"---|" * len(needles)}
| fresh needles found | {" | ".join(f"{share:.0%}" for share in needles.values())} |"""


def text_hashes(data: dict[str, Any]) -> str:
    """Hashes of the texts trained on and held out, as Markdown."""
    return f"""| text | sha256 |
|---|---|
| training, both kinds | `{data["train_sha256"]}` |
| held out, pydocs | `{data["test_sha256"]["pydocs"]}` |
| held out, pysource | `{data["test_sha256"]["pysource"]}` |"""


def write_card(
    folder: Path,
    model: PreTrainedModel,
    data: TrainingData,
    recipe: Recipe,
    state: State,
    results: dict[str, dict[str, float]],
    note: str,
) -> None:
    """Write card.json, CARD.md and losses.svg into `folder`; `note` is what else is to be said of this run."""
    held_out = [{**point, "pydocs": round(point["pydocs"], 4)} for point in state.held_out]
    card: dict[str, Any] = {
        "parameters": model.num_parameters(),
        "bytes": (folder / "model.safetensors").stat().st_size,
        **facts_of(recipe, data, state, results, note),
        "held_out": held_out,
    }
    card["data"]["train_tokens"] = {kind: len(stream) for kind, stream in data.streams.items()}
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "CARD.md").write_text(_markdown(card))
    _draw(card, folder / "losses.svg")


def _draw(card: dict[str, Any], path: Path) -> None:
    """Draw the curves; the file is a function of the card."""
    with matplotlib.rc_context({"svg.hashsalt": "tiny", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        millions = [point["tokens"] / 1e6 for point in card["curve"]]
        for name, label in (("text", "text, in training"), ("answer", "answers to needles, in training")):
            axes.plot(millions, [point[name] for point in card["curve"]], linewidth=1, label=label)
        watched = [(point["tokens"] / 1e6, point["pydocs"]) for point in card["held_out"]]
        axes.plot(*zip(*watched, strict=True), marker=".", linewidth=1, label="pydocs, held out")
        axes.set(xlabel="tokens of training, millions", ylabel="nats per token", ylim=(0, 6))
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})


def _table_rows(card: dict[str, Any]) -> dict[str, str]:
    """Rows of the card's Markdown tables: results by text, stages of the recipe, and the curve."""
    text_rows = "\n".join(
        f"| {kind} | {row['bits_per_byte']:.3f} | {row['perplexity']:.2f} | {row['tokens']:,} |"
        for kind, row in card["results"].items()
        if kind != "needles"
    )
    ends = Recipe(**{**card["recipe"], "stages": tuple(Stage(**stage) for stage in card["recipe"]["stages"])}).ends()
    stages = "\n".join(
        f"| {end:,} | {_mix(stage)} | {stage['prose']:.0%} | {stage['retrieval']:.0%} | "
        f"{stage['copies']:.0%} | {stage['answer_weight']:g} | "
        f"{' or '.join(map(str, stage['pieces']))} | {stage['rate']:.2f} |"
        for end, stage in zip(ends, card["recipe"]["stages"], strict=True)
    )
    training = {point["step"]: point for point in card["curve"]}
    curve = "\n".join(
        f"| {point['step']} | {point['tokens']:,} | {_loss(training, point, 'text')} | "
        f"{_loss(training, point, 'answer')} | {point['pydocs']:.3f} |"
        for point in card["held_out"]
    )
    return {"text": text_rows, "stages": stages, "curve": curve}


def _mix(stage: dict[str, Any]) -> str:
    """The lengths of a stage's sequences, with their shares of the steps."""
    pairs = zip(stage["lengths"], stage["odds"], strict=True)
    return ", ".join(f"{length} ({share:.0%})" for length, share in pairs)


def _loss(curve: dict[int, dict[str, float]], point: dict[str, float], name: str) -> str:
    """The training loss in the last point of the curve at or before `point`."""
    return f"{curve[int(point['step']) // CURVE_STEPS * CURVE_STEPS][name]:.3f}"


def _markdown(card: dict[str, Any]) -> str:
    recipe, needles, rows = card["recipe"], card["results"]["needles"], _table_rows(card)
    mixed = " (weights and optimizer fp32, products bf16)" if recipe["precision"] == "bf16" else ""
    return f"""# tiny: the embedded model

A Llama-shaped causal language model of {card["parameters"]:,} parameters ({recipe["layers"]} layers of width
{recipe["hidden"]}, 4 query and 2 KV heads of head_dim 128, RoPE, vocabulary 4096, tied embeddings;
{card["bytes"] / 1e6:.2f} MB of weights), small enough for two cores and the repository. It exists to tell KV-cache
quantizers apart on any machine, by perplexity and by retrieval. It is of no other use.

## Measured (weights in fp16 as stored, arithmetic in fp32)

| held-out text | bits per byte | perplexity | tokens |
|---|---|---|---|
{rows["text"]}

{needle_table(needles)}

Text: windows of 1024 tokens every 512. Needles: one to a prompt of held-out prose, at even depths, six digits, greedy
exact match.

## Recipe

`python experiments/models/train_tiny_model.py --tokens {recipe["tokens"]} --seed {recipe["seed"]}`:
{card["steps"]:,} steps of {recipe["step_tokens"]:,} tokens in {card["minutes"]:g} minutes on two cores. {card["note"]}

Muon (Newton-Schulz, updates scaled to AdamW's) at {recipe["muon_rate"]:g} for the matrices, AdamW at
{recipe["adam_rate"]:g} for the embedding and the gains, weight decay {recipe["weight_decay"]:g};
{recipe["warmup_steps"]} steps of warm-up, then rates that go linearly to their factor at each stage's end.
Precision {recipe["precision"]}{mixed}.
Of the sequences for retrieval some are copies (shuffled tokens again and again), the others samples (one, or two short
ones, to a sequence) of one to sixteen needles; of the other sequences, and of the haystacks, the share of prose is
docstrings and the rest sources.

| until token | lengths (share of steps) | prose | retrieval | copies of it | answers weigh | samples | rates at end |
|---|---|---|---|---|---|---|---|
{rows["stages"]}

{_data_and_losses(card, rows["curve"])}"""


def _data_and_losses(card: dict[str, Any], curve: str) -> str:
    data = card["data"]
    trained = " and ".join(f"{tokens:,} tokens of {kind}" for kind, tokens in data["train_tokens"].items())
    read = ", ".join(f"{number:,} of {length} tokens" for length, number in card["sequences"].items())
    versions = ", ".join(f"{name} {number}" for name, number in card["versions"].items())
    return f"""## Data

Docstrings and sources of the installed packages (`kvq/data/rows.py`), of which whole modules are held out by a hash
of their path. To train on: {trained}; read were {read}.

{text_hashes(data)}

Versions: {versions}.

## Losses (nats per token)

![losses](losses.svg)

In training: means over {CURVE_STEPS} steps. Held out: the first {WATCHED[0] * WATCHED[1]:,} tokens of pydocs, in
windows of {WATCHED[1]} (longer than what the first stage trains on); watched only, nothing was chosen by it.

| step | tokens | text | answers | pydocs, held out |
|---|---|---|---|---|
{curve}
"""
