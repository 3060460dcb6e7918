from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvq.config import compose, resolve
from kvq.config.diagnostics import (
    Arms,
    DistributionConfig,
    ErrorConfig,
    MemoryConfig,
    RandomStatesConfig,
    SyntheticConfig,
    TniConfig,
)
from kvq.config.identity import canonical
from kvq.report.figures.distribution import (
    closeness_table,
    covariances_table,
    magnitudes_table,
    moments_table,
    ranges_figure,
    ranges_table,
    rotated_channels,
)
from kvq.report.figures.drawing import image_of
from kvq.report.figures.error import (
    bars_figure,
    bars_table,
    labelled_rows,
    layers_figure,
    layers_table,
    name_states,
    steps_table,
    throughput_table,
)
from kvq.report.figures.every import drawings
from kvq.report.figures.every import main as figures_main
from kvq.report.figures.loss import valley_table
from kvq.report.figures.over_models import dispersion_table, losses_of, scatter_figure, split_scatters
from kvq.results import Store
from tests.report import sweeps
from tests.report.diagnosed import drawn, put
from tests.report.sweeps import losses, put_run
from tests.results import made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("diagnosed")
    store = Store(folder / "results")
    small: dict[str, Any] = {"context": 128, "windows": 1}
    for method in ("fp16", "oscar", "kivi"):
        put(store, folder, ErrorConfig(arms=Arms.subsets, **small), method)
        put(store, folder, TniConfig(**small), method)
        synthetic = SyntheticConfig(head_dim=32, lowness=[1.0, 10.0], outliers=[0.0, 5.0], repeats=1)
        put(store, folder, synthetic, method)
        put(store, folder, RandomStatesConfig(tokens=32, head_dim=32, draws=2), method)
        put(store, folder, MemoryConfig(lengths=[128, 512, 1024], measured=512), method, path="distilbert/distilgpt2")
    for dataset in ("pydocs", "pysource"):
        put(store, folder, DistributionConfig(signs=1, codebooks=["finetuned"], **small), "fp16", dataset)
    return store


def test_tables_are_means_of_samples(store: Store) -> None:
    records = store.scan()[0]
    (record,) = [r for r in records if (r.task, r.method) == ("error", "oscar")]
    table = steps_table(record, store)
    both = table[(table["side"] == "key") & (table["arm"] == "hadamard+norm") & (table["rope"] == "after")]
    assert float(both["rel_mse"].iloc[0]) == pytest.approx(record.metrics["key_rel_mse"])
    (record,) = [r for r in records if (r.task, r.dataset) == ("distribution", "pydocs")]
    table = closeness_table(record)
    found = table[(table["side"] == "value") & (table["step"] == "NSN") & table["hadamard"]]
    assert float(found["kl"].iloc[0]) == record.metrics["kl_value_NSN_hadamard"]
    rows = [row for row in store.samples_of(record) if row["kind"] == "vector" and row["side"] == "value"]
    last = magnitudes_table(record, store).iloc[-1]
    assert (last["side"], last["position"]) == ("value", rows[-1]["position"])
    assert last["channel 3"] == pytest.approx(abs(rows[-1]["values"][3]), abs=5e-4)
    gamma = covariances_table(record, store).groupby("side")["gamma"].mean()
    assert gamma["key"] == pytest.approx(record.metrics["key_gamma"])
    moments = moments_table(record, store)
    here = rotated_channels(moments)
    assert set(here["stage"]) == {"NSN+Hadamard"}
    assert here["deviation"].to_numpy() == pytest.approx(1, abs=1)
    table = labelled_rows([r for r in records if r.task == "memory"], store, "bytes")
    assert set(table[table["tokens"] == 1024]["measured"]) == {False}
    parts = table[["codes", "scales", "norms", "shift", "other", "residual"]].sum(axis=1)
    assert parts.tolist() == table["total"].tolist()


