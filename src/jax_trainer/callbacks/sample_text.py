"""What a language model writes while it is trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import jax
from compoconf import register

from jax_trainer.callbacks.sampling import Sampling, SamplingConfig
from jax_trainer.settings import AtLeast, Problem


@dataclass
class SampleTextConfig(SamplingConfig):
    """When the model writes, and what.

    Args:
        prompt: what a text begins with, in characters of the dataset.
        length: how many characters follow.
        temperature: below 1 the likely gets likelier, above 1 less so; 0 always takes the likeliest.
        top_k: draw among so many of the likeliest characters only; null: among all.
    """

    prompt: str = "\n"
    length: Annotated[int, AtLeast(1)] = 200
    temperature: Annotated[float, AtLeast(0)] = 0.8
    top_k: Annotated[int, AtLeast(1)] | None = None

    def problems(self) -> Iterator[Problem]:
        """A text has to begin somewhere."""
        if not self.prompt:
            yield "prompt", "`prompt` must have at least one character, such as the end of a line."


@register
class SampleText(Sampling):
    """Lets the model write a text now and then, logged as `samples/text`, for trainers with a method `generate`.

    `samples/chars_per_second` is how fast that went, except the first time, when it was compiled.
    """

    config: SampleTextConfig
    asks_for = "generate"
    speed = "samples/chars_per_second"

    def draw(self, key: jax.Array, step: int) -> int:
        """Writes and logs the text."""
        config = self.config
        options = {"temperature": config.temperature, "top_k": config.top_k, "seed": key, "state": self.state}
        text = self.trainer.generate(config.prompt, config.length, **options)
        self.run.logger.log_text("samples/text", text, step)
        return config.length
