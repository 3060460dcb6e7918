"""Forwards of a model of SmolLM2's shape, random weights, one thread: torch's float32 linear layers over oneDNN's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from kvq.models.load import onednn_linear

LENGTHS = (1, 128, 1024)
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}


@torch.inference_mode()
def measure(paired: Callable[..., dict[str, Any]], pairs: int) -> dict[str, Any]:
    """Ratios of time by tokens of a forward; `paired`: times two calls in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = LlamaModel(LlamaConfig(**SHAPE, num_key_value_heads=3, vocab_size=1024)).eval()

    def forward(length: int) -> None:
        model(input_ids=torch.arange(length)[None], use_cache=False)

    def by_onednn(length: int) -> None:
        with onednn_linear():
            forward(length)

    found = {
        f"{length}_tokens": paired(lambda n=length: forward(n), lambda n=length: by_onednn(n), pairs)
        for length in LENGTHS
    }
    torch.set_num_threads(threads)
    return found
