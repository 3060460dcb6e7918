"""What a cache is told of before it takes states: every family, every way to call it; and models that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache

import kvq
from kvq.cache import KVCache
from kvq.errors import Unsupported
from kvq.models.load import LoadedModel
from tests.cache.test_padded import padded
from tests.random_models import VOCABULARY, in_double_precision, llama, token_ids

_SIZES: dict[str, Any] = {"encoder_layers": 3, "d_kv": 16, "word_embed_proj_dim": 32, "max_source_positions": 30}
_SIZES |= dict.fromkeys(["hidden_size", "d_model", "n_embd"], 32) | dict.fromkeys(
    ["initializer_range", "init_std"], 0.2
)
_SIZES |= dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "decoder_layers"], 2)
_SIZES |= dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "attention_heads"], 2)
_SIZES |= dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2)
_SIZES |= dict.fromkeys(["intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dff"], 48)
_SIZES |= dict.fromkeys(["max_position_embeddings", "n_positions", "max_target_positions"], 128)
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_MORE: dict[str, dict[str, Any]] = {
    "GPTNeo": {"attention_types": [[["global"], 2]]},
    "Bert": {"is_decoder": True},
    "Marian": {"pad_token_id": 0, "decoder_start_token_id": 0},
    "Mamba": {"state_size": 4},
}


def tiny(name: str, head: str | None = None, **given: Any) -> Any:
    """A random model of a family by the name of its configuration, in fp32; `head`: its class."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")
    known = set(vars(kind())) | set(kind.attribute_map)
    sizes = {key: size for key, size in _SIZES.items() if key in known}
    config = kind(**{"vocab_size": VOCABULARY, **sizes, **_NO_TOKENS, **_MORE.get(name, {}), **given})
    made = AutoModelForCausalLM.from_config(config) if head is None else getattr(transformers, head)(config)
    return made.eval().requires_grad_(False)


def cache_of(model: nn.Module, name: str = "kivi") -> KVCache:
    bits = {"kivi": 2, "identity": 3}.get(name, 3)
    return KVCache(model, kvq.method_for(model, name, bits, ["residual.size=8"]))


FAMILIES = ["OPT", "BioGpt", "Bloom", "GPT2", "GPTNeo", "Falcon", "Bert"]
BY_COLUMN = ["Bart", "MBart", "Pegasus", "Marian", "Blenderbot", "XGLM"]
"""Their positions count padding, so that a padded row is not the row alone, with or without a cache."""


@pytest.mark.every_plugin
@pytest.mark.parametrize("name", [*FAMILIES, *BY_COLUMN])
def test_padding_reaches_the_cache_of_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left-padded rows are stored as alone, in fp64; masks with holes and methods without padding are refused."""
    model: Any = tiny(name)
    if name != "XGLM":  # transformers clamps its scores to a number that fp64 takes for another one
        model = in_double_precision(LoadedModel(model, torch.device("cpu")), monkeypatch).model
    rows = [token_ids(30), token_ids(30)[:, 11:]]
    tokens, mask = padded(rows)
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given |= {"return_dict_in_generate": True, "output_logits": True}

    def written(ids: Tensor, seen: Tensor, cache: Any) -> Tensor:
        out = model.generate(ids, attention_mask=seen, past_key_values=cache, **given)
        return torch.stack(out.logits, 1)

    if name in BY_COLUMN:
        cache = cache_of(model, "identity")
        plain = written(tokens, mask, DynamicCache())
        torch.testing.assert_close(written(tokens, mask, cache), plain, atol=1e-4, rtol=0)
        assert cache.padding == [0, 11]
    else:
        together = written(tokens, mask, cache_of(model))
        for index, row in enumerate(rows):
            alone = written(row, torch.ones_like(row), cache_of(model))
            torch.testing.assert_close(together[index], alone[0], atol=1e-9, rtol=0)
    for chosen, hidden, why in (("kivi", slice(10, 15), "hides tokens"), ("h2o", slice(11), "evicts")):
        seen = torch.ones_like(tokens)
        seen[0, hidden] = 0
        with pytest.raises(Unsupported, match=why):
            model(tokens, attention_mask=seen, past_key_values=cache_of(model, chosen))


class Wrapper(nn.Module):
    """As peft wraps a model: it calls `forward`, past the hooks of the model itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.forward(*args, **kwargs)


def _decoder(model: Any, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
    out = model.model(tokens, mask, None, cache)  # by position
    found: Tensor = model.lm_head(out.last_hidden_state)
    return found


def _whole(model: Any, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
    found: Tensor = model(tokens, attention_mask=mask, past_key_values=cache).logits
    return found


def _plain(model: Any) -> Any:
    return model


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[..., Tensor]]] = {
    "the model": (_plain, _plain, _whole),
    "a wrapper": (Wrapper, Wrapper, _whole),
    "a wrapper of another cache's model": (_plain, Wrapper, _whole),
    "compiled": (_compiled, _compiled, _whole),
    "compiled after the cache": (_plain, _compiled, _whole),
    "the part below the head": (_plain, _plain, _decoder),
    "cache of the part below the head": (lambda model: model.model, _plain, _whole),
}


