"""Train the embedded model: `python experiments/models/train_tiny_model.py` (half an hour on two idle cores).

Writes weights, config, tokenizer and card to kvq/models/tiny/, or to `--output`. A run is a function of its seed
and its number of tokens, up to rounding: the number of workers decides its speed alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tiny_model.card import write_card
from tiny_model.corpus import TrainingData
from tiny_model.evaluation import bits_per_byte, needle_accuracy
from tiny_model.recipe import Recipe
from tiny_model.training import final_state, train
from transformers import LlamaForCausalLM

OUTPUT = Path(__file__).parents[2] / "kvq" / "models" / "tiny"
LENGTHS = (256, 512, 1024, 2048)


def evaluate(folder: Path, data: TrainingData, needles: int, seed: int) -> dict[str, dict[str, float]]:
    """Measure the weights in `folder`, as stored in fp16 and computed in fp32, against the bars."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = {kind: bits_per_byte(model, data.tokenizer, kind) for kind in ("pydocs", "pysource")}
    results["needles"] = {str(n): needle_accuracy(model, data.tokenizer, n, needles, seed) for n in LENGTHS}
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model into kvq/models/tiny/.")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="budget of training tokens")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default=Recipe.precision, help="fp32 for CPUs without bf16 units"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--needles", type=int, default=100, help="fresh needles per length in the evaluation")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvq-tiny-model")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--note", default="", help="what the card says of this run beside its figures")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without a C++ compiler")
    return parser.parse_args()


def main() -> None:
    """Prepare the data, train, write the model, measure it and write its card."""
    given = arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(tokens=given.tokens, seed=given.seed, precision=given.precision)
    data = TrainingData.prepare(given.work)
    print(f"{recipe.tokens:,} tokens; checkpoints in {given.work}", flush=True)
    model = train(recipe, data, given.work, given.workers, given.resume, given.compile)
    torch.set_num_threads(given.workers)
    model.half().save_pretrained(given.output)
    data.tokenizer.save_pretrained(given.output)
    results = evaluate(given.output, data, given.needles, given.seed)
    write_card(given.output, model, data, recipe, final_state(given.work), results, given.note)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
