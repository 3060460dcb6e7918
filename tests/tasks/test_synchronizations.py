"""How often scoring waits for the device: as often for a window of many chunks as for one of few."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvq.cache import side
from kvq.config import compose, resolve
from kvq.results.files import Journal
from kvq.runs import Prepared
from kvq.tasks.measurement import Baseline

READS = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive", "_unique2")
"""Operations after which the host knows a number of the device, or a shape that depends on one."""
QUICK = [("kivi", "generation"), ("nsnquant", "generation"), ("kivi", "parallel")]
METHODS = ("kivi", "nsn", "nsnquant", "oscar", "turboquant", "waterfill_kv")
CASES = {(method, scoring) for method in METHODS for scoring in ("generation", "parallel")} - {*QUICK}


class CountReads(TorchDispatchMode):
    """Counts `READS`, and what is picked by a mask, whose size the host must know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.name().partition("::")[2].partition(".")[0]
        masked = name.startswith("index") and isinstance(args[1], list | tuple)
        masked = masked and any(one is not None and one.dtype is torch.bool for one in args[1])
        if name in READS or masked:
            self.found[name] += 1
        return operation(*args, **(kwargs or {}))


def reads(method: str, scoring: str, context: int, folder: Path) -> Counter[str]:
    words = ["model=tiny", f"method={method}", "bits=2", f"task.context={context}", "task.max_windows=2"]
    words += [f"task.scoring={scoring}", "task.windows=disjoint", "threads=1", f"results_dir={folder}"]
    words += ["method.calibration.length=1024", "method.calibration.samples=4"] if method == "waterfill_kv" else []
    prepared = Prepared(resolve(compose(words)))
    bound = prepared.method
    if prepared.calibrates:
        from kvq.calibration.fit import load_or_fit

        bound, _ = load_or_fit(prepared.inputs, bound)
    measured = prepared.task.measure(prepared.inputs, bound, None, Journal())
    counting = CountReads()
    with counting:
        prepared.task.measure(prepared.inputs, bound, Baseline("", measured.metrics, measured.samples), Journal())
    return counting.found


@pytest.mark.parametrize(
    ("method", "scoring"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in sorted(CASES))]
)
def test_chunks_wait_for_no_device(method: str, scoring: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(side, "reads_at_once", lambda device: False)
    reads(method, scoring, 256, tmp_path)  # what a process asks once: codebooks, styles of rotary embeddings
    assert reads(method, scoring, 768, tmp_path) == reads(method, scoring, 256, tmp_path)
