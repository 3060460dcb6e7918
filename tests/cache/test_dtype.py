"""`cache.dtype`: what is kept in full precision, and all that is quantized, is rounded as it enters the cache."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvq import runs
from kvq.cache import KVCache
from kvq.codecs import Growable
from kvq.config import Dtype, compose, resolve
from kvq.config.identity import by_names, canonical
from kvq.methods.build import build_method
from kvq.methods.kept_keys import KeptKeys
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.tasks.scoring import parallel_method, scoring_bounds
from tests.cache.states import nearest_bits
from tests.calibrated import keeping
from tests.random_models import llama, token_ids
from tests.tasks.test_scoring import chunked, token_by_token

DTYPES = [torch.float16, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.bfloat16, torch.float32))]
POLICIES = [
    "kivi method.sink_tokens=3",
    "snapkv",
    "h2o",
    "triattention",
    "streamingllm/kivi",
    "ott",
    "zipcache",
    "cq/kept_comma",
]


def method(given: str, size: int = 8, dim: int = 128) -> Method:
    """A method by its name and overrides; an uncalibrated one with kept keys in the place of the calibrated one."""
    name, *more = given.split()
    if name == "cq/kept_comma":
        found = build_method("kivi", bits=2, head_dim=dim, overrides=[f"residual.size={size}"])
        return keeping(found, KeptKeys((), (0,), (3, 17, 40)))
    overrides = [f"residual.size={size}", *(override.removeprefix("method.") for override in more)]
    return build_method(name, bits=nearest_bits(name), head_dim=dim, overrides=overrides)


def rounding(model: LlamaForCausalLM, dtype: torch.dtype) -> LoadedModel:
    return LoadedModel(model, torch.device("cpu"), cache_dtype=dtype)


@pytest.mark.parametrize("residual", ["block", "sliding", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_is_the_baseline_bit_for_bit(dtype: torch.dtype, residual: str) -> None:
    loaded, tokens = rounding(llama(head_dim=32), dtype), token_ids(75)
    given = ["residual.size=16", f"residual={residual}"]
    identity, full = (build_method(name, head_dim=32, overrides=given) for name in ("identity", "fp16"))
    # A chunk in which tokens slide holds them twice, and its sums round in another order.
    step = {"block": 16, "sliding": 1, "none": 74}[residual]
    bounds = [(start, min(start + step, 74)) for start in range(0, 74, step)]
    assert torch.equal(chunked(loaded, identity, tokens, bounds), chunked(loaded, full, tokens, bounds))
    for one in (identity, full):
        cache = KVCache(loaded.model, one, dtype=dtype)
        loaded.hidden_states(tokens, cache)
        assert cache.bits_per_element == cache.effective_bits == 8 * dtype.itemsize
        assert cache.nbytes == 75 * 2 * 2 * 2 * 32 * dtype.itemsize


def exact_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    """transformers' own takes fp32 whatever the dtype, whose rounding chunks of different lengths may tip over."""
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize(
    ("name", "more", "most"),
    [
        ("kivi", "residual.policy=block", 1e-9),
        pytest.param("nsnquant", "residual.policy=block", 1e-9, marks=pytest.mark.long),
        pytest.param("oscar", "residual.policy=block", 1e-9, marks=pytest.mark.long),
        ("nsn", "residual.policy=sliding", 1e-9),
        ("kivi", "sink_tokens=5", 1e-9),
        # Codecs compute 16-bit states in fp32, where the rotation of 4 tokens may differ in a last bit from that of 1.
        ("oscar", "residual.policy=sliding", 1e-5),
    ],
)
def test_chunks_are_one_by_one_at_16_bits(name: str, more: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64: what chunks differ by is lost in the rounding, so codes are equal."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm)
    loaded = rounding(llama(head_dim=32, seed=2).double(), torch.float16)
    chosen = build_method(name, bits=2, head_dim=32, overrides=["residual.size=12", more])
    tokens = token_ids(60)
    expected = token_by_token(loaded, chosen, tokens)
    for chunk in (None, 5):
        found = chunked(loaded, chosen, tokens, scoring_bounds(chosen, 59, chunk))
        assert (found - expected).abs().max() < most, chunk
    exact = dataclasses.replace(loaded, cache_dtype=None)
    assert (token_by_token(exact, chosen, tokens) - expected).abs().max() > 1e-6


@torch.no_grad()
def test_states_are_rounded_before_they_are_quantized() -> None:
    """Against decode(encode(rounded)) by hand, bit for bit, all tokens at once."""
    model, tokens = llama(), token_ids(40)
    chosen = parallel_method(method("oscar"))
    plain = DynamicCache(config=model.config)
    expected = model(tokens[:, :32], past_key_values=plain)
    held = [(layer.keys, layer.values) for layer in plain.layers]

    def stored(x: Tensor, codec: object) -> Tensor:
        return codec.decode(codec.encode(x.half(), 8)).float()  # type: ignore[attr-defined]

    cache = KVCache(model, chosen, dtype=torch.float16)
    first = cache._update(*held[0], 0)
    assert torch.equal(first[0], stored(held[0][0], chosen.key))
    assert torch.equal(first[1], stored(held[0][1], chosen.value))
    assert first[0].dtype is torch.float32
    assert not torch.equal(first[0], chosen.key.decode(chosen.key.encode(held[0][0], 8)))
    assert expected.logits.shape[1] == 32


@pytest.mark.parametrize("given", POLICIES)
@torch.no_grad()
def test_every_policy_keeps_16_bits(given: str) -> None:
    """No tensor that grows by a token per token is wider, a fork goes on alike, and bytes halve where nothing packs."""
    model, chosen = llama(layers=3), method(given)
    tokens = token_ids(40)
    cache, wide = KVCache(model, chosen, dtype=torch.float16), KVCache(model, chosen)
    for one in (cache, wide):
        out = model(tokens[:, :29], past_key_values=one).logits
        assert torch.isfinite(out).all()
    fork = cache.fork()
    for start in range(29, 40):
        piece = tokens[:, start : start + 1]
        assert torch.equal(*(model(piece, past_key_values=one).logits for one in (cache, fork)))
    for layer in cache.layers:
        for side in (layer.key, layer.value):
            held = [part for part in vars(side).values() if isinstance(part, Growable)]
            assert {part.view.dtype for part in held} <= {torch.float16}
            assert held or side.packed_tokens
    for side in (side for layer in wide.layers for side in (layer.key, layer.value)):
        assert side.residual_bytes == side.elements_per_token * 4 * (side.tokens - side.packed_tokens)
    half = sum(side.residual_bytes for layer in cache.layers for side in (layer.key, layer.value))
    for start in range(29, 40):
        model(tokens[:, start : start + 1], past_key_values=wide)
    assert 2 * half == sum(side.residual_bytes for layer in wide.layers for side in (layer.key, layer.value))


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["nsn", "kivi", "nsnquant"])
@torch.no_grad()
def test_attention_on_codes_reads_16_bits(name: str, dim: int) -> None:
    """The residual is rounded too; decoded values are not, so the two agree up to that rounding."""
    loaded, tokens = LoadedModel(llama(head_dim=dim), torch.device("cpu")), token_ids(40)
    chosen = build_method(name, bits=2, head_dim=dim, overrides=["residual.size=16"])
    rows = []
    for attention in ("packed", "dense"):
        cache = KVCache(loaded.model, chosen, attention=attention, dtype=torch.float16)
        loaded.hidden_states(tokens[:, :-1], cache)
        rows.append(loaded.logits(loaded.hidden_states(tokens[:, -1:], cache)))
        assert {side._full.view.dtype for layer in cache.layers for side in (layer.key, layer.value)} == {torch.float16}
    torch.testing.assert_close(*rows, atol=2e-2, rtol=2e-2)


