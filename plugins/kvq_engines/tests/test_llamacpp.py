"""llama.cpp on models in memory: its logits and its stored cache against PyTorch's."""

import contextlib
import itertools
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvq.cache import KVCache
from kvq.config import compose, resolve
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.build import build_method, method_of
from kvq.models.folder import carried_gguf
from kvq.models.inputs import cache_shape
from kvq.tasks.memory import rows_of
from kvq.tasks.scoring import parallel_method
from kvq_engines import llamacpp
from kvq_engines.agreement import engine_attention, undo_stages
from kvq_engines.llamacpp import LlamaCpp, write_gguf
from kvq_engines.tests import installed

pytestmark = installed.llamacpp
TOKENS = 96
DIM, LAYERS, KV_HEADS = 64, 2, 2


def model_of(family="llama", seed=0, head_dim=DIM, **settings):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        hidden_size=4 * head_dim,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        vocab_size=120,
        max_position_embeddings=512,
        **{"tie_word_embeddings": False} | settings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():  # so that logits, biases and norms are not nearly constant
        weight.data = torch.randn_like(weight) * 0.1 + ("norm" in name)
    return model


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(120, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    found = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(model_of(), found)
    return found


def log_probs(engine, tokens):
    return torch.log_softmax(torch.cat(list(engine.logits(tokens))).double(), -1)


@torch.no_grad()
def in_torch(model, tokens, method=None):
    cache = None if method is None else KVCache(model, parallel_method(method))
    return torch.log_softmax(model(input_ids=tokens[None], past_key_values=cache).logits[0].double(), -1)


def kl(expected, found):
    return float(torch.nn.functional.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_written_are_those_of_the_model(family, dtype, tokens, tmp_path):
    model = model_of(family)
    write_gguf(model, tmp_path / "model.gguf", dtype)
    with LlamaCpp(tmp_path / "model.gguf", TOKENS, "f32", "f32") as engine:
        assert engine.vocab == 120
        assert kl(in_torch(model, tokens), log_probs(engine, tokens)) < 1e-5


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
@pytest.mark.parametrize("variant", ["", "/unrotated"])
def test_a_preset_stores_what_the_engine_stores(kind, variant, file, tokens):
    """Of the first layer, whose keys and values no attention has changed yet; of the second nearly."""
    model = model_of()
    method = build_method(f"engine/llamacpp_{kind}{variant}", head_dim=DIM).for_model(model.config)
    with LlamaCpp(file, TOKENS, kind, kind, rotated=not variant) as engine:
        list(engine.logits(tokens))
        held = engine.cached(LAYERS, KV_HEADS, DIM)
        row = int(engine.side_bits("key") * KV_HEADS * DIM / 8)
        assert abs(engine.state_bytes - 2 * LAYERS * row * TOKENS) < 64 * TOKENS
    cache = KVCache(model, parallel_method(method))
    with torch.no_grad(), engine_attention(model, method.key):
        model(input_ids=tokens[None], past_key_values=cache)
    for layer, (place, side) in itertools.product(range(LAYERS), enumerate(("key", "value"))):
        theirs = held[layer][place]
        codec = getattr(method, side)
        ours = codec.apply_stages(codec.decode(getattr(cache.kv_layers[layer], side).packed[0]))[0]
        off = theirs - ours
        # A block whose scale lies halfway between two fp16 numbers may be rounded to the other one.
        assert layer or ((off.abs() > 1e-4 * theirs.abs().max()).sum() <= 2 * 32), side
        assert off.square().sum() < (2e-3 if layer else 1e-5) * theirs.square().sum(), (layer, side)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_queries_in_8_bits_explain_what_is_left(kind, file, tokens):
    model = model_of()
    method = build_method(f"engine/llamacpp_{kind}", head_dim=DIM)
    key = method.for_model(model.config).key
    with LlamaCpp(file, TOKENS, kind, kind) as engine:
        found = log_probs(engine, tokens)
    alone = in_torch(model, tokens, method)
    with engine_attention(model, key):
        rounded = in_torch(model, tokens, method)
    swapped = in_torch(
        model, tokens, build_method(f"engine/llamacpp_{kind}", head_dim=DIM, overrides=["key.stages.pairs=null"])
    )
    assert kl(found, rounded) < kl(found, alone) < kl(found, swapped)
    assert torch.equal(alone, in_torch(model, tokens, method)), "rounding ends with its context"


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_on_the_stored_states_pytorch_computes_what_the_engine_computes(kind, file, tokens):
    """What the two have apart is then which codes are stored, and no arithmetic of the attention."""
    model = model_of()
    method = build_method(f"engine/llamacpp_{kind}", head_dim=DIM).for_model(model.config)
    with LlamaCpp(file, TOKENS, kind, kind) as engine:
        found = log_probs(engine, tokens)
        held = engine.cached(LAYERS, KV_HEADS, DIM)
    states = [(undo_stages(method.key, key), undo_stages(method.value, value)) for key, value in held]
    own = kl(found, in_torch(model, tokens))
    with engine_attention(model, method.key, states):
        assert kl(found, in_torch(model, tokens)) < own / 100


def test_types_of_keys_and_values_are_apart(file, tokens):
    with LlamaCpp(file, TOKENS, "q8_0", "q4_0") as engine:
        list(engine.logits(tokens))
        assert (engine.side_bits("key"), engine.side_bits("value")) == (8.5, 4.5)
        assert re.search(r"llama.cpp \(ggml [\d.]+, xllamacpp==[\d.]+; .*AVX", engine.build) or "ARM" in engine.build


def test_a_text_is_read_from_an_empty_cache(file, tokens):
    with LlamaCpp(file, TOKENS) as engine:
        first = log_probs(engine, tokens)
        assert torch.equal(first, log_probs(engine, tokens))
        whole, half = torch.cat(list(engine.logits(tokens))), TOKENS // 2
        parts = [*engine.logits(tokens[:half]), *engine.read(tokens[half:])]
        torch.testing.assert_close(torch.cat(parts), whole, atol=0.05, rtol=0)  # batches of other sizes in fp16


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("q6_0",), ConfigError, "type q6_0 of a cache: one of f32, f16"),
        (("f16", "q4_0"), Unsupported, "keys f16, values q4_0"),
    ],
)
def test_types_that_it_refuses(arguments, error, said, file):
    with pytest.raises(error, match=said) as raised:
        LlamaCpp(file, TOKENS, *arguments, flash_attention=False)
    assert "\n" not in str(raised.value)


