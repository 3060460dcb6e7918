"""Maps of bits against all maps there are, and from records whose right answer is known."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvq.config import compose, resolve
from kvq.errors import ConfigError, RecordError
from kvq.methods.build import method_of
from kvq.results import Record, Store
from kvq_lab import allocate
from kvq_lab.allocate import FULL, Costs, Option, Place
from tests.results import made

PLACES: list[Place] = [(layer, side) for layer in range(2) for side in ("key", "value")]


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    """Costs that fall with the width, of places of different sizes."""
    options = {}
    total = 0.0
    for place in PLACES:
        numbers = draw(st.integers(1, 4)) * 64
        falls = sorted(draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)), reverse=True)
        widths = (2, 4, FULL)
        options[place] = tuple(
            Option(width, numbers * width / 8, fall) for width, fall in zip(widths, falls, strict=True)
        )
        total += numbers
    return Costs(options, total)


@given(costs(), st.floats(2, 16))
def test_the_integer_program_finds_the_least_cost_there_is(found: Costs, bits: float) -> None:
    maps = [dict(zip(found.options, own, strict=True)) for own in product(*found.options.values())]
    fitting = [own for own in maps if found.bits(own) <= bits * (1 + 1e-7)]
    best = min(Costs.cost(own) for own in fitting)
    chosen = allocate.solve_exact(found, bits)
    assert found.bits(chosen) <= bits * (1 + 1e-6)
    assert Costs.cost(chosen) == pytest.approx(best, abs=1e-6)
    walked = allocate.solve_greedy(found, bits)
    assert found.bits(walked) <= bits * (1 + 1e-9)
    assert Costs.cost(walked) >= best - 1e-9
    single = allocate.solve_uniform(found, bits)
    assert single is not None
    assert Costs.cost(single) >= best - 1e-9


def put(
    store: Store, bits: str, cost: dict[Place, float], heads: list[dict[str, object]] | None = None, **changes: object
) -> Record:
    """A record of costs as `task=sensitivity` leaves it, on 64 numbers a place; `heads`: rows of heads."""
    sides = {f"{side}_bits": float(bits) + 0.5 for side in ("key", "value")}
    rows = [
        {
            "item": f"layer {layer} {side}",
            "layer": layer,
            "side": side,
            "kl_mean": kl,
            "packed_bytes": 8 * sides["key_bits"],
        }
        for (layer, side), kl in cost.items()
    ]
    if heads is not None:
        changes["settings"] = made.config("kivi", bits, {"name": "sensitivity", "heads": True})
    record = made.record("kivi", bits, task="sensitivity", **changes)  # type: ignore[arg-type]
    return store.put(record, [*rows, *(heads or []), {"item": "all", "kl_mean": 1.0, **sides}])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Keys of layer 0 cost ten times as much as all else; 4 bits save nine tenths."""
    store = Store(tmp_path / "results")
    at2 = {place: 1.0 if place == (0, "key") else 0.1 for place in PLACES}
    put(store, "2", at2)
    put(store, "4", {place: cost / 10 for place, cost in at2.items()})
    return store


