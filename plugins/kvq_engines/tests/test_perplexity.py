"""`task=engine`: which format of an engine a method stands for, and the records of its runs."""

import pytest
import torch

from kvq.codecs import Codec
from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.build import build_method
from kvq.results import Store
from kvq.results.record import versions_of
from kvq.runs import run
from kvq_engines.agreement import Q8_0
from kvq_engines.formats import EngineName, format_for, format_of
from kvq_engines.kld import LogitsFile
from kvq_engines.tests import installed
from tests.sweeps import inputs_of

SMALL = ["task=engine", "task.context=64", "task.max_windows=4", "threads=1"]


def of(name, engine="llamacpp", bits=4, head_dim=64, overrides=()):
    return format_of(build_method(name, bits, head_dim, overrides), EngineName(engine), "float16")


@pytest.mark.parametrize(
    ("name", "types", "rotated"),
    [
        ("fp16", ("f16", "f16"), True),
        ("engine/llamacpp_q8_0", ("q8_0", "q8_0"), True),
        ("engine/llamacpp_iq4_nl", ("iq4_nl", "iq4_nl"), True),
        ("engine/llamacpp_q5_1/unrotated", ("q5_1", "q5_1"), False),
        ("engine/llamacpp_q8_0_q4_0", ("q8_0", "q4_0"), True),
        ("engine/llamacpp_q4_0_q8_0", ("q4_0", "q8_0"), True),
        ("engine/llamacpp_q8_0_q5_1", ("q8_0", "q5_1"), True),
    ],
)
def test_types_of_llamacpp(name, types, rotated):
    found = of(name)
    assert (found.types, found.rotated) == (types, rotated)


def test_one_side_in_full_precision():
    assert of("engine/llamacpp_q4_0", overrides=["key=null"]).types == ("f16", "q4_0")


def test_bits_and_groups_of_mlx():
    assert of("engine/mlx", "mlx", 3).types == (3, 64)
    assert of("engine/mlx_g32", "mlx", 6).types == (6, 32)
    assert of("engine/mlx_8", "mlx").types == (8, 64)
    assert of("fp16", "mlx").types == (None, 64)


@pytest.mark.parametrize(
    ("name", "engine", "overrides", "said"),
    [
        ("nsn", "llamacpp", (), "quantizes tokens as they come; residual.key"),
        ("engine/mlx_4", "llamacpp", (), "no type of its cache is engine/mlx_4's key"),
        ("engine/llamacpp_q4_0", "mlx", (), "stores keys and values alike"),
        ("engine/llamacpp_q4_0", "llamacpp", ("key.stages.hadamard=null",), "rotates keys and values, or neither"),
        (
            "engine/llamacpp_q4_0",
            "llamacpp",
            ("value.stages.hadamard.block=32",),
            "the engine rotates values otherwise",
        ),
        (
            "engine/llamacpp_q4_0",
            "llamacpp",
            ("+full_precision_layers.key=[0]",),
            "keeps layers in full precision; needs all layers",
        ),
        ("engine/llamacpp_q4_0", "llamacpp", ("key.stages.pairs.order=interleaved",), "or has another order"),
        (
            "engine/mlx_4",
            "mlx",
            ("+key.quantizer.clip=0.5", "+value.quantizer.clip=0.5"),
            "stores keys and values alike",
        ),
        ("h2o", "llamacpp", (), "eviction of h2o evicts tokens; needs codecs"),
    ],
)
def test_methods_that_an_engine_has_no_cache_for(name, engine, overrides, said):
    with pytest.raises(Unsupported, match=said):
        of(name, engine, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "error", "said"),
    [
        (["task=engine", "task.engine.name=mlx", "task.engine.file=x"], ConfigError, "of llamacpp; mlx takes"),
        (
            ["task=engine", "task.engine.name=mlx", "task.engine.flash_attention=false"],
            ConfigError,
            "of llamacpp; mlx takes",
        ),
        (["task=engine", "task.scoring=parallel"], ConfigError, "quantizes as it generates"),
        (
            ["task=engine", "task.engine.name=null", "task.engine.file=x"],
            ConfigError,
            "needs task.engine.name=llamacpp",
        ),
    ],
)
def test_settings_that_do_not_go_together(overrides, error, said):
    with pytest.raises(error, match=said):
        resolve(compose(overrides))