def test_ranges_of_channels_are_drawn_head_after_head(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    task = DistributionConfig(context=128, windows=1, signs=2, codebooks=["finetuned"], vectors=0, channel_ranges=True)
    record = put(store, tmp_path, task, "fp16")
    table = ranges_table(record, store)
    assert len(table) == 2 * 2 * 32  # sides, heads, channels
    assert bool((table["lowest"] <= 0).all() and (table["highest"] >= 0).all())
    figure = ranges_figure(table, "ranges")
    keys, values = figure.axes
    assert "keys" in keys.get_ylabel()
    assert "values" in values.get_ylabel()
    assert len(keys.collections[0].get_segments()) == 2 * 32
    assert any(one.stem.startswith("distribution-ranges") for one in drawings(store.scan()[0], store))


def test_throughput_by_batch(tmp_path: Path) -> None:
    """Medians of repeats, references of the first run alone, and where a batch does not fit."""
    store = Store(tmp_path)
    for method, seconds in (("nsnquant", 0.5), ("kivi", 1.0)):
        rows = [
            {
                "batch": batch,
                "tokens": 20,
                "subject": subject,
                "repeat": repeat,
                "fits": fits,
                **({"prefill_seconds": 0.5, "decode_seconds": seconds + repeat} if fits else {}),
                **({"prefill_peak_bytes": 2**30, "decode_peak_bytes": batch * 2**30} if fits else {}),
            }
            for batch in (1, 4)
            for subject in ("method", "dynamic", "kept")
            for repeat in range(3)
            if (fits := (batch, subject) != (4, "dynamic")) or not repeat
        ]
        settings = made.config(method, "2", {"name": "throughput", "new_tokens": 5})
        store.put(made.record(method, "2", settings=settings, task="throughput", metrics={"largest_batch": 4.0}), rows)
    table = throughput_table(sorted(store.scan()[0], key=lambda record: record.method), store)
    assert table["method"].tolist() == ["kivi 2", "kivi 2", *2 * ["full precision"], "nsnquant 2", "nsnquant 2"]
    known = table.set_index(["method", "batch"])
    assert known.loc[("nsnquant 2", 4), "tokens_per_second"] == 4 * 5 / (0.5 + 1.5)
    assert known.loc[("kivi 2", 4), "peak_bytes"] == 4 * 2**30
    assert not known.loc[("full precision", 4), "fits"]
    paths = drawn(store, tmp_path / "figures")
    assert {path.suffix for path in paths if path.stem.startswith("throughput")} == {".csv", ".pdf", ".png"}


def test_a_valley_is_found_beyond_noise_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    full = put_run(store, "fp16", "", losses(0.0, 0.0, 0), None, 16.0)
    for bits, mean in (("2", 0.3), ("3", 0.1), ("4", 0.9), ("5", 0.05), ("6", 0.051)):
        put_run(store, "rtn", bits, losses(mean, 0.01, 40 + int(bits)), full, float(bits))
    table = valley_table([r for r in store.scan()[0] if r.method == "rtn"], store)
    assert table["bits"].tolist() == [2, 3, 4, 5, 6]
    assert table["valley"].tolist() == [False, False, True, False, False]
    assert table["step"].iloc[2] == pytest.approx(0.8, abs=0.02)
    paths = drawn(store, tmp_path / "figures")
    assert {path.suffix for path in paths if path.stem.startswith("widths")} == {".csv", ".pdf", ".png"}


def test_a_pair_of_two_methods_is_no_method_of_its_own(committed: Any) -> None:
    assert not any("+" in name.split()[0] for name in losses_of(committed[0])["method"])


def test_dispersion_goes_with_failure_over_models(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for index, spread in enumerate((0.1, 0.4, 0.2, 0.3)):
        model = {"fingerprint": str(index)}
        metrics = {"key_cv_layer0": 0.5, "value_cv_layer0": spread, "key_cv": 0.5 - spread, "value_cv": spread}
        settings = made.config("fp16", "", {"name": "tni"}, model=model)
        store.put(made.record("fp16", settings=settings, task="tni", model=f"m{index}", metrics=metrics))
        # A cache in a dtype of its own changes no states.
        settings = made.config("nsn", "3", model={**model, "cache_dtype": "float16"})
        costs = {"delta_nll": spread, "delta_perplexity": 10 * spread}
        store.put(made.record("nsn", "3", settings=settings, model=f"m{index}", metrics=costs, baseline_key="b" * 64))
        # A second text of the same model, without dispersion of its own, is no further pair.
        other = made.config("nsn", "3", model=model, dataset={"fingerprint": "another"})
        store.put(made.record("nsn", "3", settings=other, model=f"m{index}", metrics=costs, baseline_key="b" * 64))
    table = dispersion_table(store.scan()[0])
    assert len(table) == 4
    (((stem, title), points),) = split_scatters(table).items()
    assert stem.startswith("models-3-")
    assert title == "3 bits, over models"
    assert sorted(points["value_cv_layer0"]) == [0.1, 0.2, 0.3, 0.4]
    assert points["value_cv_layer0_p"].tolist() == pytest.approx(4 * [2 / 24])  # two of the 24 orders are as extreme
    figure = scatter_figure(points, title)
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said[-1] == "nsn: unknown, 1.00"
    points["key_cv_layer0_rho"], points["key_cv_layer0_p"] = -0.8, 1 / 3
    said = [text.get_text() for text in scatter_figure(points, title).legends[0].get_texts()]
    assert said[-1] == "nsn: -0.80, 1.00 (p = 0.33, 0.083)"
    assert not split_scatters(table[table["model"] != "m0"].iloc[:2])


def test_one_command_draws_all_and_names_what_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    runs = sweeps.sweep(store)
    for index, name in enumerate(("good/a", "good/b $x_{$")):
        sweeps.put_run(store, name, "2", sweeps.losses(0.1 * index, 0.01, 50 + index), runs["fp16"], 2.2)
    assert figures_main(["--results", str(tmp_path)]) == 0
    names = [path.name for path in (tmp_path / "figures").glob("*-*")]
    assert sorted({name.split("-")[0] for name in names}) == ["pareto", "variants", "widths"]
    numbers = pd.read_csv(next((tmp_path / "figures").glob("pareto-*.csv")))
    assert len(numbers) == 8
    assert numbers["frontier"].any()
    bars = pd.read_csv(next((tmp_path / "figures").glob("variants-good-*.csv")))
    assert bars["variant"].iloc[0] == "good/a"
    store.samples_path(runs["good 3"].key).unlink()
    capsys.readouterr()
    figures_main(["--results", str(tmp_path)])
    (store.runs / f"{'1' * 64}.json").write_text("[]", encoding="utf-8")
    assert figures_main(["--results", str(tmp_path)]) in (0, 1)
    assert "not a record" in capsys.readouterr().err


def of_states(store: Store, task: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> list[Any]:
    """Records of a task on known states, by method with their places."""
    for method, places in rows.items():
        settings, metrics = made.config(method, "3", task), {"bits_per_element": 3.25, "key_mse": 0.1}
        record = made.record(method, "3", settings=settings, task=task["name"], metrics=metrics, baseline_key="b" * 64)
        store.put(record, [{"kind": "states", "place": at, **place} for at, place in enumerate(places)])
    return store.scan()[0]


def test_bars_of_drawn_states(tmp_path: Path) -> None:
    """Means over draws with the least and the most; reductions in percent; by attention where tokens are ranked."""
    task = {
        "name": "random_states",
        "states": "drifting",
        "tokens": 50,
        "head_dim": 64,
        "drift": 0.15,
        "against": "nsn",
    }
    place = {"key_mse": 0.1, "key_mse_reduction": 0.2, "key_held_out_error_reduction": -0.5}
    rows = {"rtn": [place, {**place, "key_mse": 0.3}]}
    store = Store(tmp_path / "plain")
    table = bars_table(of_states(store, task, rows), store).set_index("quantity")
    assert list(table.index) == ["key_mse", "key_mse_reduction"]
    assert table.loc["key_mse", ["mean", "min", "max"]].tolist() == pytest.approx([0.2, 0.1, 0.3])
    assert table.loc["key_mse_reduction", "mean"] == pytest.approx(20)
    assert table["bits_per_element"].unique() == [3.25]
    assert name_states(task) == "50 drifting tokens of 64 channels, drift 0.15, beside nsn"
    axes = bars_figure(table.reset_index(), "Drawn").axes
    assert [axis.get_xlabel() for axis in axes] == ["squared error\nof keys", "keys: less error (%)"]
    assert [bar.get_width() for bar in axes[0].patches] == pytest.approx([0.2])


def test_bars_by_layer(tmp_path: Path) -> None:
    task = {"name": "model_states", "against": "turboquant/prod_keys", "against_bits": None}
    rows = [{"key_ranking_error_reduction": r, "key_held_out_error_reduction": h} for r, h in ((0.6, -0.1), (0.5, 0.2))]
    store = Store(tmp_path / "layers")
    itself = [dict.fromkeys(rows[0], 0.0)] * 2
    table = layers_table(of_states(store, task, {"rtn": rows, "kivi": rows, "nsn": itself}), store)
    assert table["layer"].tolist() == [0, 1, 0, 1]
    assert table["key_held_out_error_reduction"].tolist() == pytest.approx([-10, 20, -10, 20])
    axes = layers_figure(table, "By layer").axes
    assert [len(axis.patches) for axis in axes] == [4, 4]
    assert [bar.get_height() for bar in axes[0].patches][:2] == pytest.approx([60, 50])
    bare = Store(tmp_path / "bare")
    assert layers_table(of_states(bare, task, {"rtn": [{"key_mse": 1.0}]}), bare).empty
    one = Store(tmp_path / "one")
    assert layers_table(of_states(one, task, {"rtn": rows[:1]}), one).empty


def put_throughput(store: Store, residual: int, bits: str, machine: str = "one GPU") -> None:
    """A run of NSNQuant's figures 4 and 8: full precision fits 64 requests, the method 4 times as many."""
    words = ["method=nsnquant", f"bits={bits}", "task=throughput", "task.batches=[16,64,256]", "model=tiny"]
    asked = resolve(compose([*words, f"residual.size={residual}", "cache.attention=packed"]))
    settings = canonical(asked, "f" * 64, machine)
    rows = []
    for batch, subject in itertools.product((16, 64, 256), ("method", "dynamic")):
        place = {"batch": batch, "tokens": 161, "subject": subject, "repeat": 0}
        if (batch, subject) == (256, "dynamic"):
            rows.append(place | {"fits": False})
            continue
        gib = batch * (1.0 if subject == "dynamic" else (0.1 + residual / 1000) * int(bits))
        seconds = {"prefill_seconds": 1.0, "decode_seconds": 4.0 + batch / 64 + residual / 100}
        peaks = {"prefill_peak_bytes": int(gib * 2**29), "decode_peak_bytes": int(gib * 2**30)}
        rows.append(place | {"fits": True} | seconds | peaks)
    store.put(made.record("nsnquant", bits, settings=settings, task="throughput", metrics={"largest_batch": 256}), rows)


def test_throughput_is_drawn_as_nsnquant_draws_it(tmp_path: Path) -> None:
    """Memory left, throughput right, by batch: a line for each width and residual, full precision until it is full."""
    store = Store(tmp_path)
    for residual, bits in itertools.product((32, 64, 128), "12"):
        put_throughput(store, residual, bits)
    (drawing,) = drawings(store.scan()[0], store)
    figure = drawing.figure()
    memory, rates = figure.axes
    assert (memory.get_ylabel(), rates.get_ylabel()) == ("peak memory above the weights (GiB)", "tokens per second")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    sizes = {32: "residual 32, packed attention", 64: "packed attention", 128: "residual 128, packed attention"}
    wanted = {f"nsnquant, {size} {bits}" for size in sizes.values() for bits in "12"}  # 64 is the preset's
    assert set(names) == wanted | {"full precision"}
    by_name = dict(zip(names, memory.lines, strict=True))
    assert by_name["full precision"].get_xdata().tolist() == [16, 64]
    assert by_name["full precision"].get_ydata().tolist() == [16, 64]
    small, large = (by_name[f"nsnquant, {sizes[size]} 2"].get_ydata() for size in (32, 128))
    assert all(a < b for a, b in zip(small, large, strict=True))
    crosses = [line for line in rates.lines if line.get_marker() == "x"]
    assert [line.get_xdata() for line in crosses] == [[256]]
    assert image_of(figure)


def test_times_of_two_machines_are_two_figures(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for machine in ("one GPU", "another GPU"):
        put_throughput(store, 64, "2", machine)
    found = list(drawings(store.scan()[0], store))
    assert len({drawing.stem for drawing in found}) == 2
    assert {drawing.title.partition(" on ")[2] for drawing in found} == {"one GPU", "another GPU"}
