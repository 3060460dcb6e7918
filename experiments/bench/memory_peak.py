"""Peak memory of a model of 8B parameters at 128K tokens, by method: `python experiments/bench/memory_peak.py`.

One attention layer of Llama-3.1-8B's shape (8 KV heads of 128, random weights, no MLP to speak of) is built on the CPU,
its cache filled with 131,072 tokens, and one token decoded. Beside what all 32 layers store, a layer needs memory while
it is encoded and while attention reads it; the peak of the process (resident set) above what was in use before is
measured and written to `results/bench/memory_peak.json`; pages that the allocator gives back blur it by some 0.2 MB.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import kvq
from kvq.results.provenance import PeakMemory, bytes_in_use

ROOT = Path(__file__).parents[2]
OUT = ROOT / "results" / "bench" / "memory_peak.json"
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
METHODS = ("fp16", "kivi", "oscar", "nsn", "nsnquant", "turboquant")


def one_layer() -> LlamaForCausalLM:
    """A model of one layer with the attention of Llama-3.1-8B, of fewer hidden channels, which no cache sees."""
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=2**18,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def skip_attention(module: Any, query: Tensor, *others: Any, **settings: Any) -> tuple[Tensor, None]:
    """In place of the prompt's attention, whose time is quadratic: its output is not needed."""
    return torch.zeros_like(query).transpose(1, 2), None


def above(before: int, peak: PeakMemory) -> int:
    """Peak above the memory in use before."""
    top = peak.read()
    return 0 if top is None else top - before


@torch.inference_mode()
def measure(model: LlamaForCausalLM, name: str, tokens: int, attention: str) -> dict[str, int]:
    """Bytes that one layer stores, and its peaks while the prompt is encoded and while one token is decoded."""
    method = kvq.build_method(name, head_dim=HEAD_DIM, **({} if name == "fp16" else {"bits": 2}))
    model.set_attn_implementation("sdpa")
    cache = kvq.KVCache(model, method, attention=attention)
    usual, found = model.config._attn_implementation, {}
    update = cache.update

    def watched(*states: Any, **more: Any) -> Any:
        before, peak = bytes_in_use("cpu"), PeakMemory()
        out = update(*states, **more)
        found["encoding"] = above(before, peak)
        return out

    cache.update = watched
    model.set_attn_implementation("skip")
    model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), past_key_values=cache)
    cache.update = update
    model.set_attn_implementation(usual)
    gc.collect()
    before, peak = bytes_in_use("cpu"), PeakMemory()
    model.model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    return {"stored": cache.nbytes, **found, "decoding": above(before, peak)}


def main() -> None:
    AttentionInterface.register("skip", skip_attention)
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 131072
    model, rows = one_layer(), {}
    for name in METHODS:
        for attention in ("dense", "packed") if name != "fp16" else ("dense",):
            rows[f"{name} {attention}"] = measure(model, name, tokens, attention)
            print(name, attention, rows[f"{name} {attention}"], flush=True)
    OUT.write_text(
        json.dumps({"tokens": tokens, "layers": LAYERS, "one_layer": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
