"""Time and memory of `make tables figures report` on 2,000 synthetic records, made from the committed ones.

python experiments/bench/bench_report.py [--records 2000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvq.results import Store, run_key

ROOT = Path(__file__).parents[2]
# Each with the name under which `make` has it.
COMMANDS = {
    "tables": ("kvq.report",),
    "experiments": ("kvq.papers",),
    "figures": ("kvq.report.figures",),
    "report": ("kvq.report.html",),
}
PROTOCOLS = 2
LIMITS = {"seconds": 60.0, "peak_bytes": 1e9}


def synthesize(records: int, folder: Path) -> None:
    """Copy committed records under other seeds (protocols) and method names until there are `records` of them."""
    source, target = Store(ROOT / "results"), Store(folder)
    templates = source.scan()[0]
    samples = {template.key: source.samples(template.key) for template in templates}
    baselines: dict[tuple[str, int], str] = {}
    written = 0
    for first in (True, False):  # full precision, which the others name, comes first
        for index in range(records):
            template, seed = templates[index % len(templates)], index // len(templates) % PROTOCOLS
            copy = index // len(templates) // PROTOCOLS
            if first != (template.baseline_key is None) or (first and copy) or written == records:
                continue
            config = {**template.config, "seed": seed, "copy": copy}
            key, name = run_key(config), template.method if not copy else f"{template.method}/copy_{copy}"
            if first:
                baselines[template.key, seed] = key
            update = {"key": key, "config": config, "method": name, "samples_sha256": None}
            if template.baseline_key is not None:
                update["baseline_key"] = baselines[template.baseline_key, seed]
            target.put(template.model_copy(update=update), samples[template.key])
            written += 1


def _children() -> float:
    """Processor seconds of all commands so far, which a busy machine does not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(records: int) -> dict[str, Any]:
    """Seconds of each command and the largest peak of resident memory of any, beside what they may cost."""
    with tempfile.TemporaryDirectory(prefix="kvq-bench-") as folder:
        synthesize(records, Path(folder))
        seconds, cpu = {}, {}
        for name, (module, *words) in COMMANDS.items():
            start, used = time.perf_counter(), _children()
            command = [sys.executable, "-m", module, *words, "--results", folder]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            seconds[name], cpu[name] = time.perf_counter() - start, _children() - used
        files = {name: len(list((Path(folder) / name).rglob("*"))) for name in ("runs", "tables", "figures")}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "records": records,
        "files": files,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "total_seconds": sum(seconds.values()),
        "peak_bytes": peak,
        "limits": LIMITS,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2000, help="how many (default 2000)")
    print(json.dumps(measure(parser.parse_args().records), indent=2))


if __name__ == "__main__":
    main()
