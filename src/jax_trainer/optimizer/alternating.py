"""Several optimizers by name, from configurations or objects: the section `optimizers`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import optax
from compoconf import ConfigInterface

from jax_trainer.config.settings import AtLeast, IsRegex, Problem, Settings, SettingsError, errors_of
from jax_trainer.core.extra_args import freezing
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers
from jax_trainer.core.state import evaluation_only
from jax_trainer.optimizer.optimizer import OptimizerInterface, checked_optimizer
from jax_trainer.optimizer.scheduler import ScheduleInterface, loss_weights

SHARED = ("parameters", "every", "steps", "loss", "joint")  # keys of both classes


@dataclass
class AlternatingOptimizerConfig(Settings):
    """One of several optimizers: which parameters it updates, by which loss, and how often.

    Args:
        optimizer: the optimizer; its schedule counts its own updates.
        parameters: regular expression of its parameters, matched from the start of their dotted path; null: those of
            the module with the name of the optimizer.
        every: update at every n-th step.
        steps: number of updates in such a step, on the same batch with different random keys.
        loss: name of its loss among those that the loss function returns; null: the name of the optimizer.
        losses: instead of `loss`, weights of several losses by name, each a number or a schedule over the steps of the
            run.
        joint: whether all optimizers update at once, by one gradient of one loss; the same for all of them. null: if
            they have one loss.
    """

    optimizer: OptimizerInterface.cfgtype
    parameters: Annotated[str, IsRegex()] | None = None
    every: Annotated[int, AtLeast(1)] = 1
    steps: Annotated[int, AtLeast(1)] = 1
    loss: str | None = None
    losses: dict[str, float | ScheduleInterface.cfgtype] = field(default_factory=dict)
    joint: bool | None = None

    def problems(self) -> Iterator[Problem]:
        """Reports an empty expression, and two settings of the loss."""
        if self.parameters == "":
            yield "parameters", "`parameters` is empty. Set it to the parameters of the optimizer."
        if self.loss is not None and self.losses:
            yield "loss", f"`loss` is {self.loss!r}, and `losses` is set as well. Leave out one of them."


def build_optimizers(optimizers: Mapping[str, Any], total_steps: int | None, *, trains: bool = True) -> Optimizers:
    """The optimizers of a run of `total_steps` steps; None if that is unknown.

    Args:
        optimizers: by name: optax optimizers, their configurations, `AlternatingOptimizer` or its configuration.
        trains: False: without the optimizers themselves, for an evaluation.
    """
    return Optimizers({name: _built(name, one, total_steps, trains=trains) for name, one in optimizers.items()})


def evaluating_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """An optimizer, or the one of a configuration, for a state that is only evaluated; of any length of the run."""
    if not isinstance(optimizer, ConfigInterface):
        return evaluation_only(checked_optimizer(optimizer))
    configured = optimizer.instantiate(OptimizerInterface)
    if type(configured).transform is OptimizerInterface.transform:  # it has a `build` of its own
        return optax.identity()
    made = evaluation_only(configured.transform(1.0))
    freezing(made.update, configured.freezes)
    return made


def stored_optimizers(optimizers: Mapping[str, Any]) -> dict[str, AlternatingOptimizerConfig] | None:
    """The section `optimizers` of a file for these; None if one of them is an object of Python."""
    configs = {name: _config_of(one) for name, one in optimizers.items()}
    return {name: one for name, one in configs.items() if one is not None} if all(configs.values()) else None


def _config_of(one: Any) -> AlternatingOptimizerConfig | None:
    if isinstance(one, AlternatingOptimizerConfig):
        return one
    one = one if isinstance(one, AlternatingOptimizer) else AlternatingOptimizer(one)
    weights = one.losses or {}
    if not isinstance(one.tx, ConfigInterface) or any(map(callable, weights.values())):
        return None
    return AlternatingOptimizerConfig(one.tx, **{key: getattr(one, key) for key in SHARED}, losses=dict(weights))


def _built(name: str, one: Any, total_steps: int | None, *, trains: bool) -> AlternatingOptimizer:
    if isinstance(one, AlternatingOptimizerConfig):
        kept = {key: getattr(one, key) for key in SHARED}
        one = AlternatingOptimizer(one.optimizer, **kept, losses=one.losses or None)
    elif not isinstance(one, AlternatingOptimizer):
        one = AlternatingOptimizer(one)
    with errors_of(f"optimizers.{name}"):
        losses = loss_weights(one.losses, total_steps)
        tx = _tx(name, one, total_steps) if trains else evaluating_optimizer(one.tx)
        return replace(one, tx=tx, losses=losses)


def _tx(name: str, one: AlternatingOptimizer, total_steps: int | None) -> optax.GradientTransformation:
    updates = None if total_steps is None else total_steps // one.every * one.steps
    if updates == 0:
        text = (
            f"`every` of the optimizer {name!r} is {one.every}, but the run has only {total_steps} steps, so it would "
        )
        raise SettingsError([("every", text + "never update. Train longer, or update more often.")])
    if not isinstance(one.tx, ConfigInterface):
        return checked_optimizer(one.tx, ", or an optimizer's configuration")
    with errors_of("optimizer"):
        return one.tx.instantiate(OptimizerInterface).build(updates)
