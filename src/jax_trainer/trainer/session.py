"""One training of a trainer: where it writes, who watches, and its events from the first to the last."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from jax_trainer.callbacks import Callback, ModelCheckpoint, Progress, ProgressBar, Run, logger_observers
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import CompiledProgram, HeldState, NonFiniteError, step_of
from jax_trainer.datasets import Data, Position
from jax_trainer.engine import (
    Driver,
    EpochEnd,
    EpochStart,
    Event,
    Plan,
    StepEnd,
    StopTraining,
    driving,
    eval_events,
    train_events,
)
from jax_trainer.logger import Logger
from jax_trainer.trainer.best import BestWeights
from jax_trainer.trainer.hooks import TrainerHooks
from jax_trainer.trainer.nonfinite import WatchedEvaluations, explained
from jax_trainer.trainer.results import Results


@dataclass
class Session:
    """What one call of `train_model` works with.

    Args:
        trainer: whose state is trained.
        program: what runs.
        plan: how long, and when to validate.
        data: training and validation sets.
        tests: test sets by name.
        folder: the run's.
        store: its checkpoints.
        logger: where numbers go.
        at: where in the data training begins.
        callbacks: who watches, by name.
        results: what comes out.
    """

    trainer: Any
    program: CompiledProgram
    plan: Plan
    data: Data
    tests: Mapping[str, Any]
    folder: RunFolder
    store: CheckpointStore
    logger: Logger
    at: Position = Position()
    callbacks: dict[str, Callback] = field(default_factory=dict)
    results: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        keeps_best = self.tests and self.data.evals and self.trainer.config.saver is None
        self.best = BestWeights(self.trainer.is_new_model_better) if keeps_best else None
        self._driver: Driver | None = None
        self._events: Iterator[Event] = iter(())

    @property
    def run(self) -> Run:
        """What callbacks may use."""
        return Run(
            self.folder.path,
            self.logger,
            checkpoints=self.store,
            dataset=self.trainer.dataset,
            validates=bool(self.data.evals),
            trainer=self.trainer,
            callback_states=self._states,
            monitors=not self.trainer.compares_itself,
            epochs=self.plan.max_epochs,
        )

    def go(self, train_loader: Any, *, quiet: bool) -> dict[int | str, dict[str, Any]]:
        """Trains, tests the best weights, and returns all metrics of evaluations."""
        watching = self._observers(quiet)
        self.plan = self.plan.seen_by(watching)
        with driving(watching, self.trainer.state, self.at) as driver, closing(self._training()) as self._events:  # type: ignore[type-var]
            self._driver = driver
            try:
                while driver.goes_on and driver.feed(self._events, until=EpochStart):
                    self.trainer.train_epoch(train_loader, driver.event.epoch)
                    self._check_trained(driver)
                if self.tests and (driver.stopped is None or driver.stopped.then is None):
                    driver.feed(self._testing())
            finally:
                self._driver = None
        return self.results.metrics

    def train_epoch(self) -> dict[str, Any]:
        """The rest of the epoch that has begun; its metrics, none if it was cut off."""
        assert self._driver is not None
        end = self._driver.feed(self._events, until=EpochEnd)
        return end.metrics if isinstance(end, EpochEnd) else {}

    def _check_trained(self, driver: Driver) -> None:
        if driver.goes_on and not isinstance(driver.event, EpochEnd):
            name = type(self.trainer).__name__
            raise RuntimeError(f"`{name}.train_epoch` did not train. Call `super().train_epoch(…)` in it.")

    def _training(self) -> Iterator[Event]:
        trainer, at = self.trainer, self.at
        last: Event | None = None
        try:
            with closing(train_events(self.program, trainer.state, self.data, self.plan, at)) as events:  # type: ignore[type-var]
                for event in events:
                    trainer.follow(event)
                    last = event if isinstance(event, StepEnd) else last
                    yield event
        except NonFiniteError as error:
            if error.batch is None or not isinstance(last, StepEnd):
                raise
            late = last.step - (error.step - 1)
            before = Position(last.epoch, last.epoch_step - late, None)
            told = explained(error, self.program, trainer.state, before, self.folder.path)
            if trainer.config.guards == "stop":
                raise StopTraining(str(told)) from error
            raise told from error

    def _testing(self) -> Iterator[Event]:
        trainer = self.trainer
        if self.best is not None:
            state = self.best.of(trainer.state)
        else:
            best = self.store.best()
            state = trainer.state if best is None else trainer.with_weights(self.store, best)
        epoch = 0 if self._driver is None else self._driver.event.epoch
        at = Event(step_of(trainer.state), epoch, HeldState.of(state))
        return eval_events(self.program, at, self.tests, trainer.config.test_plan)

    def _observers(self, quiet: bool) -> list[Any]:
        """In the order in which they are told: who saves comes last, and saves what the others have learnt."""
        config, run = self.trainer.config, self.run
        watched = WatchedEvaluations(config.watched_evaluations, config.guards or "raise")
        records = [*logger_observers(self.logger), self.results, TrainerHooks(run, self.results, self._loaders)]
        records += [self.best] if self.best is not None else []
        records += [watched] if config.guards and config.watched_evaluations else []
        savers = [one for one in self.callbacks.values() if isinstance(one, ModelCheckpoint)]
        apart = (ModelCheckpoint, Progress) if quiet else ModelCheckpoint  # a bar that nobody is to see hears nothing
        others = [one for one in self.callbacks.values() if not isinstance(one, apart)]
        return [*self._bar(others, quiet), *records, *others, *savers]

    @property
    def _loaders(self) -> dict[str, Any]:
        return {**self.data.evals, **self.tests}

    def _bar(self, callbacks: list[Callback], quiet: bool) -> list[ProgressBar]:
        is_shown = self.trainer.config.enable_progress_bar and not quiet
        if not is_shown or any(isinstance(one, Progress) for one in callbacks):
            return []
        return [ProgressBar(title=f"Run folder: {self.folder.path}", epochs=self.plan.max_epochs)]

    def _states(self) -> dict[str, Any]:
        states = {name: one.state_dict() for name, one in self.callbacks.items()}
        return {name: state for name, state in states.items() if state}
