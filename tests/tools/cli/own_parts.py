"""What a user may have written: a model and a callback, as the content of files that tests write and import."""

MODEL = '''\
"""A user's model."""

from dataclasses import dataclass
from typing import Annotated

import jax
from compoconf import register
from flax import nnx
from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import AtLeast


@dataclass
class OwnWideConfig(BaseModelConfig):
    """One wide layer.

    Args:
        width: how many units it has.
        num_classes: how many classes there are.
    """

    width: Annotated[int, AtLeast(1)] = 24
    num_classes: Annotated[int, AtLeast(2)] = 10


@register
class OwnWide(BaseModelNNX):
    """A wide layer between pixels and classes."""

    config: OwnWideConfig

    def __init__(self, config: OwnWideConfig, *, exmp_input: jax.Array, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(exmp_input[0].size, config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(images.reshape(len(images), -1))))
'''

CALLBACK = '''\
"""A user's callback that gives a test the time to send a signal, or sends one itself."""

import signal
import time
from dataclasses import dataclass

from compoconf import register
from jax_trainer.callbacks import Callback, CallbackConfig


@dataclass
class OwnPauseConfig(CallbackConfig):
    """When to wait.

    Args:
        seconds: how long to wait after each epoch.
        signal_at_epoch: the epoch at whose start SIGINT is raised; 0: never.
    """

    seconds: float = 0.0
    signal_at_epoch: int = 0


@register
class OwnPause(Callback):
    """Waits after each epoch."""

    config: OwnPauseConfig

    def on_training_epoch_start(self, epoch: int) -> None:
        if epoch == self.config.signal_at_epoch:
            signal.raise_signal(signal.SIGINT)

    def on_validation_epoch_end(self, eval_metrics: dict, epoch: int) -> None:
        time.sleep(self.config.seconds)
'''
