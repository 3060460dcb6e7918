"""`hydra/sweeper=kvq_search`: trials over any axes of the configuration, chosen by Optuna, each an ordinary record.

A search keeps no state but its file: asked again it draws the same trials, and those on record are read, not measured.
Winners are chosen on the text of the search and measured on that of the verdict (`hydra.sweeper.verdict`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hydra.core.override_parser.types import IntervalSweep, Override

from kvq.config.explain import composed
from kvq.config.limits import Count, among, between, check_limits
from kvq.errors import MAX_SEED, ConfigError, KvqError
from kvq.results.files import write_file
from kvq.results.metrics import is_lower_better
from kvq.runs import Prepared

Launch = Callable[[Sequence[Sequence[str]]], None]
WORST = {"effective_bits": 16.0, "bits_per_element": 16.0, "kl_mean": 1.0, "delta_nll": 1.0}
"""What a hypervolume is measured against where `reference` says nothing."""


@dataclass
class Settings:
    """Settings of a search.

    Attributes:
        trials: how many.
        sampler: `nsga2` and `tpe` learn from earlier trials; `random` does not.
        objectives: metrics of the records, of which less is better.
        seed: of the sampler; not that of any run.
        together: trials that the sampler proposes at once; the results depend on it.
        winners: most trials of the frontier that are measured on the verdict's text.
        verdict: overrides under which winners are measured; none: there is no verdict.
        reference: the worst values that count in the hypervolume, one for each objective; None: those of `WORST`.
    """

    trials: Count = 40
    sampler: Annotated[str, among(("nsga2", "tpe", "random"))] = "tpe"
    objectives: list[str] = field(default_factory=lambda: ["kl_mean", "effective_bits"])
    seed: Annotated[int, between(0, MAX_SEED)] = 0
    together: Count = 1
    winners: Count = 5
    verdict: list[str] = field(default_factory=list)
    reference: list[float] | None = None

    def __post_init__(self) -> None:
        check_limits("hydra.sweeper", self)
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ConfigError(f"hydra.sweeper.objectives={self.objectives}: one metric or more, each once")
        for name in self.objectives:
            if not is_lower_better(name) and name not in WORST:
                raise ConfigError(f"hydra.sweeper.objectives: {name} is no metric of which less is better")
            if name not in WORST and self.reference is None:
                raise ConfigError(f"hydra.sweeper.reference: needs the worst {name} that counts")
        if self.reference is not None and len(self.reference) != len(self.objectives):
            raise ConfigError(f"hydra.sweeper.reference={self.reference}: a number for each of {self.objectives}")

    @property
    def worst(self) -> list[float]:
        """The reference point, in the order of the objectives."""
        return [float(number) for number in self.reference or (WORST[name] for name in self.objectives)]


@dataclass(frozen=True)
class SearchAxis:
    """A setting to search over, with its values as words of a command line, or with an interval of numbers."""

    name: str
    values: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None

    def suggest(self, trial: Any) -> str:
        """`name=value` of a trial of Optuna."""
        if self.interval is not None:
            return f"{self.name}={trial.suggest_float(self.name, *self.interval):.6g}"
        return f"{self.name}={trial.suggest_categorical(self.name, self.values)}"


@dataclass(frozen=True)
class Space:
    """The axes of a search, and the overrides that all its trials share."""

    axes: tuple[SearchAxis, ...]
    fixed: tuple[str, ...]

    @classmethod
    def from_overrides(cls, overrides: Sequence[Override]) -> Space:
        """The space of a command line, whose swept settings are axes. Raises: ConfigError: none is swept."""
        axes, fixed = [], []
        for one in overrides:
            name = one.get_key_element()
            value = one.value()
            apart = getattr(value, "tags", None) or getattr(value, "shuffle", False)
            if apart or (isinstance(value, IntervalSweep) and isinstance(value.start, int)):
                raise ConfigError(f"{name}: a search takes values, ranges and intervals, no int(), tag() or shuffle()")
            if isinstance(value, IntervalSweep):
                axes.append(SearchAxis(name, interval=(float(value.start or 0), float(value.end or 0))))
            elif one.is_sweep_override():
                axes.append(SearchAxis(name, tuple(one.sweep_string_iterator())))
            else:
                fixed.append(f"{name}={one.get_value_element_as_str()}" if not one.is_delete() else name)
        if not axes:
            raise ConfigError("hydra/sweeper=kvq_search: no setting has several values; such as bits=2,3,4")
        return cls(tuple(axes), tuple(fixed))

    @property
    def size(self) -> int | None:
        """Number of combinations of values; None: an axis is an interval."""
        if any(axis.interval is not None for axis in self.axes):
            return None
        return math.prod(len(axis.values) for axis in self.axes)


@dataclass
class Trial:
    """A run of a search: its overrides (`words`), record key and objective values; None where it failed (`reason`)."""

    words: list[str]
    key: str | None = None
    values: list[float] | None = None
    reason: str = ""


class Search:
    """One search over a space; `launch` runs jobs, each a list of overrides."""

    def __init__(self, space: Space, settings: Settings, launch: Launch) -> None:
        try:
            import optuna
        except ModuleNotFoundError as error:
            raise ConfigError("hydra/sweeper=kvq_search: needs optuna; pip install -e '.[search]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.settings, self._launch = space, settings, launch
        # A quarter of the trials, so that there are generations to learn from.
        population = max(4, settings.trials // 4)
        samplers: Mapping[str, Any] = {
            "nsga2": lambda: optuna.samplers.NSGAIISampler(population_size=population, seed=settings.seed),
            "tpe": lambda: optuna.samplers.TPESampler(seed=settings.seed, multivariate=True),
            "random": lambda: optuna.samplers.RandomSampler(seed=settings.seed),
        }
        self._failed = optuna.trial.TrialState.FAIL
        self.study = optuna.create_study(
            directions=["minimize"] * len(settings.objectives), sampler=samplers[settings.sampler]()
        )
        self.trials: list[Trial] = []
        self.results = Path(composed(space.fixed).results_dir)

    @property
    def name(self) -> str:
        """Names the search's file: a digest of its space and settings."""
        return hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def path(self) -> Path:
        """The search's own file."""
        return self.results / "searches" / f"{self.settings.sampler}-{self.name}.json"

    @property
    def _identity(self) -> dict[str, Any]:
        """The inputs that determine a search's result: axes, overrides that all trials share, and settings."""
        fixed = [word for word in self.space.fixed if not word.startswith(_PLACE)]
        return {"axes": [asdict(axis) for axis in self.space.axes], "fixed": fixed, "settings": asdict(self.settings)}

    def run(self) -> list[Trial]:
        """Run every trial, then the verdict; the file is written after each batch."""
        while len(self.trials) < self.settings.trials:
            count = min(self.settings.together, self.settings.trials - len(self.trials))
            asked = [self.study.ask() for _ in range(count)]
            batch = [Trial([axis.suggest(one) for axis in self.space.axes]) for one in asked]
            self._measure(batch, self.space.fixed)
            for one, trial in zip(asked, batch, strict=True):
                if trial.values is None:
                    self.study.tell(one, state=self._failed)
                else:
                    self.study.tell(one, trial.values)
            self.trials += batch
            self.write([])
        chosen = self.winners()
        verdicts = [Trial(list(trial.words)) for trial in chosen] if self.settings.verdict else []
        if verdicts:
            self._measure(verdicts, [*self.space.fixed, *self.settings.verdict])
        self.write(verdicts)
        return verdicts

    def winners(self) -> list[Trial]:
        """Up to `settings.winners` trials on the Pareto frontier, one per record, sorted by the first objective."""
        known = {trial.key: trial for trial in reversed(self.trials) if trial.values is not None}
        points = [trial.values or [] for trial in known.values()]
        free = [trial for trial, beaten in zip(known.values(), dominated(points), strict=True) if not beaten]
        return sorted(free, key=lambda trial: trial.values or [])[: self.settings.winners]

    def hypervolumes(self) -> list[float]:
        """The hypervolume of all trials up to each trial, as a share of the box up to the reference point."""
        points: list[list[float]] = []
        volumes = []
        for trial in self.trials:
            points += [] if trial.values is None else [trial.values]
            volumes.append(hypervolume(points, self.settings.worst))
        return volumes

    def write(self, verdicts: Sequence[Trial]) -> None:
        """Write the file: space, settings, trials, hypervolumes, winners and their verdict."""
        content = {
            **self._identity,
            "trials": [asdict(trial) for trial in self.trials],
            "hypervolume": self.hypervolumes(),
            "winners": [trial.key for trial in self.winners()],
            "verdicts": [asdict(trial) for trial in verdicts],
        }
        write_file(self.path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())

    def _measure(self, batch: Sequence[Trial], fixed: Sequence[str]) -> None:
        jobs = [[*fixed, *trial.words] for trial in batch]
        self._launch(jobs)
        for job, trial in zip(jobs, batch, strict=True):
            self._fill_from_record(job, trial)

    def _fill_from_record(self, job: Sequence[str], trial: Trial) -> None:
        """Set a trial's key and objective values from the record of its job, or the reason why there are none."""
        try:
            state, why, record = Prepared(composed(job)).state
        except KvqError as error:
            trial.reason = str(error)
            return
        trial.key = None if record is None else record.key
        if state != "done" or record is None:
            trial.reason = why or state
            return
        lacking = [name for name in self.settings.objectives if name not in record.metrics]
        if lacking:
            raise ConfigError(f"hydra.sweeper.objectives: the record of {' '.join(trial.words)} has no {lacking[0]}")
        trial.values = [float(record.metrics[name]) for name in self.settings.objectives]