def test_files_that_it_refuses(file, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        LlamaCpp(tmp_path / "none.gguf", TOKENS)
    with pytest.raises(DataError, match=r"task.context=4096: model.gguf takes at most 512 tokens"):
        LlamaCpp(file, 4096)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(Unsupported, match=r"broken.gguf cannot be loaded: .+") as raised:
        LlamaCpp(broken, TOKENS)
    assert "\n" not in str(raised.value)
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(file.read_bytes().replace(b"llama", b"lxxma"))
    with pytest.raises(Unsupported, match=r"odd.gguf cannot be loaded: .*unknown model architecture"):
        LlamaCpp(odd, TOKENS)


def test_another_version_of_the_wheel_is_refused(file, monkeypatch):
    monkeypatch.setattr(llamacpp, "WHEEL", ("xllamacpp", "2025.1.1"))
    llamacpp.library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"xllamacpp==\S+ installed; its layout is known of 2025.1.1"):
            LlamaCpp(file, TOKENS)
    finally:
        llamacpp.library.cache_clear()


def test_another_layout_is_refused(file, monkeypatch):
    monkeypatch.setitem(llamacpp._DEFAULTS, "context", {"n_batch": 4096})
    llamacpp.library.cache_clear()
    try:
        with pytest.raises(ConfigError, match="default n_batch is 2048; another build"):
            LlamaCpp(file, TOKENS)
    finally:
        llamacpp.library.cache_clear()


def test_models_that_have_no_gguf_here(tmp_path):
    model = model_of()
    model.config.rope_parameters["rope_type"] = "linear"
    with pytest.raises(Unsupported, match="scaled RoPE"):
        write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(Unsupported, match="attention to a window"):
        write_gguf(model_of("mistral", sliding_window=8), tmp_path / "model.gguf")
    model.config.model_type = "gpt2"
    with pytest.raises(Unsupported, match="model_type=gpt2, only of llama, mistral"):
        write_gguf(model, tmp_path / "model.gguf")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "method"), [("f16", "fp16"), ("q8_0", "engine/llamacpp_q8_0")])
def test_a_windowed_layer_of_gemma_takes_its_window_and_a_batch(kind, method, monkeypatch):
    """Layers without a window take what `task=memory` counts; the 15 others a window of 512 cells and a batch of 512.

    The C functions give windowed layers the whole context unless `swa_full` is off, as llama-server has it.
    """
    config = resolve(compose(["model=gemma3_270m", "task=memory", f"method={method}"]))
    try:
        file = carried_gguf("model.path", config.model.path)
    except DataError:
        pytest.skip("make real MODELS=gemma3_270m")
    shape, tokens, said, quiet = cache_shape(config.model), 8192, [], llamacpp._collect_messages

    @contextlib.contextmanager
    def heard(ffi, lib):
        with quiet(ffi, lib) as messages:
            yield messages
        said.extend(messages)

    monkeypatch.setattr(llamacpp, "_collect_messages", heard)
    LlamaCpp(file, tokens, kind, kind).close()
    cells = [int(found) for line in said for found in re.findall(r"KV cache, size = (\d+) cells", line)]
    sizes = [float(found) * 2**20 for line in said for found in re.findall(r"KV buffer size = +([\d.]+) MiB", line)]
    total = sum(row["total"] for row in rows_of(shape, method_of(config, *shape.head_dims), tokens, measured=False))
    per_token = total / (3 * tokens + 15 * 512)
    assert cells[0] == tokens
    assert sizes[0] == pytest.approx(3 * tokens * per_token, rel=1e-3)
    assert sizes[1] == pytest.approx(15 * cells[1] * per_token, rel=1e-3)
    assert cells[1] in (512 + 512, tokens)
