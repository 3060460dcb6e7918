"""No number moves without the version of what made it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvq.results.record import declared_versions
from tests.golden import methods, models, tasks
from tests.golden.held import Golden, complaint, file_of, moved, read, to_raise

ROOT = Path(__file__).resolve().parents[2]


def hold(name: str, golden: Golden) -> None:
    before = read(file_of(name)).get(name)
    assert before is not None, f"{name} has no golden: python -m tests.golden '{name}'"
    what = moved(before, golden)
    assert not what, complaint({name: (golden, what)})
    assert before.versions == golden.versions, f"a version was raised: python -m tests.golden '{name}'"


@pytest.mark.parametrize("name", methods.METHODS)
def test_methods(name: str) -> None:
    if package := methods.missing(name):
        pytest.skip(f"needs the extra [{package}]")
    hold(f"method {name}", methods.golden_of(name))


@pytest.mark.parametrize("name", tasks.CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_tasks(name: str, tmp_path: Path) -> None:
    hold(f"task {name}", tasks.golden_of(name, tmp_path))


@pytest.mark.parametrize("name", models.FAMILIES)
def test_models(name: str) -> None:
    hold(f"model {name}", models.golden_of(name))


@pytest.mark.parametrize("name", ["waterfill/heads_apart", "waterfill/pairs"])
def test_how_many_heads_share_a_transform_is_held(name: str) -> None:
    assert moved(_golden("method waterfill"), _golden(f"method {name}"))


@pytest.mark.every_plugin
def test_every_part_of_every_method_and_task_has_a_golden() -> None:
    """All but what times, other libraries' caches and engines, which may not be installed, and rotations of weights.

    `tests/methods/test_merged.py` holds the last against the rotation in the codec, to 1e-9; `test_bits_by_layer.py`
    heads of different bits against caches of one head each.
    """
    held = {name for case in _cases() for name in _golden(case).versions}
    settings = {name for name in declared_versions() if name.endswith("Config")}
    engines = {"LlamaCpp", "LogitsFile", "Mlx", "OnnxRuntime"}
    elsewhere = {"latency", "throughput", "LibraryCache", "MergedRotation", "HeadsCodec", *engines}
    assert set(declared_versions()) - held - settings == elsewhere


def _cases() -> list[str]:
    files = sorted({file_of(f"method {name}") for name in methods.METHODS} | {file_of("task ppl")})
    return [name for file in files for name in read(file)]


def _golden(name: str) -> Golden:
    return read(file_of(name))[name]


def test_what_moves_is_found() -> None:
    before = Golden({"ppl": 1}, {"nbytes": 8}, {"x": [float(value) for value in range(100)]})
    assert moved(before, before) == []
    assert moved(before, Golden({"ppl": 1}, {"nbytes": 9}, before.numbers)) == ["nbytes was 8, is 9"]
    for share, stands in [(2, True), (20, False)]:
        numbers = [value + (5 if index < share else 0) for index, value in enumerate(before.numbers["x"])]
        assert (moved(before, Golden({"ppl": 1}, before.exact, {"x": numbers})) == []) is stands
    assert moved(before, Golden({"ppl": 1}, before.exact, {"x": [2 * x for x in before.numbers["x"]]}))
    assert moved(before, Golden({"ppl": 1}, before.exact, {}))


def test_parts_that_amplify_are_held_by_the_median_layer_and_their_loss() -> None:
    """Of three layers, one may be decoded otherwise with the same loss, as on another processor; no side in all."""
    numbers = {"decoded": [float(value) for value in range(1, 61)], "loss": [0.1] * 6}
    before = Golden({"CoupledQuantizer": 1}, {"nbytes": 8}, numbers)

    def now(places: set[int], loss: float = 0.1) -> Golden:
        decoded = [value + (9 if index // 10 in places else 0) for index, value in enumerate(numbers["decoded"])]
        return Golden(before.versions, before.exact, {"decoded": decoded, "loss": [loss] * 6})

    assert moved(before, now({4, 5})) == []  # the last layer's keys and values
    assert moved(before, now({0, 2, 4}))  # keys of all layers
    assert moved(before, now({1, 3}))  # values of two layers of three
    assert moved(before, now(set(), 0.11)) == ["loss: moved by 10.0% of itself"]


def test_a_rounding_may_move_the_last_layer_and_no_other() -> None:
    """A third of its numbers, on another processor; not most of them, and not those of two layers."""
    numbers = {"decoded": [float(value) for value in range(1, 61)]}
    before = Golden({"ppl": 1}, {"nbytes": 8}, numbers)

    def now(shares: dict[int, float]) -> Golden:
        moved = [value + 9 * (index % 10 < 10 * shares.get(index // 10, 0)) for index, value in enumerate(range(1, 61))]
        return Golden(before.versions, before.exact, {"decoded": [float(value) for value in moved]})

    assert moved(before, now({4: 0.3, 5: 0.3})) == []
    assert moved(before, now({4: 0.6}))
    assert moved(before, now({2: 0.3, 4: 0.3}))


def test_the_version_to_raise_is_named() -> None:
    one, two, three = (Golden(dict.fromkeys(names, 1)) for names in (["a", "b", "c"], ["a", "b"], ["a"]))
    assert to_raise([one, two], [three]) == ["b"]
    assert to_raise([one, three], [two]) == ["a"]


MACHINES = {
    "as it is": {"OMP_NUM_THREADS": "1"},
    "two threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "AVX2": {"OMP_NUM_THREADS": "1", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "no AVX": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
    "plain MKL": {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"},
}
"""Settings under which torch and MKL round as on other processors."""


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_goldens_hold_on_other_processors(machine: str) -> None:
    given = ["-q", "-p", "no:cacheprovider", "-n", "0", "-k", "test_methods or test_tasks or test_models"]
    run = [sys.executable, "-m", "pytest", *given, str(Path(__file__).relative_to(ROOT))]
    plain = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env={**plain, **MACHINES[machine]}, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
