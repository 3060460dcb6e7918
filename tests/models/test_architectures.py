"""Bytes computed from a configuration against bytes that a real model's cache holds, over all architectures."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvq
from kvq.config import ModelConfig
from kvq.errors import Unsupported
from kvq.models.inputs import cache_shape
from kvq.tasks.memory import rows_of
from tests.families import FAMILIES, MORE, family
from tests.models.table import LIMIT, MEASURED, PAGE, SIDES, held, rows

TOKENS, WINDOW = 40, 16
_HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
_LAYERS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4) | {"decoder_layers": 2}
_WIDTHS = dict.fromkeys(
    "hidden_size n_embd d_model intermediate_size ffn_dim n_inner word_embed_proj_dim decoder_ffn_dim embedding_size"
    " moe_intermediate_size".split(),
    64,
)
_EXPERTS = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_LINEAR = dict.fromkeys(("linear_num_key_heads", "num_experts_per_tok"), 2) | {"linear_num_value_heads": 4}
_STATES = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16}
_DIMS = {"head_dim": 16, "global_head_dim": 16}
_OTHER = {"vocab_size": 128, "max_position_embeddings": 128, "mamba_d_state": 8, "n_group": 1, "topk_group": 1}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPS = {"num_key_value_heads": 2, "num_kv_heads": 2}
SMALL = _HEADS | _LAYERS | _WIDTHS | _EXPERTS | _LATENT | _LINEAR | _STATES | _DIMS | _OTHER | _SPECIAL | _GROUPS
"""Small settings by all the names that configurations have for them."""
KEPT: tuple[set[str], ...] = (
    set(),
    set(_DIMS),
    {*_DIMS, *_LAYERS},
    {"hidden_size", "n_embd", "embedding_size", *_HEADS, *_GROUPS, *_DIMS},
)
"""Settings left at their default, one attempt after the other: not all sizes fit each other."""
OF_ITS_OWN = {"cpmant": "puts 32 tokens of its own before the text"}
LARGEST = 20_000_000
"""Parameters of a model that is built: where the names above miss a size, it keeps its default."""


def small_model(kind: str) -> tuple[Any, int]:
    """A small random model's configuration and the bytes that it caches of `TOKENS` tokens, 16 bits a number.

    Skips an architecture whose class cannot be built or run from these settings.
    """
    try:
        default = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    except Exception as error:  # each class refuses in its own way
        pytest.skip(f"no default configuration: {error}")
    failed: Exception | None = None
    for kept in KEPT:
        settings = {name: size for name, size in SMALL.items() if name not in kept and _has(default, name)}
        windows = {name: WINDOW for name in ("sliding_window", "attention_window") if _has(default, name)}
        try:
            with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
                config = type(default)(**settings, **windows)
                with torch.device("meta"):
                    size = AutoModelForCausalLM.from_config(config).num_parameters()
                assert size < LARGEST, f"{size} parameters"
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
                cache = DynamicCache(config=config)
                model(torch.randint(3, 100, (1, TOKENS)), past_key_values=cache, use_cache=True)
        except Exception as error:
            failed = error
        else:
            return config, held_bytes(cache)
    pytest.skip(f"cannot be built so small: {failed}")


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # it differs by layer
        return False


def held_bytes(cache: DynamicCache) -> int:
    """Bytes of keys, values and convolutions in 16 bits and of recurrent states in 32."""
    size = 0
    for layer in cache.layers:
        for name, width in (("keys", 2), ("values", 2), ("conv_states", 2), ("recurrent_states", 4)):
            held = getattr(layer, name, None)
            parts = held.values() if isinstance(held, dict) else [held]
            size += sum(width * part.numel() for part in parts if isinstance(part, torch.Tensor))
    return size


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_computed_bytes_are_those_held(kind: str, tmp_path: Path) -> None:
    config, held = small_model(kind)
    config.save_pretrained(tmp_path)
    try:
        shape = cache_shape(ModelConfig(path=str(tmp_path)))
    except Unsupported:
        return  # said in one line, not counted
    computed = sum(row["fp16"] for row in rows_of(shape, kvq.build_method("fp16"), TOKENS, False))
    assert (computed == held) is (kind not in OF_ITS_OWN)


ROWS = json.loads(MEASURED.read_text("utf-8"))["families"]


def test_the_page_has_the_measured_families() -> None:
    assert ROWS
    assert ROWS.keys() <= {*FAMILIES, *MORE}
    assert rows() in PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_exact_and_of_what_the_configuration_says(name: str) -> None:
    row = ROWS[name]
    assert max(row[side] for side in SIDES) < LIMIT < 0.1 < row["quantized"]
    assert row["held"] == held(family(name).text_config)
