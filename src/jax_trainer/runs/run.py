"""One training run, the same for every style: what it locks, restores and opens, in which order its observers are
notified, what ends it, and how it closes.

A style translates its arguments into a `RunSpec`, and reads the `Run` when it has ended.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import jax
import optax

from jax_trainer.callbacks import (
    Callback,
    ConfusionMatrixCallback,
    ModelCheckpoint,
    ProgressBar,
    RunContext,
    logger_observers,
)
from jax_trainer.callbacks.classification import class_names_of
from jax_trainer.callbacks.log_metrics import LogMetrics, merged_names
from jax_trainer.checkpoint.mirror import Mirror
from jax_trainer.checkpoint.store import CheckpointStore, SavedCheckpoint
from jax_trainer.core import FlatState, TrainState, step_of
from jax_trainer.datasets import DataSource, Position
from jax_trainer.diagnostics.ledger import (
    CALLBACK,
    CLOSING,
    EVALUATION,
    INIT,
    LOGGING,
    RESTORE,
    SAVING,
    open_ledger,
    phase,
)
from jax_trainer.diagnostics.output import short_path
from jax_trainer.engine import (
    Driver,
    EpochEnd,
    EpochStart,
    EvalRoundEnd,
    EvalStart,
    Event,
    LoopState,
    Plan,
    SavePoint,
    StepEnd,
    driving,
    eval_events,
    is_by_ctrl_c,
    precompile,
    train_events,
)
from jax_trainer.engine.costs import memory_of
from jax_trainer.engine.events import by_ctrl_c
from jax_trainer.engine.loop_state import Progress as LoopProgress
from jax_trainer.engine.processes import peers
from jax_trainer.logger import Logger
from jax_trainer.runs.best import BestInMemory, KeptBest, Weights, best_in, select_weights, used_by_default
from jax_trainer.runs.callback_list import CallbackList
from jax_trainer.runs.history import HISTORY, TEST, History
from jax_trainer.runs.nonfinite import FiniteEvaluations, recover
from jax_trainer.runs.provenance import Provenance
from jax_trainer.runs.spec import Recording, RunSpec
from jax_trainer.runs.target import RunTarget, check_data_state, loop_state_of, restore_run, resumable_step
from jax_trainer.runs.time_report import TIMES, TimeRecord, TimeReport
from jax_trainer.sharding.placement import is_primary

LOG = logging.getLogger("jax_trainer")


def warn_of_small_batches(state: TrainState, batches: int | None, plan: Plan) -> None:
    """Logs a warning if the optimizer is L-BFGS, and an epoch has several `batches`."""
    is_lbfgs = lambda node: isinstance(node, optax.ScaleByLBFGSState)
    repeats = 1 in (plan.overfit_batches, batches or 1)
    if not repeats and any(map(is_lbfgs, jax.tree.leaves(state.opt_state, is_leaf=is_lbfgs))):
        LOG.warning(
            f"L-BFGS compares the gradients of successive updates, which must be those of the same data, but an epoch "
            f"has {batches} batches. Make every batch the whole data set (batch size, or `overfit_batches: 1`)."
        )


@contextmanager
def before_first_step() -> Iterator[None]:
    """Reports a Ctrl-C during the setup of a run (tracing, compiling, initialisation) in one line."""
    try:
        yield
    except KeyboardInterrupt as end:
        if is_by_ctrl_c(end):
            raise
        raise by_ctrl_c("Interrupted before the first step. Nothing was saved.") from None


class Run:
    """One run: `execute` trains, and the attributes tell the state, the metrics and the best weights.

    Attributes:
        flat_state: the state after the last event of training.
        at: its position.
        evaluated: step and metrics of the last evaluation.
        writes: whether this process writes files and logs, and shows progress.
        history: all metrics so far, and how the run ended.
        step: the step of the last event, once the run has ended.
        is_training: whether the loop owns the state.
        is_resumed: whether it continues an earlier run.
        has_started: whether it has emitted an event.
        tested: which weights were tested; None: no test.
        store, logger, callbacks, context: of a run with a recording, once it is open.
    """

    store: CheckpointStore
    callbacks: CallbackList
    context: RunContext

    def __init__(self, spec: RunSpec, target: RunTarget | None = None) -> None:
        self.spec, self.target, self.plan = spec, target, spec.plan
        self.writes = is_primary() if target is None else target.writes
        self.flat_state: FlatState | None = None
        self.at: Position | LoopState = Position()
        self.evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self.history = History(
            None if target is None or spec.recording is None else target.folder.path / HISTORY,
            keeps_training=spec.recording is not None,
            writes=self.writes,
        )
        records = target is not None and spec.recording is not None and self.writes
        self._times = TimeRecord(target.folder.path / TIMES if target and records else None, open_ledger())
        self.is_training = self.is_resumed = False
        self.step = 0
        self.tested: Weights | None = None
        self.logger: Logger | None = None
        self._mirror: Mirror | None = None
        self.best_in_memory: BestInMemory | None = None
        self.provenance = None if target is None or spec.recording is None else Provenance(target)
        self.has_started = self._is_testing = False
        self._is_first_step = True
        self._driver: Driver | None = None
        self._events: Iterator[Event] = iter(())

    # the story of a run

    def execute(self, result: "Callable[[Run], Any]" = lambda run: run) -> Any:
        """Trains from the first step, or from the checkpoint to resume, to the last; returns `result(run)`.

        After Ctrl-C or SIGTERM, the exception has the result so far, and names the call that resumes the run.
        """
        spec = self.spec
        with nullcontext() if self.target is None else self.target.locked():
            try:
                self._times.open()
                with before_first_step():
                    self.open()
                with self._notifying() as driver:
                    if spec.train_epoch is None and driver.is_running:
                        driver.consume(self._events)
                    while spec.train_epoch and driver.is_running and driver.consume(self._events, until=EpochStart):
                        with self._user_epoch(driver):
                            spec.train_epoch(driver.event.epoch)
                    if spec.tests and (driver.stopped is None or driver.stopped.then is None):
                        with phase(EVALUATION):
                            driver.consume(self._testing(driver.event.epoch))
            except (KeyboardInterrupt, SystemExit) as end:
                raise _with_result(end, self, result) from None
            finally:
                try:
                    with phase(CLOSING):
                        self._close()
                finally:
                    self._times.close(self.history.status)
                    if self._mirror is not None:
                        self._mirror.close()  # last: all files are written
            return result(self)

    def open(self) -> None:
        """Opens the store and the logger, creates the callbacks, and restores or initialises the state."""
        spec, recording = self.spec, self.spec.recording
        if recording is None or self.target is None:
            with phase(INIT):
                self.state = self._initial()
            with phase(RESTORE):
                found = None if spec.restore is None else spec.restore(self.state)
        else:
            folder = self.target.folder
            self.store = recording.store(folder)
            self.store.before_commit = self.history.write
            self._mirror = recording.mirror(folder) if self.writes else None
            if self._mirror is not None:
                self._mirror.claim()
            self.best_in_memory = recording.in_memory(
                validates=bool(spec.data.evals), leaves_out=lambda metrics: self.context.leaves_out(None, metrics)
            )
            self.logger = recording.logger(folder)
            logs = {f"run/log/{index}": one for index, one in enumerate(logger_observers(self.logger))}
            callbacks: dict[str, Callback] = {}
            self.callbacks = CallbackList(callbacks, {**logs, "run/history": self.history})
            self.context = self._context(recording, self.logger)
            callbacks.update(recording.callbacks(self.context))
            with phase(INIT):
                self.state = self._initial()
            with phase(RESTORE):
                saves = recording.saver is not None and recording.saver.saves_at_all
                options: dict[str, Any] = {"saves": saves, "logger": self.logger, "load_states": self.load_states}
                restored = restore_run(self.target, self.store, self.state, **options)
                found = None if restored is None else (restored[0], loop_state_of(restored[1]))
            for name, text in recording.files.items():
                self.target.write_text(name, text)
        if found is not None:
            self.state, self.at = found
        self.is_resumed = found is not None
        if self.is_resumed and self._is_complete:
            where = "The training" if self.target is None else short_path(self.target.folder.path)
            LOG.warning("%s is complete, at step %s: nothing is trained.", where, step_of(self.state))
        warn_of_small_batches(self.state, DataSource(spec.data.train, "train").length, self.plan)
        if self.provenance is not None:
            self.step = step_of(self.state)
            assert recording is not None
            drawing = [one for one in self.callbacks.callbacks.values() if isinstance(one, ConfusionMatrixCallback)]
            classes = next((one.class_names for one in drawing), class_names_of(recording.dataset))
            self.provenance.start(spec, self.state, self.step, classes)
        if self._mirror is not None:
            self.store.after_commit = self._mirror.wake
            self._mirror.start()
        spec.on_open(self)

    @property
    def _is_complete(self) -> bool:
        """Whether nothing is left to train after the checkpoint that it resumes from."""
        step = step_of(self.state)
        at = LoopState.of(self.at, step)
        return self.plan.resolved().finished(step, LoopProgress.at(at, step).complete_epochs, at.seconds)

    def _initial(self) -> TrainState:
        with precompile(self.spec.program, self.spec.data, self.plan):
            return self.spec.init()

    @contextmanager
    def _notifying(self) -> Iterator[Driver]:
        """Notifies the observers of the start, of the events of training that the driver consumes, and of the end."""
        observers = self._observers()
        self.plan = self.plan.with_observers(observers)
        run = driving(observers, self.state, self.at, self._phase_of)
        with run as driver, closing(self.training()) as self._events:  # type: ignore[type-var]
            self._driver, self.is_training = driver, True
            self._times.follow(lambda: driver.event.step)
            try:
                yield driver
            finally:
                self.step = driver.event.step
                self._driver, self.is_training = None, False

    @contextmanager
    def _user_epoch(self, driver: Driver) -> Iterator[None]:
        """Ends the training if the user's `train_epoch` fails, or does not train."""
        try:
            yield
            # an epoch whose time was up before its first step has no end event, and the run has ended
            if driver.is_running and isinstance(driver.event, EpochStart):
                name = type(self.context.trainer).__name__
                raise RuntimeError(f"`{name}.train_epoch` did not train. Call `super().train_epoch(…)` in it.")
        except Exception as reason:  # of the user's code; the events already know of others
            driver.close_early(self._events, reason)
            raise

    def _close(self) -> None:
        if self.spec.recording is None or self.logger is None:
            return
        if self.history.status in ("completed", "stopped"):
            best = {} if self.kept_best is None else self.kept_best.best.logged
            self.logger.log_hparams(self.spec.recording.hparams, {**self.history.final(), **best})
        if self.provenance is not None:
            error, status = sys.exception(), self.history.status
            if isinstance(error, KeyboardInterrupt) and not self.has_started:
                status = "interrupted"
            # only its type: the message of an error of user code may contain secrets
            reason = type(error).__name__ if error is not None and status == "failed" else self.history.reason
            times = {name: round(seconds, 3) for name, seconds in self._times.ledger.read().items()}
            self.provenance.end(status, reason, self.step, seconds=times, **memory_of(jax.local_devices()))
        self.logger.close(self.history.status)

    # what the loop runs

    def training(self) -> Iterator[Event]:
        """The events of training to the end of the plan, with the policy for non-finite steps."""
        return train_events(self.spec.program, self.state, self.spec.data, self.plan, self.at, partial(recover, self))

    def train_epoch(self) -> dict[str, Any]:
        """Trains the rest of the current epoch; returns its metrics, none if it was cut off."""
        assert self._driver is not None
        end = self._driver.consume(self._events, until=EpochEnd)
        return end.metrics if isinstance(end, EpochEnd) else {}

    def _testing(self, epoch: int) -> Iterator[Event]:
        self.tested = used_by_default(self.kept_best)
        at = Event(step_of(self.state), epoch, FlatState.of(select_weights(None, self.state, self.kept_best)))
        plan = Plan(max_steps=0, eval_batches=self.spec.test_batches)
        return eval_events(self.spec.program, at, self.spec.tests, plan)

    # observers: the order of notification

    def _observers(self) -> list[Any]:
        """The state of this run, the bar, logs and history, the style, the best weights, callbacks, those that save."""
        spec = self.spec
        if spec.recording is None:
            return [self, *self._bar(), *spec.observers(self)]
        more: list[Any] = [*spec.observers(self)]
        more += [self.best_in_memory] if self.best_in_memory is not None else []
        if metrics := spec.options.checked_eval_metrics:
            more += [FiniteEvaluations(metrics, spec.options.guards or "raise")]
        return self.callbacks.observers([self, *self._bar()], more)

    def _phase_of(self, observer: Any) -> str:
        """To which phase of the time ledger the time of an observer counts; "": that of the loop."""
        if isinstance(observer, ModelCheckpoint | BestInMemory):
            return SAVING
        if isinstance(observer, LogMetrics | History | ProgressBar):
            return LOGGING
        if not isinstance(observer, Callback) or self.spec.recording is None:
            return ""
        names = {id(one): name for name, one in self.callbacks.callbacks.items()}
        return CALLBACK + names.get(id(observer), type(observer.trainer or observer).__name__)  # or the trainer's hooks

    def _bar(self) -> list[ProgressBar]:
        if not self.spec.progress:
            return []
        epochs, steps = self.ends_at
        return [
            ProgressBar(
                title="" if self.target is None else f"Run folder: {short_path(self.target.folder.path)}",
                epochs=epochs,
                steps=steps,
                in_steps=self.spec.in_steps,
                metric=self._progress_metric(),
                is_primary=self.writes,
            )
        ]

    def _progress_metric(self) -> str:
        """The metric of the progress bar: as configured, or what `ModelCheckpoint` or another callback monitors."""
        if self.spec.progress_metric or self.spec.recording is None:
            return self.spec.progress_metric
        callbacks = sorted(self.callbacks.callbacks.values(), key=lambda one: not isinstance(one, ModelCheckpoint))
        monitors = (getattr(one.config, "monitor", None) for one in callbacks)
        return next((name for name in monitors if name), "")

    def handle(self, event: Event) -> None:
        """Follows the state of training; a test may use other weights."""
        self.has_started = True
        self._is_testing |= isinstance(event, EvalStart) and event.name.startswith(TEST)
        if self._is_testing:
            return
        self.flat_state = event.flat_state
        match event:
            case StepEnd() | EpochEnd():
                self.at = event.position
                if self._is_first_step and self.provenance is not None:
                    self._is_first_step = False
                    self.provenance.stepped()
            case SavePoint():
                self.at = event.loop_state
            case EvalRoundEnd():
                self.evaluated = (event.step, merged_names(event.metrics))

    def _context(self, recording: Recording, logger: Logger) -> RunContext:
        assert self.target is not None
        epochs, steps = self.ends_at
        return RunContext(
            self.target.folder.path,
            logger,
            checkpoints=self.store,
            dataset=recording.dataset,
            validates=bool(self.spec.data.evals),
            trainer=recording.trainer,
            callback_states=self.callbacks.states,
            monitors=recording.monitors,
            epochs=epochs,
            steps=steps,
            transforms=recording.transforms,
            writes=self.writes,
            eval_sets=tuple(self.spec.data.evals) if self.plan.resolved().evals_every else (),
        )

    def load_states(self, saved: SavedCheckpoint) -> None:
        """Restores the states of callbacks and loggers; a `CheckpointError` if that fails."""
        check_data_state(saved, self.spec.data.train)
        self.callbacks.load_states(saved)

    # what a style reads

    @property
    def time(self) -> TimeReport:
        """Where the time went, over all starts of the run."""
        return self._times.report

    @property
    def state(self) -> TrainState:
        """The state after the last event of training."""
        assert self.flat_state is not None
        return self.flat_state.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.flat_state = FlatState.of(state)

    @property
    def has_state(self) -> bool:
        """False before the initialisation, and after a step that failed on the device and deleted its arrays."""
        return self.flat_state is not None and not any(leaf.is_deleted() for leaf in self.flat_state.leaves)

    @property
    def ends_at(self) -> tuple[int | None, int | None]:
        """The last epoch and the last step, None if unknown."""
        return self.plan.ends_at(DataSource(self.spec.data.train, "train").lengths)

    @cached_property
    def kept_best(self) -> KeptBest | None:
        """The best weights, once training is over; None without any."""
        if self.spec.recording is None:
            return None
        if self.best_in_memory is not None:
            return self.best_in_memory.kept(self.state)
        self.store.wait()
        return best_in(self.store, self.state, self.spec.recording.ranked_by, validated=bool(self.spec.data.evals))


def _with_result(
    end: KeyboardInterrupt | SystemExit, run: Any, result: Callable[[Any], Any]
) -> KeyboardInterrupt | SystemExit:
    """`end` with the `result` of the `Run` so far; for Ctrl-C, the message has the call that resumes it.

    Before the first step and without a folder, `end` itself.
    """
    recording, target = run.spec.recording, run.target
    if recording is None or target is None or not run.has_started:
        return end
    if peers().is_multi_process:
        run.kept_best = None  # the store would wait for the others
    reached = result(run) if run.has_state else None
    if isinstance(end, KeyboardInterrupt):
        if not is_by_ctrl_c(end):
            return end
        step, call = resumable_step(target.folder), recording.resume_call.format(repr(str(target.folder.path)))
        how = "Nothing was saved." if step is None else f"Resume from step {step} with `{call}`."
        end.args = (f"{end} {how} The partial result is the `result` of this KeyboardInterrupt.",)
        end.__traceback__ = None  # no error in the library
    end.result = reached  # type: ignore[union-attr]  # exceptions take any attribute
    return end
