"""The base class of callbacks that sample from a model."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.run import RunContext
from jax_trainer.engine import Every, StepEnd
from jax_trainer.settings import AtLeast, checked

__all__ = ["Sampling", "SamplingConfig"]


@dataclass
class SamplingConfig(CallbackConfig):
    """When samples are drawn.

    Args:
        every_n_epochs: sample every n epochs; -1: every epoch, 0: not by epochs.
        every_n_minutes: not used.
        every_n_steps: also sample every n steps; 0: not by steps. Dispatches of several steps end there.
        seed: the seed, combined with the step: a resumed run draws the same samples.
    """

    every_n_steps: Annotated[int, AtLeast(0)] = 0
    seed: Annotated[int, AtLeast(0)] = 0


class Sampling(Callback):
    """Samples every n steps or epochs, and at the end of training; subclasses implement `draw`.

    Uses the weights of evaluations: averaged ones if the trainer has `ema`. Training is not affected.
    """

    trainer_method = ""  # the method of the trainer that samples
    speed = "samples/per_second"  # name of the speed metric

    def attach(self, run: RunContext) -> None:
        if not hasattr(run.trainer, self.trainer_method):
            kind = "no trainer" if run.trainer is None else f"a {type(run.trainer).__name__}"
            raise TypeError(
                f"{type(self).__name__} needs a trainer with a method `{self.trainer_method}`; this run has {kind}. "
                "Remove the callback, or add such a method to the trainer."
            )
        super().attach(run)

    def reset(self) -> None:
        self._drawn_at, self._is_compiled = -1, False

    def state_dict(self) -> dict[str, Any]:
        """The step of the last samples."""
        return {"drawn_at": self._drawn_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn_at = checked(state, {"drawn_at": int})["drawn_at"]

    @property
    def sees_state_every(self) -> Every:
        """The steps at which it needs the state."""
        return Every(steps=self.config.every_n_steps)

    def draw(self, key: jax.Array, step: int) -> int:
        """Draws and logs samples; returns their number, once all are on the host."""
        raise NotImplementedError(f"{type(self).__name__} must implement `draw(key, step)`.")

    def on_step_end(self, event: StepEnd) -> None:
        """Samples at multiples of `every_n_steps`."""
        every = self.config.every_n_steps
        if every and event.step // every > (event.step - event.steps) // every:
            self._draw(event.step)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self._draw(self.event.step)

    def on_training_end(self) -> None:
        """Samples from the final weights."""
        if self.config.every_n_steps or self.config.every_n_epochs:
            self._draw(self.event.step)

    def _draw(self, step: int) -> None:
        if step == self._drawn_at:
            return
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        jax.block_until_ready(self.state)  # so that pending steps do not count as sampling time
        started = time.perf_counter()
        count = self.draw(key, step)
        seconds = time.perf_counter() - started
        if self._is_compiled:  # the first time is mostly compiling
            self.run.logger.write(step, {self.speed: count / seconds})
        self._drawn_at, self._is_compiled = step, True
