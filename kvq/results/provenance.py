"""Provenance of a measurement: code, packages, machine and cost."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import mmap
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvq.config.explain import setting_of
from kvq.results.record import Provenance

PACKAGES = (
    "kvq",
    "torch",
    "transformers",
    "numpy",
    "hydra-core",
    "datasets",
    "lm-eval",
    "optimum-quanto",
    "hqq",
    "xllamacpp",
    "mlx",
    "mlx-lm",
)


def collect(*, device: str | torch.device = "cpu", **known: Any) -> Provenance:
    """The provenance of a run: what this process can find out, and the other fields of `Provenance` (`known`)."""
    commit, dirty = git_state()
    program = Path(sys.argv[0]).name or "python"  # by its file name only
    return Provenance(
        git_commit=commit,
        git_dirty=dirty,
        packages=package_versions(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        device=device_name(device),
        threads=torch.get_num_threads(),
        command=shlex.join([program, *sys.argv[1:]]),
        **known,
    )


def utc_now() -> datetime:
    """The present moment in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def single_command(words: Sequence[str]) -> str:
    """The command that measures one run, of a sweep too, quoted for a shell: its overrides without those of places."""
    places = ("results_dir", "plan", "force", "hydra")
    return shlex.join(["python", "run.py", *(word for word in words if _group(word) not in places)])


def full_precision_words(words: Sequence[str]) -> list[str]:
    """Overrides of the full-precision baseline of the run that these overrides compose."""
    return [*(word for word in words if _group(word) not in ("method", "bits", "residual")), "method=fp16"]


def _group(word: str) -> str:
    """The first part of the setting that an override changes: `model` of `model.path=x`."""
    return re.split(r"[./]", setting_of(word), maxsplit=1)[0]


@functools.cache
def git_state(package: Path | None = None) -> tuple[str | None, bool | None]:
    """Return (commit, dirty) of the checkout that tracks this package, or (None, None) when none does.

    `dirty` covers only the package, `conf/` and `run.py`, because a sweep writes results into the checkout. A package
    installed inside another project's checkout is not tracked there, and that commit is not reported.
    """
    package = Path(__file__).resolve().parents[1] if package is None else package
    tracked = _git(package, "ls-files", "--", ".")
    commit = _git(package, "rev-parse", "--verify", "HEAD")
    if not tracked or not commit:
        return None, None
    root = package.parent
    changes = _git(root, "status", "--porcelain", "--", str(package), str(root / "conf"), str(root / "run.py"))
    return commit.strip(), None if changes is None else bool(changes.strip())


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, or None when git is absent, refuses or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


@functools.cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; an absent one is left out."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version("kvq-harness" if name == "kvq" else name)
    return found


@functools.cache
def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return platform.processor() or platform.machine() if found is None else found[1].strip()


def device_name(device: str | torch.device) -> str:
    """'cpu', or the accelerator's name as its driver gives it."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def bytes_in_use(device: str | torch.device) -> int:
    """Bytes in use: the allocator's on a GPU, the resident set on a CPU (0 where the system does not say)."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    file = Path("/proc/self/statm")
    return int(file.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE if file.is_file() else 0


class PeakMemory:
    """Peak memory from its making until `read()`: the allocator's on a GPU, the process's resident set on a CPU."""

    _STATUS = Path("/proc/self/status")
    _RESET = Path("/proc/self/clear_refs")

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device, self.measurable = torch.device(device), True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            # Writing 5 resets the peak; otherwise the peak of an earlier job would be read as this one's.
            self._RESET.write_text("5", encoding="ascii")
        except OSError:
            self.measurable = False

    def read(self) -> int | None:
        """Peak in bytes, or None where the system cannot measure one run apart from those before it."""
        if not self.measurable:
            return None
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        found = re.search(r"^VmHWM:\s+(\d+)", self._STATUS.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
        return None if found is None else int(found[1]) * 1024


def now(device: torch.device | None = None) -> float:
    """The time in seconds, read after a GPU has finished its queued work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def timed(seconds: dict[str, float], *phases: str, device: torch.device | None = None) -> Iterator[None]:
    """Add the seconds that the block takes to those of each phase; nothing where it fails. `device`: as `now`."""
    start = now(device)
    yield
    took = now(device) - start
    for phase in phases:
        seconds[phase] = seconds.get(phase, 0.0) + took
