"""Costs of one side of one layer equal those of a run that quantizes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvq
from kvq.codecs import HeadsCodec, rope_table
from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import method_of
from kvq.models.inputs import Inputs
from kvq.results import Record, Store
from kvq.results.files import Journal
from kvq.runs import Prepared, run
from kvq_lab.figures import costs_figure, costs_table, sums_figure, sums_table
from kvq_lab.sensitivity import check, measure, random_sets

WINDOWS = "task.windows=2 task.context=96".split()
GIVEN = ["model=tiny", "task=sensitivity", "task.maps=5", *WINDOWS, "threads=1"]
METHOD = ["method=kivi", "bits=2"]
PPL = "model=tiny task=ppl task.windows=disjoint task.scoring=parallel task.context=96 task.max_windows=2".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Record]:
    folder = tmp_path_factory.mktemp("sensitivity")
    record = run(resolve(compose([*GIVEN, *METHOD, f"results_dir={folder}"])))
    stored = Store(folder).get(record.key)
    assert stored is not None
    return Store(folder), stored


def test_a_side_alone_is_a_run_that_quantizes_it_alone(made: tuple[Store, Record], tmp_path: Path) -> None:
    store, record = made
    rows = {row["item"]: row for row in store.samples(record.key)}
    layers = 1 + max(row["layer"] for row in rows.values() if "side" in row)
    others = [layer for layer in range(layers) if layer != 1]
    for side, other in (("key", "value"), ("value", "key")):
        whole = [
            f"method.full_precision_layers.{side}={others}",
            f"method.full_precision_layers.{other}={[*range(layers)]}",
        ]
        alone = run(resolve(compose([*PPL, *METHOD, *whole, f"results_dir={tmp_path}", "threads=1"])))
        row = rows[f"layer 1 {side}"]
        assert row["kl_mean"] == alone.metrics["kl_mean"]
        assert row["delta_nll"] == pytest.approx(alone.metrics["delta_nll"], abs=1e-12)
        assert row["packed_bytes"] == alone.metrics["packed_bytes"]
    everything = run(resolve(compose([*PPL, *METHOD, f"results_dir={tmp_path}", "threads=1"])))
    for name in ("kl_mean", "bits_per_element", "key_bits", "value_bits"):
        assert record.metrics[name] == everything.metrics[name]
    assert record.metrics["delta_nll"] == pytest.approx(everything.metrics["delta_nll"], abs=1e-12)


def test_sums(made: tuple[Store, Record]) -> None:
    store, record = made
    rows = store.samples(record.key)
    alone = [row for row in rows if "side" in row]
    assert record.metrics["kl_sum"] == pytest.approx(sum(row["kl_mean"] for row in alone))
    keys = sum(row["kl_mean"] for row in alone if row["side"] == "key")
    assert record.metrics["kl_sum_keys"] == pytest.approx(keys)
    assert len([row for row in rows if "layers" in row]) == 6
    assert -1 <= record.metrics["sum_correlation"] <= 1


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    inputs = Inputs(resolve(compose([*GIVEN, *METHOD])))
    method = Prepared(inputs.config).method
    journal = Journal(tmp_path / "journal.jsonl", "header")
    whole = measure(inputs, method, None, journal)
    again = Journal(tmp_path / "again.jsonl", "header")
    again.add([{**journal.rows["layer 0 key"], "kl_mean": 5.0}])
    rest = measure(inputs, method, None, again)
    assert rest.samples[0]["kl_mean"] == 5.0
    assert rest.samples[1:] == whole.samples[1:]


def test_full_precision_has_a_loss_alone(tmp_path: Path) -> None:
    record = run(resolve(compose([*GIVEN, "method=fp16", f"results_dir={tmp_path}"])))
    assert set(record.metrics) == {"nll", "windows", "scored_tokens"}


def test_random_sets() -> None:
    places = [(side, layer) for layer in range(4) for side in ("key", "value")]
    sets = random_sets(places, 9, 1)
    assert sets == random_sets(places, 9, 1) != random_sets(places, 9, 2)
    assert all(2 <= len(own) == len(set(own)) <= 8 for own in sets)
    assert random_sets(places[:1], 9, 1) == []


@pytest.mark.parametrize("method", ["h2o", "streamingllm", "waterfill_kv"])
def test_methods_without_layers_or_sides_of_their_own_are_refused(method: str) -> None:
    config = resolve(compose([*GIVEN, f"method={method}"]))
    with pytest.raises(Unsupported, match=r"^task=sensitivity: .*; needs each side of each layer quantized by itself"):
        check(Inputs(config), method_of(config, 64))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="generation or parallel"):
        resolve(compose([*GIVEN, *METHOD, "task.scoring=continuation"]))


def test_figures(made: tuple[Store, Record]) -> None:
    store, record = made
    costs, sums = costs_table([record], store), sums_table([record], store)
    assert set(costs["side"]) == {"keys", "values"}
    assert len(sums) == 6
    assert costs_figure(costs, "a title").get_axes()
    assert sums_figure(sums, "a title").get_axes()


HEADS = [*GIVEN[:2], "task.maps=0", *WINDOWS, "threads=1", "task.heads=true"]


def test_each_head_alone(tmp_path: Path) -> None:
    """A head's pass changes that head of that layer alone; of rounding per token the costs of heads nearly add up."""
    record = run(resolve(compose([*HEADS, "method=turboquant", "bits=3", f"results_dir={tmp_path}"])))
    rows = {row["item"]: row for row in Store(tmp_path).samples(record.key)}
    heads = [row for row in rows.values() if "head" in row]
    places = [row for row in rows.values() if "side" in row]
    assert len(heads) == 2 * len(places)  # of a model with two KV heads
    assert {tuple(row["of"]) for row in heads} == {(row["side"], row["layer"]) for row in places}
    assert record.metrics["kl_sum_heads"] == pytest.approx(sum(row["kl_mean"] for row in heads))
    assert record.metrics["kl_sum_heads"] == pytest.approx(record.metrics["kl_sum"], rel=0.25)
    table = costs_table([Store(tmp_path).get(record.key)], Store(tmp_path))
    assert set(table["side"]) == {
        "keys",
        "values",
        *(f"{side}s, head {h}" for side in ("key", "value") for h in (0, 1)),
    }
    assert costs_figure(table, "a title").get_axes()


def test_one_head_is_encoded_and_the_others_kept() -> None:
    codec = kvq.build_method("nsnquant", 2, 64).key
    states, rope = torch.randn(2, 3, 150, 64), rope_table(150, 64)
    whole, own = codec.encode(states, 64, rope), HeadsCodec([None, codec, None])
    found = own.decode(own.encode(states, 64, rope), rope)
    assert torch.equal(found[:, [0, 2]], states[:, [0, 2]])
    assert torch.equal(found[:, 1], codec.decode(whole, rope)[:, 1])


@pytest.mark.parametrize("method", ["oscar/token_scope", "kvquant", "waterfill"])
def test_heads_that_are_encoded_together_are_refused(method: str) -> None:
    config = resolve(compose([*HEADS, f"method={method}", "bits=2"]))
    with pytest.raises(Unsupported, match=r"task.heads=true: method=.* keys: encodes heads together"):
        check(Inputs(config), method_of(config, 64))


def test_records_from_before_heads_keep_their_key() -> None:
    plain, off, on = (
        canonical(resolve(compose([*GIVEN, *METHOD, *more])), "m", "d")
        for more in ([], ["task.heads=false"], ["task.heads=true"])
    )
    assert plain == off != on
    assert "heads" not in plain["task"]
