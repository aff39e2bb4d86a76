"""What callbacks that draw samples from a model share: when they draw, and with which random numbers."""

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
        every_n_epochs: epochs between two drawings; -1: every epoch, 0: not by epochs.
        every_n_minutes: has no meaning here.
        every_n_steps: draw every so many steps as well; 0: not by steps. Calls of several steps end there.
        seed: decides, with the step, what is drawn: the same in a run that was interrupted and went on.
    """

    every_n_steps: Annotated[int, AtLeast(0)] = 0
    seed: Annotated[int, AtLeast(0)] = 0


class Sampling(Callback):
    """Draws samples every so many steps and epochs, and when training ends; a subclass says what, in `draw`.

    The weights are those that are judged: averaged ones where the trainer has `ema`. Nothing that is trained changes.
    """

    asks_for = ""  # the method of a trainer that draws
    speed = "samples/per_second"  # what the log calls it

    def attach(self, run: RunContext) -> None:
        """Watches `run`, whose trainer must be able to draw."""
        if not hasattr(run.trainer, self.asks_for):
            kind = "no trainer" if run.trainer is None else f"a {type(run.trainer).__name__}"
            raise TypeError(
                f"{type(self).__name__} asks the trainer to `{self.asks_for}`, and this run has {kind}, which cannot. "
                "Leave the callback out, or give the trainer such a method."
            )
        super().attach(run)

    def reset(self) -> None:
        """Has drawn nothing."""
        self._drawn_at, self._is_compiled = -1, False

    def state_dict(self) -> dict[str, Any]:
        """When it drew last."""
        return {"drawn_at": self._drawn_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was drawn is not drawn again."""
        self._drawn_at = checked(state, {"drawn_at": int})["drawn_at"]

    @property
    def sees_state_every(self) -> Every:
        """At which steps it must see the state."""
        return Every(steps=self.config.every_n_steps)

    def draw(self, key: jax.Array, step: int) -> int:
        """Draws, logs, and returns how many samples there were; all of them are on the host by then."""
        raise NotImplementedError(f"{type(self).__name__} must say what it draws: `draw(key, step)`.")

    def on_step_end(self, event: StepEnd) -> None:
        """Draws when a multiple of `every_n_steps` was reached."""
        every = self.config.every_n_steps
        if every and event.step // every > (event.step - event.steps) // every:
            self._draw(event.step)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Draws after the epoch."""
        self._draw(self.event.step)

    def on_training_end(self) -> None:
        """Draws from what training has come to."""
        if self.config.every_n_steps or self.config.every_n_epochs:
            self._draw(self.event.step)

    def _draw(self, step: int) -> None:
        if step == self._drawn_at:
            return
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        jax.block_until_ready(self.state)  # what is still running is not the time that drawing takes
        began = time.perf_counter()
        count = self.draw(key, step)
        seconds = time.perf_counter() - began
        if self._is_compiled:  # the first time is mostly compiling
            self.run.logger.write(step, {self.speed: count / seconds})
        self._drawn_at, self._is_compiled = step, True
