"""Formats as engines read them, and what they cannot."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config.explain import choices
from kvq_lab.export import main

FORMATS = [name for name in choices()["method"] if name.startswith("engine/")]
FIRST = {name.partition("_")[0]: name for name in reversed(FORMATS)}
"""Of each engine."""


def layers(key: str, value: str) -> list[str]:
    return [f"method.full_precision_layers.key={key}", f"method.full_precision_layers.value={value}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=engine/llamacpp_q8_0_q4_0"], "llama-server -m M.gguf -fa on -ctk q8_0 -ctv q4_0"),
        (["method=engine/mlx", "bits=4"], "mlx_lm.generate --model M --kv-bits 4 --kv-group-size 64"),
        (
            ["method=engine/vllm_fp8", *layers("[1,0]", "[0,1]")],
            "vllm serve M --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 1",
        ),
        (
            ["method=quanto", "bits=4", "residual.size=64"],
            '"backend": "quanto", "nbits": 4, "q_group_size": 64, "residual_length": 64',
        ),
        (["method=hqq", "bits=2"], '"backend": "hqq", "nbits": 2, "q_group_size": 64, "residual_length": 128'),
    ],
)
def test_what_engines_read(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=oscar", "bits=2"], "no engine reads it"),
        (["method=engine/llamacpp_q4_0", *layers("[0]", "[0]")], "stores all layers alike"),
        (["method=engine/vllm_fp8", *layers("[0]", "[]")], "give both alike"),
        (["method=engine/vllm_fp8", *layers("[-1]", "[-1]")], "counts layers from 0"),
        (["method=engine/mlx", "bits=4", "method.key.quantizer.group_size=32"], "departs from engine/mlx"),
        (["method=engine/mlx", "method.bits_by_layer.key=[2,4]"], "stores all layers alike"),
        (["method=quanto", "bits=4", *layers("[0]", "[0]")], "stores all layers alike"),
        (["method=quanto", "bits=4", "residual.size=64", "residual.value.size=32"], "alike, and both sides"),
        (["method=quanto", "bits=4", "method.sink_tokens=4"], "method.sink_tokens: departs from quanto"),
        (["method=engine/vllm_fp8", "residual.size=128"], "residual: departs from engine/vllm_fp8"),
        (["recipe=modelopt", "method=engine/vllm_fp8"], "method=engine/vllm_fp8 is none of them"),
        (["recipe=modelopt", "method=engine/tensorrt_fp8", *layers("[-1]", "[]")], "names count layers from 0"),
    ],
)
def test_what_they_cannot(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def widths(key: object, value: object, *more: str) -> list[str]:
    given = [f"method.bits_by_layer.key={key}", f"method.bits_by_layer.value={value}"]
    return ["method=rtn", *(word.replace(" ", "") for word in given), *more]


def runs_of(text: str, count: int) -> list[str]:
    """The format of each of `count` layers by TensorRT-LLM's words: ranges and single layers, others `auto`."""
    found = ["auto"] * count
    for part in text.split('"')[1].split(","):
        span, _, name = part.partition(":")
        first, _, last = span.partition("-")
        found[int(first) : int(last or first) + 1] = [name] * (int(last or first) + 1 - int(first))
    return found


@given(st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=9).filter(lambda own: set(own) != {16}))
@settings(max_examples=10, deadline=None)
def test_maps_of_fp8_and_nvfp4_say_each_layer(own: list[int]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["map=tensorrt", *widths(own, own)]) == 0
        assert main(["map=modelopt", *widths(own, own)]) == 0
    first, _, rest = out.getvalue().partition("\n")
    assert runs_of(first, len(own)) == [{4: "nvfp4", 8: "fp8", 16: "auto"}[width] for width in own]
    found = json.loads(rest)["quantization"]
    assert found.pop("kv_cache_quantized_layers") == {
        f"model.layers.{layer}.self_attn": {"quant_algo": {4: "NVFP4", 8: "FP8"}[width]}
        for layer, width in enumerate(own)
        if width < 16
    }
    assert found == {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_schema_version": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["map=tensorrt", *widths([8, 8, 4, 4], [8, 8, 4, 4])], 'dtype="0-1:fp8,2-3:nvfp4"'),
        (["map=tensorrt", *widths([8, 4, 4], [8, 4, 4]), *layers("[-1]", "[2]")], 'dtype="0:fp8,1:nvfp4"'),
        (["map=ikllama", *widths([4, 4], [8, 8])], "-fa -ctk q4_0 -ctv q8_0"),
        (["map=ikllama", *widths([8, 4, 4], [6, 6, 8])], "-ctk q4_0 -ctk-first q8_0,1 -ctv q8_0 -ctv-first q6_0,2"),
        (["map=ikllama", *widths([8, 4, 5], []), "bits=4"], "-ctk q4_0 -ctk-first q8_0,1 -ctk-last q5_0,1 -ctv q4_0"),
        (["map=ikllama", *widths([16, 4], [4, 4])], "-ctk q4_0 -ctk-first f16,1 -ctv q4_0"),
    ],
)
def test_maps_in_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["map=vllm", *widths([8], [8])], "map=vllm: modelopt, tensorrt, ikllama"),
        (["map=tensorrt", "method=engine/tensorrt_fp8"], "method=engine/tensorrt_fp8 has none"),
        (["map=tensorrt", *widths([8, 2], [8, 2])], "keys of layer 1 have 2 bits; it has [4, 8, 16]"),
        (["map=modelopt", *widths([[4, 8]], [8])], "keys of layer 0 have [4, 8] bits"),
        (["map=tensorrt", *widths([8], [8]), *layers("[1]", "[]")], "full_precision_layers.key: 1, of 1 layers"),
        (["map=tensorrt", *widths([8], [8]), "method.sink_tokens=4"], "method.sink_tokens: departs from rtn"),
        (["map=modelopt", *widths([4, 8], [4, 4])], "layer 1 has keys and values of other bits"),
        (["map=ikllama", *widths([8, 4, 8, 4], [4] * 4)], "first, middle and last layers; 4 runs"),
    ],
)
def test_maps_that_a_form_cannot_say(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    test_what_they_cannot(words, said, capsys)


def test_a_recipe_of_modelopt(capsys: pytest.CaptureFixture[str]) -> None:
    """The format's unit after all quantizers are off, then layers in full precision, keys and values apart."""
    assert main(["recipe=modelopt", "method=engine/tensorrt_fp8", *layers("[3,0]", "[0]")]) == 0
    text = capsys.readouterr().out
    recipe = yaml.safe_load(text)
    assert text.startswith("# modelopt-schema: modelopt.recipe.config.ModelOptPTQRecipe\n")
    assert list(recipe["imports"].values()) == ["configs/ptq/units/base_disable_all", "configs/ptq/units/kv_fp8"]
    first, second, *rest = recipe["quantize"]["quant_cfg"]
    assert (first, second) == ({"$import": "base_disable_all"}, {"$import": "kv_fp8"})
    wanted = ["*layers.0.*k_bmm_quantizer", "*layers.3.*k_bmm_quantizer", "*layers.0.*v_bmm_quantizer"]
    assert rest == [{"quantizer_name": name, "enable": False} for name in wanted]


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["method=nothing"]) == 2
    assert "unknown method" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [name if name in FIRST.values() else pytest.param(name, marks=pytest.mark.long) for name in FORMATS]
)
def test_every_engine_format_has_its_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"method={name}", "bits=4"]) == 0
    assert capsys.readouterr().out.strip()
