"""A training of `fit` as a run with a folder: what is written, who watches, and what it goes on from."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax_trainer.adapters import write_back
from jax_trainer.callbacks import (
    Callback,
    CallbackConfig,
    ModelCheckpoint,
    ModelCheckpointConfig,
    Progress,
    ProgressBar,
    RunContext,
    logger_observers,
)
from jax_trainer.callbacks.monitored import Mode
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.memory import BestInMemory
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import CompiledProgram, FlatState, NonFiniteError, TrainState
from jax_trainer.datasets import Data, DataSource, Position
from jax_trainer.engine import Event, Every, LoopState, Plan, drive, train_events
from jax_trainer.logger import Logger, LoggerConfig, TensorboardConfig
from jax_trainer.runs import (
    CallbackList,
    RunTarget,
    best_in,
    check_data_state,
    explain_nonfinite,
    interrupted,
    loop_state_of,
    restore_run,
    run_and_step,
)
from jax_trainer.runs.interrupted import before_first_step
from jax_trainer.styles.fitting.metadata import config_text
from jax_trainer.styles.fitting.program import FitTarget
from jax_trainer.styles.fitting.result import FitResult, History, PredictContext

Store = CheckpointStore | BestInMemory
Resume = bool | Literal["auto"] | str | Path
SAVER = "ModelCheckpoint"


class RunSpec(NamedTuple):
    """What is trained, on what, and how long."""

    trained: FitTarget
    program: CompiledProgram
    begin: Callable[[], TrainState]  # the state before the first step; nobody holds on to it
    data: Data
    plan: Plan
    batch_size: int


class RunOutputs(NamedTuple):
    """What is written and shown of a run."""

    told: Mapping[str, Any]  # to `fit`, in plain data
    callbacks: Mapping[str, Any]  # objects and configurations
    tensorboard: bool
    progress: bool
    writes_checkpoints: bool  # otherwise the best weights are kept in memory

    @property
    def hparams(self) -> dict[str, Any]:
        """What the page of hyperparameters shows: those that were given, and what else matters."""
        others = {name: value for name, value in self.told.items() if name != "hparams" and value is not None}
        return {**others, **self.told["hparams"]}

    @property
    def saver(self) -> ModelCheckpointConfig:
        """What is saved, and which states are the best."""
        return find_saver(self.callbacks)


def resolve_target(log_dir: str | Path, log_name: str, told: Mapping[str, Any], resume: Resume) -> RunTarget:
    """Where a run that was told this writes; makes the folder of a new one."""
    where = (Path(log_dir), log_name)
    if isinstance(resume, str | Path) and resume != "auto":
        folder, step = run_and_step(Path(resume))
        return RunTarget(folder, folder, step)
    found = RunFolder.find(*where, None, config_text(told)) if resume else None
    if resume is True and found is None:
        raise ValueError(
            f"There is no run in {where[0] / log_name} that was told the same as this one, so there is nothing to "
            f"resume. Go on with another run by its folder (`resume='{where[0] / log_name}/…'`), or begin one: "
            "`resume='auto'` begins one where there is none."
        )
    return RunTarget(RunFolder.create(*where) if found is None else found, found)


def run_fit(work: RunSpec, recording: RunOutputs, place: RunTarget) -> FitResult:
    """Trains, and writes all of it into the folder of `place`."""
    with place.locked():
        return _Session(work, recording, place).go()


class _Session:
    """One training."""

    def __init__(self, work: RunSpec, recording: RunOutputs, place: RunTarget) -> None:
        self._work, self._recording, self._place, self._folder = work, recording, place, place.folder
        self._validates = bool(work.data.evals)
        self._history, self._latest = History(), _Latest()

    def go(self) -> FitResult:
        """From the first step, or from where the run stood, to the last."""
        saver = self._recording.saver
        # without validation there is only what `fit` itself has chosen to go by
        is_evaluated = self._validates or saver.monitor == self._recording.told["metric"]
        store = self._store(saver, is_evaluated=is_evaluated)
        try:
            return self._result(self._trained(store), store)
        except (KeyboardInterrupt, SystemExit) as end:
            if self._latest.held is None:  # before the first step: nothing was reached
                raise
            call = f"fit(…, resume={str(self._folder.path)!r})"
            state = self._latest.state
            reached = None if state is None else self._result(state, store)
            raise interrupted(end, reached, self._folder, call) from None

    def _result(self, state: TrainState, store: Store) -> FitResult:
        kept = best_in(store, state, self._recording.saver, validated=self._validates)
        asked = PredictContext(self._work.trained, self._work.program, state, kept, self._work.batch_size)
        return FitResult(asked, self._history, self._folder.path)

    def _trained(self, store: Store) -> TrainState:
        with before_first_step():
            saver, state = self._recording.saver, self._work.begin()
        logger = LoggerConfig(tool_config=TensorboardConfig() if self._recording.tensorboard else None).instantiate(
            Logger, self._folder.path
        )
        try:
            watching, saves = self._watching(logger, store), saver.saves_at_all
            found = None
            if isinstance(store, CheckpointStore):
                found = restore_run(
                    self._place,
                    store,
                    state,
                    saves=saves,
                    logger=logger,
                    remember=lambda saved: (
                        check_data_state(saved, self._work.data.train),
                        watching.load_states(saved),
                    ),
                )
            self._place.write_text(self._folder.config_file.name, config_text(self._recording.told))
            at: Position | LoopState = Position()
            if found is not None:
                state, at = found[0], loop_state_of(found[1])
            return self._train(state, at, watching)
        finally:
            self._close(logger, store)

    def _store(self, saver: ModelCheckpointConfig, *, is_evaluated: bool) -> Store:
        if self._recording.writes_checkpoints:
            return CheckpointStore(self._folder.checkpoints, **saver.store_options(validates=is_evaluated))
        return BestInMemory(self._folder.path, monitor=saver.monitor if is_evaluated else None, mode=saver.best_mode)

    def _watching(self, logger: Logger, store: Store) -> CallbackList:
        callbacks: dict[str, Callback] = {}
        records = {f"run/log/{index}": one for index, one in enumerate(logger_observers(logger))}
        watching = CallbackList(callbacks, {**records, "run/history": self._history})
        run = RunContext(
            self._folder.path,
            logger,
            checkpoints=store,
            validates=self._validates,
            callback_states=watching.states,
            monitors=self._validates,  # without validation the store goes by a metric of training
            epochs=self._ends_at[0],
            steps=self._ends_at[1],
        )
        for name, given in self._recording.callbacks.items():
            if isinstance(given, CallbackConfig):
                given = given.instantiate(Callback, run)
            else:
                given.attach(run)
            callbacks[name] = given
        return watching

    def _train(self, state: TrainState, at: Position | LoopState, watching: CallbackList) -> TrainState:
        observers = watching.observers(first=[self._latest, *self._bar(watching.callbacks)])
        plan = self._work.plan.seen_by(observers)
        return drive(self._events(state, plan, at), observers, state, at)

    def _events(self, state: TrainState, plan: Plan, at: Position | LoopState) -> Iterator[Event]:
        program = self._work.program
        try:
            yield from train_events(program, state, self._work.data, plan, at)
        except NonFiniteError as error:
            if error.place is None or self._latest.held is None:
                raise
            before = Position(*error.place)
            raise explain_nonfinite(error, program, self._latest.held.state, before, self._folder.path) from error

    def _bar(self, callbacks: Mapping[str, Callback]) -> list[ProgressBar]:
        if not self._recording.progress or any(isinstance(one, Progress) for one in callbacks.values()):
            return []
        epochs, steps = self._ends_at
        return [ProgressBar(title=f"Run folder: {self._folder.path}", epochs=epochs, steps=steps)]

    @property
    def _ends_at(self) -> tuple[int | None, int | None]:
        return self._work.plan.ends_at(DataSource(self._work.data.train, "train").length)

    def _close(self, logger: Logger, store: Store) -> None:
        """However training ended: the module has the newest weights, and the record is complete."""
        status = self._history.status
        try:
            self._write_back()
        finally:
            if status in ("completed", "stopped"):
                logger.log_hparams(self._recording.hparams, {**self._history.last, **self._best_of(store)})
            logger.close(status)

    def _best_of(self, store: Store) -> dict[str, float]:
        saved, monitor = store.best(), self._recording.saver.monitor
        return {f"best/{monitor}": saved.metrics[monitor]} if saved is not None and monitor in saved.metrics else {}

    def _write_back(self) -> None:
        module, state = self._work.trained.module, self._latest.state
        if module is not None and state is not None:
            write_back(module, state)
            module.eval()


class _Latest:
    """Holds the newest state; the first to be told."""

    def __init__(self) -> None:
        self.held: FlatState | None = None

    @property
    def state(self) -> TrainState | None:
        """None where there is none: a step that failed on the device may have taken the arrays with it."""
        held = self.held
        return None if held is None or any(leaf.is_deleted() for leaf in held.leaves) else held.state

    def handle(self, event: Event) -> None:
        self.held = event.flat_state


def find_saver(callbacks: Mapping[str, Any]) -> ModelCheckpointConfig:
    """The configuration of the one that saves."""
    return next(config for config in map(_config_of, callbacks.values()) if config is not None)


def check_save(save: bool | Every, resume: Resume) -> None:
    """Refuses a `save` that says nothing, or that `resume` contradicts."""
    if not isinstance(save, bool | Every) or save == Every():
        raise ValueError(f"`save` must be True, False, or how often, such as `Every(epochs=10)`; got {save!r}.")
    if save is False and resume is not False:
        raise ValueError(
            f"`save=False` writes nothing to resume from, and `resume` is {resume!r}. Leave out one of them."
        )


def with_saver(
    callbacks: Mapping[str, Any], metric: str, mode: Mode, save: bool | Every, *, is_wish: bool
) -> dict[str, Any]:
    """`callbacks` with one that saves by `metric`, unless there is one among them; `is_wish`: the user named it."""
    if not any(_config_of(one) is not None for one in callbacks.values()):
        every = save if isinstance(save, Every) else Every(epochs=1)
        often = {"every_n_epochs": every.epochs, "every_n_steps": every.steps, "every_n_minutes": every.minutes}
        return {**callbacks, SAVER: ModelCheckpointConfig(monitor=metric, mode=mode, **often)}
    if is_wish:
        raise ValueError("`metric` and a `ModelCheckpoint` both say what the best state is. Set its `monitor` alone.")
    if save is not True:
        raise ValueError(f"`save={save!r}` and a `ModelCheckpoint` both say when to save. Leave out one of them.")
    return dict(callbacks)


def _config_of(callback: Any) -> ModelCheckpointConfig | None:
    if isinstance(callback, ModelCheckpoint):
        return callback.config
    return callback if isinstance(callback, ModelCheckpointConfig) else None
