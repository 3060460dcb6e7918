"""Sweeps that take a fraction of a second a run, for whoever tests what happens around runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq.cli import main
from kvq.config import compose, resolve
from kvq.models.inputs import Inputs
from kvq.results import Record, Store
from tests.random_models import save_random_model

TEXT = " ".join(f"{number} is the square of {root};" for root in range(300) for number in [root * root])


def small_run(folder: Path, model: Path | None = None) -> list[str]:
    """Overrides of a run on a random model and a text file in `folder`; the results are the caller's to place."""
    text = folder / "squares.txt"
    text.write_text(TEXT, encoding="utf-8")
    return [
        "model=hf",
        f"model.path={model or save_random_model(folder / 'model')}",
        "model.dtype=float32",
        "dataset=wikitext2",
        f"dataset.path={text}",
        "task.context=96",
        "task.stride=32",
        "task.max_windows=12",
        "residual.size=32",
    ]


def records(results: Path) -> dict[str, Record]:
    """Records of a results folder by method and bits; none may be broken."""
    found, broken = Store(results).scan()
    assert not broken
    names = {f"{record.method} {record.bits}".strip(): record for record in found}
    assert len(names) == len(found)
    return names


def numbers(results: Path) -> dict[str, tuple[str, dict[str, float]]]:
    """Key and metrics of each record."""
    return {name: (record.key, record.metrics) for name, record in records(results).items()}


def samples(results: Path, method: str) -> list[dict[str, Any]]:
    """Samples of the run of this method and bits."""
    return Store(results).samples(records(results)[method].key)


def refused(capsys: pytest.CaptureFixture[str], given: list[str], change: str, says: str) -> None:
    """The overrides, changed by these words, end with one line that says so."""
    pairs = [word.partition("=") for word in change.split()]
    words = [f"{name}='{value}'" if "{" in value else f"{name}={value}" for name, _, value in pairs]
    names = {word.partition("=")[0] for word in words}
    names |= {"residual.size"} if "residual" in names else {"dataset.path"} if "dataset" in names else set()
    assert main([*(word for word in given if word.partition("=")[0] not in names), *words]) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert says in err


def inputs_of(given: list[str], *changes: str) -> Inputs:
    """What a run of these overrides reads."""
    return Inputs(resolve(compose([*given, *changes])))
