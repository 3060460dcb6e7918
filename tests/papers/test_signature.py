"""A cell takes a record for its own only where nothing that changes a number differs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import by_names, canonical
from kvq.papers import expected
from kvq.report.tables.experiments import address
from tests.results import made

# A score of a calibrated method, times on packed codes and in several regimes, methods with parts of their own.
RUNS = {
    "calibrated": ("model=llama_2_7b", "dataset=c4", "task=ppl/nsnquant_table2", "method=kvquant/sink", "bits=2",
                   "method.calibration.dataset=wikitext2"),
    "kept keys": ("model=llama_3_8b", "dataset=wikitext2", "task=ppl/nsnquant_table2", "method=cq/kept_comma"),
    "packed": ("model=qwen3_8b", "task=latency", "method=oscar", "bits=2", "cache.attention=packed"),
    "regimes": ("model=qwen2_7b", "task=latency/nsn_dequantization", "method=nsn", "bits=3"),
    "items": ("model=tiny_outliers", "task=lm_eval/aime24", "method=ott", "bits=2", "residual.size=64"),
    "evicted": ("model=tiny", "task=niah", "method=snapkv/kivi", "bits=4"),
    "bits by layer": ("model=tiny", "method=kivi", "method.bits_by_layer.key=[8,4,4,2]"),
    "another library": ("model=tiny", "method=hqq", "bits=2"),
}  # fmt: skip
TEXTS = {("model", "fingerprint"), ("dataset", "fingerprint"), ("method", "calibration", "fingerprint")}
"""Weights and texts, for which their names stand; names are in the signature beside the key."""


def key_of(run: tuple[str, ...]) -> dict[str, Any]:
    config = resolve(compose(list(run)))
    calibrates = "calibration" in by_names(config)["method"]
    return canonical(config, "weights", "text or machine", "calibration text" if calibrates else None)


def leaves(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values that hold no others; an empty list or mapping is one."""
    inner = list(part.items()) if isinstance(part, dict) else list(enumerate(part)) if isinstance(part, list) else []
    if not inner:
        yield path
    for name, item in inner:
        yield from leaves(item, (*path, name))


def changed(key: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    out = copy.deepcopy(key)
    place = out
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "something else"
    return out


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_whatever_the_key_has_is_in_the_signature(run: tuple[str, ...]) -> None:
    key = key_of(run)
    here = address(made.record("m", settings=key))
    paths = list(leaves(key))
    assert len(paths) > 15
    for path in paths:
        there = address(made.record("m", settings=changed(key, path)))
        assert (there == here) == (path in TEXTS), path
    assert address(made.record("m", settings=key, model="another")) != here
    assert address(made.record("m", settings=key, dataset="another")) != here


def test_what_a_cell_asks_for_is_what_a_record_of_it_says() -> None:
    for run in RUNS.values():
        config = resolve(compose(list(run)))
        record = made.record("m", settings=key_of(run), model=config.model.name, dataset=config.dataset.name)
        assert address(record).signature == expected._signature(run)
        assert address(record).machine == ("text or machine" if "task=latency" in " ".join(run) else "")


def test_runs_that_differ_do_not_fill_one_anothers_cells() -> None:
    packed = RUNS["packed"]
    calibrated = RUNS["calibrated"]
    for one, other in (
        (packed, packed[:-1]),
        (packed, (*packed[:-1], "cache.attention=dense")),
        (calibrated, (*calibrated[:-1], "method.calibration.dataset=c4")),
        (calibrated, (*calibrated, "method.calibration.samples=8")),
        (calibrated, (*calibrated, "model.dtype=bfloat16")),
    ):
        assert expected._signature(one) != expected._signature(other)
    assert expected._signature(packed[:-1]) == expected._signature((*packed[:-1], "cache.attention=dense"))
