"""The optimizer argument of a trainer: a configuration or an object."""

from typing import Any, Protocol

import optax
from compoconf import ConfigInterface

from jax_trainer.optimizer import OptimizerInterface, checked_optimizer


class OptimizerArgument(Protocol):
    """Builds the optimizer of a run."""

    def build(self, total_steps: int | None) -> optax.GradientTransformation:
        """The optimizer for a run of `total_steps` steps."""
        ...


class _OptaxOptimizer:
    """An optax optimizer, independent of the length of the run."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx

    def build(self, total_steps: int | None) -> optax.GradientTransformation:
        return self._tx


def optimizer_of(optimizer: Any) -> OptimizerArgument:
    """The optimizer argument, from a configuration or an optax optimizer."""
    if isinstance(optimizer, ConfigInterface):
        if not optimizer.class_name:
            kind = type(optimizer).__name__
            raise TypeError(
                f"No optimizer is registered for {kind}: its `class_name` is empty. Decorate the optimizer with "
                f"`@register`, and annotate it with `config: {kind}`."
            )
        return optimizer.instantiate(OptimizerInterface)
    return _OptaxOptimizer(checked_optimizer(optimizer, ", or an optimizer's configuration"))


def one_of(config: Any, value: Any, names: tuple[str, str]) -> Any:
    """The one of two arguments that is not None."""
    if (config is None) == (value is None):
        raise TypeError(f"Pass either `{names[0]}` or `{names[1]}`{', not both' if value is not None else ''}.")
    return value if config is None else config
