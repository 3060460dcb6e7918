"""`kvq allocate model=smollm2_135m method=nsnquant bits=2`: bits of each layer's keys and values, or of their heads.

Costs are those of `task=sensitivity` on record, at every width that was measured; a side of a layer, or a head of it,
may also stay in full precision. An integer program finds the map of least cost that stores at most the bits asked for,
as measured; a greedy one and the best single width are printed next to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvq.errors import ConfigError, RecordError
from kvq.report.labels import label
from kvq.results import Record, Store, is_stale, run_key
from kvq.results.files import write_file
from kvq.results.presets import protocol_parts
from kvq_lab.words import parse_number, parse_words, run_command

SIDES = ("key", "value")
FULL = 16
"""Width of a side that stays in full precision: fp16, at no cost."""
_USAGE = """Bits of each layer's keys and values, from costs on record (task=sensitivity).

  python run.py -m task=sensitivity model=smollm2_135m dataset=pydocs method=nsnquant bits=1,2
  kvq allocate model=smollm2_135m dataset=pydocs method=nsnquant bits=2 out=mine/method/own.yaml
  python run.py --config-dir mine model=smollm2_135m method=own

  model=NAME      as in the records
  method=NAME     as in the records; its widths are those that are on record, and full precision
  bits=NUMBER     most bits per element on average, as measured (scales and norms included)
  dataset=NAME    text of the costs; default: the only one on record
  full=false      no side of a layer may stay in full precision (default: true)
  heads=true      bits of each KV head, from records with task.heads=true (default: false)
  out=FILE        writes the map as a preset, which a run takes with --config-dir
  results=FOLDER  default: results
"""
Place = tuple[int, str] | tuple[int, str, int]
"""A layer and a side, or a head of them."""


class Option(NamedTuple):
    """A bit width for a layer's keys or values: nominal width, bytes stored, KL to full precision in nats per token."""

    width: int
    bytes: float
    cost: float


@dataclass(frozen=True)
class Costs:
    """Options of each place, sorted by width; `numbers`: elements of keys and values that all places store."""

    options: Mapping[Place, tuple[Option, ...]]
    numbers: float

    def bits(self, chosen: Mapping[Place, Option]) -> float:
        """Measured bits per element of a map, the choice of an option for each place."""
        return 8 * sum(option.bytes for option in chosen.values()) / self.numbers

    @staticmethod
    def cost(chosen: Mapping[Place, Option]) -> float:
        """Sum of the costs of a map."""
        return sum(option.cost for option in chosen.values())


def read_costs(records: Sequence[Record], store: Store, full: bool = True, heads: bool = False) -> Costs:
    """Costs from records of `task=sensitivity` of one method, one protocol, at several widths.

    How many numbers a place stores follows from its bytes and the bits per element of its side in all layers; heads of
    a side store equally many (`kvq.codecs.HeadsCodec` takes no other codecs).
    """
    tables: dict[Place, dict[int, Option]] = {}
    numbers: dict[Place, float] = {}
    for record in records:
        if not record.bits.isdecimal():
            raise RecordError(f"bits={record.bits}: costs are needed at one width for keys and values")
        rows = store.samples_of(record)
        together = next(row for row in rows if row["item"] == "all")
        for place, size, cost in _places(rows, heads):
            width = int(record.bits)
            if width in tables.setdefault(place, {}):
                raise RecordError(f"two records of {label(record)} at {width} bits: their protocols differ")
            tables[place][width] = Option(width, size, cost)
            numbers[place] = 8 * size / float(together[f"{place[1]}_bits"])
    if len({frozenset(options) for options in tables.values()}) > 1:
        raise RecordError("records of different widths do not have the same layers and sides")
    if full:
        for place, by_width in tables.items():
            by_width.setdefault(FULL, Option(FULL, FULL / 8 * numbers[place], 0.0))
    options = {place: tuple(row[width] for width in sorted(row)) for place, row in sorted(tables.items())}
    return Costs(options, sum(numbers.values()))


def _places(rows: Sequence[Mapping[str, Any]], heads: bool) -> Iterator[tuple[Place, float, float]]:
    """Yield each place of a record with its stored bytes and its cost, KL in nats per token."""
    sides = {(int(row["layer"]), str(row["side"])): row for row in rows if "side" in row}
    of_heads = [((int(row["of"][1]), str(row["of"][0])), row) for row in rows if "head" in row]
    count = Counter(place for place, _ in of_heads)
    for place, row in of_heads if heads else sides.items():
        size = float(sides[place]["packed_bytes"])
        where = (*place, int(row["head"])) if heads else place
        yield where, size / count[place] if heads else size, float(row["kl_mean"])


