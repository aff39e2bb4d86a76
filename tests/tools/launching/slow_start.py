"""A user's callback that slows down every step of the first start of a SLURM job, and may fail in one process."""

import os
import time

from compoconf import register

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.engine import StepEnd


@register
class SlowStart(Callback):
    """Waits at every step, unless the job was requeued; raises at step 9 of the process `RAISES`."""

    config: CallbackConfig

    def on_step_end(self, event: StepEnd) -> None:
        if event.step == 9 and os.environ.get("RAISES") == os.environ.get("SLURM_PROCID", "none"):
            raise RuntimeError("of one process")
        time.sleep(0.0 if "SLURM_RESTART_COUNT" in os.environ else 0.2)