def test_a_map_and_the_preset_that_stores_by_it(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine" / "method" / "own.yaml"
    words = ["model=tiny", "method=kivi", "bits=3", f"results={store.root}", f"out={out}", "full=false"]
    assert allocate.main(words) == 0
    said = capsys.readouterr().out
    assert "integer program   0.4000 nats of KL in sum, 3.000 bits" in said
    assert "one width a side  1.3000 nats of KL in sum, 2.500 bits" in said
    preset = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert preset["bits_by_layer"] == {"key": [4, 2], "value": [2, 2]}
    assert preset["full_precision_layers"] == {"key": [], "value": []}
    config = resolve(compose(["method=own", "bits=2"], config_dir=tmp_path / "mine"))
    method = method_of(config, 64)
    assert [one.bits.label for one in method.by_layer if one.bits] == ["k4v2", "2"]


def test_sides_in_full_precision(store: Store, tmp_path: Path) -> None:
    records = allocate.find_records(store, "tiny", "kivi", None)
    found = allocate.read_costs(records, store)
    assert found.numbers == 4 * 64
    chosen = allocate.solve_exact(found, 8.0)
    assert {place for place, option in chosen.items() if option.width == FULL} == {(0, "key")}
    preset = yaml.safe_load(allocate.preset_text("own", "kivi", chosen, "a note"))
    assert preset["full_precision_layers"] == {"key": [0], "value": []}
    assert preset["bits_by_layer"]["key"] == [4, 4]
    folder = tmp_path / "mine" / "method"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text(yaml.safe_dump(preset))
    method = method_of(resolve(compose(["method=own", "bits=2"], config_dir=tmp_path / "mine")), 64)
    assert method.codec("key", 0, 2) is None
    assert method.codec("key", 1, 2) is not None


def test_bits_of_heads(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Second heads have all of their sides' cost; at 3 bits on average the two that cost most have 4."""
    words = ["model=tiny", "method=kivi", "bits=3", f"results={store.root}", "full=false", "heads=true"]
    assert allocate.main(words) == 1
    assert "task=sensitivity task.heads=true model=tiny" in capsys.readouterr().err
    for bits, scale in (("2", 1.0), ("4", 0.1)):
        at = {place: scale * {(0, "key"): 1.0, (1, "value"): 0.2}.get(place, 0.1) for place in PLACES}
        rows = [
            {"item": f"{place} {head}", "head": head, "of": [place[1], place[0]], "kl_mean": cost * (head == 1)}
            for place, cost in at.items()
            for head in (0, 1)
        ]
        put(store, bits, at, heads=rows)
    out = tmp_path / "mine" / "method" / "own.yaml"
    assert allocate.main([*words, f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert "integer program   0.3200 nats of KL in sum, 3.000 bits" in said
    assert "keys   2/4 2/2\n" in said
    preset = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert preset["bits_by_layer"] == {"key": [[2, 4], 2], "value": [2, [2, 4]]}
    method = method_of(resolve(compose(["method=own", "bits=2"], config_dir=tmp_path / "mine")), 64)
    assert [type(codec).__name__ for codec in (method.codec("key", 0, 2), method.codec("value", 0, 2))] == [
        "HeadsCodec",
        "Codec",
    ]
    assert allocate.main(words[:-1]) == 0  # by sides, from the records that have no heads
    assert "0.4000 nats" in capsys.readouterr().out


def test_stale_costs_are_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate, "is_stale", lambda record: True)
    with pytest.raises(RecordError):
        allocate.find_records(store, "tiny", "kivi", None)


def test_records_that_give_no_costs(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"the narrowest map stores 2\.500 bits"):
        allocate.solve_exact(allocate.read_costs(allocate.find_records(store, "tiny", "kivi", None), store), 2.0)
    put(store, "2", dict.fromkeys(PLACES, 0.5), settings=made.config("kivi", "2") | {"seed": 1})
    with pytest.raises(RecordError, match="two records of"):
        allocate.read_costs(allocate.find_records(store, "tiny", "kivi", None), store)
    put(store, "3", dict.fromkeys(PLACES, 0.5), dataset="essays")
    with pytest.raises(RecordError, match="choose by dataset="):
        allocate.find_records(store, "tiny", "kivi", None)
    with pytest.raises(RecordError, match=r"two records|do not have the same"):
        allocate.read_costs(store.scan()[0], store)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["model=tiny", "method=kivi"], 2, "needs bits="),
        (["model=tiny", "method=kivi", "bits=many"], 2, "bits=many: a number"),
        (["model=tiny", "method=kivi", "bits=3", "full=no"], 2, "true or false"),
        (["speed=1"], 2, "speed=1: model="),
        (["model=tiny", "method=nsn", "bits=3"], 1, "measure them: python run.py -m task=sensitivity model=tiny"),
    ],
)
def test_a_bad_question_is_one_line(
    words: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allocate.main([*words, f"results={tmp_path}"] if status == 1 else words) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate.main(["--help"]) == 0
    assert "kvq allocate" in capsys.readouterr().out
