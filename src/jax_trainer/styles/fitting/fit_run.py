"""One run of `fit`: its folder, callbacks, checkpoints, and where it resumes from."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    """What to train, on which data, and for how long."""

    target: FitTarget
    program: CompiledProgram
    init: Callable[[], TrainState]  # a function, so that the initial state is not kept in memory
    data: Data
    plan: Plan
    batch_size: int


class RunOutputs(NamedTuple):
    """What a run writes and shows."""

    metadata: Mapping[str, Any]  # the arguments of `fit`, as plain data
    callbacks: Mapping[str, Any]  # objects and configurations
    tensorboard: bool
    progress: bool
    writes_checkpoints: bool  # otherwise the best weights are kept in memory

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyperparameters to log: the user's, and the arguments of `fit`."""
        others = {name: value for name, value in self.metadata.items() if name != "hparams" and value is not None}
        return {**others, **self.metadata["hparams"]}

    @property
    def saver(self) -> ModelCheckpointConfig:
        """The configuration of the checkpoint callback."""
        return find_saver(self.callbacks)


def resolve_target(log_dir: str | Path, log_name: str, metadata: Mapping[str, Any], resume: Resume) -> RunTarget:
    """The folder to write to and the run to resume; creates the folder of a new run."""
    where = (Path(log_dir), log_name)
    if isinstance(resume, str | Path) and resume != "auto":
        folder, step = run_and_step(Path(resume))
        return RunTarget(folder, folder, step)
    found = RunFolder.find(*where, None, config_text(metadata)) if resume else None
    if resume is True and found is None:
        raise ValueError(
            f"`resume=True`: no run in {where[0] / log_name} has this configuration. Resume another run by its folder "
            f"(`resume='{where[0] / log_name}/…'`), or pass `resume='auto'` to start a new one."
        )
    return RunTarget(RunFolder.create(*where) if found is None else found, found)


def run_fit(spec: RunSpec, outputs: RunOutputs, target: RunTarget) -> FitResult:
    """Trains, and writes the run to the folder of `target`."""
    with target.locked():
        return _FitRun(spec, outputs, target).run()


class _FitRun:
    """One run of `fit`."""

    def __init__(self, spec: RunSpec, outputs: RunOutputs, target: RunTarget) -> None:
        self._spec, self._outputs, self._target, self._folder = spec, outputs, target, target.folder
        self._validates = bool(spec.data.evals)
        self._history, self._latest = History(), _LatestState()

    def run(self) -> FitResult:
        """Trains from the first step, or from the resumed one, to the last."""
        saver = self._outputs.saver
        # without validation, checkpoints are compared only by the training metric that `fit` has chosen
        is_evaluated = self._validates or saver.monitor == self._outputs.metadata["metric"]
        store = self._store(saver, is_evaluated=is_evaluated)
        try:
            return self._result(self._train(store), store)
        except (KeyboardInterrupt, SystemExit) as end:
            if self._latest.flat is None:
                with before_first_step():
                    raise
            call = f"fit(…, resume={str(self._folder.path)!r})"
            state = self._latest.state
            reached = None if state is None else self._result(state, store)
            raise interrupted(end, reached, self._folder, call) from None

    def _result(self, state: TrainState, store: Store) -> FitResult:
        kept = best_in(store, state, self._outputs.saver, validated=self._validates)
        context = PredictContext(self._spec.target, self._spec.program, state, kept, self._spec.batch_size)
        return FitResult(context, self._history, self._folder.path)

    def _train(self, store: Store) -> TrainState:
        saver, state = self._outputs.saver, self._spec.init()
        logger = LoggerConfig(tool_config=TensorboardConfig() if self._outputs.tensorboard else None).instantiate(
            Logger, self._folder.path
        )
        try:
            callbacks, saves = self._callbacks(logger, store), saver.saves_at_all
            found = None
            if isinstance(store, CheckpointStore):
                found = restore_run(
                    self._target,
                    store,
                    state,
                    saves=saves,
                    logger=logger,
                    load_states=lambda saved: (
                        check_data_state(saved, self._spec.data.train),
                        callbacks.load_states(saved),
                    ),
                )
            self._target.write_text(self._folder.config_file.name, config_text(self._outputs.metadata))
            at: Position | LoopState = Position()
            if found is not None:
                state, at = found[0], loop_state_of(found[1])
            return self._drive(state, at, callbacks)
        finally:
            self._close(logger, store)

    def _store(self, saver: ModelCheckpointConfig, *, is_evaluated: bool) -> Store:
        if self._outputs.writes_checkpoints:
            return CheckpointStore(self._folder.checkpoints, **saver.store_options(validates=is_evaluated))
        return BestInMemory(self._folder.path, monitor=saver.monitor if is_evaluated else None, mode=saver.best_mode)

    def _callbacks(self, logger: Logger, store: Store) -> CallbackList:
        callbacks: dict[str, Callback] = {}
        records = {f"run/log/{index}": one for index, one in enumerate(logger_observers(logger))}
        callback_list = CallbackList(callbacks, {**records, "run/history": self._history})
        run = RunContext(
            self._folder.path,
            logger,
            checkpoints=store,
            validates=self._validates,
            callback_states=callback_list.states,
            monitors=self._validates,  # without validation the store compares a training metric
            epochs=self._ends_at[0],
            steps=self._ends_at[1],
        )
        for name, callback in self._outputs.callbacks.items():
            if isinstance(callback, CallbackConfig):
                callback = callback.instantiate(Callback, run)
            else:
                callback.attach(run)
            callbacks[name] = callback
        return callback_list

    def _drive(self, state: TrainState, at: Position | LoopState, callbacks: CallbackList) -> TrainState:
        observers = callbacks.observers(first=[self._latest, *self._bar(callbacks.callbacks)])
        plan = self._spec.plan.with_observers(observers)
        return drive(self._events(state, plan, at), observers, state, at)

    def _events(self, state: TrainState, plan: Plan, at: Position | LoopState) -> Iterator[Event]:
        program = self._spec.program
        try:
            yield from train_events(program, state, self._spec.data, plan, at)
        except NonFiniteError as error:
            if error.position is None or self._latest.flat is None:
                raise
            before = Position(*error.position)
            raise explain_nonfinite(error, program, self._latest.flat.state, before, self._folder.path) from error

    def _bar(self, callbacks: Mapping[str, Callback]) -> list[ProgressBar]:
        if not self._outputs.progress or any(isinstance(one, Progress) for one in callbacks.values()):
            return []
        epochs, steps = self._ends_at
        return [ProgressBar(title=f"Run folder: {self._folder.path}", epochs=epochs, steps=steps)]

    @property
    def _ends_at(self) -> tuple[int | None, int | None]:
        return self._spec.plan.ends_at(DataSource(self._spec.data.train, "train").length)

    def _close(self, logger: Logger, store: Store) -> None:
        """Writes the latest weights to the user's module, and completes the log, however training ended."""
        status = self._history.status
        try:
            self._write_back()
        finally:
            if status in ("completed", "stopped"):
                logger.log_hparams(self._outputs.hparams, {**self._history.last, **self._best_of(store)})
            logger.close(status)

    def _best_of(self, store: Store) -> dict[str, float]:
        saved, monitor = store.best(), self._outputs.saver.monitor
        return {f"best/{monitor}": saved.metrics[monitor]} if saved is not None and monitor in saved.metrics else {}

    def _write_back(self) -> None:
        if (state := self._latest.state) is not None:
            self._spec.target.write_back(state)