def solve_exact(costs: Costs, bits: float) -> dict[Place, Option]:
    """The options of least total cost with at most `bits` per element on average, by an integer program."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [(place, option) for place, options in costs.options.items() for option in options]
    budget = bits * costs.numbers / 8
    if sum(min(option.bytes for option in options) for options in costs.options.values()) > budget:
        raise ConfigError(f"bits={bits:g}: the narrowest map stores {costs.bits(_choose_narrowest(costs)):.3f} bits")
    once = np.array([[float(place == at) for at, _ in flat] for place in costs.options])
    limits = [
        LinearConstraint(once, 1, 1),
        LinearConstraint(np.array([[option.bytes for _, option in flat]]) / budget, -np.inf, 1),
    ]
    cost = np.array([option.cost for _, option in flat])
    scale = float(cost.max()) or 1.0
    solved = milp(cost / scale, constraints=limits, integrality=np.ones(len(flat)), bounds=Bounds(0, 1))
    if solved.x is None:
        raise ConfigError(f"bits={bits:g}: the solver found no map ({solved.message})")
    return {place: option for (place, option), taken in zip(flat, solved.x, strict=True) if taken > 0.5}


def solve_greedy(costs: Costs, bits: float) -> dict[Place, Option]:
    """Widen places from their narrowest options, most cost saved per byte first, while the mean is at most `bits`."""
    chosen, budget = _choose_narrowest(costs), bits * costs.numbers / 8
    while True:
        room = budget - sum(option.bytes for option in chosen.values())
        steps = [
            ((chosen[place].cost - option.cost) / (option.bytes - chosen[place].bytes), place, option)
            for place, options in costs.options.items()
            for option in options
            if chosen[place].bytes < option.bytes <= chosen[place].bytes + room and option.cost < chosen[place].cost
        ]
        if not steps:
            return chosen
        _, place, option = max(steps)
        chosen[place] = option


def solve_uniform(costs: Costs, bits: float) -> dict[Place, Option] | None:
    """A width for all keys and one for all values: of pairs within mean `bits` the cheapest; None: no pair fits."""
    widths = sorted({option.width for options in costs.options.values() for option in options})
    maps = []
    for key, value in product(widths, repeat=2):
        asked = {"key": key, "value": value}
        plan = {
            place: next(option for option in options if option.width == asked[place[1]])
            for place, options in costs.options.items()
        }
        if costs.bits(plan) <= bits * (1 + 1e-9):
            maps.append((costs.cost(plan), key, value, plan))
    return min(maps, key=lambda one: one[:3])[3] if maps else None


def _choose_narrowest(costs: Costs) -> dict[Place, Option]:
    return {place: min(options, key=lambda option: option.bytes) for place, options in costs.options.items()}


def preset_text(name: str, method: str, chosen: Mapping[Place, Option], note: str) -> str:
    """The YAML of a preset that stores each place in the width chosen for it."""
    layers = 1 + max(place[0] for place in chosen)
    quantized = [option.width for option in chosen.values() if option.width < FULL]
    filler = min(quantized, default=FULL)
    maps: dict[str, list[int | list[int]]] = {}
    whole: dict[str, list[int]] = {}
    for side in SIDES:
        by_layer = [_widths_at(chosen, layer, side) or [filler] for layer in range(layers)]
        whole[side] = [layer for layer, widths in enumerate(by_layer) if set(widths) == {FULL}]
        kept = [[filler] if set(widths) == {FULL} else widths for widths in by_layer]
        maps[side] = [widths[0] if len(set(widths)) == 1 else widths for widths in kept]
    fields: dict[str, Any] = {"defaults": [f"/method/{method}@_here_", "_self_"], "name": name, "note": note}
    fields |= {"bits_by_layer": maps, "full_precision_layers": whole}
    return yaml.safe_dump(fields, sort_keys=False, default_flow_style=None, width=120)


def _widths_at(chosen: Mapping[Place, Option], layer: int, side: str) -> list[int]:
    """The width of a layer's keys or values, as one entry, or the widths of its heads."""
    return [option.width for place, option in sorted(chosen.items()) if place[:2] == (layer, side)]


