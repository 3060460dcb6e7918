"""Train what makes a sink of the token in front of `tiny`: `python experiments/models/train_tiny_sinks.py`.

Writes the difference from kvq/models/tiny/ and a card to kvq/models/tiny_sinks/, or to `--output`. A run is a function
of its seed and its number of tokens, up to rounding; `--resume` goes on from the last checkpoint in `--work`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tiny_model.corpus import TrainingData
from tiny_model.evaluation import bits_per_byte, needle_accuracy
from tiny_model.sinks import SinkRecipe, changes
from tiny_model.sinks_card import sink_figures, write_sinks_card
from tiny_model.sinks_training import Run, train_sinks
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvq.config import ModelConfig
from kvq.models.folder import DELTA_SETTINGS
from kvq.models.load import load_model
from kvq.models.weights import save_delta

BASE = Path(__file__).parents[2] / "kvq" / "models" / "tiny"
OUTPUT = BASE.with_name("tiny_sinks")
LENGTHS = (256, 512, 1024, 2048)
KINDS = ("pydocs", "pysource")


def evaluate(folder: Path, run: Run, needles: int) -> dict[str, object]:
    """Measure what the loader makes of `folder`, in fp32, and `tiny` beside it, with the token in front and without."""
    tokenizer, seed = run.data.tokenizer, run.recipe.seed
    front = (tokenizer.bos_token_id,)
    model = load_model(ModelConfig("sinks", str(folder)), "cpu").model
    return {
        "sink": {kind: sink_figures(model, tokenizer, kind) for kind in KINDS},
        "text": {kind: bits_per_byte(model, tokenizer, kind, front=front) for kind in KINDS},
        "tiny": {kind: bits_per_byte(run.base, tokenizer, kind) for kind in KINDS},
        "tiny_with_token": {kind: bits_per_byte(run.base, tokenizer, kind, front=front) for kind in KINDS},
        "needles": {str(n): needle_accuracy(model, tokenizer, n, needles, seed, front) for n in LENGTHS},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train what makes a sink, into kvq/models/tiny_sinks/.")
    parser.add_argument("--tokens", type=int, default=SinkRecipe.tokens, help="budget of training tokens")
    parser.add_argument("--seed", type=int, default=SinkRecipe.seed)
    parser.add_argument("--rank", type=int, default=SinkRecipe.rank, help="of the change of each matrix")
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default=SinkRecipe.precision, help="fp32 for CPUs without bf16 units"
    )
    parser.add_argument("--rate", type=float, default=SinkRecipe.adam_rate, help="AdamW's, before it falls")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--needles", type=int, default=100, help="fresh needles per length in the evaluation")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvq-tiny-sinks")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--note", default="", help="what the card says of this run beside its figures")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    parser.add_argument("--compile", action="store_true", help="compile the loss: minutes once, then faster steps")
    return parser.parse_args()


def main() -> None:
    """Prepare the data, train, write the difference, measure the model and write its card."""
    given = arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    given.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(given.threads)
    recipe = SinkRecipe(
        tokens=given.tokens, seed=given.seed, precision=given.precision, rank=given.rank, adam_rate=given.rate
    )
    data = TrainingData.prepare(given.work, PreTrainedTokenizerFast.from_pretrained(BASE))
    base = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    print(f"{recipe.tokens:,} tokens; checkpoints in {given.work}", flush=True)
    run = train_sinks(recipe, data, base, given.work, given.resume, given.compile)
    (given.output / DELTA_SETTINGS).write_text(json.dumps({"base": "embedded:tiny"}) + "\n")
    save_delta(changes(run.trained), BASE, given.output)
    results = evaluate(given.output, run, given.needles)
    write_sinks_card(given.output, run, results, given.note)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
