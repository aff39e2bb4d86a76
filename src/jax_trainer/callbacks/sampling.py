"""Callbacks that sample from a model during training, and log images or text."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig, RunContext
from jax_trainer.config.settings import AtLeast, Problem
from jax_trainer.engine import Every, StepEnd

SHOWN_SIDE, GAP = 32, 2  # pixels: small images are magnified to about this size; the gap between images


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

    kept: ClassVar[Mapping[str, Any]] = {"drawn_at": int}
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
        self.drawn_at, self._is_compiled = -1, False

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
        if step == self.drawn_at:
            return
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        jax.block_until_ready(self.state)  # so that pending steps do not count as sampling time
        started = time.perf_counter()
        count = self.draw(key, step)
        seconds = time.perf_counter() - started
        if self._is_compiled:  # the first time is mostly compiling
            self.run.logger.write(step, {self.speed: count / seconds})
        self.drawn_at, self._is_compiled = step, True


@dataclass
class SampleImagesConfig(SamplingConfig):
    """Options of the sampled images.

    Args:
        per_class: number of images per class; for a dataset without classes, number of rows of ten.
        steps: number of sampler steps; null: the objective's default.
        guidance: classifier-free guidance scale; null: the objective's default.
    """

    per_class: Annotated[int, AtLeast(1)] = 8
    steps: Annotated[int, AtLeast(1)] | None = None
    guidance: Annotated[float, AtLeast(0)] | None = None


@register
class SampleImages(Sampling):
    """Samples images of every class, and logs them as one image, `samples/images`: a column per class.

    It is in `media/` of the run folder and in TensorBoard. `samples/per_second` is the sampling speed.
    """

    config: SampleImagesConfig
    trainer_method = "sample"

    def draw(self, key: jax.Array, step: int) -> int:
        config = self.config
        dataset: Any = self.run.dataset
        classes = getattr(getattr(dataset, "config", None), "num_classes", 0)
        columns = classes or 10
        labels = np.tile(np.arange(classes, dtype=np.int32), config.per_class) if classes else None
        options = {"steps": config.steps, "guidance": config.guidance, "state": self.state}
        samples = np.asarray(self.trainer.sample(key, labels, count=columns * config.per_class, **options))
        shown = dataset.pixels(samples) if hasattr(dataset, "pixels") else stretched(samples)
        self.run.logger.log_image("samples/images", grid(shown, columns), step)
        return len(samples)


def stretched(images: np.ndarray) -> np.ndarray:
    """Images scaled to the range from 0 to 1, if the dataset has no scaling."""
    low, high = images.min(), images.max()
    return (images - low) / max(high - low, 1e-6)


def grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Images [n, h, w, c] side by side, row by row, magnified where they are small: [height, width, c].

    >>> grid(np.zeros((6, 8, 8, 1)), 3).shape
    (70, 104, 1)
    """
    times = max(1, SHOWN_SIDE // max(images.shape[1:3]))
    images = images.repeat(times, axis=1).repeat(times, axis=2)
    images = np.pad(images, ((0, 0), (GAP, 0), (GAP, 0), (0, 0)), constant_values=1)
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    images = np.pad(images, ((0, rows * columns - count), (0, 0), (0, 0), (0, 0)), constant_values=1)
    joined = images.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    joined = joined.reshape(rows * height, columns * width, channels)
    return np.pad(joined, ((0, GAP), (0, GAP), (0, 0)), constant_values=1)


@dataclass
class SampleTextConfig(SamplingConfig):
    """Options of the generated text.

    Args:
        prompt: the start of the text, in characters of the dataset.
        length: number of generated characters.
        temperature: sampling temperature; 0: greedy decoding.
        top_k: sample from the k most likely characters; null: from all.
    """

    prompt: str = "\n"
    length: Annotated[int, AtLeast(1)] = 200
    temperature: Annotated[float, AtLeast(0)] = 0.8
    top_k: Annotated[int, AtLeast(1)] | None = None

    def problems(self) -> Iterator[Problem]:
        """An empty prompt."""
        if not self.prompt:
            yield "prompt", "`prompt` must have at least one character, such as the end of a line."


@register
class SampleText(Sampling):
    """Generates text regularly, logged as `samples/text`, for trainers with a method `generate`.

    `samples/chars_per_second` is the speed, except for the first time, which compiles.
    """

    config: SampleTextConfig
    trainer_method = "generate"
    speed = "samples/chars_per_second"

    def draw(self, key: jax.Array, step: int) -> int:
        config = self.config
        options = {"temperature": config.temperature, "top_k": config.top_k, "seed": key, "state": self.state}
        text = self.trainer.generate(config.prompt, config.length, **options)
        self.run.logger.log_text("samples/text", text, step)
        return config.length