@pytest.mark.every_plugin
@pytest.mark.parametrize("way", WAYS)
def test_padding_reaches_the_cache_in_every_way_to_call_a_model(way: str) -> None:
    model = llama(head_dim=32).double()
    build, wrap, call = WAYS[way]
    rows = [token_ids(30), token_ids(30)[:, 11:]]
    tokens, mask = padded(rows)
    longer = torch.cat([mask, torch.ones(2, 1)], 1)
    built, called = build(model), wrap(model)
    cache, cached = cache_of(built), []
    _whole(model, tokens, mask, DynamicCache())
    call(called, tokens, mask, cache)
    assert cache.padding == [0, 11]
    h2o = cache_of(built, "h2o")
    with pytest.raises(Unsupported, match="evicts"):
        call(called, tokens, mask, h2o)
    for row in rows:
        alone = cache_of(model)
        _whole(model, row, torch.ones_like(row), alone)
        cached.append(alone.nbytes)
    assert cache.nbytes == sum(cached)
    call(called, tokens[:, :1], longer, cache)
    assert cache.get_seq_length() == 31


def test_states_that_nothing_announced_are_refused() -> None:
    """Of another model, a copy, a part called past its hooks, or by hand; the cache stays empty."""
    model, tokens = llama(head_dim=32), token_ids(9)
    cache, before = cache_of(model), copy.deepcopy(model)
    x = torch.zeros(1, 2, 9, 32)
    calls: list[Callable[[], Any]] = [
        lambda: llama(head_dim=32)(tokens, past_key_values=cache),
        lambda: before(tokens, past_key_values=cache),
        lambda: model.model.forward(tokens, past_key_values=cache),
        lambda: cache.update(x, x, 0),
    ]
    for call in calls:
        with pytest.raises(Unsupported, match="KVCache: built for LlamaForCausalLM, but what runs announces") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert cache.get_seq_length() == 0
    model(tokens, past_key_values=cache)  # what failed before does not matter
    assert cache.get_seq_length() == 9


MASKS = {"a dict": {}, "a list": [[1] * 9], "of 4 dimensions": torch.ones(1, 1, 9, 9), "of 1 dimensions": torch.ones(9)}


@pytest.mark.parametrize("form", MASKS)
def test_masks_that_do_not_show_padding_are_one_line(form: str) -> None:
    model = llama(head_dim=32)
    for part in (model, model.model):
        with pytest.raises(Unsupported, match=rf"attention_mask: {form}, .*a tensor \[batch, tokens\]"):
            part(token_ids(9), attention_mask=MASKS[form], past_key_values=cache_of(model))


def test_prompts_in_parts_need_a_token_of_each_sequence_in_the_first() -> None:
    model = llama(head_dim=32).double()
    tokens, mask = padded([token_ids(30), token_ids(30)[:, 11:]])
    given = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(Unsupported, match=r"nothing but padding so far; .*\(prefill_chunk_size\)"):
        model.generate(tokens, past_key_values=cache_of(model), prefill_chunk_size=8, **given)
    parts = model.generate(tokens, past_key_values=cache_of(model, "identity"), prefill_chunk_size=12, **given)
    assert torch.equal(parts, model.generate(tokens, **given))


@pytest.mark.parametrize(
    ("name", "head", "why"),
    [
        ("OpenAIGPT", None, "takes no past_key_values"),
        ("XLNet", None, "takes no past_key_values"),
        ("Mamba", None, "takes no past_key_values"),
        ("Rwkv", None, "takes no past_key_values"),
        ("CTRL", None, "has no attention that takes hidden_states, attention_mask and past_key_values"),
        ("Bert", "BertLMHeadModel", r"reads later tokens too; a decoder has config\.is_decoder=True"),
    ],
)
def test_models_that_a_cache_cannot_follow_are_refused(name: str, head: str | None, why: str) -> None:
    model = tiny(name, head, **({"is_decoder": False} if name == "Bert" else {}))
    with pytest.raises(Unsupported, match=f"model: {type(model).__name__} {why}") as caught:
        KVCache(model, kvq.build_method("kivi", head_dim=16))
    assert "\n" not in str(caught.value)


def test_a_model_that_ignores_its_cache_is_refused() -> None:
    model = llama(head_dim=32).train().requires_grad_(True)
    model.activation_checkpointing_enable()
    with pytest.raises(Unsupported, match="LlamaForCausalLM ignores the cache"):
        model(token_ids(9), past_key_values=cache_of(model))


ENCODER_DECODERS = {
    "T5": "T5ForConditionalGeneration",
    "Bart": "BartForConditionalGeneration",
    "Marian": "MarianMTModel",
    "Whisper": "WhisperForConditionalGeneration",
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_take_a_cache_of_the_decoders_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`identity` gives plain scores in fp64, also of padded decoder prompts; the cache alone is refused in one line."""
    model: Any = tiny(name, ENCODER_DECODERS[name], decoder_start_token_id=0, pad_token_id=0)
    model = in_double_precision(LoadedModel(model, torch.device("cpu")), monkeypatch).model
    words = {"decoder_input_ids": token_ids(20, seed=2), "past_key_values": None}
    sound = {"input_features": torch.randn(1, 80, 60).double()}
    words |= sound if name == "Whisper" else {"input_ids": token_ids(20)}

    def logits(cache: Any) -> Tensor:
        model(**words | {"past_key_values": cache})
        found: Tensor = model(**words | {"past_key_values": cache}).logits
        return found

    plain = logits(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    both = [EncoderDecoderCache(cache_of(model, chosen), DynamicCache()) for chosen in ("identity", "zero")]
    torch.testing.assert_close(logits(both[0]), plain, atol=1e-9, rtol=0)
    assert (logits(both[1]) - plain).abs().max() > 1e-3
    with pytest.warns(UserWarning, match="read no quantized token"), kvq.quantize(model, "identity"):
        assert type(model(**words).past_key_values.self_attention_cache) is KVCache
    with pytest.raises(Unsupported, match=r"attends to an encoder.*EncoderDecoderCache\(kvq.KVCache"):
        model(**words | {"past_key_values": cache_of(model)})
