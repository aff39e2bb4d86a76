"""The module and the optimizer of a caller, brought up to the state of a training when somebody looks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
from flax import nnx

from jax_trainer.adapters.nnx import write_back
from jax_trainer.adapters.nnx_optimizer import write_back_optimizer
from jax_trainer.core import TrainState
from jax_trainer.engine import Event, FitEnd

MODES = ("deterministic", "use_running_average")


class Mirror:
    """A module and its optimizer, which get copies of a training's arrays when they are asked for, and at its end.

    The module is in evaluation mode meanwhile.

    Args:
        model: the caller's.
        optimizer: the caller's.
        followers: told of every state that is written.
    """

    def __init__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, followers: Sequence[Callable[[TrainState], None]] = ()
    ) -> None:
        self._model, self._optimizer, self._followers = model, optimizer, followers
        self._step = -1  # that was written last
        model.eval()  # whoever looks at a model while it is trained wants to judge it

    def shown(self, event: Event) -> tuple[nnx.Module, nnx.Optimizer]:
        """The caller's objects as of `event`."""
        if event.step != self._step:
            self._write(event.state)
            self._step = event.step
        return self._model, self._optimizer

    def handle(self, event: Event) -> None:
        """At the end, however it came, the caller has what was trained."""
        if isinstance(event, FitEnd) and not any(_is_gone(leaf) for leaf in event.held.leaves):
            self._write(event.state)

    def _write(self, state: TrainState) -> None:
        write_back(self._model, state)
        write_back_optimizer(self._optimizer, state)
        for follow in self._followers:
            follow(state)


def _is_gone(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


@contextmanager
def modes_kept(model: nnx.Module) -> Iterator[None]:
    """Afterwards each part of `model` is in the mode, of training or of evaluation, that it was in before."""
    modules = [module for _, module in nnx.iter_modules(model)]
    before = [(module, name, getattr(module, name)) for module in modules for name in MODES if hasattr(module, name)]
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
