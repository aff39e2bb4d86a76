"""One run of `train_model`: its folder, callbacks and events."""

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
    """What to train and evaluate, and for how long."""

    program: CompiledProgram
    plan: Plan
    data: Data  # training and validation sets
    tests: Mapping[str, Any]  # test sets, by name


@dataclass
class TrainingRun:
    """One call of `train_model`.

    Args:
        trainer: its state is trained.
        spec: what to train, and for how long.
        folder: the run folder.
        store: the checkpoints.
        logger: the logger.
        at: the position to start from.
        callbacks: callbacks by name.
        results: collects the metrics.
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
        """The run, as callbacks see it."""
        return RunContext(
            self.folder.path,
            self.logger,
            checkpoints=self.store,
            dataset=self.trainer.dataset,
            validates=bool(self.data.evals),
            transforms=self.trainer.describe_transforms,
            trainer=self.trainer,
            callback_states=self._states,
            monitors=not self.trainer.has_custom_comparison,
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
                with self.trainer.state_in_use_by_run():
                    while driver.is_running and driver.consume(self._events, until=EpochStart):
                        self._train_epoch(driver)
                    if self.tests and (driver.stopped is None or driver.stopped.then is None):
                        driver.consume(self._testing())
            finally:
                self._driver = None
        return self.finish()

    def finish(self) -> TrainResults:
        """Sets the best weights of the trainer; returns the results."""
        self.trainer.use_best(self.kept_best)
        self.results.metrics.best = None if self.kept_best is None else self.kept_best.best
        return self.results.metrics

    @cached_property
    def kept_best(self) -> KeptBest | None:
        """The best weights, once training is over."""
        trainer = self.trainer
        if self.best is not None:
            return self.best.kept(trainer.state)
        self.store.wait()
        return best_in(self.store, trainer.state, None if trainer.has_custom_comparison else trainer.config.saver)

    def train_epoch(self) -> dict[str, Any]:
        """Trains the rest of the current epoch; returns its metrics, none if it was cut off."""
        assert self._driver is not None
        end = self._driver.consume(self._events, until=EpochEnd)
        return end.metrics if isinstance(end, EpochEnd) else {}

    def _train_epoch(self, driver: Driver) -> None:
        try:
            self.trainer.train_epoch(self.data.train, driver.event.epoch)
            # an epoch whose time was up before its first step has no end event, and the run has ended
            if driver.is_running and isinstance(driver.event, EpochStart):
                name = type(self.trainer).__name__
                raise RuntimeError(f"`{name}.train_epoch` did not train. Call `super().train_epoch(…)` in it.")
        except Exception as reason:  # from an overridden `train_epoch`; the events already know of others
            driver.close_early(self._events, reason)
            raise

    def _training(self) -> Iterator[Event]:
        """Trains to the end of the plan; rolls back at a non-finite step, if configured."""
        config, at = self.trainer.config, self.at
        for rollbacks in range(config.max_rollbacks + 1):
            try:
                yield from train_events(self.program, self.trainer.state, self.data, self.plan, at)
                return
            except NonFiniteError as error:
                if error.position is None:
                    raise
                may_roll_back = config.guards == "rollback" and rollbacks < config.max_rollbacks
                at = self._roll_back(error) if may_roll_back else None
                if at is None:
                    self._end_at(error)

    def _end_at(self, error: NonFiniteError) -> NoReturn:
        """Saves the batch and the state for debugging, and ends the run as configured."""
        assert error.position is not None
        trainer, (epoch, number) = self.trainer, error.position
        explained = explain_nonfinite(error, self.program, trainer.state, Position(epoch, number), self.folder.path)
        if trainer.config.guards == "stop":
            raise StopTraining(str(explained)) from error
        raise explained from error

    def _roll_back(self, error: NonFiniteError) -> Position | LoopState | None:
        """Restores the latest checkpoint, and skips the batch from now on; None if that is impossible."""
        assert error.position is not None
        self.store.wait()
        if self.store.latest() is None or not DataSource(self.data.train, "train").can_rewind:
            return None
        state, saved = resumable(self.store, "latest", self.trainer.state, self.load_states)
        self.trainer.set_state(state)
        self.logger.cut(record_mark(saved))
        self.plan = replace(self.plan, skipped_batches=self.plan.skipped_batches | {error.position})
        LOG.warning(
            f"Step {error.step} was not finite. Rolled back to the checkpoint of step {saved.step}; batch "
            f"{error.position[1]} of epoch {error.position[0]} is skipped from now on."
        )
        return loop_state_of(saved)

    def load_states(self, saved: SavedCheckpoint) -> None:
        """Restores the states of all callbacks from a checkpoint."""
        check_data_state(saved, self.data.train)
        self._callback_list.load_states(saved)

    @property
    def _callback_list(self) -> CallbackList:
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
        """All observers in order: those that save come last, and save the states of the others."""
        config, run = self.trainer.config, self.run
        finite = FiniteEvaluations(config.checked_eval_metrics, config.guards or "raise")
        more: list[Any] = [TrainerHooks(run, self.results, self._loaders)]
        more += [self.best] if self.best is not None else []
        more += [finite] if config.guards and config.checked_eval_metrics else []
        observers = self._callback_list.observers([StateTracker(self.trainer), *self._bar(quiet)], more)
        return [one for one in observers if not (quiet and isinstance(one, Progress))]

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
        return self._callback_list.states()


class StateTracker:
    """Updates the state of the trainer; the first observer. Ignores tests, which may use other weights."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._is_training = trainer, True

    def handle(self, event: Event) -> None:
        self._is_training &= not (isinstance(event, EvalStart) and event.name.startswith("test"))
        if self._is_training:
            self._trainer.track(event)
