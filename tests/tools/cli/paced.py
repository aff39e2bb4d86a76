"""A user's callback that slows down every step."""

import time

from compoconf import register

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.engine import StepEnd


@register
class Paced(Callback):
    """Waits a little at every step."""

    config: CallbackConfig

    def on_step_end(self, event: StepEnd) -> None:
        time.sleep(0.02)