_PLACE = ("results_dir=", "threads=", "device=", "logger", "force=")
"""Overrides that change where or how fast a search runs, not what it finds."""


def summary_lines(search: Search, verdicts: Sequence[Trial]) -> Iterator[str]:
    """Lines for the terminal: winners with their values, and what the verdict's text says of them."""
    objectives = search.settings.objectives
    done = [trial for trial in search.trials if trial.values is not None]
    size = "" if search.space.size is None else f" of {search.space.size} combinations"
    yield f"search: {len(done)} trials{size}, hypervolume {search.hypervolumes()[-1]:.4f}; {search.path}"
    by_words = {tuple(trial.words): trial for trial in verdicts}

    def told(trial: Trial) -> str:
        """Its values, or the reason why it has none."""
        pairs = zip(objectives, trial.values or (), strict=False)
        return ", ".join(f"{name} {value:.4f}" for name, value in pairs) or trial.reason

    for trial in search.winners():
        verdict = by_words.get(tuple(trial.words))
        outcome = "" if verdict is None else f"; verdict: {told(verdict)}"
        yield f"  {' '.join(trial.words)}: {told(trial)}{outcome}"


def dominated(points: Sequence[Sequence[float]]) -> list[bool]:
    """For each point, whether another one is at most as large in every coordinate and smaller in one."""
    return [
        any(all(a <= b for a, b in zip(other, point, strict=True)) and list(other) != list(point) for other in points)
        for point in points
    ]


def hypervolume(points: Sequence[Sequence[float]], worst: Sequence[float]) -> float:
    """Share of the box from 0 to `worst` that points (below 0: 0) dominate, by slices along the last coordinate."""
    inside = [[max(value, 0.0) for value in point] for point in points]
    inside = [point for point in inside if all(value < most for value, most in zip(point, worst, strict=True))]
    if not inside or not worst:
        return float(bool(inside))
    heights = sorted({point[-1] for point in inside})
    slices = (
        (high - low) * hypervolume([point[:-1] for point in inside if point[-1] <= low], worst[:-1])
        for low, high in itertools.pairwise([*heights, worst[-1]])
    )
    return sum(slices) / worst[-1]
