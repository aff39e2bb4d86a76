"""Unfreezes parameters during training, by epoch and by path."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import AtLeast, IsRegex, Problem
from jax_trainer.core import Program
from jax_trainer.core.by_epoch import value_in
from jax_trainer.diagnostics.leaves import parameter_paths
from jax_trainer.engine import Edit, EpochEnd
from jax_trainer.optimizer.unfreezing import UNFREEZE_EPOCH, unfrozen_at, with_unfreezing


@dataclass
class UnfreezeConfig(CallbackConfig):
    """Which parameters train, and from when on.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        schedule: regular expressions of parameters, by the number of complete epochs after which they train; matched
            from the start of the dotted path. 0 is needed: something must train from the beginning.
        train_bn: update the running statistics of BatchNorms whose parameters are all frozen; otherwise they stay.
    """

    schedule: dict[Annotated[int, AtLeast(0)], Annotated[str, IsRegex()]] = field(default_factory=dict)
    train_bn: bool = False

    def problems(self) -> Any:
        """A schedule without a beginning."""
        if 0 not in self.schedule:
            found = f"`schedule` {self.schedule} has no parameters that train from the beginning"
            problem: Problem = ("schedule", f"{found}: add `0:`, as in {{0: 'head', 3: '.*'}}.")
            yield problem


@register
class Unfreeze(Callback):
    """Trains some parameters from the beginning, and unfreezes others after some epochs.

    A frozen parameter gets no update, its moments in the optimizer state stay as they are, and it does not count in the
    clipped norm. A BatchNorm all of whose parameters are frozen keeps its running statistics. When a parameter is
    unfrozen, the optimizer treats it as a new one, at the present learning rate. Each step is an `Edit` of one number
    in the state: it is logged, is part of the next checkpoint, resumes exactly, and compiles nothing.

    >>> unfreeze = Unfreeze(schedule={0: r"head\\..*", 3: r".*block[34].*", 6: ".*"})
    """

    config: UnfreezeConfig
    changes_training = True
    needs = ()

    def wrap(self, program: Program) -> Program:
        return with_unfreezing(program, self.config.schedule, train_bn=self.config.train_bn)

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        event, schedule = self.event, self.config.schedule
        if epoch not in schedule or (isinstance(event, EpochEnd) and event.cut_off_after):
            return None
        paths = parameter_paths(self.state.params)
        new = [path for path, start in zip(paths, unfrozen_at(schedule, paths), strict=True) if start == epoch]
        reason = f"{len(new)} of {len(paths)} parameters are unfrozen by {value_in(schedule, epoch + 1)!r}: {new[0]}, …"
        return Edit(hyperparameters={UNFREEZE_EPOCH: epoch}, reason=reason)
