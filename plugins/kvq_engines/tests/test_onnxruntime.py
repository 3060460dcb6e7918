"""ONNX Runtime's attention: its full precision against PyTorch's, its stored codes and logits against the presets'."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvq.codecs import bind_codec
from kvq.codecs.calibrated import fit_codec
from kvq.config import compose, resolve
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.runs import run
from kvq_engines.formats import EngineName, format_of
from kvq_engines.onnxruntime import OnnxRuntime, attention_session
from kvq_engines.tests import installed
from kvq_engines.tests.test_llamacpp import TOKENS, in_torch, kl, log_probs, model_of

pytestmark = installed.onnxruntime
FORMATS = [f"engine/onnxruntime_int{bits}{steps}" for bits in (8, 4) for steps in ("", "/per_tensor")]


def windowed_model():
    """Layers with windows of 32 tokens and without, QK norms, one KV head, another scale of logits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=120,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=64,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(120, (3 * TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model", [model_of(), model_of("qwen3"), windowed_model()], ids=["llama", "qwen3", "gemma3"])
def test_full_precision_is_pytorchs(model, tokens):
    with OnnxRuntime(model) as engine:
        assert kl(in_torch(model, tokens), log_probs(engine, tokens)) < 1e-9
        assert engine.side_bits("key") == 32
        assert engine.vocab == 120
        assert "CPU" in engine.build


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_attention_are_the_presets(name, tokens):
    """Of one layer: every code, and outputs equal to attention of the decoded states in fp64."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, heads, 40, 64, generator=generator) for heads in (8, 2, 2))
    method = build_method(name, head_dim=64)
    codecs = []
    for codec, states in ((method.key, key), (method.value, value)):
        tables = fit_codec(codec, 0.8 * states[0], None, None, 0)  # so that some are clipped
        codecs.append(bind_codec(codec, tables, 2, 64))
    steps = [codec.stages[0][1].tables["scale"] for codec in codecs]
    bits = codecs[0].quantizer.bits
    session = attention_session(8, 2, 64, bits, steps[0].numel() > 1, scale=0.125)
    wide = [x.transpose(1, 2).flatten(2).numpy() for x in (query, key, value)]
    empty = torch.zeros(1, 2, 0, 64 if bits == 8 else 32, dtype=torch.int8 if bits == 8 else torch.uint8).numpy()
    names = [entry.name for entry in session.get_inputs()]
    lengths = [torch.tensor([40 - less], dtype=torch.int32).numpy() for less in (1, 0)]
    feed = dict(zip(names, [*wide, empty, empty, *lengths, *(x.flatten().numpy() for x in steps)], strict=True))
    out, *stored = session.run(None, feed)
    decoded = []
    for codec, states, step, bytes_ in zip(codecs, (key, value), steps, stored, strict=True):
        decoded.append(codec.decode(codec.encode(states)))
        codes = torch.from_numpy(bytes_).int()
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2) - 8
        torch.testing.assert_close(codes * step, decoded[-1], atol=0, rtol=0)
    rows = query.double().unflatten(1, (2, 4))
    scores = rows @ decoded[0].double()[:, :, None].mT / 8
    weights = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = (weights @ decoded[1].double()[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)
    torch.testing.assert_close(torch.from_numpy(out).double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_agrees_with_its_preset(name, tmp_path):
    settings = ["task=engine", "task.engine.name=onnxruntime", "task.context=64", "task.max_windows=2", "threads=1"]
    config = resolve(compose([f"method={name}", "model=tiny", *settings, f"results_dir={tmp_path}"]))
    metrics = run(config).metrics
    assert metrics["agreement_kl_stored"] < 1e-6
    assert metrics["bits_per_element"] == (8 if "int8" in name else 4)
    assert metrics["agreement_kl"] < max(0.1 * metrics["preset_kl"], 1e-5)


def test_other_formats_are_refused():
    with pytest.raises(Unsupported, match="stores keys and values as engine/onnxruntime_"):
        format_of(build_method("engine/mlx_4", head_dim=64), EngineName.onnxruntime, "float16")
