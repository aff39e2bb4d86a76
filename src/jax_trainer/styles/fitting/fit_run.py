"""One run of `fit`: its folder, and what it writes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax_trainer.callbacks import Callback, CallbackConfig, ModelCheckpoint, ModelCheckpointConfig, RunContext
from jax_trainer.callbacks.monitored import Mode
from jax_trainer.checkpoint.folder import CONFIG, RunFolder
from jax_trainer.core import CompiledProgram, ProgramOptions, TrainState
from jax_trainer.datasets import Data
from jax_trainer.engine import Every, Plan
from jax_trainer.logger import Logger, LoggerConfig, TensorboardConfig
from jax_trainer.runs import Ranking, Recording, Run, RunSpec, RunTarget, run_and_step
from jax_trainer.styles.fitting.metadata import config_text
from jax_trainer.styles.fitting.program import FitTarget
from jax_trainer.styles.fitting.result import FitResult

Resume = bool | Literal["auto"] | str | Path
SAVER = "ModelCheckpoint"


class RunOutputs(NamedTuple):
    """What a run writes and shows."""

    metadata: Mapping[str, Any]  # the arguments of `fit`, as plain data
    callbacks: Mapping[str, Any]  # objects and configurations, with the checkpoint callback
    tensorboard: bool
    progress: bool
    options: ProgramOptions
    writes_checkpoints: bool  # otherwise the best weights are kept in memory

    def recording(self, *, validates: bool) -> Recording:
        """What the run writes to its folder."""
        saver = find_saver(self.callbacks)
        tools = TensorboardConfig() if self.tensorboard else None
        arguments = {name: value for name, value in self.metadata.items() if name != "hparams" and value is not None}
        return Recording(
            logger=lambda folder: LoggerConfig(tool_config=tools).instantiate(Logger, folder.path),
            callbacks=self._created,
            files={CONFIG: config_text(self.metadata)},
            hparams={**arguments, **self.metadata["hparams"]},
            saver=saver if self.writes_checkpoints else None,
            ranking=None if self.writes_checkpoints else Ranking.by(saver.monitor, saver.best_mode),
            # without validation, checkpoints are compared only by the training metric that `fit` has chosen
            is_ranked=validates or saver.monitor == self.metadata["metric"],
            monitors=validates,
            resume_call="fit(…, resume={})",
        )

    def _created(self, run: RunContext) -> dict[str, Callback]:
        created: dict[str, Callback] = {}
        for name, one in self.callbacks.items():
            if config_of_saver(one) is not None and not self.writes_checkpoints:
                continue
            if isinstance(one, CallbackConfig):
                one = one.instantiate(Callback, run)
            else:
                one.attach(run)
            created[name] = one
        return created


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


def run_fit(
    fit_target: FitTarget,
    program: CompiledProgram,
    init: Callable[[], TrainState],
    data: Data,
    plan: Plan,
    batch_size: int,
    outputs: RunOutputs,
    target: RunTarget,
) -> FitResult:
    """Trains, and writes the run to the folder of `target`; a module that holds weights gets those that it reaches."""
    recording = outputs.recording(validates=bool(data.evals))
    spec = RunSpec(
        program=program,
        plan=plan,
        data=data,
        init=init,
        policy=outputs.options.guard or "raise",
        max_rollbacks=outputs.options.max_rollbacks,
        progress=outputs.progress,
        recording=recording,
    )
    run = Run(spec, target)
    try:
        return run.execute(lambda run: FitResult(run, fit_target, batch_size))
    except BaseException:
        if run.has_state:
            fit_target.write_back(run.state)
        raise


def find_saver(callbacks: Mapping[str, Any]) -> ModelCheckpointConfig:
    """The configuration of the checkpoint callback."""
    return next(config for config in map(config_of_saver, callbacks.values()) if config is not None)


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
    if not any(config_of_saver(one) is not None for one in callbacks.values()):
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


def config_of_saver(callback: Any) -> ModelCheckpointConfig | None:
    """The configuration of a checkpoint callback; None for any other callback."""
    if isinstance(callback, ModelCheckpoint):
        return callback.config
    return callback if isinstance(callback, ModelCheckpointConfig) else None