def find_records(store: Store, model: str, method: str, dataset: str | None, heads: bool = False) -> list[Record]:
    """Records of `task=sensitivity` of a model and a method, on one text.

    `heads`: those with costs of heads; else those without, or where there are none, with them.
    """
    matching = [
        record
        for record in store.scan()[0]
        if (record.task, record.model, record.method, record.status) == ("sensitivity", model, method, "done")
        and dataset in (None, record.dataset)
        and not is_stale(record)
        and (_has_heads(record) or not heads)
    ]
    texts = sorted({record.dataset for record in matching})
    if not matching:
        raise RecordError(
            f"no costs of method={method} on model={model} are on record; measure them: python run.py -m "
            f"task=sensitivity {'task.heads=true ' if heads else ''}model={model} method={method} bits=2,3,4"
        )
    if len(texts) > 1:
        raise RecordError(f"costs of method={method} on {', '.join(texts)} are on record; choose by dataset=")
    chosen = matching if heads else [record for record in matching if not _has_heads(record)] or matching
    forms = {(label(one), run_key(protocol_parts(one))): one.key[:8] for one in chosen}
    if len(forms) > 1:
        raise RecordError(f"two records of method={method} differ in more than bits: {', '.join(forms.values())}")
    return sorted(chosen, key=lambda record: record.bits)


def _has_heads(record: Record) -> bool:
    return bool(record.config["task"].get("heads"))


def map_text(chosen: Mapping[Place, Option]) -> str:
    """Widths of keys and of values, a digit or two per layer or `2/3/2` for its heads, in one line each."""
    lines = []
    for side in SIDES:
        layers = sorted({place[0] for place in chosen if place[1] == side})
        texts = ["/".join(map(str, _widths_at(chosen, layer, side))).rjust(2) for layer in layers]
        lines.append(f"{side + 's':7}" + " ".join(texts))
    return "\n".join(lines)


_NAMES = ("model", "method", "bits", "dataset", "full", "heads", "out", "results")


def _parse(words: Sequence[str]) -> dict[str, str]:
    """The values of a command line by name, with defaults. Raises: ConfigError: one is missing or wrong."""
    values = {"results": "results", "full": "true", "heads": "false"} | parse_words(words, _NAMES)
    for name in ("model", "method", "bits"):
        if name not in values:
            raise ConfigError(f"allocate: needs {name}=; --help says the rest")
    for name in ("full", "heads"):
        if values[name] not in ("true", "false"):
            raise ConfigError(f"{name}={values[name]}: true or false")
    return values


def _allocate(words: list[str]) -> int:
    args = _parse(words)
    bits = parse_number("bits", args["bits"], f"a number above 0 and up to {FULL}", lambda value: 0 < value <= FULL)
    store = Store(args["results"])
    full, heads = (args[name] == "true" for name in ("full", "heads"))
    records = find_records(store, args["model"], args["method"], args.get("dataset"), heads)
    costs = read_costs(records, store, full, heads)
    best, greedy, single = solve_exact(costs, bits), solve_greedy(costs, bits), solve_uniform(costs, bits)
    text, widths = records[0].dataset, ", ".join(record.bits for record in records)
    print(f"{args['method']} on {args['model']}, costs on {text} at {widths} bits, at most {bits:g} bits as measured")
    for name, plan in (("integer program", best), ("greedy", greedy), ("one width a side", single)):
        sums = "none fits" if plan is None else f"{costs.cost(plan):.4f} nats of KL in sum, {costs.bits(plan):.3f} bits"
        print(f"  {name:17} {sums}")
    print(map_text(best))
    if "out" in args:
        path = Path(args["out"])
        note = f"Widths by task=sensitivity on {text}, at most {bits:g} measured bits (kvq allocate)."
        try:
            write_file(path, preset_text(path.stem, args["method"], best, note).encode())
        except OSError as error:
            raise RecordError(f"out={path}: cannot be written: {error.strerror}") from error
        run = f"python run.py --config-dir {path.parent.parent} model={args['model']} method={path.stem}"
        print(f"written: {path}; {run}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the map and return 0; 1: costs are not on record; 2: a question that cannot be answered."""
    return run_command(arguments, _USAGE, _allocate, RecordError)
