"""Weights rounded to few bits: against a loop over groups, undone afterwards, and after a merged rotation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config import compose, resolve
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.models.weights import round_to_nearest, rounded_weights
from kvq.runs import Prepared, run
from tests.properties import examples
from tests.random_models import llama

TEXT = "task=ppl task.context=256 task.max_windows=1 task.scoring=parallel task.windows=disjoint".split()


@settings(max_examples=examples(8))
@given(rows=st.integers(1, 5), columns=st.integers(1, 300), bits=st.integers(2, 8), seed=st.integers(0, 99))
def test_a_weight_is_rounded_to_even_steps_of_its_group(rows: int, columns: int, bits: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
    found = round_to_nearest(weight, bits)
    for row in range(rows):
        for start in range(0, columns, 128):
            own = weight[row, start : start + 128].double()
            step = (own.max() - own.min()) / (2**bits - 1)
            left = (found[row, start : start + 128] - own).abs().max()
            assert left <= step * 0.5001 + 1e-6
            assert len(found[row, start : start + 128].unique()) <= 2**bits


def test_the_weights_come_back_and_the_output_embedding_stays() -> None:
    model = llama(head_dim=32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with rounded_weights(model, 3):
        changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".layers." in name and before[name].ndim == 2}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_rotation_is_merged_before_the_weights_are_rounded() -> None:
    model = llama(head_dim=32)
    merged = build_method("oscar", 2, head_dim=32, overrides=["merge_rotation=true"]).merged
    assert merged is not None
    matrix = model.model.layers[0].self_attn.v_proj.weight
    with merged.in_weights(model):
        turned = matrix.detach().clone()
        with rounded_weights(model, 4):
            assert torch.equal(matrix, round_to_nearest(turned, 4))
        assert torch.equal(matrix, turned)


def test_a_run_names_its_rounded_weights_and_has_a_baseline_under_them(tmp_path: Path) -> None:
    given = ["model=tiny", "method=kivi", "bits=2", f"results_dir={tmp_path}", *TEXT]
    plain, fewer = (run(resolve(compose([*given, *more]))) for more in ([], ["model.round_weights=3"]))
    assert fewer.config["model"].pop("round_weights") == 3
    assert fewer.config == plain.config
    assert fewer.baseline_key != plain.baseline_key
    assert fewer.metrics["perplexity"] > plain.metrics["perplexity"]


@pytest.mark.parametrize("more", [["method=cq"], ["task=latency"]])
def test_tables_fitted_to_other_weights_and_times_are_refused(more: list[str]) -> None:
    prepared = Prepared(resolve(compose(["model=tiny", "model.round_weights=4", *more])))
    with pytest.raises(Unsupported, match=r"^model\.round_weights=4: not with "):
        _ = prepared.method