class _LatestState:
    """The latest state of the run; the first observer."""

    def __init__(self) -> None:
        self.flat: FlatState | None = None

    @property
    def state(self) -> TrainState | None:
        """None if there is none, or if a step that failed on the device has deleted its arrays."""
        flat = self.flat
        return None if flat is None or any(leaf.is_deleted() for leaf in flat.leaves) else flat.state

    def handle(self, event: Event) -> None:
        self.flat = event.flat_state


def find_saver(callbacks: Mapping[str, Any]) -> ModelCheckpointConfig:
    """The configuration of the checkpoint callback."""
    return next(config for config in map(_config_of, callbacks.values()) if config is not None)


def check_save(save: bool | Every, resume: Resume) -> None:
    """Refuses an empty `save`, and `save=False` with `resume`."""
    if not isinstance(save, bool | Every) or save == Every():
        raise ValueError(f"`save` must be True, False, or an interval such as `Every(epochs=10)`, got {save!r}.")
    if save is False and resume is not False:
        raise ValueError(f"`save=False` writes no checkpoints, but `resume` is {resume!r}. Leave out one of them.")


def with_saver(
    callbacks: Mapping[str, Any], metric: str, mode: Mode, save: bool | Every, *, metric_is_set: bool
) -> dict[str, Any]:
    """`callbacks` with a `ModelCheckpoint` for `metric`, unless they contain one.

    Args:
        metric_is_set: whether the user passed `metric`.
    """
    if not any(_config_of(one) is not None for one in callbacks.values()):
        every = save if isinstance(save, Every) else Every(epochs=1)
        often = {"every_n_epochs": every.epochs, "every_n_steps": every.steps, "every_n_minutes": every.minutes}
        return {**callbacks, SAVER: ModelCheckpointConfig(monitor=metric, mode=mode, **often)}
    if metric_is_set:
        raise ValueError(
            "`metric` and a `ModelCheckpoint` both select the best checkpoint. Leave out `metric`, and set `monitor`."
        )
    if save is not True:
        raise ValueError(f"`save={save!r}` and a `ModelCheckpoint` both set when to save. Leave out one of them.")
    return dict(callbacks)


def _config_of(callback: Any) -> ModelCheckpointConfig | None:
    if isinstance(callback, ModelCheckpoint):
        return callback.config
    return callback if isinstance(callback, ModelCheckpointConfig) else None
