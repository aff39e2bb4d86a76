"""What a language model writes while it is trained."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.run import Run
from jax_trainer.engine import Every, StepEnd
from jax_trainer.settings import AtLeast, Problem

TEXT, SPEED = "samples/text", "samples/chars_per_second"


@dataclass
class SampleTextConfig(CallbackConfig):
    """When the model writes, and what.

    Args:
        every_n_epochs: epochs between two texts; -1: every epoch, 0: not by epochs.
        every_n_minutes: has no meaning here.
        every_n_steps: write every so many steps as well; 0: not by steps.
        prompt: what a text begins with, in characters of the dataset.
        length: how many characters follow.
        temperature: below 1 the likely gets likelier, above 1 less so; 0 always takes the likeliest.
        top_k: draw among so many of the likeliest characters only; null: among all.
        seed: decides, with the step, what is drawn.
    """

    every_n_steps: Annotated[int, AtLeast(0)] = 0
    prompt: str = "\n"
    length: Annotated[int, AtLeast(1)] = 200
    temperature: Annotated[float, AtLeast(0)] = 0.8
    top_k: Annotated[int, AtLeast(1)] | None = None
    seed: Annotated[int, AtLeast(0)] = 0

    def problems(self) -> Iterator[Problem]:
        """A text has to begin somewhere."""
        if not self.prompt:
            yield "prompt", "`prompt` must have at least one character, such as the end of a line."


@register
class SampleText(Callback):
    """Lets the model write a text now and then, logged as `samples/text`, for trainers with a method `generate`.

    `samples/chars_per_second` is how fast that went, except the first time, when it was compiled. What is drawn depends
    on `seed` and the step alone. With several steps per call, a call ends where a text is due.
    """

    config: SampleTextConfig

    def attach(self, run: Run) -> None:
        """Watches `run`, whose trainer must be able to write."""
        if not callable(getattr(run.trainer, "generate", None)):
            trainer = "no trainer" if run.trainer is None else type(run.trainer).__name__
            raise TypeError(
                f"`SampleText` needs a trainer with a method `generate`, as `LanguageModelTrainer` has, and this run "
                f"has {trainer}. Leave the callback out."
            )
        super().attach(run)
        self._is_compiled = False

    def reset(self) -> None:
        """Has written nothing."""
        self._written_at = -1

    def state_dict(self) -> dict[str, Any]:
        """The step of the last text."""
        return {"written_at": self._written_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A step whose text was written does not get another one."""
        self._written_at = state["written_at"]

    @property
    def sees_state_every(self) -> Every:
        """At which steps it must see the state."""
        return Every(steps=self.config.every_n_steps)

    def on_step_end(self, event: StepEnd) -> None:
        """Writes when so many steps were reached, or passed."""
        every = self.config.every_n_steps
        if every and event.step // every > (event.step - event.steps) // every:
            self._write()

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Writes."""
        self._write()

    def _write(self) -> None:
        config, step, state = self.config, self.event.step, self.state
        if step == self._written_at:
            return
        self._written_at = step
        jax.block_until_ready(state)  # what is still running is not the time that writing takes
        began = time.perf_counter()
        text = self.trainer.generate(
            config.prompt,
            config.length,
            temperature=config.temperature,
            top_k=config.top_k,
            seed=config.seed + step,
            state=state,
        )
        seconds = time.perf_counter() - began  # a text is on the host: nothing is left to wait for
        self.run.logger.log_text(TEXT, text, step)
        if self._is_compiled:
            self.run.logger.write(step, {SPEED: config.length / seconds})
        self._is_compiled = True
