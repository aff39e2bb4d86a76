"""Applies what callbacks add to a step: `Callback.wrap` and `Callback.wrap_optimizer`."""

from collections.abc import Iterable

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.registration import implementation_of
from jax_trainer.core import Program
from jax_trainer.core.extra_args import Around
from jax_trainer.core.wrappers import with_optimizer
from jax_trainer.optimizer.reported import with_learning_rate


def with_needs_of(
    callbacks: Iterable[Callback | CallbackConfig], program: Program, *, log_rate: bool = False
) -> Program:
    """`program`, wrapped by `callbacks` in their order, the first one innermost.

    Args:
        callbacks: callbacks, or configurations of some.
        program: the program.
        log_rate: log the learning rate of windows of steps and of epochs, whatever callbacks do.
    """
    for callback in callbacks:
        kind = type(callback) if isinstance(callback, Callback) else implementation_of(callback) or Callback
        wraps_optimizer = kind.wrap_optimizer is not Callback.wrap_optimizer
        if not wraps_optimizer and kind.wrap is Callback.wrap:
            continue
        callback = callback if isinstance(callback, Callback) else kind(callback)
        if wraps_optimizer:
            program = with_optimizer(program, Around(kind.__name__, callback.wrap_optimizer))
        program = callback.wrap(program)
    return with_learning_rate(program) if log_rate else program
