"""`RunRecord`: a run as its folder describes it, as plain data."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.ranking import Direction


@dataclass
class Curve:
    """The values of a metric by ascending step; NaN and infinities included."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def put(self, step: int, value: float) -> None:
        """Adds a value; one of the same step, before a resume, is replaced."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        where = bisect_left(self.steps, step)
        same = self.steps[where : where + 1] == [step]
        self.steps[where : where + same] = [step]
        self.values[where : where + same] = [value]


@dataclass(frozen=True)
class BestValue:
    """The best value of the monitored metric."""

    metric: str
    mode: Direction
    value: float
    step: int


@dataclass(frozen=True)
class Start:
    """One start of a run: the seconds of each phase, and in total."""

    number: int
    wall: float
    seconds: Mapping[str, float]
    status: str = ""


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint: its step, metrics and size."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """The values of an array at a step: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`."""

    step: int
    edges: Sequence[float]
    counts: Sequence[float]


@dataclass(frozen=True)
class Recompile:
    """A step that was compiled again: when, on which batch, for how long, and why."""

    time: str
    function: str
    where: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class LogLine:
    """A message of `run.log`, or an edit of the training state."""

    time: str
    level: str
    text: str


@dataclass(kw_only=True)
class RunRecord:
    """A run, as its folder describes it.

    Attributes:
        path: the run folder.
        status: running, completed, stopped, interrupted, failed, killed or unknown.
        config: the configuration by dotted key.
        curves: every scalar metric by its name.
        epochs: the last step of every epoch, as (step, epoch).
        seconds: the running time at a step, as (step, seconds); all starts together.
        batch_size: examples per step; None if unknown.
        best: the best value of the monitored metric.
        evaluations: the latest scalars of each evaluation set, with `step` and `epoch`.
        matrices: the latest confusion matrix by name, as (step, rows).
        media: images by name, as (step, file), by ascending step.
        texts: the latest logged text by name, as (step, text).
        histograms: by name, by ascending step.
        classes: names of the classes of the data, by label.
        checkpoints: by ascending step.
        starts: where the time of every start went.
        recompiles: the steps that were compiled again.
        log: other messages of the run.
        provenance: the content of `run.json`.
        versions: of the packages that wrote the latest checkpoint.
        notes: what could not be read.
    """

    path: Path
    status: str = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    batch_size: int | None = None
    best: BestValue | None = None
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    matrices: dict[str, tuple[int, list[list[float]]]] = field(default_factory=dict)
    media: dict[str, list[tuple[int, Path]]] = field(default_factory=dict)
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    checkpoints: list[SavedStep] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    log: list[LogLine] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step with a metric."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    @property
    def wall(self) -> float | None:
        """Running time in seconds; None if unknown."""
        if self.starts:
            return sum(start.wall for start in self.starts)
        return self.seconds[-1][1] if self.seconds else None


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names of runs: as many of the last parts of their paths as tell them apart; two for a single run.

    >>> names_of([Path("/a/CNN/1"), Path("/a/CNN/2")]), names_of([Path("/a/x/1"), Path("/b/x/1")])
    (['1', '2'], ['a/x/1', 'b/x/1'])
    """
    longest = max(len(path.parts) for path in paths)
    for count in range(1 if len(paths) > 1 else 2, longest + 1):
        names = ["/".join(path.parts[1:][-count:]) for path in paths]
        if len({*names}) == len(paths):
            return names
    return [str(path) for path in paths]
