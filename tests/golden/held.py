"""A golden output: what was stored when the versions were these, and how it is compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "stored"
TOLERANCE = 1e-3
"""Of the root mean square: other processors round otherwise, and a code may fall on the other side of a boundary."""
SHARE = 0.97
"""Of the numbers, within the tolerance; of what a method decodes, in the median layer of each side: a code that falls
otherwise in one layer moves the states of the next, so the last layer is held to `HALF`."""
FITTED = 2e-3
"""Relative; bytes of methods that store lists (outliers, code words) follow their data."""
LISTS = ("SparseCodec", "HuffmanCodec", "DeflateCodec")
AMPLIFYING = (
    *("CoupledQuantizer", "NonUniformQuantizer", "LearnedRotation", "DeltaQuantizer", "FisherTransform"),
    "PrincipalComponents",
)
"""Parts that make much of a rounding, so that another processor decodes something else with the same loss: k-means,
learned rotations and bases of eigenvectors end elsewhere, and a delta that is rounded the other way moves the rest of
its block. Their goldens have a loss, and so have those of `methods.TRUNCATED`."""
HALF = 0.5
"""Of a layer's numbers, within the tolerance where a part amplifies; the median layer of each side is held to it."""
LOSS = 0.05
"""Relative; of what such a method loses in the median layer of each side."""
NO_LOSS = 1e-5
"""Relative squared errors far below it, of tables that hold every state, are the rounding of fp16."""
LAYERS, SIDES = 3, 2
PLACES = LAYERS * SIDES


@dataclass(frozen=True)
class Golden:
    """Outputs of one case, and the versions of all that made them."""

    versions: dict[str, int | str]
    exact: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)


def read(file: Path) -> dict[str, Golden]:
    """Goldens of a file by case; none where there is no file."""
    if not file.is_file():
        return {}
    return {name: Golden(**value) for name, value in json.loads(file.read_text(encoding="utf-8")).items()}


def write(file: Path, goldens: Mapping[str, Golden]) -> None:
    """One line for each list of numbers, five digits each."""
    shown = {}
    for name, golden in sorted(goldens.items()):
        shown[name] = asdict(golden) | {
            "numbers": {what: [float(f"{x:.5g}") for x in values] for what, values in golden.numbers.items()}
        }
    text = json.dumps(shown, indent=1, sort_keys=True)
    file.parent.mkdir(exist_ok=True)
    file.write_text(_lists_on_a_line(text) + "\n", encoding="utf-8")


def _lists_on_a_line(text: str) -> str:
    out: list[str] = []
    inside = False
    for line in text.split("\n"):
        if inside:
            out[-1] += line.strip() if line.strip() in ("]", "],") else line.strip() + " "
            inside = line.strip() not in ("]", "],")
        else:
            out.append(line)
            inside = line.endswith("[")
    return "\n".join(line.replace(" ]", "]") for line in out)


def moved(before: Golden, now: Golden) -> list[str]:
    """What is not as it was, in words; empty where all is within the tolerance."""
    found = []
    for name in sorted(before.exact.keys() | now.exact.keys()):
        old, new = before.exact.get(name), now.exact.get(name)
        if old is None or new is None or abs(old - new) > FITTED * old * (not before.versions.keys().isdisjoint(LISTS)):
            found.append(f"{name} was {old}, is {new}")
    for name in sorted(before.numbers.keys() | now.numbers.keys()):
        a, b = (np.array(golden.numbers.get(name, []), dtype=np.float64) for golden in (before, now))
        if a.shape != b.shape:
            found.append(f"{name} had {a.size} numbers, has {b.size}")
            continue
        if name == "loss":
            off = _of_sides(np.abs(a - b) / (a + NO_LOSS), a.size).max()
            found += [f"loss: moved by {off:.1%} of itself"] if off > LOSS else []
            continue
        scale = float(np.sqrt(np.mean(a**2))) or 1.0
        near = np.abs(a - b) <= TOLERANCE * scale
        inside, least = float(near.mean()) if a.size else 1.0, SHARE
        if name == "decoded":
            amplifies = "loss" in before.numbers
            inside, least = float(_of_sides(near, PLACES).min()), HALF if amplifies else SHARE
            if not amplifies and inside >= least:
                inside, least = float(near.reshape(PLACES, -1).mean(-1).min()), HALF
        if inside < least:
            found.append(f"{name}: {1 - inside:.0%} of {a.size} numbers moved by more than {TOLERANCE} of their size")
    return found


def _of_sides(numbers: Any, places: int) -> Any:
    """Means of the `places` (layers, then sides) that numbers are of, the median layer's of each side."""
    return np.median(numbers.reshape(places // SIDES, SIDES, -1).mean(-1), axis=0)


def complaint(moving: Mapping[str, tuple[Golden, list[str]]]) -> str:
    """What moved, which version to raise, and the command that writes the goldens anew."""
    standing = [golden for file in FOLDER.glob("*.json") for name, golden in read(file).items() if name not in moving]
    suspects = to_raise([golden for golden, _ in moving.values()], standing)
    lines = [f"{name}: {'; '.join(what)}" for name, (_, what) in moving.items()]
    return "\n".join(
        [
            *lines,
            f"Raise the version of what changed ({', '.join(suspects)}), so that its records are measured again, then:",
            "    python -m tests.golden " + " ".join(f"'{name}'" for name in moving),
        ]
    )


def to_raise(moving: Sequence[Golden], standing: Iterable[Golden]) -> list[str]:
    """Parts that every golden that moved has and no golden that stood; else those that all that moved have."""
    common = set.intersection(*(set(golden.versions) for golden in moving))
    return sorted(common - {name for golden in standing for name in golden.versions} or common)


def file_of(name: str) -> Path:
    """File of a case: methods by family, tasks and models together."""
    kind, _, case = name.partition(" ")
    return FOLDER / (f"method_{case.partition('/')[0]}.json" if kind == "method" else f"{kind}s.json")
