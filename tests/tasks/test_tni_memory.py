from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Peak memory in bytes of the whole process, less what it held before the measured part: import, weights, text.
# Not `ru_maxrss`, which a child inherits from the process that started it. glibc is told to give back what is freed:
# what it would keep for later changes from run to run.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
PROGRAM = """
import sys, torch
from kvq.config import compose, resolve
from kvq.diagnostic_config import TniConfig
from kvq.models import load_model
from kvq.results.provenance import PeakMemory
from kvq.tasks.capture import capture
from kvq.tasks.tni import Norms

torch.set_num_threads(1)
loaded = load_model(resolve(compose(["model=tiny", "method=fp16"])).model, "cpu")
task = TniConfig(context=2048, windows=1)
norms = Norms(task)
tokens = torch.arange(2048) % loaded.text_config.vocab_size
capture(loaded, tokens[:64], lambda layer: None)
before = PeakMemory().read()
peak = PeakMemory()
if sys.argv[1] == "tni":
    capture(loaded, tokens, norms.add)
else:
    with torch.no_grad():
        loaded.model.base_model(input_ids=tokens[None], use_cache=False)
print(peak.read() - before)
"""


@pytest.mark.slow
@pytest.mark.bench
def test_norms_are_streamed() -> None:
    """At 2,048 tokens on `tiny`, looking at all norms takes less than twice the memory of a plain forward."""
    peaks = {
        part: int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, part],
                env=os.environ | RETURNED,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for part in ("plain", "tni")
    }
    assert peaks["tni"] < 2 * peaks["plain"], peaks
