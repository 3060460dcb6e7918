"""Tiny random llama-shaped models, and double precision throughout them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvq.codecs import trellis
from kvq.models.load import LoadedModel

VOCABULARY = 61


def llama(
    layers: int = 2,
    head_dim: int = 128,
    seed: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = VOCABULARY,
    positions: int = 512,
) -> LlamaForCausalLM:
    """A random llama with peaked attention, so that what the cache holds matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_llama(seed: int = 0, heads: int = 4, kv_heads: int = 2) -> LoadedModel:
    """A random llama of head_dim 32, as tasks take it."""
    return LoadedModel(llama(head_dim=32, seed=seed, heads=heads, kv_heads=kv_heads), torch.device("cpu"))


def in_double_precision(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The model in fp64, also where transformers takes fp32 whatever the dtype is (norms, RoPE, softmax)."""
    to, kind, softmax = Tensor.to, Tensor.type, torch.nn.functional.softmax

    def wider(given: Any) -> Any:
        return torch.float64 if given is torch.float32 else given

    def to_double(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *map(wider, args), **{name: wider(value) for name, value in kwargs.items()})

    def type_in_double(self: Tensor, *args: Any, **kwargs: Any) -> Any:  # routers of experts
        return kind(self, *map(wider, args), **kwargs)

    def softmax_in_double(*args: Any, **kwargs: Any) -> Tensor:
        return softmax(*map(wider, args), **{name: wider(value) for name, value in kwargs.items()})

    monkeypatch.setattr(Tensor, "to", to_double)
    monkeypatch.setattr(Tensor, "type", type_in_double)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax_in_double)
    # Tables of meanwhile are in fp64 too, which later tests would be given.
    monkeypatch.setattr(trellis, "books", functools.lru_cache(trellis.books.__wrapped__))
    return LoadedModel(loaded.model.double(), loaded.device)


def token_ids(count: int, seed: int = 1, batch: int = 1) -> Tensor:
    """Random tokens of the vocabulary of `random_llama`, from a stream of their own."""
    return torch.randint(0, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def save_random_model(folder: Path, seed: int = 0, head_dim: int = 128, positions: int = 512) -> Path:
    """A random llama over bytes, with its tokenizer, as a local folder that `model.path=` takes."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    shape = {"heads": 2, "kv_heads": 1, "vocabulary": 256, "positions": positions}
    llama(head_dim=head_dim, seed=seed, **shape).save_pretrained(folder)
    return folder
