"""Records that the schema takes and no run would write: settings, metrics, dates and samples changed at random."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from pathlib import Path
from typing import Any

from kvq.errors import RecordError
from kvq.results import Store, run_key
from kvq.results.files import loose_samples, read_samples
from kvq.results.record import parse_record

ODD: list[Any] = [
    *(None, 0, 1, -1, 5, 1e300, -0.5, True, "", "x", "k3v2", "nan", "../..", "<b>", [], [1, 2], ["a"], {}, {"a": 1}),
    *([None], {"name": 5}, {"quantizer": 7}, "\u0000", "é" * 50, [[[]]], {"stages": []}, 2**70, "1e9"),
]
DATES = ["0001-01-01T00:00:00+00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1969-12-31T23:59:59Z"]
Samples = list[dict[str, Any]]


def examples(results: Path, tasks: int = 3) -> list[tuple[dict[str, Any], bytes]]:
    """Some records of every task, with the bytes of their samples, each beside its full precision."""
    found: dict[str, list[dict[str, Any]]] = {}
    store = Store(results)
    for one in store.scan()[0]:
        record = json.loads(store.record_path(one.key).read_text(encoding="utf-8"))
        if record["baseline_key"] is not None or record["task"] in ("tni", "distribution", "synthetic", "memory"):
            found.setdefault(record["task"], []).append(record)
    chosen = [record for same in found.values() for record in same[:tasks]]
    keys = {record["key"] for record in chosen} | {record["baseline_key"] for record in chosen} - {None}
    out = []
    for key in sorted(keys):
        file = store.record_path(key)
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            out.append((found, read_samples(loose_samples(file)) if found["samples_sha256"] else b""))
    return out


def places(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [where, *(place for name, part in items for place in places(part, (*where, name)))]


def changed(value: Any, rng: random.Random) -> Any:
    """A copy with one place of it lost, or with something odd in it."""
    value = copy.deepcopy(value)
    found = [place for place in places(value) if place]
    if not found:
        return rng.choice(ODD)
    *path, last = rng.choice(found)
    inside = value
    for name in path:
        inside = inside[name]
    if rng.random() < 0.35:
        del inside[last]
    else:
        inside[last] = rng.choice(ODD)
    return value


def mutated(
    record: dict[str, Any], samples: bytes, others: list[bytes], rng: random.Random
) -> tuple[dict, bytes] | None:
    """An odd record that the schema still takes, with its samples, or None where this change is none."""
    record = copy.deepcopy(record)
    kind = rng.choice(
        ["config", "config", "config", "metrics", "names", "date", "samples", "rows", "baseline", "status"]
    )
    if kind == "config":
        for _ in range(rng.randint(1, 3)):
            record["config"] = changed(record["config"], rng)
    elif kind == "metrics":
        for name in rng.sample(sorted(record["metrics"]), min(len(record["metrics"]), rng.randint(1, 6))):
            if rng.random() < 0.5:
                del record["metrics"][name]
            else:
                record["metrics"][name] = rng.choice([0.0, -1.0, 1e300, 1e-300, -1e300, 2.5])
    elif kind == "names":
        record[rng.choice(["task", "model", "dataset", "method", "bits"])] = rng.choice(
            ["", "x", "ppl", "niah", "error", "memory", "../..", "k9v", "3", "1e9", "\u202e", "a" * 300]
        )
    elif kind == "date":
        record["provenance"]["started"] = rng.choice(DATES)
    elif kind == "samples":
        samples = rng.choice(others)
    elif kind == "rows" and samples:
        rows = [json.loads(line) for line in samples.splitlines()[:200]]
        rows = [changed(row, rng) if rng.random() < 0.3 else row for row in rows]
        samples = b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows)
    elif kind == "baseline":
        record["baseline_key"] = rng.choice([None, "0" * 64, "", "x", record["key"]])
    else:
        record["status"], record["reason"] = (
            rng.choice(["failed", "unsupported", "done"]),
            rng.choice([None, "", "x\ny"]),
        )
    if not isinstance(record["config"], dict):
        return None
    try:
        # A key of its own: by the seed, and so in a table of its own, or by the method, beside sound records.
        method, number = record["config"].get("method"), rng.randint(0, 2**31)
        if rng.random() < 0.5 and isinstance(method, dict):
            method["odd"] = number
        else:
            record["config"]["seed"] = number
        record["key"] = run_key(record["config"])
        record["samples_sha256"] = hashlib.sha256(samples).hexdigest() if samples else None
        parse_record(json.dumps(record).encode())
    except RecordError:
        return None
    return record, samples


def put(results: Path, record: dict[str, Any], samples: bytes) -> None:
    """Write a record as `Store.put` would have."""
    runs = results / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    file = runs / f"{record['key'][:8]}.json"
    file.write_text(json.dumps(record), encoding="utf-8")
    if samples:
        loose_samples(file).write_bytes(samples)
