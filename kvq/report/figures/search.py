"""The figure of searches: their trials with the frontier, and what they dominate after so many trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.figures.plots import below, dress, panels, points, titled
from kvq.report.figures.style import colour
from kvq.results import Store, run_key
from kvq.results.frontier import dominated

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def searches(store: Store) -> dict[str, list[Mapping[str, Any]]]:
    """Searches of a results folder that differ in sampler and seed alone, by a digest of what they share."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for path in sorted((store.root / "searches").glob("*.json")):
        one = _read(path)
        if one is not None:
            settings = {name: value for name, value in one["settings"].items() if name not in ("sampler", "seed")}
            shared = {"axes": one["axes"], "fixed": one["fixed"], "settings": settings}
            found.setdefault(run_key(shared)[:8], []).append(one)
    return found


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return found if {"axes", "fixed", "settings", "trials", "hypervolume"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def search_table(found: list[Mapping[str, Any]]) -> pd.DataFrame:
    """One line per trial: sampler, seed, its number, its values, whether it is on the frontier of all, hypervolume."""
    lines = []
    for search in found:
        settings = search["settings"]
        for number, (trial, volume) in enumerate(zip(search["trials"], search["hypervolume"], strict=True), 1):
            values = dict(zip(settings["objectives"], trial["values"] or [], strict=False))
            own = {"sampler": settings["sampler"], "seed": settings["seed"], "trial": number, "hypervolume": volume}
            lines.append({**own, "words": " ".join(trial["words"]), **values})
    table = pd.DataFrame(lines)
    objectives = found[0]["settings"]["objectives"]
    done = table.dropna(subset=objectives)
    table.loc[done.index, "frontier"] = [not beaten for beaten in dominated(done[objectives].to_numpy().tolist())]
    return table


@titled
def search_figure(table: pd.DataFrame, objectives: str) -> Figure:
    """Trials and the frontier of all of them on the left; on the right hypervolume, a line for each seed."""
    first, second = objectives.split(",")[:2]
    made, axes = panels(2, 3.0, 1, 2)
    done = table.dropna(subset=[first, second])
    for index, (sampler, part) in enumerate(table.groupby("sampler", sort=True)):
        own = part.dropna(subset=[first, second])
        points(axes[0], own[second], own[first], index, str(sampler), s=14)
        for place, (_, line) in enumerate(part.groupby("seed")):
            label = str(sampler) if place == 0 else None
            axes[1].plot(line["trial"], line["hypervolume"], color=colour(index), linewidth=0.9, label=label)
    free = done[done["frontier"].astype(bool)].drop_duplicates([first, second]).sort_values(second)
    axes[0].plot(free[second], free[first], color="black", linewidth=0.7, zorder=0)
    axes[0].set_yscale("log")
    dress(axes[0], second, first, "both")
    dress(axes[1], "trials", "hypervolume (share of the box)", "y", whole=True)
    below(made, axes[1], 4)
    return made