def bits_of(folder: Path, *overrides: str) -> dict[str, float]:
    given = ["cache.dtype=float16", "task.context=320", "task.stride=320", "task.max_windows=1", *overrides]
    record = runs.run(resolve(compose([*given, f"results_dir={folder}"])))
    assert record.status == "done"
    return record.metrics


def composed(*overrides: str) -> dict[str, object]:
    return canonical(resolve(compose(list(overrides))), "weights", "text")


def test_the_key_has_it_where_it_is_set_and_another() -> None:
    plain = composed("cache.dtype=float32")
    assert "cache_dtype" not in plain["model"]
    assert composed("model.cache_dtype=float32") == composed("model.cache_dtype=null") == plain
    half = composed("cache.dtype=float16")
    assert half == composed() == {**plain, "model": {**plain["model"], "cache_dtype": "float16"}}
    assert composed("model.cache_dtype=float16") == half
    assert composed("model.cache_dtype=float16", "cache.dtype=float32") == plain
    assert composed("model.dtype=float16", "cache.dtype=float16") == composed("model.dtype=float16")
    # Diagnostics encode states without a cache.
    assert composed("task=error", "model.cache_dtype=float32") == composed("task=error")
    assert by_names(resolve(compose(["cache.dtype=float16"])))["model"]["cache_dtype"] == Dtype.float16


def test_a_loaded_model_gives_its_caches_their_dtype() -> None:
    loaded = rounding(llama(head_dim=32), torch.float16)
    full = build_method("fp16", head_dim=32)
    for cache, bits in ((KVCache(loaded, full), 16), (KVCache(loaded, full, dtype=torch.float32), 32)):
        loaded.hidden_states(token_ids(20), cache)
        assert cache.effective_bits == bits
    plain = KVCache(loaded.model, full)
    loaded.hidden_states(token_ids(20), plain)
    assert plain.effective_bits == 32


def test_tasks_make_their_caches_of_the_loaded_model() -> None:
    """What a task passes is never the bare model, whose caches would miss the run's dtype; nor does it choose one."""
    root = Path(__file__).parents[2]
    sources = {path.name: path.read_text(encoding="utf-8") for path in (root / "kvq" / "tasks").glob("*.py")}
    page = (root / "docs" / "extend.md").read_text(encoding="utf-8")
    sources["extend.md"] = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S))
    made = {
        (name, ast.unparse(node))
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("KVCache")
    }
    assert {name for name, _ in made} >= {"extend.md", "ppl.py", "reader.py", "speed.py"}
    assert not [call for call in made if "dtype=" in call[1] or ".model," in call[1].replace("inputs.model,", "")]