def test_the_key_names_the_engine_and_the_content_of_its_file(tmp_path):
    transformers = [f"task.{name}" for name in ("engine.name=null", "windows=sliding", "context=2048", "save_logits=x")]
    with pytest.raises(ConfigError, match=r"hold disjoint windows; task.windows=disjoint"):
        resolve(compose(["task=engine", *transformers]))
    plain = by_names(resolve(compose(["task=engine", *transformers[:-1]])))
    assert plain == by_names(resolve(compose(["task=ppl"])))
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    config = resolve(compose(["task=engine", f"task.engine.file={file}"]))
    keyed = by_names(config)
    assert keyed["task"]["engine"]["file"].startswith("7692c3ad")
    assert "weights" not in keyed["task"]["engine"]
    assert "LlamaCpp" in versions_of(keyed, type(config.task))
    with pytest.raises(DataError, match="no such file"):
        by_names(resolve(compose(["task=engine", "task.engine.file=/nothing.gguf"])))
    with pytest.raises(DataError, match="the package no-such-thing is not installed"):
        by_names(resolve(compose(["task=engine", "task.engine.file=distribution:no-such-thing"])))


def test_queries_are_rounded_to_127_steps_of_each_block():
    """Against ggml's `quantize_row_q8_0`: code = round(x (127 / max|x|)), times the scale in fp16."""
    x = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 0
    blocks = x.unflatten(-1, (2, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(blocks * torch.where(scale > 0, 1 / scale, 0))
    expected = (codes * scale.half().float()).flatten(-2)
    codec = Codec({}, [], Q8_0)
    assert torch.equal(codec.decode(codec.encode(x)), expected)


@installed.llamacpp
def test_a_run_in_llamacpp(tmp_path):
    config = resolve(compose([*SMALL, "method=engine/llamacpp_q4_0", f"results_dir={tmp_path}"]))
    record = run(config)
    metrics = record.metrics
    assert metrics["bits_per_element"] == 4.5
    assert metrics["scored_tokens"] == 4 * 63
    assert metrics["agreement_kl_q8"] < metrics["agreement_kl"] < metrics["kl_mean"]
    assert metrics["agreement_kl_stored"] < metrics["kl_mean"] / 100
    assert 0 < metrics["preset_kl_self"] < metrics["preset_kl"]
    assert metrics["agreement_correlation_q8"] > 0.99
    assert abs(metrics["preset_off"]) < 3 * metrics["preset_off_se"] + 1e-3
    assert "llama.cpp" in record.provenance.engine
    assert record.versions["LlamaCpp"] == 1
    baseline = Store(tmp_path).get(record.baseline_key)
    assert baseline.metrics["agreement_kl"] < 1e-5
    assert run(config) == Store(tmp_path).get(record.key)


@installed.mlx
def test_a_run_in_mlx(tmp_path):
    asked = [*SMALL, "task.engine.name=mlx", "task.max_windows=2", "method=engine/mlx", "bits=4"]
    record = run(resolve(compose([*asked, f"results_dir={tmp_path}"])))
    assert record.metrics["agreement_kl"] < record.metrics["kl_mean"] / 10
    assert record.metrics["agreement_kl_stored"] < record.metrics["kl_mean"] / 100
    assert "MLX-LM" in record.provenance.engine


def test_logits_of_transformers_are_saved(tmp_path):
    file = tmp_path / "own.logits"
    asked = ["task.windows=disjoint", "task.context=64", "task.max_windows=2", "method=q8_0", f"results_dir={tmp_path}"]
    record = run(resolve(compose(["task=ppl", *asked])))
    again = run(resolve(compose(["task=engine", "task.engine.name=null", *asked, f"task.save_logits={file}"])))
    assert (again.key, again.versions) == (record.key, record.versions)
    assert again.metrics == record.metrics
    found = LogitsFile.open(file)
    assert (found.context, found.chunks, found.rows) == (64, 2, 31)
    probabilities = torch.cat(list(found.chunk(1))).exp().sum(-1)
    assert torch.allclose(probabilities, torch.ones(31), atol=2e-3)


@pytest.mark.parametrize(("engine", "dtype"), [("onnxruntime", "float16"), ("mlx", "bfloat16")])
def test_dtypes_that_an_engine_does_not_compute_in(engine, dtype):
    task = ["task=engine", f"task.engine.name={engine}", f"model.dtype={dtype}", "model=tiny", "method=fp16"]
    with pytest.raises(Unsupported, match=f"model.dtype={dtype}: {engine} computes in float32"):
        format_for(inputs_of(task), build_method("fp16"))


def test_each_side_of_mlx_has_its_bits():
    assert build_method("engine/mlx", "k4v2").settings["value"]["quantizer"]["bits"] == 2
    with pytest.raises(Unsupported, match="stores keys and values alike"):
        of("engine/mlx", "mlx", "k4v2")
    with pytest.raises(Unsupported, match="bits=7: of MLX, 2 to 6 or 8"):
        build_method("engine/mlx", 7)
