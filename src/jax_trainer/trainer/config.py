"""How a model is trained, as a configuration."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.callbacks import Callback, ModelCheckpointConfig, full_names
from jax_trainer.checkpoint.names import safe_join
from jax_trainer.engine import Every, Plan
from jax_trainer.interfaces import ModelMode
from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.settings import Above, AtLeast, Below, Problem, Settings, SettingsError

Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]


@dataclass
class TrainerConfig(Settings):
    """How a model is trained.

    Args:
        train_epochs: how many times the training data is gone through.
        check_val_every_n_epoch: epochs between two validations; 0: never.
        debug: run without compiling, so that a breakpoint in the loss works.
        enable_progress_bar: show a bar, and a line per epoch and validation.
        seed: decides the first weights, dropout and everything else that is random in training.
        log_grad_norm: report the norms of gradients and parameters.
        detect_nans: end the run at the first loss or gradient that is not finite, with the weights before it.
        logger: what is recorded, and where.
        callbacks: watchers by name; the name of a callback's class needs no `class_name`.
        model_mode: nnx or linen; left out, the model says so itself.
        max_steps: end after this many optimizer steps, whatever `train_epochs` says.
        max_steps_per_epoch: an epoch is at most this many steps.
        max_time: end after this many seconds.
        val_every_n_steps: validate every so many steps as well; 0: only by epochs.
        steps_per_call: optimizer steps per dispatch; "epoch" sends a whole epoch at once.
        resident: keep the training data on the device; "auto" does so when it fits well.
        precision: f32, bf16 (computing in bf16, weights in f32) or bf16_full.
        accumulate: compute gradients in this many parts of a batch, one after the other.
        ema: keep an average of the weights that forgets by this factor per step, and judge that one.
        overfit_batches: train on the first so many batches only, again and again.
        fast_dev_run: take only so many steps and validation batches, to see whether it runs.
    """

    train_epochs: Size = 1
    check_val_every_n_epoch: Count = 1
    debug: bool = False
    enable_progress_bar: bool = True
    seed: Count = 42
    log_grad_norm: bool = True
    detect_nans: bool = False
    logger: Logger.cfgtype = field(default_factory=LoggerConfig)
    callbacks: dict[str, Callback.cfgtype] = field(default_factory=dict)
    model_mode: ModelMode | None = None
    max_steps: Size | None = None
    max_steps_per_epoch: Size | None = None
    max_time: Annotated[float, Above(0)] | None = None
    val_every_n_steps: Count = 0
    steps_per_call: Size | Literal["epoch"] = 1
    resident: bool | Literal["auto"] = False
    precision: Literal["f32", "bf16", "bf16_full"] = "f32"
    accumulate: Size = 1
    ema: Annotated[float, AtLeast(0), Below(1)] | None = None
    overfit_batches: Count = 0
    fast_dev_run: Count = 0

    def problems(self) -> Iterator[Problem]:
        """What does not go together."""
        savers = self._savers()
        if len(savers) > 1:
            yield "callbacks", f"One ModelCheckpoint can save, and there are {len(savers)}: {', '.join(savers)}."
        yield from _bad_names(self.logger)

    def plan(self, num_epochs: int | None = None) -> Plan:
        """How long to train and when to validate."""
        return Plan(
            max_epochs=self.train_epochs if num_epochs is None else num_epochs,
            max_steps=self.max_steps,
            max_time=self.max_time,
            steps_per_epoch=self.max_steps_per_epoch,
            eval_every=Every(epochs=self.check_val_every_n_epoch, steps=self.val_every_n_steps),
            steps_per_call=self.steps_per_call,
            overfit_batches=self.overfit_batches,
            fast_dev_run=self.fast_dev_run,
            metrics_every=self.logger.log_steps_every or 50,
        )

    @property
    def validates(self) -> bool:
        """Whether a run validates at all, if it has data for it."""
        return bool(self.check_val_every_n_epoch or self.val_every_n_steps or self.fast_dev_run)

    @property
    def saver(self) -> ModelCheckpointConfig | None:
        """The configuration of the callback that saves."""
        return next(iter(self._savers().values()), None)

    def _savers(self) -> dict[str, ModelCheckpointConfig]:
        return {name: one for name, one in self.callbacks.items() if isinstance(one, ModelCheckpointConfig)}

    def check_monitored(self, evals: Iterable[str], judged: Iterable[str]) -> None:
        """Refuses to monitor what evaluations of these sets, which report `judged`, will not have."""
        known = {name for one in evals for name in full_names(dict.fromkeys(judged), one)}
        for key, saver in self._savers().items():
            if known and saver.every_n_epochs and saver.monitor not in known:
                text = f"no metric {saver.monitor!r} will be there. There are {', '.join(sorted(known))}."
                raise SettingsError([(f"trainer.callbacks.{key}.monitor", text)])


def _bad_names(logger: Any) -> Iterator[Problem]:
    """What a file calls a run becomes a folder, which must stay among the runs."""
    tool = logger.tool_config
    name, version = (getattr(tool, key, "") for key in ("name", "version"))
    parts = [("name", part) for part in name.split("/") if name] + [("version", version)] * bool(version)
    for key, part in parts:
        try:
            safe_join(Path("runs"), part)
        except ValueError as error:
            yield f"logger.tool_config.{key}", str(error)
    for key, place in (("log_dir", logger.log_dir), ("tool_config.save_dir", getattr(tool, "save_dir", ""))):
        if "\0" in place:
            yield f"logger.{key}", "A path cannot have the character NUL in it."


@register_interface
class BaseTrainer(RegistrableConfigInterface):
    """What the `trainer:` section of a file can name; `TrainerModule` is what implements it."""

    config: Any
