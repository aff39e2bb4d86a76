"""One training of a trainer: where it writes, who watches, and its events from the first to the last."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from jax_trainer.callbacks import Callback, Progress, ProgressBar, RunContext, logger_observers
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointStore, SavedCheckpoint
from jax_trainer.core import CompiledProgram, FlatState, NonFiniteError, step_of
from jax_trainer.datasets import Data, DataSource, Position
from jax_trainer.engine import (
    Driver,
    EpochEnd,
    EpochStart,
    EvalStart,
    Event,
    LoopState,
    Plan,
    StopTraining,
    driving,
    eval_events,
    train_events,
)
from jax_trainer.logger import Logger
from jax_trainer.runs import (
    CallbackList,
    FiniteEvaluations,
    KeptBest,
    best_in,
    check_data_state,
    explain_nonfinite,
    loop_state_of,
    record_mark,
    resumable,
    select_weights,
    used_by_default,
)
from jax_trainer.trainer.best import BestWeights
from jax_trainer.trainer.hooks import TrainerHooks
from jax_trainer.trainer.results import Results, TrainResults

LOG = logging.getLogger("jax_trainer")


class RunSpec(NamedTuple):
    """What is to be trained and judged, and how long."""

    program: CompiledProgram
    plan: Plan
    data: Data  # training and validation sets
    tests: Mapping[str, Any]  # by name


@dataclass
class TrainingRun:
    """What one call of `train_model` works with.

    Args:
        trainer: whose state is trained.
        work: what is to be done.
        folder: the run's.
        store: its checkpoints.
        logger: where numbers go.
        at: where training begins.
        callbacks: who watches, by name.
        results: what comes out.
    """

    trainer: Any
    spec: RunSpec
    folder: RunFolder
    store: CheckpointStore
    logger: Logger
    at: Position | LoopState = Position()
    callbacks: dict[str, Callback] = field(default_factory=dict)
    results: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        self.program, self.plan, self.data, self.tests = self.spec
        keeps_best = self.data.evals and self.trainer.config.saver is None
        self.best = BestWeights(self.trainer, must_compare=bool(self.tests)) if keeps_best else None
        self._records = logger_observers(self.logger)
        self._driver: Driver | None = None
        self._events: Iterator[Event] = iter(())

    @property
    def run(self) -> RunContext:
        """What callbacks may use."""
        return RunContext(
            self.folder.path,
            self.logger,
            checkpoints=self.store,
            dataset=self.trainer.dataset,
            validates=bool(self.data.evals),
            transforms=self.trainer.describe_transforms,
            trainer=self.trainer,
            callback_states=self._states,
            monitors=not self.trainer.compares_itself,
            epochs=self._ends_at[0],
            steps=self._ends_at[1],
        )

    def run_all(self, *, quiet: bool) -> TrainResults:
        """Trains, tests the best weights, and returns all metrics of evaluations."""
        watching = self._observers(quiet)
        self.plan = self.plan.with_observers(watching)
        with driving(watching, self.trainer.state, self.at) as driver, closing(self._training()) as self._events:  # type: ignore[type-var]
            self._driver = driver
            try:
                with self.trainer.having_state_in_use():
                    while driver.is_running and driver.consume(self._events, until=EpochStart):
                        self._train_epoch(driver)
                    if self.tests and (driver.stopped is None or driver.stopped.then is None):
                        driver.consume(self._testing())
            finally:
                self._driver = None
        return self.finish()

    def finish(self) -> TrainResults:
        """Gives the trainer the best weights, which it uses from now on; returns what came out."""
        self.trainer.use_best(self.kept_best)
        self.results.metrics.best = None if self.kept_best is None else self.kept_best.best
        return self.results.metrics

    @cached_property
    def kept_best(self) -> KeptBest | None:
        """The best weights, once there will be no others."""
        trainer = self.trainer
        if self.best is not None:
            return self.best.kept(trainer.state)
        self.store.wait()
        return best_in(self.store, trainer.state, None if trainer.compares_itself else trainer.config.saver)

    def train_epoch(self) -> dict[str, Any]:
        """The rest of the epoch that has begun; its metrics, none if it was cut off."""
        assert self._driver is not None
        end = self._driver.consume(self._events, until=EpochEnd)
        return end.metrics if isinstance(end, EpochEnd) else {}

    def _train_epoch(self, driver: Driver) -> None:
        try:
            self.trainer.train_epoch(self.data.train, driver.event.epoch)
            # one whose time was up before its first step has no end, and the run went on to its own
            if driver.is_running and isinstance(driver.event, EpochStart):
                name = type(self.trainer).__name__
                raise RuntimeError(f"`{name}.train_epoch` did not train. Call `super().train_epoch(…)` in it.")
        except Exception as reason:  # of a `train_epoch` of the user's own; the events know of others already
            driver.close_early(self._events, reason)
            raise

    def _training(self) -> Iterator[Event]:
        """Trains to the end of the plan; goes back to the latest checkpoint at a bad batch, if that is the policy."""
        config, at = self.trainer.config, self.at
        for gone_back in range(config.max_rollbacks + 1):
            try:
                yield from train_events(self.program, self.trainer.state, self.data, self.plan, at)
                return
            except NonFiniteError as error:
                if error.place is None:
                    raise
                may_go_back = config.guards == "rollback" and gone_back < config.max_rollbacks
                at = self._gone_back(error) if may_go_back else None
                if at is None:
                    self._end_at(error)

    def _end_at(self, error: NonFiniteError) -> NoReturn:
        """Keeps what is needed to look into it, and ends the run as the configuration says."""
        assert error.place is not None
        trainer, (epoch, number) = self.trainer, error.place
        told = explain_nonfinite(error, self.program, trainer.state, Position(epoch, number), self.folder.path)
        if trainer.config.guards == "stop":
            raise StopTraining(str(told)) from error
        raise told from error

    def _gone_back(self, error: NonFiniteError) -> Position | LoopState | None:
        """The latest checkpoint becomes the present state, and the bad batch is left out; None: that cannot be."""
        assert error.place is not None
        self.store.wait()
        if self.store.latest() is None or not DataSource(self.data.train, "train").can_rewind:
            return None
        state, saved = resumable(self.store, "latest", self.trainer.state, self.load_states)
        self.trainer.set_state(state)
        self.logger.cut(record_mark(saved))
        self.plan = replace(self.plan, skipped_batches=self.plan.skipped_batches | {error.place})
        LOG.warning(
            f"Step {error.step} was not finite. Going back to the checkpoint of step {saved.step}; batch "
            f"{error.place[1]} of epoch {error.place[0]} is left out from now on."
        )
        return loop_state_of(saved)

    def load_states(self, saved: SavedCheckpoint) -> None:
        """Everybody who watches goes on with what they knew at a checkpoint."""
        check_data_state(saved, self.data.train)
        self._watching.load_states(saved)

    @property
    def _watching(self) -> CallbackList:
        records = {f"run/log/{index}": one for index, one in enumerate(self._records)}
        return CallbackList(self.callbacks, {**records, "run/results": self.results})

    def _testing(self) -> Iterator[Event]:
        trainer = self.trainer
        self.results.metrics.tested = used_by_default(self.kept_best)
        state = select_weights(None, trainer.state, self.kept_best)
        epoch = 0 if self._driver is None else self._driver.event.epoch
        at = Event(step_of(trainer.state), epoch, FlatState.of(state))
        return eval_events(self.program, at, self.tests, trainer.config.test_plan)

    def _observers(self, quiet: bool) -> list[Any]:
        """In the order in which they are told: who saves comes last, and saves what the others have learnt."""
        config, run = self.trainer.config, self.run
        watched = FiniteEvaluations(config.watched_evaluations, config.guards or "raise")
        more: list[Any] = [TrainerHooks(run, self.results, self._loaders)]
        more += [self.best] if self.best is not None else []
        more += [watched] if config.guards and config.watched_evaluations else []
        everybody = self._watching.observers([StateTracker(self.trainer), *self._bar(quiet)], more)
        # a bar that nobody is to see hears nothing
        return [one for one in everybody if not (quiet and isinstance(one, Progress))]

    @property
    def _loaders(self) -> dict[str, Any]:
        return {**self.data.evals, **self.tests}

    def _bar(self, quiet: bool) -> list[ProgressBar]:
        is_shown = self.trainer.config.enable_progress_bar and not quiet
        if not is_shown or any(isinstance(one, Progress) for one in self.callbacks.values()):
            return []
        epochs, steps = self._ends_at
        return [ProgressBar(title=f"Run folder: {self.folder.path}", epochs=epochs, steps=steps)]

    @property
    def _ends_at(self) -> tuple[int | None, int | None]:
        return self.plan.ends_at(DataSource(self.data.train, "train").length)

    def _states(self) -> dict[str, Any]:
        return self._watching.states()


class StateTracker:
    """Keeps a trainer up with its training; the first to be told. Tests may be of other weights."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._is_training = trainer, True

    def handle(self, event: Event) -> None:
        """Passes the state on."""
        self._is_training &= not (isinstance(event, EvalStart) and event.name.startswith("test"))
        if self._is_training:
            self._trainer.track(event)
